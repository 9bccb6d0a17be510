"""Where the plugin enters SGLang besides the algorithm registry, as SGLang hook definitions."""

from __future__ import annotations

from libraspec_sglang import options


def add_flags(result, *args, **kwargs) -> None:
    """After ``ServerArgs.add_cli_args(parser)``: our flags, also for ``--config`` files."""
    parser = kwargs.get("parser", args[-1] if args else None)
    options.add_cli_flags(parser)


def take_flags(original, *args, **kwargs):
    """Around ``ServerArgs.from_cli_args(args)``: flags come into force before they are needed."""
    options.take_cli_flags(kwargs.get("args", args[-1] if args else None))
    return original(*args, **kwargs)


def validate_request(original, req, *args, **kwargs) -> str | None:
    """Around SGLang's per-request DFLASH validation: a reason to refuse the request, or None."""
    try:
        options.request_options(req.sampling_params.custom_params)
    except options.OptionError as error:
        return str(error)
    if req.return_hidden_states:
        return "LIBRASPEC does not return hidden states; send return_hidden_states=false"
    if req.return_sampling_mask:
        return "LIBRASPEC does not return sampling masks; send return_sampling_mask=false"
    return original(req, *args, **kwargs)


HOOKS = (
    ("sglang.srt.server_args.ServerArgs.add_cli_args", add_flags, "AFTER"),
    ("sglang.srt.server_args.ServerArgs.from_cli_args", take_flags, "AROUND"),
    ("sglang.srt.managers.scheduler.validate_dflash_request", validate_request, "AROUND"),
)
