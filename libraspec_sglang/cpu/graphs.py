"""The CUDA-graph path without CUDA graphs, so that it can be run and tested on a CPU.

``LIBRASPEC_CPU_GRAPHS=1`` makes the CPU runtime "capture" the target's verifications: SGLang's
graph runner with its static buffers, tiers, padding and plans is the real one; a replay calls the
captured forward again, on the static batch it was captured with, where CUDA would launch the
recorded kernels. Results are written over those of the last replay of the tier, as in a graph.
Slower than no graphs, hence off unless asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend

from libraspec_sglang.engine.graphs import RaggedGraphRunner


class ReplayedCalls(BaseCudaGraphBackend):
    """Keeps a forward and the attention metadata it was captured with; a replay runs it again."""

    def __init__(self, runner: RaggedGraphRunner) -> None:
        self._attention = runner.attn_backend
        self._captured: dict[ShapeKey, tuple[Callable[[], Any], Any, Any]] = {}

    def capture_one(
        self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None
    ) -> None:
        metadata = self._attention.forward_metadata
        self._captured[shape_key] = forward_fn, metadata, forward_fn()

    def can_run(self, forward_batch, shape_key) -> bool:
        return shape_key in self._captured

    def replay(self, shape_key, static_forward_batch, **kwargs):
        forward, self._attention.forward_metadata, static = self._captured[shape_key]
        result = forward()
        for name in ("next_token_logits", "hidden_states"):
            getattr(static, name).copy_(getattr(result, name))
        return static

    @contextlib.contextmanager
    def capture_session(self, stream) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def cleanup(self) -> None:
        self._captured.clear()


class ReplayedRunner(RaggedGraphRunner):
    """The runner over :class:`ReplayedCalls`."""

    def _capture(self) -> None:
        self.backend = ReplayedCalls(self)
        self.buffers.seq_lens.fill_(self.seq_len_fill_value)
        self.buffers.seq_lens_cpu.fill_(self.seq_len_fill_value)
        self.buffers.reset_index_buffers()
        self._capture_one_stream()

    def _record_in_graph_metadata_prep_done(self) -> None:
        """There is no other stream to tell."""

    def _publish_read_done(self, in_graph: bool) -> None:
        """Likewise."""
