"""What requests may and wish to verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from libraspec_sglang.controller.policy import Sampled
from libraspec_sglang.drafters.base import Window
from libraspec_sglang.options import RequestOptions
from libraspec_sglang.upload import upload

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_DEFAULTS = RequestOptions()


def key(request: Req) -> str:
    """What a policy knows the request by. (SGLang makes temperature 0 a top-k of 1.)"""
    return request.rid if request.sampling_params.top_k == 1 else Sampled(request.rid)


def caps(
    requests: Sequence[Req],
    anchored: Sequence[int],
    window: Window,
    *,
    context_len: int,
    on_host: bool,
) -> torch.Tensor:
    """int64 [bs]: drafted tokens a request may verify at most.

    The window, the request's own wish, the tokens it may still produce and the context that is
    left; none at all for an anchored request.

    Args:
        requests: of the batch.
        anchored: places in it of requests whose logits cannot follow drafted tokens.
        window: the round's slots.
        context_len: tokens a request may have.
        on_host: whether the window's values can be read without waiting for a device.
    """
    most, end = window.width - 1, context_len - 1
    allowed = []
    for request in requests:
        left = request.sampling_params.max_new_tokens - len(request.output_ids) - 1
        wish = _own(request).max_length
        allowed.append(max(0, min(most, left, most if wish is None else wish)))
    for place in anchored:
        allowed[place] = 0
    if on_host:
        lens = window.prefix_lens.tolist()
        return torch.tensor([max(0, min(m, end - n)) for m, n in zip(allowed, lens, strict=True)])
    here = upload(torch.tensor(allowed), window.prefix_lens.device)
    return torch.minimum(here, end - window.prefix_lens).clamp_(min=0)


def alpha(requests: Sequence[Req], default: float, device: torch.device) -> torch.Tensor | None:
    """float64 [bs]: T / (tau c) where a request has one of its own; None where none has."""
    wishes = [_own(request).alpha for request in requests]
    if all(wish is None for wish in wishes):
        return None
    values = [default if wish is None else wish for wish in wishes]
    return upload(torch.tensor(values, dtype=torch.float64), device)


def _own(request: Req) -> RequestOptions:
    """Parsed when the request came in; SGLang's own requests may not have passed there."""
    return getattr(request, "libraspec", _DEFAULTS)
