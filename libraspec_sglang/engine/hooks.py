"""Where the plugin enters SGLang besides the algorithm registry, as SGLang hook definitions."""

from __future__ import annotations

from typing import NoReturn

from sglang.srt.runtime_context import get_exec

from libraspec_sglang import options

from . import algorithm

_command_line = False
"""Whether this process was started with SGLang's command line."""


def add_flags(result, *args, **kwargs) -> None:
    """After ``ServerArgs.add_cli_args(parser)``: our flags, also for ``--config`` files."""
    parser = kwargs.get("parser", args[-1] if args else None)
    options.add_cli_flags(parser)


def take_flags(original, *args, **kwargs):
    """Around ``ServerArgs.from_cli_args(args)``: flags come into force before they are needed."""
    global _command_line
    _command_line = True
    try:
        options.take_cli_flags(kwargs.get("args", args[-1] if args else None))
    except options.OptionError as error:
        _end(error)
    return original(*args, **kwargs)


def resolve(original, server_args, *args, **kwargs):
    """Around ``ServerArgs.resolve_once()``: our checks come first, and read as one line.

    SGLang looks into the draft checkpoint before it asks an algorithm's validation, and would
    answer a wrong path with a hub client's traceback.
    """
    try:
        if str(server_args.speculative_algorithm).upper() == algorithm.NAME:
            algorithm.draft_checkpoint(server_args)
        return original(server_args, *args, **kwargs)
    except options.OptionError as error:
        if not _command_line:
            raise
        _end(error)


def _end(error: options.OptionError) -> NoReturn:
    """A user at a command line wants the message, not where in SGLang it was raised."""
    raise SystemExit(f"libraspec: {error}") from None


def validate_request(original, req, *args, **kwargs) -> str | None:
    """Around SGLang's per-request DFLASH validation: a reason to refuse the request, or None."""
    req.libraspec = options.RequestOptions()
    try:
        req.libraspec = options.request_options(req.sampling_params.custom_params)
    except options.OptionError as error:
        return str(error)
    ids = req.origin_input_ids
    if len(ids) == 0:
        return "the prompt is empty; SGLang needs at least one token"
    plain_ids = req.multimodal_inputs is None and req.input_embeds is None
    if plain_ids and req.vocab_size and not 0 <= min(ids) <= max(ids) < req.vocab_size:
        return f"input_ids must be in 0..{req.vocab_size - 1}, the target's vocabulary"
    if req.return_logprob and (problem := _logprob_problem(req.logprob, req.vocab_size)):
        return problem
    if req.return_hidden_states:
        return "LIBRASPEC does not return hidden states; send return_hidden_states=false"
    if req.return_sampling_mask:
        return "LIBRASPEC does not return sampling masks; send return_sampling_mask=false"
    if req.sampling_params.min_p > 0 and get_exec().deterministic.enable_deterministic_inference:
        req.sampling_params.min_p = 0.0  # a refused request still passes through the sampler once
        return (
            "min_p does not go with --enable-deterministic-inference: SGLang's sampler takes no "
            "seed with it and would end the server; leave one of the two out"
        )
    return original(req, *args, **kwargs)


def _logprob_problem(wanted, vocabulary: int | None) -> str | None:
    """What would end SGLang's scheduler when it picks logprobs, or None."""
    if vocabulary and wanted.top_logprobs_num > vocabulary:
        return f"top_logprobs_num {wanted.top_logprobs_num}: the target has {vocabulary} tokens"
    ids = wanted.token_ids_logprob or []
    if vocabulary and ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        return f"token_ids_logprob must be in 0..{vocabulary - 1}, the target's vocabulary"
    return None


def attention_backends(original, runner, *args, **kwargs):
    """Around ``ModelRunner.init_attention_backends``: ours for a target that we capture."""
    from . import graphs

    if not graphs.wanted(runner):
        return original(runner, *args, **kwargs)
    with graphs.flashinfer.in_place_of_sglangs():
        return original(runner, *args, **kwargs)


def runner_class(original, runner, *args, **kwargs):
    """Around ``ModelRunner._decode_cuda_graph_runner_cls``: likewise."""
    from . import graphs

    ours = isinstance(runner.attn_backend, graphs.flashinfer.FlashInferAttnBackend)
    if ours and graphs.wanted(runner):  # SGLang wraps the backend of a target with Mamba layers
        return graphs.RaggedGraphRunner
    return original(runner, *args, **kwargs)


def requests_of_penalties(original, penalties, *args, **kwargs):
    """Around ``BatchedPenalizerOrchestrator.filter`` and ``merge``: counts are complete first."""
    from libraspec_sglang.verify.penalties import wait_until_counted

    wait_until_counted(penalties)
    return original(penalties, *args, **kwargs)


_PENALTIES = "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
HOOKS = (
    ("sglang.srt.server_args.ServerArgs.add_cli_args", add_flags, "AFTER"),
    ("sglang.srt.server_args.ServerArgs.from_cli_args", take_flags, "AROUND"),
    ("sglang.srt.server_args.ServerArgs.resolve_once", resolve, "AROUND"),
    ("sglang.srt.managers.scheduler.validate_dflash_request", validate_request, "AROUND"),
    (f"{_PENALTIES}.filter", requests_of_penalties, "AROUND"),
    (f"{_PENALTIES}.merge", requests_of_penalties, "AROUND"),
    (f"{_RUNNER}.init_attention_backends", attention_backends, "AROUND"),
    (f"{_RUNNER}._decode_cuda_graph_runner_cls", runner_class, "AROUND"),
)
