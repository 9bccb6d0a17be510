"""Layout of ragged rows and the acceptance walk, against per-request loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libraspec_sglang.verify.accept import accept
from libraspec_sglang.verify.choose import prepare_seeded
from libraspec_sglang.verify.layout import verify_rows

WIDTH = 9
lens_lists = st.lists(st.integers(1, WIDTH), min_size=1, max_size=6)


@given(lens_lists)
def test_rows_are_each_requests_first_columns(lens):
    rows = verify_rows(lens, WIDTH, "cpu")
    window = torch.arange(len(lens) * WIDTH).view(len(lens), WIDTH)
    expected = torch.cat([window[r, :n] for r, n in enumerate(lens)])
    assert rows.take(window).tolist() == expected.tolist()
    assert rows.request.tolist() == [r for r, n in enumerate(lens) for _ in range(n)]
    assert rows.total == sum(lens)
    assert (rows.index is None) == (len(set(lens)) == 1)


@given(lens_lists)
def test_spread_undoes_take(lens):
    rows = verify_rows(lens, WIDTH, "cpu")
    window = torch.arange(len(lens) * WIDTH).view(len(lens), WIDTH)
    spread = rows.spread(rows.take(window), WIDTH, fill=-7)
    for r, n in enumerate(lens):
        assert spread[r, :n].tolist() == window[r, :n].tolist()
        assert spread[r, n:].tolist() == [-7] * (WIDTH - n)


@pytest.mark.parametrize("lens", [[], [0], [3, WIDTH + 1]])
def test_lengths_outside_the_window_are_refused(lens):
    with pytest.raises(ValueError, match="verify lengths must be in"):
        verify_rows(lens, WIDTH, "cpu")


def accept_by_loop(target, drafted, lens):
    """The rule, one request at a time."""
    tokens = []
    for row, draft, n in zip(target, drafted, lens, strict=True):
        out = []
        for depth in range(n):
            out.append(row[depth])
            if depth == n - 1 or draft[depth] != row[depth]:
                break
        tokens.append(out)
    return tokens


@given(lens_lists, st.randoms(use_true_random=False))
def test_accept_is_the_rule(lens, random):
    # Three token values, so that long agreements and early misses both occur.
    drafted = [[random.randrange(3) for _ in range(WIDTH - 1)] for _ in lens]
    target = [[random.randrange(3) for _ in range(n)] for n in lens]
    rows = verify_rows(lens, WIDTH, "cpu")
    got = accept(
        torch.tensor([t for row in target for t in row]), torch.tensor(drafted), rows, WIDTH
    )
    expected = accept_by_loop(target, drafted, lens)
    assert got.commit_lens.tolist() == [len(e) for e in expected]
    assert got.bonus.tolist() == [e[-1] for e in expected]
    for row, e in zip(got.tokens.tolist(), expected, strict=True):
        assert row[: len(e)] == e


def test_every_acceptance_at_every_length():
    """All (verified, accepted) pairs, not only the end points."""
    for n in range(1, WIDTH + 1):
        for hits in range(n):
            drafted = torch.arange(10, 10 + WIDTH - 1)[None]
            target = torch.cat([drafted[0, :hits], torch.tensor([99]), torch.zeros(WIDTH).long()])[
                :n
            ]
            other = torch.tensor([7])  # a second request makes the layout ragged
            rows = verify_rows([n, 1], WIDTH, "cpu")
            got = accept(torch.cat([target, other]), drafted.repeat(2, 1), rows, WIDTH)
            assert got.commit_lens.tolist() == [hits + 1, 1]
            assert got.bonus.tolist() == [99, 7]


def test_a_draft_shorter_than_the_window():
    rows = verify_rows([3, 1], WIDTH, "cpu")
    got = accept(torch.tensor([5, 6, 7, 1]), torch.tensor([[5, 6], [1, 1]]), rows, WIDTH)
    assert got.commit_lens.tolist() == [3, 1]
    assert got.tokens.shape == (2, WIDTH)


def test_zero_drafted_tokens():
    rows = verify_rows([1, 1], WIDTH, "cpu")
    got = accept(torch.tensor([4, 5]), torch.empty(2, 0, dtype=torch.int64), rows, WIDTH)
    assert got.bonus.tolist() == [4, 5]
    assert got.commit_lens.tolist() == [1, 1]


def test_index_is_host_arithmetic():
    from libraspec_sglang.verify.layout import packed_index

    assert np.array_equal(packed_index([2, 3], 5), [0, 1, 5, 6, 7])


def test_limits_cut_what_fixed_rows_verified_too_much():
    rows = verify_rows([4, 4], WIDTH, "cpu")
    drafted = torch.tensor([[1, 2, 3], [1, 2, 3]])
    got = accept(torch.tensor([1, 2, 3, 9] * 2), drafted, rows, WIDTH, limits=torch.tensor([3, 1]))
    assert got.commit_lens.tolist() == [4, 2]
    assert got.bonus.tolist() == [9, 2]


def test_unequal_drafts_come_back_request_by_request():
    """Rows of 2, 0 and 3 drafted tokens behind their anchors; the hidden states say which row."""
    from libraspec_sglang.drafters.dflash import DFlashDrafter

    drafter = DFlashDrafter.__new__(DFlashDrafter)
    drafter._head = lambda hidden, confidence: (hidden[:, 0].long(), hidden[:, 0] / 10)
    rows = verify_rows([3, 1, 4], WIDTH, "cpu")
    got = drafter._ragged(torch.arange(8.0)[:, None], rows, confidence=True)
    assert (got.length, got.rows) == (3, 8)
    known = ~got.confidence.isnan()
    assert known.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert got.tokens[known].tolist() == [1, 2, 5, 6, 7]  # 0, 3 and 4 are anchors
    assert got.confidence[known].tolist() == pytest.approx([0.1, 0.2, 0.5, 0.6, 0.7])

    drafter._head = lambda hidden, confidence: (hidden[:, 0].long(), None)
    assert drafter._ragged(torch.arange(8.0)[:, None], rows, False).confidence.isnan().all()


def test_equal_rows_are_laid_out_once():
    """A plain round and one of a fixed length come back all the time; no upload for them."""
    first, again = (verify_rows([3, 3], 8, "cpu") for _ in range(2))
    assert again.lengths is first.lengths and again.request is first.request
    assert verify_rows([3, 3, 3], 8, "cpu").lengths.tolist() == [3, 3, 3]
    assert verify_rows([3, 3], 4, "cpu").window == 4


def test_seeded_sampling_is_compiled_for_one_row_and_for_several():
    seen = []

    def sampler(output, info, **rest):
        logits = output.next_token_logits
        seen.append((*logits.shape, len(info.sampling_seed), len(rest["positions"])))
        return logits.argmax(dim=-1)

    prepare_seeded(sampler, vocab_size=7, device="cpu")
    assert seen == [(1, 7, 1, 1), (2, 7, 2, 2)]
