"""Survival curves of recent drafts, and what rounds of every width would have brought by them.

Kinds of rounds are told apart, as they go very differently: those *inside* something predictable
(the request's draft before was accepted whole) from all others, both for requests that sample and
for those that do not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from .compiled import compiled
from .policy import Sampled

INSIDE, SAMPLED = 1, 2  # what makes a kind, added up
KINDS = 4
CURVES, ENOUGH_CURVES = 128, 8
"""Survival curves remembered of each kind, and how many of a kind say something about it. Only the
younger half of those there ever were is used: the first are of raw confidences."""
REQUESTS_REMEMBERED = 1024
UNSEEN = 0.9
"""Chance of acceptance assumed for positions no draft has reached yet."""
BUCKETS = 64
"""Steps of survival in which a width's expected rate is searched for its best threshold."""
FIRST_ROUNDS, REFRESH_EVERY = 16, 8
"""Rounds that come into force at once, and how many together later on; one says little then."""
UNDRAFTED = -1
PACE = 0.2
"""How fast the chances beyond a draft follow what deeper drafts showed."""
CONTINUED = 0.5
"""How far what a narrow draft leaves is taken to be found by the next (:func:`_taken_later`). On
the test pair, tokens per round at a fixed length of 4, 8 and 16 by rounds 24 long: 2.81, 3.40 and
4.00 if what is left were lost, 3.15, 3.82 and 4.13 if it were found again; measured 3.06, 3.58 and
4.05."""


class Curves:
    """Recent survival curves, to full depth, of every kind of round.

    A curve is what a draft's calibrated chances multiply to; beyond the draft it goes on with the
    chances that deeper drafts of its kind showed. Kinds 1 and 3 are rounds *inside* something
    predictable: the request's draft before was accepted whole. Kinds 2 and 3 are of requests that
    sample.
    """

    def __init__(self, depth: int) -> None:
        self._inside: dict[Hashable, None] = {}  # requests, the oldest first
        self._beyond = np.full((KINDS, depth), UNSEEN)
        """Chance that position d is accepted when all before it are."""
        self._curves = np.zeros((KINDS, CURVES, depth))
        self._taken = np.zeros(KINDS, dtype=np.int64)  # curves ever taken; the oldest make way
        self._curves[0, 0], self._taken[0] = np.cumprod(self._beyond[0]), 1  # to start from
        self._rounds = 0
        self._tables = _fold(self._curves, self._taken)

    def kinds(self, requests: Sequence[Hashable]) -> list[int]:
        """The kind of each request's next round."""
        inside = self._inside
        return [
            INSIDE * (request in inside) + SAMPLED * isinstance(request, Sampled)
            for request in requests
        ]

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
            members: [4] of them of each kind that draft; the others take their own token only.
            widths: [4] tokens each kind drafts, where it is not varied.
            varied: bool [4], the kinds in question.
            fixed: seconds of a round outside both forwards.
            verify: [N (D + 1) + 1] seconds of the target's forward by rows.
            draft: the same of the drafter's pass.
        """
        return _rates(*self._tables, batch, members, widths, varied, fixed, verify, draft)

    def take(
        self,
        requests: Sequence[Hashable],
        kinds: Sequence[int],
        confidence: np.ndarray,
        chance: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Add a draft: confidences and their calibrated chances [bs, D'], D' <= D; [bs] accepted.

        ``kinds`` are the requests', from :meth:`kinds`. A request drafted as many tokens as have
        a confidence.
        """
        states = _take(
            confidence, chance, accepted, np.array(kinds), self._beyond, self._curves, self._taken
        )
        for request, kind, now in zip(requests, kinds, states.tolist(), strict=True):
            if kind & INSIDE and now != UNDRAFTED:
                del self._inside[request]
            if now == 1:  # the latest last
                self._inside[request] = None
        while len(self._inside) > REQUESTS_REMEMBERED:
            del self._inside[next(iter(self._inside))]
        self._rounds += 1
        if self._rounds < FIRST_ROUNDS or self._rounds % REFRESH_EVERY == 0:
            self._tables = _fold(self._curves, self._taken)


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
def _rates(gain, paid, later, batch, members, widths, varied, fixed, verify, draft):
    """See :meth:`Curves.rates`; tables of :func:`_fold`.

    For every width the best threshold on survival: tokens above it are verified. Positions are
    added width by width, so all widths take one pass over the tables.
    """
    depth, present = gain.shape[1], np.flatnonzero(members)
    tokens, rows = np.zeros((KINDS, BUCKETS)), np.zeros((KINDS, BUCKETS))  # a request of the kind
    factor = np.ones(KINDS)
    others = float(batch)  # rows of the draft that are not varied
    for kind in present:
        if not varied[kind]:
            others += members[kind] * widths[kind]
            factor[kind] = later[kind, widths[kind]]
            for position in range(widths[kind]):
                _add(tokens[kind], gain[kind, position])
                _add(rows[kind], paid[kind, position])
    rates = np.empty(depth + 1)
    for width in range(depth + 1):
        for kind in present:
            if varied[kind]:
                factor[kind] = later[kind, width]
                if width > 0:
                    _add(tokens[kind], gain[kind, width - 1])
                    _add(rows[kind], paid[kind, width - 1])
        drafted = others + width * (members * varied).sum()
        spent = fixed + (draft[int(drafted)] if drafted > batch else 0.0)
        first = paid[:, 0] if drafted > batch else np.zeros((KINDS, BUCKETS))
        rates[width] = _best_rate(
            batch, members, present, factor, tokens, rows, first, spent, verify
        )
    return rates


@compiled
def _add(total, more):
    for place in range(len(total)):
        total[place] += more[place]


@compiled
def _best_rate(batch, members, present, factor, tokens, rows, first, spent, verify):
    """The best rate over thresholds.

    Rounds that verify nothing are apart from those that do: they cost what plain decoding costs,
    often much less than a row more, which the mean of both would hide.
    """
    brought = batch - members.sum() + (members * factor).sum()
    verified = float(batch)
    best = brought / (spent + verify[batch])
    rest = np.ones(KINDS)  # shares of the kinds' requests that verify nothing
    idle = 1.0  # chance that all of them do
    for place in range(BUCKETS - 1, -1, -1):
        before, starts = verified, False
        for kind in present:
            verified += members[kind] * rows[kind, place]
            brought += members[kind] * tokens[kind, place] * factor[kind]
            starts |= first[kind, place] > 0.0
        if verified == before:
            continue
        if starts and idle > 0.0:
            idle = 1.0
            for kind in present:
                rest[kind] = max(rest[kind] - first[kind, place], 0.0)
                idle *= rest[kind] ** members[kind]
        some = verified  # rows where one does not
        if idle > 0.0:
            some = batch + (verified - batch) / max(1.0 - idle, 1e-9)
        below = min(int(some), len(verify) - 2)
        seconds = verify[below] + (some - below) * (verify[below + 1] - verify[below])
        seconds = spent + idle * verify[batch] + (1.0 - idle) * seconds
        if brought > best * seconds:
            best = brought / seconds
    return best


@compiled
def _fold(curves, taken):
    """What the younger half of the curves says of a request of each kind.

    Returns:
        gain: [4, D, BUCKETS] tokens that position d brings, by bucket of its survival.
        paid: [4, D, BUCKETS] chance that the survival is in the bucket.
        later: [4, D + 1], see :func:`_taken_later`.
    """
    size, depth = curves.shape[1:]
    count, young = np.zeros(KINDS, dtype=np.int64), np.empty_like(curves)
    for kind in range(KINDS):
        count[kind] = min(max((taken[kind] + 1) // 2, min(taken[kind], ENOUGH_CURVES)), size)
        for index in range(count[kind]):
            young[kind, index] = curves[kind, (taken[kind] - 1 - index) % size]
    gain, paid = np.zeros((KINDS, depth, BUCKETS)), np.zeros((KINDS, depth, BUCKETS))
    for kind in range(KINDS):
        source = kind  # whose curves stand for it
        for other in (kind ^ 1, kind ^ 2, kind ^ 3):
            if count[source] < ENOUGH_CURVES and count[other] > count[source]:
                source = other
        share = 1.0 / max(count[source], 1)
        for index in range(count[source]):
            for position in range(depth):
                survival = young[source, index, position]
                place = min(int(survival * BUCKETS), BUCKETS - 1)
                gain[kind, position, place] += share * survival
                paid[kind, position, place] += share
    return gain, paid, _taken_later(young, count)


@compiled
def _taken_later(curves, count):
    """[4, D + 1] factors by kind and width for what a draft that ends early leaves to the next.

    A span of L acceptable tokens is L + 1 tokens in one round if the draft is long enough, and in
    floor(L / (w + 1)) + 1 rounds of width w: no token is lost by drafting less, a round is spent.
    That holds in part (``CONTINUED``), and only as far as rounds inside a span do go better.
    """
    depth = curves.shape[2]
    factors, mean = np.ones((KINDS, depth + 1)), np.ones((KINDS, depth + 1))
    for outside in range(0, KINDS, 2):
        if count[outside : outside + 2].min() < ENOUGH_CURVES:
            continue
        for kind in range(outside, outside + 2):
            for position in range(depth):
                mean[kind, position + 1] = curves[kind, : count[kind], position].sum() / count[kind]
        better = mean[outside + 1].sum() / mean[outside].sum() - 1.0
        holds = CONTINUED * min(max(better, 0.0), 1.0)
        for kind in range(outside, outside + 2):
            survival = mean[kind]
            for width in range(1, depth + 1):
                lost = survival[: width + 1].sum()
                found = survival.sum() / survival[:: width + 1].sum()
                factors[kind, width] += holds * (found / lost - 1.0)
    return factors


@compiled
def _take(confidence, chance, accepted, kinds, beyond, curves, taken):
    """See :meth:`Curves.take`. A position teaches in the measure that it was likely reached.

    Returns [bs] whether each request's next round is inside, 1 or 0; UNDRAFTED: as before.
    """
    drafted = tokens_drafted(confidence)
    states = np.full(len(drafted), UNDRAFTED)
    teaching = max((drafted > 0).sum(), 1)
    for index in range(chance.shape[0]):
        if drafted[index] == 0:
            continue
        states[index] = 1 if accepted[index] >= drafted[index] else 0
        kind = kinds[index]
        if taken[kind] == 0:
            beyond[kind] = beyond[kind ^ 1] if taken[kind ^ 1] else beyond[kind ^ 2]
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
    return states
