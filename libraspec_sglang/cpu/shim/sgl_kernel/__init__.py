"""Stand-in for ``sgl_kernel`` on a machine without CUDA.

The real package links against libcuda, and SGLang imports it long before plugins load, so a CPU
run needs *something* importable under this name. It must be found through ``PYTHONPATH``: SGLang
spawns its scheduler and detokenizer, and a ``sys.modules`` entry does not survive a spawn.

Only the functions SGLang calls on the CPU paths we serve exist here, in plain torch. Every other
name can be imported but raises ``NotImplementedError`` when called, so that a missing kernel is
reported by name rather than as a wrong number. Submodules (``sgl_kernel.scalar_type``, ...) do
not exist: SGLang catches the ImportError and takes its own fallback.
"""

from __future__ import annotations

import ctypes

import torch

LIBRASPEC_STAND_IN = True
"""Tells ``libraspec_sglang.cpu.enable`` this module from the real one."""


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, but this is the CPU stand-in of libraspec-sglang, "
            "which has no such kernel. Choose an SGLang option that does not need it "
            "(see the CPU section of the README), or run on a GPU."
        )

    missing.__name__ = missing.__qualname__ = name
    return missing


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move KV rows ``src_loc`` -> ``tgt_loc`` in every layer buffer given by address and stride.

    data_ptrs, strides: [layers] addresses and row sizes in bytes; tgt_loc, src_loc: [n] rows.
    All sources are read before any target is written, so overlapping moves are safe.
    """
    src, tgt = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + s * stride, stride) for s in src]
        for t, row in zip(tgt, rows, strict=True):
            ctypes.memmove(base + t * stride, row, stride)


def _spans(start_offset: torch.Tensor, end_offset: torch.Tensor):
    """Yield (request, start, end, offset of its first slot in the packed stream)."""
    out = 0
    starts, ends = start_offset.tolist(), end_offset.tolist()
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        yield row, start, end, out
        out += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Pack ``req_to_token[req, start:end]`` of each request into ``out_cache_loc``."""
    pool = req_pool_indices.tolist()
    for row, start, end, out in _spans(start_offset, end_offset):
        out_cache_loc[out : out + end - start] = req_to_token[pool[row], start:end]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Inverse of ``assign_extend_cache_locs_cpu``: write the packed slots into the table."""
    pool = req_pool_indices.tolist()
    for row, start, end, out in _spans(start_offset, end_offset):
        req_to_token[pool[row], start:end] = out_cache_loc[out : out + end - start].to(
            req_to_token.dtype
        )


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Pack each request's ``topk * num_steps`` slots that follow its sequence."""
    width = topk * num_steps
    columns = seq_lens.long()[:, None] + torch.arange(width)
    rows = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc[: rows.numel()] = rows.reshape(-1).to(out_cache_loc.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """bonus_tokens[i] = the last accepted token of request i; accept_lens counts the bonus."""
    rows = torch.arange(accept_lens.numel())
    bonus_tokens.copy_(accept_tokens.reshape(-1)[rows * accept_stride + accept_lens.long() - 1])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted positions (index > -1) to the front, order kept."""
    flat = accept_index.reshape(-1)
    kept = out_cache_loc[flat[flat > -1].long()]
    accept_out_cache_loc[: kept.numel()] = kept


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's ids left by one and write its new token at the end (or the index)."""
    starts, lens = extend_start_loc.tolist(), extend_seq_lens.tolist()
    for row, (start, length) in enumerate(zip(starts, lens, strict=True)):
        if length <= 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = start + length - 1 if select_index is None else int(select_index[row])
        input_ids[last] = topk_index.reshape(-1)[row]


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """EAGLE's verify tree: child / sibling links, positions and the ancestors' mask.

    selected_index: [bs, N - 1] node ids; parent_list: [bs, *] parent id of each block of topk
    ids; node 0 is the root. tree_mask_mode 0 writes into a mask over the whole sequence, 1 over
    the N nodes only. The bit-packed mode 2 is refused.
    """
    if int(tree_mask_mode) == 2:
        raise NotImplementedError("the bit-packed tree mask has no CPU stand-in")
    n = draft_token_num
    mask, flat_positions = tree_mask.view(-1), positions.view(-1)
    links = (retrieve_index.view(-1, n), retrieve_next_token.view(-1, n))
    index, next_token = links
    sibling = retrieve_next_sibling.view(-1, n)
    prefix_sum = 0
    for row, seq_len in enumerate(verified_seq_len.tolist()):
        chosen, parents = selected_index[row].tolist(), parent_list[row].tolist()
        node_of = {}
        for node, node_id in enumerate(chosen):
            node_of.setdefault(node_id, node + 1)

        def parent(node, chosen=chosen, parents=parents, node_of=node_of):
            """Parent node of a node >= 1, or None for a dangling link."""
            block = chosen[node - 1] // topk
            return 0 if block == 0 else node_of.get(parents[block])

        for node in range(n - 1, 0, -1):
            above = parent(node)
            if above is not None:
                first_child = int(next_token[row, above])
                if first_child != -1:
                    sibling[row, node] = first_child
                next_token[row, above] = node
        index[row] = torch.arange(row * n, (row + 1) * n)

        whole = int(tree_mask_mode) == 0
        base = n * n * row + (prefix_sum * n if whole else 0)
        width, left = (seq_len + n, seq_len) if whole else (n, 0)
        for node in range(n):
            at = base + width * node + left
            mask[at : at + n] = 0
            mask[at] = 1
            level, current = 0, node
            while current and level < depth:
                level += 1
                mask[at + current] = 1
                current = parent(current)
            flat_positions[row * n + node] = seq_len + level
        prefix_sum += seq_len


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree from its root along the target's own choices; see SGLang's kernel.

    accept_index: [bs, depth + 1] flat rows walked, accept_token_num: [bs] without the bonus,
    predicts: flat, the target's token at each walked row.
    """
    target = target_predict.reshape(-1)
    for row in range(candidates.shape[0]):
        at = int(retrive_index[row, 0])
        accept_index[row, 0] = at
        accepted, node = 0, 0
        while accepted + 1 < accept_index.shape[1]:
            want, node = int(target[at]), int(retrive_next_token[row, node])
            while node != -1 and int(candidates[row, node]) != want:
                node = int(retrive_next_sibling[row, node])
            if node == -1:
                break
            predicts[at] = want
            accepted, at = accepted + 1, int(retrive_index[row, node])
            accept_index[row, accepted] = at
        accept_token_num[row] = accepted
        predicts[at] = target[at]


_LOW = 0xFFFFFFFF


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _LOW


def _mix(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = (_rotate((k * 0xCC9E2D51) & _LOW, 15) * 0x1B873593) & _LOW
    return (_rotate(h ^ k, 13) * 5 + 0xE6546B64) & _LOW


def murmur_hash32_cpu(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit) of seed (8 bytes), position and column (4 bytes each).

    seed uint64 [n], positions [n], col_indices [m] -> uint32 [n, m]. SGLang draws seeded samples
    from it. Everything is 32-bit arithmetic in the low half of int64.
    """
    seed = seed.to(torch.int64)
    h = _mix(torch.zeros_like(seed), seed & _LOW)
    h = _mix(h, (seed >> 32) & _LOW)
    h = _mix(h, positions.to(torch.int64) & _LOW)
    h = _mix(h[:, None], (col_indices.to(torch.int64) & _LOW)[None])
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _LOW
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _LOW
    return (h ^ (h >> 16)).to(torch.uint32)


def _register() -> None:
    """Once per process, however often this module is loaded: torch keeps operators globally."""
    if hasattr(torch.library, "_libraspec_operators"):
        return
    operators = torch.library.Library("sgl_kernel", "FRAGMENT")
    operators.define(
        "murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor"
    )
    operators.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
    torch.library.register_fake(
        "sgl_kernel::murmur_hash32_cpu",
        lambda seed, positions, cols: seed.new_empty(
            (seed.shape[0], cols.shape[0]), dtype=torch.uint32
        ),
    )
    torch.library._libraspec_operators = operators  # dropping it would drop the operators


_register()
