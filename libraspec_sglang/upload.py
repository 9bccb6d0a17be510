"""Host values onto a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(values: torch.Tensor | np.ndarray, device: torch.device | str) -> torch.Tensor:
    """``values`` on ``device``.

    A copy to a GPU from pageable memory waits until the GPU has worked off its queue; from pinned
    memory it takes its turn in the queue. (PyTorch keeps the pinned block until the copy is done.)
    """
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def upload_together(
    values: Sequence[torch.Tensor | np.ndarray], device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """Flat ``values`` of one type, in one copy; they share one block of memory there."""
    hosts = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in values]
    return upload(torch.cat(hosts), device).split([host.numel() for host in hosts])
