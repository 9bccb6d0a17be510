"""Penalties and grammars along drafted tokens, against SGLang's own, one request at a time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.sampling import penaltylib
from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

from libraspec_sglang.engine.hooks import requests_of_penalties
from libraspec_sglang.verify.choose import PathDependence
from libraspec_sglang.verify.grammar import path_masks, walkable
from libraspec_sglang.verify.layout import verify_rows
from libraspec_sglang.verify.penalties import PenaltyWalk, mark_counted

VOCAB, WIDTH = 11, 6
PENALIZERS = (
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
)


def request(frequency=0.0, presence=0.0, repetition=1.0, minimum=0, **kwargs):
    sampling = SimpleNamespace(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_new_tokens=minimum,
        stop_token_ids={2},
        ignore_eos=False,
    )
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1)
    given = {"grammar": None, "custom_logit_processor": None, "output_ids": [], **kwargs}
    return SimpleNamespace(
        sampling_params=sampling, eos_token_ids=None, tokenizer=tokenizer, **given
    )


class Penalties(penaltylib.BatchedPenalizerOrchestrator):
    """SGLang's, holding on to its batch, which it refers to weakly."""

    def __init__(self, requests):
        self.owner = _Batch(requests)
        super().__init__(VOCAB, self.owner, PENALIZERS)


class _Batch:
    def __init__(self, requests):
        self.reqs, self.device = requests, "cpu"


KINDS = (
    {"frequency": 0.5},
    {"presence": 0.7},
    {"repetition": 1.3},
    {"minimum": 3},
    {"frequency": -0.3, "presence": 0.2, "repetition": 0.8, "minimum": 2},
    {},
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, len(KINDS) - 1), st.integers(1, WIDTH)), min_size=1,
             max_size=6),
    st.booleans(),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_penalties_are_those_of_a_request_decoded_alone(batch, summed, random):
    requests = [request(**KINDS[kind]) for kind, _ in batch]
    lens = [length for _, length in batch]
    rows = verify_rows(lens, WIDTH, "cpu")
    before = [[random.randrange(4) for _ in range(3)] for _ in batch]
    # Few values, so that tokens repeat; out of the vocabulary, as a broken drafter's may be.
    drafted = torch.tensor([[random.randrange(4) for _ in range(WIDTH - 1)] for _ in batch])
    drafted[0, -1] = VOCAB + 5
    accepted = [random.randrange(length) for length in lens]
    logits = torch.randn(rows.total, VOCAB, generator=torch.Generator().manual_seed(3))

    together = Penalties(requests)
    for step in zip(*before, strict=True):
        together.cumulate_output_tokens(torch.tensor(step))
    path = PathDependence.of(requests)
    got = logits.clone()
    own = torch.tensor([i in path.penalised for i in range(len(requests))])
    depth = max((lens[i] for i in path.penalised), default=1) - 1
    walk = PenaltyWalk(together, drafted, depth, summed=summed)
    walk.apply(got, rows, own)
    walk.keep(torch.tensor(accepted))

    # From here on as if nothing had been speculated.
    after = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(4))
    got_after = after.clone()
    together.cumulate_output_tokens(torch.tensor([7] * len(batch)))
    together.apply(got_after)

    first = np.cumsum([0, *lens])
    for i, one in enumerate(requests):
        alone = Penalties([one])
        for token in before[i]:
            alone.cumulate_output_tokens(torch.tensor([token]))
        expected = logits[first[i] : first[i + 1]].clone()
        counted = [t.item() for t in drafted[i, : lens[i] - 1] if t < VOCAB]
        for at, row in enumerate(expected[: len(counted) + 1]):
            if at:
                alone.cumulate_output_tokens(torch.tensor([counted[at - 1]]))
            alone.apply(row[None], repeat=1 if summed else None)
        torch.testing.assert_close(got[first[i] : first[i] + len(counted) + 1],
                                   expected[: len(counted) + 1])  # fmt: skip
        alone = Penalties([one])
        kept = min(accepted[i], depth)  # deeper only where no penalty asks for a count
        for token in [*before[i], *drafted[i, :kept].clamp(max=VOCAB - 1).tolist(), 7]:
            alone.cumulate_output_tokens(torch.tensor([token]))
        expected = after[i : i + 1].clone()
        alone.apply(expected)
        torch.testing.assert_close(got_after[i : i + 1], expected)


TOKENS = [chr(97 + i) for i in range(26)] + ["{", "}", '"', ":", " ", "</s>"] + list("0123456789")
END = TOKENS.index("</s>")


def grammar(regex):
    info = TokenizerInfo(TOKENS, VocabType.RAW, vocab_size=len(TOKENS), stop_token_ids=[END])
    compiled = GrammarCompiler(info, max_threads=1).compile_regex(regex)
    return XGrammarGrammar(None, len(TOKENS), compiled, None, regex).copy()


def ids(text):
    return [TOKENS.index(c) for c in text]


def allowed(mask):
    """Sets of tokens, from a mask that is applied."""
    logits = torch.zeros(mask.vocab_mask.shape[0], len(TOKENS))
    mask.apply(logits)
    return [{t for t, v in enumerate(row) if v == 0} for row in logits.tolist()]


def test_every_row_allows_what_the_grammar_does_there():
    one, other = grammar(r"[a-c]{2}\d+"), grammar(r"xy?z")
    one.accept_token(ids("a")[0])
    digits, everything = set(ids("0123456789")), set(range(len(TOKENS)))
    drafted = {0: ids("b12"), 2: ids("xz")}
    for _ in range(2):  # the grammars are left where they were
        mask = path_masks({0: one, 2: other}, drafted, [4, 2, 3], len(TOKENS), torch.device("cpu"))
        got = allowed(mask)
        assert got[0] == set(ids("abc"))
        assert got[1] == digits
        assert got[2] == got[3] == digits | {END}
        assert got[4] == got[5] == everything  # a request without a grammar
        assert got[6] == set(ids("x"))
        assert got[7] == set(ids("yz"))
        assert got[8] == {END}


@pytest.mark.parametrize("wrong", [ids("q")[0], -1, 10_000])
def test_a_forbidden_draft_ends_the_walk(wrong):
    one = grammar(r"[a-c]{3}")
    mask = path_masks({0: one}, {0: [ids("a")[0], wrong, 0]}, [4], len(TOKENS), torch.device("cpu"))
    got = allowed(mask)
    assert got[0] == got[1] == set(ids("abc"))  # row 1 never chooses the wrong token
    one.accept_token(ids("c")[0])  # still at its start: two more follow
    assert allowed(path_masks({0: one}, {}, [1], len(TOKENS), torch.device("cpu")))[0] == got[0]


def test_a_draft_past_the_end_is_walked_to_the_end_only():
    one = grammar("ab")
    drafted = {0: [*ids("ab"), END, *ids("ab")]}
    got = allowed(path_masks({0: one}, drafted, [6], len(TOKENS), torch.device("cpu")))
    assert got[:3] == [set(ids("a")), set(ids("b")), {END}]
    assert not one.is_terminated()
    for token in drafted[0][:3]:
        one.accept_token(token)
    assert path_masks({0: one}, {}, [1], len(TOKENS), torch.device("cpu")) is None


class Broken(XGrammarGrammar):
    """In error from some call on, as llguidance's grammars may be, and for good."""

    calls = 0
    working = 0

    def _check(self):
        self.calls += 1
        if self.calls > self.working:
            raise ValueError("in error")

    def fill_vocab_mask(self, vocab_mask, idx):
        self._check()
        super().fill_vocab_mask(vocab_mask, idx)

    def rollback(self, k):
        self._check()
        super().rollback(k)


@pytest.mark.parametrize("working", [0, 1, 2])
def test_a_grammar_in_error_harms_nobody_else(working, caplog):
    """It fails at the anchor's mask, at a later one (and when put back), when put back only."""
    one, other = grammar("a[bc]d"), grammar("xy")
    one.__class__, one.working = Broken, working
    mask = path_masks({0: one, 1: other}, {0: ids("a"), 1: ids("x")}, [2, 2], len(TOKENS),
                      torch.device("cpu"))  # fmt: skip
    assert allowed(mask)[2:] == [set(ids("x")), set(ids("y"))]
    assert "a grammar" in caplog.text
    assert other.accepted_tokens == []


def test_fixed_rows_do_not_make_an_anchored_grammar_follow():
    """Whole windows are verified for every request; SGLang's outlines has no rollback."""
    outlines = SimpleNamespace(finished=False)
    path = PathDependence.of([request(grammar=outlines), request(grammar=grammar("a"))])
    assert path.anchored == [0]
    assert path.drafted(torch.zeros(2, 3, dtype=torch.int64), verify_rows([4, 4], 4, "cpu")) == {
        1: [0, 0, 0]
    }


def test_who_follows_drafts_and_who_does_not():
    requests = [
        request(),
        request(frequency=0.1),
        request(grammar=grammar("a")),
        request(custom_logit_processor="x"),
        request(grammar=SimpleNamespace(grammar=grammar("a"))),  # as a reasoner's wrapper
        request(grammar=SimpleNamespace(grammar=None)),
        request(minimum=2, output_ids=[5, 5]),
        request(minimum=3, output_ids=[5, 5]),
        request(grammar=grammar("a")),
    ]
    requests[8].sampling_params.ignore_eos = True
    path = PathDependence.of(requests)
    assert path.penalised == [1, 7]
    assert list(path.grammars) == [2, 4, 5, 8]
    assert path.anchored == [3, 5, 8]
    assert walkable(requests[2])
    assert not walkable(requests[0])


def test_requests_come_and_go_when_counts_are_complete():
    """On a GPU SGLang does it on another stream; here only the order can be looked at."""
    order = []
    penalties = SimpleNamespace(
        libraspec_counted=SimpleNamespace(wait=lambda: order.append("wait"))
    )
    assert requests_of_penalties(lambda p, keep: order.append(keep) or 5, penalties, "filter") == 5
    assert order == ["wait", "filter"]
    plain = Penalties([request(frequency=0.5)])  # nothing was speculated with it
    mark_counted(plain)
    plain.filter(torch.tensor([0]))
    assert plain.is_required
