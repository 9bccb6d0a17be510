"""Survival curves of recent drafts, and what rounds of every width would have brought by them.

Two kinds of rounds are told apart, as they go very differently: those *inside* something
predictable (the request's draft before was accepted whole), and all others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from .compiled import compiled

CURVES, ENOUGH_CURVES = 128, 8
"""Survival curves remembered of each kind, and how many of a kind say something about it. Only the
younger half of those there ever were is used: the first are of raw confidences."""
REQUESTS_REMEMBERED = 1024
UNSEEN = 0.9
"""Chance of acceptance assumed for positions no draft has reached yet."""
BUCKETS = 64
"""Steps of survival in which a width's expected rate is searched for its best threshold."""
PACE = 0.2
"""How fast the chances beyond a draft follow what deeper drafts showed."""
CONTINUED = 0.5
"""How far what a narrow draft leaves is taken to be found by the next (:func:`_taken_later`). On
the test pair, tokens per round at a fixed length of 4, 8 and 16 by rounds 24 long: 2.81, 3.40 and
4.00 if what is left were lost, 3.15, 3.82 and 4.13 if it were found again; measured 3.06, 3.58 and
4.05."""


class Curves:
    """Recent survival curves, to full depth, of two kinds of rounds.

    A curve is what a draft's calibrated chances multiply to; beyond the draft it goes on with the
    chances that deeper drafts of its kind showed. Kind 1 are rounds *inside* something predictable:
    the request's draft before was accepted whole. Kind 0 are all others.
    """

    def __init__(self, depth: int) -> None:
        self._inside: dict[Hashable, None] = {}  # requests, the oldest first
        self._beyond = np.full((2, depth), UNSEEN)
        """Chance that position d is accepted when all before it are."""
        self._curves = np.zeros((2, CURVES, depth))
        self._taken = np.zeros(2, dtype=np.int64)  # curves ever taken; the oldest make way
        self._curves[0, 0], self._taken[0] = np.cumprod(self._beyond[0]), 1  # to start from

    def kinds(self, requests: Sequence[Hashable]) -> list[int]:
        """The kind of each request's next round."""
        return [int(request in self._inside) for request in requests]

    def rates(
        self,
        batch: int,
        members: np.ndarray,
        widths: np.ndarray,
        varied: np.ndarray,
        fixed: float,
        verify: np.ndarray,
        draft: np.ndarray,
    ) -> np.ndarray:
        """[D + 1] expected tokens per second of a round by the width that some kinds draft.

        Args:
            batch: N, requests in the round.
            members: [2] of them of each kind that draft; the others take their own token only.
            widths: [2] tokens each kind drafts, where it is not varied.
            varied: bool [2], the kinds in question.
            fixed: seconds of a round outside both forwards.
            verify: [N (D + 1) + 1] seconds of the target's forward by rows.
            draft: the same of the drafter's pass.
        """
        return _rates(
            self._curves, self._taken, batch, members, widths, varied, fixed, verify, draft
        )

    def take(
        self,
        requests: Sequence[Hashable],
        confidence: np.ndarray,
        chance: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Add a draft: confidences and their calibrated chances [bs, D'], D' <= D; [bs] accepted.

        A request drafted as many tokens as have a confidence.
        """
        kinds = np.array(self.kinds(requests))
        drafted = _take(confidence, chance, kinds, self._beyond, self._curves, self._taken)
        for request, tokens, taken in zip(
            requests, drafted.tolist(), accepted.tolist(), strict=True
        ):
            if not tokens:
                continue
            self._inside.pop(request, None)
            if taken >= tokens:
                self._inside[request] = None
        while len(self._inside) > REQUESTS_REMEMBERED:
            del self._inside[next(iter(self._inside))]


@compiled
def tokens_drafted(confidence):
    """[bs] tokens each request drafted: those with a confidence."""
    drafted = np.zeros(confidence.shape[0], dtype=np.int64)
    for request in range(confidence.shape[0]):
        for q in confidence[request]:
            if q != q:
                break
            drafted[request] += 1
    return drafted


@compiled
def _rates(curves, taken, batch, members, widths, varied, fixed, verify, draft):
    """See :meth:`Curves.rates`.

    For every width the best threshold on survival: tokens above it are verified. Positions are
    added width by width, survivals sorted into buckets, so all widths take one pass over them.

    Rounds that verify nothing are apart from those that do: they cost what plain decoding costs,
    often much less than a row more, which the mean of both would hide.
    """
    depth = curves.shape[2]
    curves, count = _younger(curves, taken)
    later = _taken_later(curves, count)
    source = np.array([0, 1])  # whose curves stand for a kind
    for kind in range(2):
        if count[kind] < ENOUGH_CURVES and count[1 - kind] > count[kind]:
            source[kind] = 1 - kind

    share = members / np.maximum(count[source], 1)
    gain, paid = np.zeros((2, BUCKETS)), np.zeros(BUCKETS)
    first = np.zeros((2, BUCKETS))  # share of a kind's drafts whose first token is there
    factor = np.ones(2)
    others = float(batch)  # rows of the draft that are not varied
    for kind in range(2):
        if members[kind] and not varied[kind]:
            others += members[kind] * widths[kind]
            factor[kind] = later[kind, widths[kind]]
            known = curves[source[kind], : count[source[kind]]]
            for position in range(widths[kind]):
                _sort_in(known, position, share[kind], gain[kind], paid, first[kind])
    rates = np.empty(depth + 1)
    for width in range(depth + 1):
        for kind in range(2):
            if members[kind] and varied[kind]:
                factor[kind] = later[kind, width]
                known = curves[source[kind], : count[source[kind]]]
                if width > 0:
                    _sort_in(known, width - 1, share[kind], gain[kind], paid, first[kind])
        rows = others + width * (members * varied).sum()
        spent = fixed + (draft[int(rows)] if rows > batch else 0.0)
        tokens = batch - members.sum() + (members * factor).sum()
        verified = float(batch)
        best = tokens / (spent + verify[batch])
        rest = np.ones(2)  # share of a kind's requests that verify nothing
        for place in range(BUCKETS - 1, -1, -1):
            if paid[place] == 0.0:
                continue
            tokens += gain[0, place] * factor[0] + gain[1, place] * factor[1]
            verified += paid[place]
            rest = np.maximum(rest - first[:, place], 0.0)
            idle = rest[0] ** members[0] * rest[1] ** members[1]  # that all of them do
            some = batch + (verified - batch) / max(1.0 - idle, 1e-9)  # rows where one does not
            below = min(int(some), len(verify) - 2)
            seconds = verify[below] + (some - below) * (verify[below + 1] - verify[below])
            seconds = idle * verify[batch] + (1.0 - idle) * seconds
            best = max(best, tokens / (spent + seconds))
        rates[width] = best
    return rates


@compiled
def _sort_in(curves, position, share, gain, paid, first):
    """Add a position of the curves to the buckets: ``share`` of a token for each curve.

    ``first`` takes the first position alone, as shares of the curves.
    """
    for survival in curves[:, position]:
        place = min(int(survival * BUCKETS), BUCKETS - 1)
        gain[place] += share * survival
        paid[place] += share
        if position == 0:
            first[place] += 1.0 / len(curves)


@compiled
def _younger(curves, taken):
    """The younger half of the curves of each kind, at most all remembered; and how many."""
    size = curves.shape[1]
    count, young = np.zeros(2, dtype=np.int64), np.empty_like(curves)
    for kind in range(2):
        count[kind] = min(max((taken[kind] + 1) // 2, min(taken[kind], ENOUGH_CURVES)), size)
        for index in range(count[kind]):
            young[kind, index] = curves[kind, (taken[kind] - 1 - index) % size]
    return young, count


@compiled
def _taken_later(curves, count):
    """[2, D + 1] factors by kind and width for what a draft that ends early leaves to the next.

    A span of L acceptable tokens is L + 1 tokens in one round if the draft is long enough, and in
    floor(L / (w + 1)) + 1 rounds of width w: no token is lost by drafting less, a round is spent.
    That holds in part (``CONTINUED``), and only as far as rounds inside a span do go better.
    """
    depth = curves.shape[2]
    factors = np.ones((2, depth + 1))
    if count.min() < ENOUGH_CURVES:
        return factors
    mean = np.ones((2, depth + 1))
    for kind in range(2):
        for position in range(depth):
            mean[kind, position + 1] = curves[kind, : count[kind], position].sum() / count[kind]
    holds = CONTINUED * min(max(mean[1].sum() / mean[0].sum() - 1.0, 0.0), 1.0)
    for kind in range(2):
        survival = mean[kind]
        for width in range(1, depth + 1):
            lost = survival[: width + 1].sum()
            found = survival.sum() / survival[:: width + 1].sum()
            factors[kind, width] += holds * (found / lost - 1.0)
    return factors


@compiled
def _take(confidence, chance, kinds, beyond, curves, taken):
    """See :meth:`Curves.take`. A position teaches in the measure that it was likely reached.

    Returns [bs] tokens drafted.
    """
    drafted = tokens_drafted(confidence)
    teaching = max((drafted > 0).sum(), 1)
    for index in range(chance.shape[0]):
        if drafted[index] == 0:
            continue
        kind = kinds[index]
        if taken[kind] == 0:
            beyond[kind] = beyond[1 - kind]
        curve = curves[kind, taken[kind] % curves.shape[1]]
        taken[kind] += 1
        survival = 1.0
        for position in range(curves.shape[2]):
            p = beyond[kind, position]
            if position < drafted[index]:
                p = chance[index, position]
                beyond[kind, position] += PACE / teaching * survival * (p - beyond[kind, position])
            survival *= p
            curve[position] = survival
    return drafted
