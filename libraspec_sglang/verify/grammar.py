"""Grammar masks along drafted tokens.

What a grammar allows at a row depends on the drafted tokens before it, so the grammar is advanced
over them, its mask taken at every row, and then put back to the anchor. A drafted token that the
grammar forbids ends that: its row's parent masks it, so it is never chosen and no later row counts.

All of it is host work. It runs while the target's forward is under way on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, GrammarMask

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

WALKABLE = ("XGrammarGrammar", "GuidanceGrammar")
"""SGLang's grammars that can be rolled back and whose masks are bits, 32 tokens to an int32."""


def walkable(req: Req) -> bool:
    """Whether the request's grammar can be advanced over drafted tokens and put back.

    Not with ``ignore_eos``: plain decoding goes on behind the grammar's end then, while SGLang
    drops what a speculative round brings behind it.
    """
    grammar = req.grammar
    inner = getattr(grammar, "grammar", grammar)  # a reasoner's wrapper holds the grammar proper
    return type(inner).__name__ in WALKABLE and not req.sampling_params.ignore_eos


def path_masks(
    grammars: dict[int, BaseGrammarObject],
    drafted: dict[int, list[int]],
    lens: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> GrammarMask | None:
    """What grammars allow at every verified row; None where none restricts anything.

    Args:
        grammars: by request of the batch; each advanced to its anchor, and left there.
        drafted: at least ``lens[r] - 1`` drafted tokens of each such request that verifies any.
        lens: rows per request, anchor included.
        vocab_size: V of the logits.
        device: where the mask is needed.
    """
    open_ends = {r: g for r, g in grammars.items() if not g.finished and not g.is_terminated()}
    if not open_ends:
        return None
    handle = next(iter(open_ends.values()))
    mask = handle.allocate_vocab_mask(vocab_size=vocab_size, batch_size=sum(lens), device=device)
    row = 0
    for request, length in enumerate(lens):
        if request in open_ends:
            _fill(open_ends[request], drafted.get(request, [])[: length - 1], mask, row)
        row += length
    return GrammarMask(handle, handle.move_vocab_mask(mask, device))


def _fill(grammar: BaseGrammarObject, tokens: list[int], mask: torch.Tensor, row: int) -> None:
    """Masks from ``row`` on: of the anchor, then behind each token that is allowed.

    A grammar in error stays so; SGLang ends its request when it takes the round's tokens.
    """
    advanced = 0
    try:
        grammar.fill_vocab_mask(mask, row)
        for token in tokens:
            if not _allows(mask[row], token):
                break
            grammar.accept_token(token)
            advanced += 1
            if grammar.is_terminated():
                break
            row += 1
            grammar.fill_vocab_mask(mask, row)
    except ValueError as error:
        logger.warning("LibraSpec: a grammar failed: %s", error)
    if advanced:
        try:
            grammar.rollback(advanced)
        except ValueError as error:
            logger.warning("LibraSpec: a grammar cannot be put back: %s", error)


def _allows(bits: torch.Tensor, token: int) -> bool:
    """Whether a row's bits allow the token."""
    return 0 <= token < 32 * bits.shape[0] and bool(int(bits[token // 32]) >> (token % 32) & 1)
