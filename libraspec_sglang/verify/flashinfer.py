"""FlashInfer attention for captured verifications of unequal lengths.

SGLang's FlashInfer backend refuses ragged verification in CUDA graphs: it keys its wrappers by the
number of requests, and plans them for one width. What a captured kernel really depends on is the
number of query rows it was captured for. So there is one wrapper per tier of rows
(:mod:`.tiers`), with a slot for every request that could be in it, empty ones included, and one
more slot that owns the rows between the batch's and the tier's. They attend to the sink slot and
are thrown away.

Plans are made from lengths that the host has (:attr:`DFlashVerifyInput.live_seq_lens_cpu`), so no
replay waits for the device here; index arrays go up in one copy.

Memory, for S slots, T rows of the largest tier and a context of C: 4 (S C + T) bytes of page
indices and 1 byte S C of SGLang's mask (unused), where SGLang's own layout takes 5 bytes a row and
token of context, T C in all; and one FlashInfer workspace of 8 MiB for all tiers, where each
wrapper otherwise keeps its own: a plan is used by the replay that follows it, and by no other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from sglang.srt.layers.attention import attention_registry, flashinfer_backend
from sglang.srt.layers.attention.flashinfer_backend import PrefillMetadata, fast_prefill_plan
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from libraspec_sglang.upload import upload_together

NAME = "flashinfer"


class FlashInferAttnBackend(flashinfer_backend.FlashInferAttnBackend):
    """SGLang's backend, for a target whose ragged verifications are captured.

    SGLang knows what a backend can do by the name of its class, hence the name.
    """

    supports_ragged_verify_graph = True

    def __init__(self, model_runner, **kwargs) -> None:
        super().__init__(model_runner, **kwargs)
        # SGLang makes these two checks for its own class only.
        self._check_kv_attention_access("prefill", self.prefill_kv_access)
        self._check_kv_attention_access("decode", self.decode_kv_access)
        self._tiers: dict[int, flashinfer_backend.BatchPrefillWithPagedKVCacheWrapper] = {}
        self._workspace: tuple[torch.Tensor, torch.Tensor] | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, kv_indices_buf=None) -> None:
        """Buffers that captured kernels read; see the module for their sizes."""
        device, slots = self.kv_indptr[0].device, max_bs + 1
        most = max_bs * self.max_context_len + max_num_tokens
        self._indices = torch.zeros(most, dtype=torch.int32, device=device)
        super().init_cuda_graph_state(max_bs, max_bs, self._indices)
        self._offsets = torch.zeros((2, slots + 1), dtype=torch.int32, device=device)
        self._last_page = torch.ones(slots, dtype=torch.int32, device=device)

    def graph_state_bytes(self) -> int:
        """Bytes of device memory that all tiers share, beside SGLang's."""
        return sum(t.nbytes for t in (self._indices, self._offsets, self._last_page)) + (
            0 if self._workspace is None else self._workspace[0].nbytes
        )

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        layout = getattr(forward_batch.spec_info, "ragged_verify_layout", None)
        if layout is None or not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        slots = forward_batch.batch_size
        if in_capture:
            self._tiers[layout.graph_num_tokens] = self._wrapper(slots + 1)
        wrapper = self._tiers[layout.graph_num_tokens]
        self._plan(wrapper, forward_batch, layout, slots)
        if in_capture:  # the first plan loaded the kernels that the fast one needs
            wrapper.begin_forward = partial(fast_prefill_plan, wrapper)
        self.forward_metadata = PrefillMetadata([wrapper], False, False)

    def _wrapper(self, slots: int):
        wrapper = flashinfer_backend.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace_buffer,
            "NHD",
            use_cuda_graph=True,
            backend=self.prefill_backend,
            qo_indptr_buf=self._offsets[0, : slots + 1],
            paged_kv_indptr_buf=self._offsets[1, : slots + 1],
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=self._last_page[:slots],
        )
        if self._workspace is None:
            self._workspace = (
                wrapper._int_workspace_buffer,
                wrapper._pin_memory_int_workspace_buffer,
            )
        wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer = self._workspace
        return wrapper

    def _plan(self, wrapper, forward_batch, layout: RaggedVerifyLayout, slots: int) -> None:
        """Plan ``wrapper`` for the batch's rows, the empty slots and the rows up to the tier."""
        prefix = forward_batch.spec_info.live_seq_lens_cpu
        rows = torch.zeros(slots + 1, dtype=torch.int32)
        rows[: layout.bs] = torch.tensor(layout.verify_lens_cpu)
        rows[slots] = layout.graph_num_tokens - layout.total_verify_tokens
        keys = rows.clone()
        if prefix is not None:  # none while capturing
            keys[: layout.bs] += prefix
        offsets = torch.zeros((2, slots + 2), dtype=torch.int32)
        torch.cumsum(rows, 0, out=offsets[0, 1:])
        torch.cumsum(keys, 0, out=offsets[1, 1:])
        used = int(offsets[1, -1])
        device = self._indices.device
        sent, kv_lens = upload_together([offsets.view(-1), keys], device)
        qo_indptr, kv_indptr = sent.view(2, -1)
        indices = self._indices[:used]
        self.kv_index_translator.pack_read_stream(
            forward_batch.kv_loc_plan,
            req_pool_indices=forward_batch.req_pool_indices[: layout.bs],
            seq_lens=kv_lens[: layout.bs],
            indptr=kv_indptr[: layout.bs + 1],
            out=indices,
        )
        indices[used - int(keys[slots]) :].zero_()  # the sink
        host = {}
        if isinstance(wrapper.begin_forward, partial):
            host = {
                "qo_indptr_host": offsets[0],
                "kv_indptr_host": offsets[1],
                "kv_lens_host": keys,
                "max_q_len": int(rows.max()),
                "max_kv_len": int(keys.max()),
            }
        updater = self.indices_updater_prefill
        wrapper.begin_forward(
            qo_indptr,
            kv_indptr,
            indices,
            self._last_page[: slots + 1],
            updater.num_qo_heads,
            updater.num_kv_heads,
            updater.head_dim,
            1,
            q_data_type=updater.q_data_type,
            kv_data_type=updater.data_type,
            non_blocking=True,
            **host,
        )


def create(runner):
    """What SGLang's registry calls for ``--attention-backend flashinfer``."""
    return FlashInferAttnBackend(runner, init_new_workspace=runner.init_new_workspace)


@contextlib.contextmanager
def in_place_of_sglangs() -> Iterator[None]:
    """While it lasts, SGLang constructs :class:`FlashInferAttnBackend` for "flashinfer"."""
    registry = attention_registry.ATTENTION_BACKENDS
    stock, registry[NAME] = registry[NAME], create
    try:
        yield
    finally:
        registry[NAME] = stock
