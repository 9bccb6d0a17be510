"""Per-request seeds work on a CPU: ``--enable-deterministic-inference`` without a CUDA library.

Why: SGLang honours ``sampling_seed`` only in deterministic mode, and that mode registers
batch-invariant CUDA kernels, which fails without a GPU. The CPU's kernels run the same way every
time; what is not promised here is that logits are bit-equal at every batch size, so a seeded draw
may differ where two candidates are equal up to rounding.
Where: ``ModelRunner.maybe_enable_batch_invariant_mode`` in SGLang 0.5.23; no upstream issue known
to us.
Undo: the hook passes through.
"""

from __future__ import annotations

from libraspec_sglang.patches._base import Hook


def _around(original, self, *args, **kwargs) -> None:
    """Nothing to enable: there are no CUDA kernels to replace."""


_hook = Hook(
    "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode", _around
)
apply, undo = _hook.apply, _hook.undo
