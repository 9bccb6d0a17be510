"""The target's verifications can be "captured" on a CPU, for tests of that path.

Why: SGLang captures nothing on a CPU, and its CPU graphs refuse speculative decoding. Only with
``LIBRASPEC_CPU_GRAPHS=1``; see :mod:`libraspec_sglang.cpu.graphs`.
Where: ``sglang.srt.model_executor.model_runner.capture_cuda_graphs`` and
``ForwardMode.is_cpu_graph``, which must be as ``is_cuda_graph`` then (SGLang 0.5.23).
Undo: the hook passes through, the method is put back.
"""

from __future__ import annotations

import os

from libraspec_sglang.patches._base import Hook, Swap

_swap = Swap()


def _capture(original, *args, **kwargs):
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import (
        CudaGraphsCapture,
        GraphCapture,
    )

    from libraspec_sglang.cpu import graphs
    from libraspec_sglang.engine.graphs import wanted

    captured, runner = original(*args, **kwargs), kwargs["model_runner"]
    if not wanted(runner):
        return captured
    decode = GraphCapture(
        runner=graphs.ReplayedRunner(runner),
        memory_phase="target_verify",
        memory_usage_gb=0,
        capture_time=0,
    )
    return CudaGraphsCapture(
        eager_runner=captured.eager_runner, prefill=captured.prefill, decode=decode
    )


_hook = Hook("sglang.srt.model_executor.model_runner.capture_cuda_graphs", _capture)


def apply() -> None:
    if os.environ.get("LIBRASPEC_CPU_GRAPHS") != "1" or _hook.applied:
        return
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    _swap.attribute(ForwardMode, "is_cpu_graph", ForwardMode.is_cuda_graph)
    _hook.apply()


def undo() -> None:
    _swap.undo()
    _hook.undo()
