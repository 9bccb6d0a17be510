"""Acceptance on the device: each request's longest drafted prefix that the target chose too.

One Triton kernel (:mod:`.accept_triton`) on CUDA tensors and under ``TRITON_INTERPRET=1``, its
torch twin here on CPU tensors. One launch, no look at a value on the host. Bytes moved: 8 a
verified row, 8 a drafted token compared, 8 W + 16 a request; all small beside the logits that the
choices were made from, so the floor is the launch itself.
"""

from __future__ import annotations

import torch
import triton

from . import accept_triton as kernels
from .length_controller import on_device


def accept(
    choices: torch.Tensor,
    drafted: torch.Tensor,
    lens: torch.Tensor,
    width: int,
    limits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk every request's draft along the target's choices.

    Args:
        choices: int64 [T], the token the target chose at each verified row, request after request,
            none of them negative.
        drafted: int64 [bs, D], D >= max(lens) - 1.
        lens: int32 [bs], rows of each request, its anchor's included; at least 1, T in total.
        width: W, columns of the result, at least max(lens).
        limits: int64 [bs], drafted tokens that may be kept at most; None: all verified.

    Returns:
        tokens int64 [bs, W]: the choices at the request's rows, -1 beyond them; gained int32 [bs]:
        accepted tokens and the bonus, so at least 1; bonus int64 [bs], the last token gained.

    Raises:
        TypeError: another dtype. ValueError: another shape.
    """
    bs = lens.shape[0]
    for name, tensor, dims, dtype in (
        ("choices", choices, 1, torch.int64),
        ("drafted", drafted, 2, torch.int64),
        ("lens", lens, 1, torch.int32),
        ("limits", limits, 1, torch.int64),
    ):
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}, must be {dtype}")
        if tensor.dim() != dims or (name != "choices" and tensor.shape[0] != bs):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} for {bs} requests")
    if not on_device(choices.device):
        return _twin(choices, drafted, lens, width, limits)
    tokens = choices.new_empty((bs, width))
    gained, bonus = torch.empty_like(lens), choices.new_empty(bs)
    if bs:
        kernels.accept[(bs,)](
            choices, drafted, *drafted.stride(), lens, lens if limits is None else limits,
            tokens, gained, bonus, width, drafted.shape[1],
            LIMITED=limits is not None, LANES=triton.next_power_of_2(width),
            REQUESTS=min(triton.next_power_of_2(bs), 1024), num_warps=1,
        )  # fmt: skip
    return tokens, gained, bonus


def _twin(choices, drafted, lens, width, limits):
    column = torch.arange(width, device=choices.device)
    first = lens.cumsum(dim=0) - lens
    rows = (first[:, None] + column).clamp_(max=max(len(choices) - 1, 0))
    tokens = torch.where(column < lens[:, None], choices[rows], -1)
    depth = min(width - 1, drafted.shape[1])
    # A row verifies the token drafted behind it only if that token has a row of its own.
    agree = (tokens[:, :depth] == drafted[:, :depth]) & (tokens[:, 1 : depth + 1] >= 0)
    if limits is not None:
        agree &= column[:depth] < limits[:, None]
    run = agree.to(torch.int32).cumprod(dim=1).sum(dim=1)
    return tokens, (run + 1).to(torch.int32), tokens.gather(1, run[:, None])[:, 0]
