"""Muon for weight matrices, AdamW for the rest, and a warm-up / stable / decay schedule.

Muon (Jordan et al., 2024): the momentum of each matrix is replaced by its nearest
semi-orthogonal matrix, found by five Newton-Schulz steps. It needs about half the tokens of
AdamW on models this small. Matrices of one shape are orthogonalised as one batch, in
float32 (bfloat16 matrix products are emulated, hence slow, on CPUs without them).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate the orthogonal polar factor of each matrix of `[N, R, C]`."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.flatten(1).norm(dim=1).view(-1, 1, 1) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised per matrix; every parameter must be 2-D."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95,
                 weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[tuple(weight.shape)].append(weight)
            for (rows, cols), weights in by_shape.items():
                updates = []
                for weight in weights:
                    state = self.state[weight]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(weight)
                    state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                    updates.append(weight.grad.lerp(state["momentum"], group["momentum"]))
                step = group["lr"] * math.sqrt(max(1.0, rows / cols))
                orthogonal = orthogonalise(torch.stack(updates))
                for weight, update in zip(weights, orthogonal, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-step)


class Optimizer:
    """Muon and AdamW stepped together under one schedule.

    Matrices whose name contains none of `adam_names` go to Muon, everything else to AdamW.
    """

    def __init__(self, model: nn.Module, lr: float, adam_lr: float, weight_decay: float = 0.0,
                 adam_names: tuple[str, ...] = ("embed_tokens", "lm_head")) -> None:
        matrices, rest = [], []
        seen: set[int] = set()
        for name, weight in model.named_parameters():
            if not weight.requires_grad or id(weight) in seen:
                continue
            seen.add(id(weight))
            is_matrix = weight.ndim == 2 and not any(part in name for part in adam_names)
            (matrices if is_matrix else rest).append(weight)
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(Muon(matrices, lr=lr, weight_decay=weight_decay))
        if rest:
            self.parts.append(torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95),
                                                weight_decay=0.0))
        self.base = [[g["lr"] for g in part.param_groups] for part in self.parts]

    def step(self, scale: float) -> None:
        """One update at `scale` times the base learning rates; clears the gradients."""
        for part, base in zip(self.parts, self.base, strict=True):
            for group, lr in zip(part.param_groups, base, strict=True):
                group["lr"] = lr * scale
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


class Progress:
    """How far a run is, from 0 to 1: by steps, or by minutes if those run out first.

    Minutes make a run fit a slot on a busy machine; steps make it reproducible. Time spent
    before a resumption counts (`spent` is kept in the checkpoint).
    """

    def __init__(self, steps: int, minutes: float | None = None, spent: float = 0.0) -> None:
        self.steps, self.minutes = steps, minutes
        self.start = time.monotonic() - spent

    @property
    def spent(self) -> float:
        """Seconds since the run began, resumptions included."""
        return time.monotonic() - self.start

    def at(self, step: int) -> float:
        done = step / self.steps
        if self.minutes is not None:
            done = max(done, self.spent / (60 * self.minutes))
        return min(done, 1.0)


def lr_scale(progress: float, step: int, warmup: int = 50, decay_from: float = 0.5) -> float:
    """Linear warm-up over `warmup` steps, flat, then linear to 2 % from `decay_from` on."""
    up = min(1.0, (step + 1) / warmup)
    down = 1.0 if progress < decay_from else 1 - 0.98 * (progress - decay_from) / (1 - decay_from)
    return up * down
