"""What a server says it does: one log line when it starts."""

from __future__ import annotations

import logging

from libraspec_sglang.controller.policy import Policy
from libraspec_sglang.drafters.checkpoint import LengthPlan
from libraspec_sglang.options import Options

logger = logging.getLogger(__name__)


def say_what_is_active(
    policy: Policy,
    options: Options,
    lengths: LengthPlan,
    *,
    window: int,
    draft_vocabulary: int | None,
    attention: str,
    rows: str,
    on_device: bool,
    device: str,
) -> None:
    """Log what decides, what drafts and what verifies.

    Args:
        window: W, rows a request verifies at most.
        draft_vocabulary: tokens the drafter chooses from; None for all.
        attention: the target's attention backend.
        rows: how decided lengths are verified.
        on_device: whether lengths are decided by kernels on the device.
    """
    papers = policy.name == "libraspec"
    logger.info(
        "LibraSpec active: policy=%s, cost=%s, drafter=DFLASH, block=%d, max_length=%d, "
        "alpha=%s, extension=%s, window=%d, draft_vocabulary=%s, attention=%s, rows=%s, "
        "controller=%s, device=%s",
        policy.name,
        _prices(policy, options, refined=device == "cpu"),
        lengths.block_size,
        window - 1,
        options.alpha if papers else "-",
        options.extension if papers else "-",
        window,
        draft_vocabulary or "all",
        attention,
        rows,
        "kernels" if on_device else "host",
        device,
    )


def _prices(policy: Policy, options: Options, *, refined: bool) -> str:
    """Where the policy's idea of cost comes from."""
    if policy.name != "libra":
        return "-"
    start = options.cost or "conservative prior (no --libraspec-cost)"
    return f"{start}, refined by its rounds" if refined else start
