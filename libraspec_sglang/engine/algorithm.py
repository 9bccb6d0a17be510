"""``--speculative-algorithm LIBRASPEC``: what SGLang asks of an algorithm."""

from __future__ import annotations

import json
import logging

from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.runtime_context import attn_dp_enabled_of
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from libraspec_sglang import options
from libraspec_sglang.controller import cost_file
from libraspec_sglang.drafters import checkpoint
from libraspec_sglang.options import OptionError

from . import contract

logger = logging.getLogger(__name__)

NAME = "LIBRASPEC"
DEFAULT_MAX_RUNNING = 48  # as SGLang sets for DFLASH


class LibraSpecAlgorithm(CustomSpecAlgo):
    """Answers as SGLang's DFLASH does, since the drafter, its KV and its prefill are DFLASH's."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    def supports_ragged_verify(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> type | None:
        return None

    def create_future_map(
        self, device, req_to_token_pool, needs_cpu_seq_lens=True, needs_confidence_relay=False
    ) -> FutureMap:
        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def handle_server_args(self, server_args) -> None:
        """Fill in what follows from the drafter; the counterpart of SGLang's ``_handle_dflash``."""
        draft = draft_checkpoint(server_args)
        plan = checkpoint.plan_lengths(
            options.load(),
            draft.block_size,
            host_timed=server_args.device == "cpu",
            ragged=_verifies_ragged(server_args),
        )
        server_args.speculative_dflash_block_size = draft.block_size
        server_args.speculative_num_steps = 1
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = plan.window
        if server_args.speculative_draft_attention_backend is None:
            server_args.speculative_draft_attention_backend = _draft_backend(server_args)
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING


def validate(server_args) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        OptionError: names the option and the fix.
    """
    contract.require()
    chosen = options.load()
    _check_cost(chosen.cost)
    _check_trace(chosen.trace)
    for field, flag, unset, why in _REFUSED:
        value = getattr(server_args, field, None)
        if value is not None and value != unset:
            raise OptionError(f"LIBRASPEC does not support {flag} ({value}): {why}")
    backend = server_args.prefill_attention_backend or server_args.attention_backend
    if server_args.device == "cpu" and backend not in (None, "flashinfer"):
        raise OptionError(
            f"--attention-backend {backend} cannot verify drafts on a CPU; leave it out or pass "
            "--attention-backend flashinfer"
        )
    if attn_dp_enabled_of(server_args):
        raise OptionError(
            "LIBRASPEC does not support --enable-dp-attention; use --dp-size replicas"
        )
    draft = draft_checkpoint(server_args)
    target = _target_config(server_args)
    if target is not None:
        _check_layers(server_args)
        checkpoint.check_against_target(draft, target)


def _check_layers(server_args) -> None:
    """Refuse targets whose state SGLang advances by whole windows of its own algorithms."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config = mambaish_config(model_config_of(server_args))
    if config is not None:
        raise OptionError(
            f"LIBRASPEC does not support --model-path {server_args.model_path}: "
            f"{config.model_type} has Mamba or linear-attention layers, whose state is no KV "
            "cache; use --speculative-algorithm DFLASH"
        )


def _check_cost(path: str | None) -> None:
    """Find an unreadable profile before models are loaded; for what it was measured, the worker
    knows."""
    if path is not None:
        try:
            cost_file.read(path)
        except cost_file.CostError as error:
            raise OptionError(f"--libraspec-cost: {error}") from None


def _check_trace(path: str | None) -> None:
    """Find a trace that cannot be written before models are loaded; nothing is written yet."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise OptionError(f"--libraspec-trace {path}: {error.strerror}") from None


_REFUSED = (
    # field, flag, value that means "not used", why
    ("pp_size", "--pp-size", 1, "the drafter reads hidden states of layers on every stage"),
    (
        "speculative_draft_window_size",
        "--speculative-draft-window-size",
        None,
        "leave it out; the drafter attends to the whole context",
    ),
    (
        "disaggregation_mode",
        "--disaggregation-mode",
        "null",
        "the drafter's KV is not transferred; serve prefill and decode together",
    ),
    ("enable_lora", "--enable-lora", False, "SGLang allows LoRA with its own algorithms only"),
    (
        "enable_watermark",
        "--enable-watermark",
        False,
        "it changes the sampler per row; leave it out",
    ),
    (
        "enable_mixed_chunk",
        "--enable-mixed-chunk",
        False,
        "SGLang mixes prefill into decoding for its own algorithms only; leave it out",
    ),
)


def draft_checkpoint(server_args) -> checkpoint.DraftCheckpoint:
    """Read the drafter that the arguments name.

    Raises:
        OptionError: names the option or file and the fix.
    """
    # In DFLASH, --speculative-num-draft-tokens is another spelling of the block size; a command
    # line that worked with DFLASH must mean the same here. Once resolved, the field holds our
    # window, which is why the block size is taken from the raw flag.
    sizes = {
        "--speculative-dflash-block-size": server_args.speculative_dflash_block_size,
        "--speculative-num-draft-tokens": server_args.speculative_num_draft_tokens,
    }
    given = {flag: int(size) for flag, size in sizes.items() if size is not None}
    if len(set(given.values())) > 1:
        raise OptionError(
            "--speculative-dflash-block-size and --speculative-num-draft-tokens are two names for "
            f"the block size here and differ: {given}; pass one of them"
        )
    return checkpoint.read(
        server_args.speculative_draft_model_path,
        getattr(server_args, "speculative_draft_model_revision", None),
        next(iter(given.values()), None),
    )


def _target_config(server_args) -> dict | None:
    """The target's text configuration, or None where SGLang will say better what is wrong."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    try:
        config = get_config(
            server_args.model_path,
            trust_remote_code=server_args.trust_remote_code,
            revision=server_args.revision,
            model_override_args=json.loads(server_args.json_model_override_args),
        )
    except Exception as error:
        logger.debug("LibraSpec: target configuration not read: %s", error)
        return None
    return config.get_text_config().to_dict()


def _verifies_ragged(server_args) -> bool:
    """Whether rounds will verify decided lengths: FlashInfer, in ragged graphs or in none."""
    backend = server_args.prefill_attention_backend or server_args.attention_backend
    eager = server_args.cuda_graph_backend_decode == "disabled" or server_args.disable_cuda_graph
    unequal = bool(eager) or options.load().graphs == "ragged"
    return server_args.device == "cpu" or (backend == "flashinfer" and unequal)


def _draft_backend(server_args) -> str:
    from sglang.srt.server_args import DRAFT_ATTENTION_BACKEND_CHOICES

    backend = server_args.prefill_attention_backend or server_args.attention_backend
    return backend if backend in DRAFT_ATTENTION_BACKEND_CHOICES else "flashinfer"
