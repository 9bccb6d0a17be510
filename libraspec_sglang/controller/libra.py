"""``libra``: lengths from measured cost and calibrated survival, for the whole batch.

Where the paper puts the cost of verification into one number (alpha), this policy measures it: the
time of the target's forward and of the drafter's pass as functions of their rows, and the time a
round spends elsewhere. Each round it decides two things.

1. *How wide to draft*, before drafting. Recent survival curves say what a pass of each width would
   have brought; the width with the best expected rate is used. Curves of rounds that follow a draft
   accepted whole (the text is in the middle of something predictable) are kept apart from the
   others; each request is expected to go on like its kind, and drafted as wide as pays for that
   kind. Zero is a width: plain decoding. While it is chosen, a draft is tried now and then (further
   and further apart) to see whether the text has become predictable.
2. *How many tokens to verify*, after drafting: :func:`batch.allocate` on the calibrated survivals.

Everything is host arithmetic in small compiled loops; the confidences come to the host anyway,
with the lengths the verification layout needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from .batch import best_lengths
from .calibration import REFRESH_EVERY, Calibration
from .compiled import compiled
from .cost import BatchCost, Elsewhere, Profile
from .cost_file import Cost, Forward
from .policy import Policy, RoundTimes

CURVES, ENOUGH_CURVES = 128, 8
"""Survival curves remembered of each kind, and how many of a kind say something about it. Only the
younger half of those there ever were is used: the first are of raw confidences."""
REQUESTS_REMEMBERED = 1024
FIRST_PROBE, LAST_PROBE = 4, 64
"""Rounds of plain decoding before the next trial draft: first, and at most."""
EXPLORE_EVERY, EXPLORE_BY = 16, 2.0
"""How often a draft is made wider than what pays by what is known, and how many times as wide.
A narrow draft says nothing about the positions beyond it."""
FIRST_PLAIN, LAST_PLAIN = 6, 192
"""Rounds that draft, at one batch size, before a plain one: first, and at most. What plain decoding
costs is seen only there; a line through drafted rounds alone says too much for it."""
FAR = 0.75
"""Plain decoding's rate, as a share of the best, below which its price is looked at again late."""
PROBE_WIDTH = 3
"""Tokens of a trial draft."""
WIDTH_EVERY = 3
"""Rounds a chosen width stands, while the batch is of the same size and state."""
MARGIN = 0.01
"""Expected gain in rate below which the width stays as it is."""
UNSEEN = 0.9
"""Chance of acceptance assumed for positions no draft has reached yet."""
TYPICAL_CONTEXT = 512
"""Tokens of context a request is taken to have in a profile; rounds shift it to the real ones."""
BUCKETS = 64
"""Steps of survival in which a width's expected rate is searched for its best threshold."""
PACE = 0.2
"""How fast the chances beyond a draft follow what deeper drafts showed."""
CONTINUED = 0.5
"""How far what a narrow draft leaves is taken to be found by the next (:func:`_taken_later`). On
the test pair, tokens per round at a fixed length of 4, 8 and 16 by rounds 24 long: 2.81, 3.40 and
4.00 if what is left were lost, 3.15, 3.82 and 4.13 if it were found again; measured 3.06, 3.58 and
4.05."""


class Libra(Policy):
    """The policy's state. Not thread-safe: one per worker."""

    name = "libra"
    needs_confidence = True
    learns = True

    def __init__(self, block_size: int, max_length: int, cost: Cost | None = None) -> None:
        """Args:
        block_size: n, tokens a trained block drafts; the first width tried.
        max_length: d_max.
        cost: what rounds cost on this machine (``libraspec profile``); without it a
            conservative prior, refined like the profile by the rounds themselves.
        """
        self.max_length = max_length
        self.calibration = Calibration(max_length)
        verify, draft = (cost.verify, cost.draft) if cost is not None else (None, None)
        self.verify_cost = BatchCost(0.01, max_length, _profile(verify))
        self.draft_cost = BatchCost(0.01, max_length, _profile(draft))
        self.elsewhere = Elsewhere(cost.elsewhere if cost is not None else 0.0)
        self._width = [min(block_size, max_length)] * 2  # by kind of round
        self._memory = _Memory(max_length)
        self._chance: np.ndarray | None = None
        self._drafting = True
        self._probe_in, self._probe_gap = 0, FIRST_PROBE
        self._explore_in = EXPLORE_EVERY
        self._plain_in: dict[int, tuple[int, int]] = {}  # by batch size: rounds left, of how many
        self._plain_far = False
        self._settled, self._situation = 0, (0, 0)

    def prepare(self) -> None:
        """Compile the loops, on a policy that is thrown away."""
        other, requests = Libra(1, self.max_length), ["a"]
        drafted = torch.full((1, self.max_length), 0.5)
        for _ in range(2 * REFRESH_EVERY):
            other.first_drafts(requests, [1])
            lengths = other.decide(drafted, torch.ones(1, dtype=torch.int64))
            other.learn(requests, drafted.numpy(), lengths.numpy(), lengths.numpy())
            other.learn_times(RoundTimes(1, 2, 1e-3, 2, 1e-3, 1e-3))

    # -- decisions -----------------------------------------------------------------------

    def first_draft(self, requests: Sequence[Hashable], cap: int) -> int:
        """Tokens to draft for each request this round, the same for all.

        Args:
            requests: keys of the requests in the batch, one use per request (never reused).
            cap: the longest length any of them may verify.
        """
        return min(max(self._drafts(requests, None)), cap)

    def first_drafts(self, requests: Sequence[Hashable], caps: Sequence[int]) -> list[int]:
        """See :meth:`Policy.first_drafts`: each request as wide as pays for its kind."""
        widths = self._drafts(requests, caps)
        return [min(width, cap) for width, cap in zip(widths, caps, strict=True)]

    def _drafts(self, requests: Sequence[Hashable], caps: Sequence[int] | None) -> list[int]:
        """Widths before caps; without ``caps`` the same for all."""
        kinds = self._memory.kinds(requests)
        if not self.verify_cost.known:
            return [self._width[kind] for kind in kinds]
        situation = len(kinds), sum(kinds)
        if self._settled > 0 and self._drafting and situation == self._situation:
            self._settled -= 1
        else:
            self._settle(*situation, equal=caps is None)
            self._settled, self._situation = WIDTH_EVERY - 1, situation
        widths = [self._width[kind] for kind in kinds]
        if not any(widths):
            return [self._probed()] * len(widths)
        if self._plain_is_due(len(widths)):
            return [0] * len(widths)
        return self._explored(widths, caps)

    def _plain_is_due(self, batch: int) -> bool:
        """Whether this round shall show what plain decoding costs; further and further apart."""
        left, gap = self._plain_in.get(batch, (FIRST_PLAIN, FIRST_PLAIN))
        if left > 0:
            self._plain_in[batch] = left - 1, gap
            return False
        gap = LAST_PLAIN if self._plain_far and gap > FIRST_PLAIN else min(2 * gap, LAST_PLAIN)
        self._plain_in[batch] = gap, gap
        return True

    def _explored(self, widths: list[int], caps: Sequence[int] | None) -> list[int]:
        """Widths that pay; now and then one that may show that a wider one would."""
        self._drafting = True
        self._probe_in, self._probe_gap = 0, FIRST_PROBE
        self._explore_in -= 1
        if self._explore_in > 0:
            return widths
        wider = [min(int(width * EXPLORE_BY) + 1, self.max_length) for width in widths]
        if caps is None:
            self._explore_in = EXPLORE_EVERY
            return wider
        able = [r for r, width in enumerate(widths) if caps[r] > width]
        if able:  # one is enough to show it, the narrowest
            self._explore_in = EXPLORE_EVERY
            shows = min(able, key=widths.__getitem__)
            widths[shows] = wider[shows]
        return widths

    def _probed(self) -> int:
        """Plain decoding, with a trial draft now and then, further and further apart."""
        self._probe_in -= 1
        if self._drafting and self._probe_in <= 0:  # the first plain round
            self._drafting, self._probe_in = False, self._probe_gap
        if self._probe_in > 0:
            return 0
        self._probe_gap = min(self._probe_gap * 2, LAST_PROBE)
        self._probe_in = self._probe_gap
        return min(PROBE_WIDTH, self.max_length)

    def decide(
        self, confidence: torch.Tensor, caps: torch.Tensor, alpha: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Lengths with the best expected rate; alpha has no part in it."""
        bs, values = len(confidence), confidence.cpu().numpy()
        self._chance = self.calibration.probability(values)
        limits, rows = _limits(values, caps.cpu().numpy())
        spent = self.elsewhere.seconds(bs) + self.draft_cost.drafted(bs, rows)
        lengths = _lengths(self._chance, limits, spent, self.verify_cost.seconds(bs))
        return torch.from_numpy(lengths).to(confidence.device)

    def _settle(self, batch: int, inside: int, equal: bool) -> None:
        """Choose the widths with the best expected rate over recent survival curves.

        One kind after the other, requests inside first; both at once where all must be ``equal``.
        """
        draft, verify = self.draft_cost.seconds(batch), self.verify_cost.seconds(batch)
        fixed = self.elsewhere.seconds(batch)
        members = np.array([batch - inside, inside])
        present = [kind for kind in (1, 0) if members[kind]]
        for kinds in [[0, 1]] if equal else [[kind] for kind in present]:
            varied = np.array([0 in kinds, 1 in kinds])
            widths = np.array(self._width)
            rates = self._memory.rates(members, widths, varied, fixed, verify, draft)
            best, now = int(rates.argmax()), self._width[kinds[0]]
            if rates[best] >= rates[now] * (1.0 + MARGIN):
                for kind in kinds:
                    self._width[kind] = best
            self._plain_far = batch / (fixed + verify[batch]) < FAR * rates[best]

    # -- learning ------------------------------------------------------------------------

    def learn(
        self,
        requests: Sequence[Hashable],
        confidence: np.ndarray,
        verified: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Take in a round's outcome.

        Args:
            requests: as in :meth:`first_draft`.
            confidence: [bs, D] of the round's draft, D = 0 after a plain round; NaN beyond what
                a request drafted.
            verified: [bs] drafted tokens verified.
            accepted: [bs] of them accepted.
        """
        if not confidence.shape[1]:
            return
        chance, self._chance = self._chance, None
        if chance is None:  # lengths were not ours to decide this round
            chance = self.calibration.probability(confidence)
        self.calibration.update(confidence, verified, accepted, chance)
        self._memory.take(requests, confidence, chance, accepted)

    def learn_times(self, times: RoundTimes) -> None:
        """See :meth:`Policy.learn_times`; all seconds are taken at the machine's usual pace."""
        if times.elsewhere is not None:
            self.elsewhere.observe(times.batch, times.elsewhere)
        pace = self.elsewhere.pace
        if times.draft_rows:
            self.draft_cost.observe(times.batch, times.draft_rows, times.draft_seconds / pace)
        self.verify_cost.observe(times.batch, times.verify_rows, times.verify_seconds / pace)

    def report(self) -> str:
        """See :meth:`Policy.report`."""
        before, after = self.calibration.error()
        return (
            f"calibration error of the drafter's confidences {before:.3f}, as used {after:.3f}, "
            f"over {self.calibration.observed} verified tokens; drafting {self._width[0]} tokens, "
            f"{self._width[1]} after a draft accepted whole"
        )


class _Memory:
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
        members: np.ndarray,
        widths: np.ndarray,
        varied: np.ndarray,
        fixed: float,
        verify: np.ndarray,
        draft: np.ndarray,
    ) -> np.ndarray:
        """[D + 1] expected tokens per second of a round by the width that some kinds draft.

        Args:
            members: [2] requests of each kind; N together.
            widths: [2] tokens each kind drafts, where it is not varied.
            varied: bool [2], the kinds in question.
            fixed: seconds of a round outside both forwards.
            verify: [N (D + 1) + 1] seconds of the target's forward by rows.
            draft: the same of the drafter's pass.
        """
        return _rates(self._curves, self._taken, members, widths, varied, fixed, verify, draft)

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


def _profile(forward: Forward | None) -> Profile | None:
    if forward is None:
        return None
    return lambda batch, rows: forward(batch, rows, batch * TYPICAL_CONTEXT)


@compiled
def _drafted(confidence):
    """[bs] tokens each request drafted: those with a confidence."""
    drafted = np.zeros(confidence.shape[0], dtype=np.int64)
    for request in range(confidence.shape[0]):
        for q in confidence[request]:
            if q != q:
                break
            drafted[request] += 1
    return drafted


@compiled
def _limits(confidence, caps):
    """(longest length per request [bs], rows of the pass that drafted them)."""
    drafted = _drafted(confidence)
    return np.maximum(np.minimum(drafted, caps), 0), len(drafted) + drafted.sum()


@compiled
def _lengths(chance, limits, spent, verify):
    """The batch's lengths where a round costs ``spent + verify[rows]`` seconds."""
    bs, depth = chance.shape
    survival = chance.copy()
    for request in range(bs):
        for position in range(1, depth):
            survival[request, position] *= survival[request, position - 1]
    return best_lengths(survival, limits, spent + verify[bs : bs + limits.sum() + 1])


@compiled
def _rates(curves, taken, members, widths, varied, fixed, verify, draft):
    """See :meth:`_Memory.rates`.

    For every width the best threshold on survival: tokens above it are verified. Positions are
    added width by width, survivals sorted into buckets, so all widths take one pass over them.
    """
    bs, depth = members.sum(), curves.shape[2]
    curves, count = _younger(curves, taken)
    later = _taken_later(curves, count)
    source = np.array([0, 1])  # whose curves stand for a kind
    for kind in range(2):
        if count[kind] < ENOUGH_CURVES and count[1 - kind] > count[kind]:
            source[kind] = 1 - kind

    share = members / np.maximum(count[source], 1)
    gain, paid = np.zeros((2, BUCKETS)), np.zeros(BUCKETS)
    factor = np.ones(2)
    others = float(bs)  # rows of the draft that are not varied
    for kind in range(2):
        if members[kind] and not varied[kind]:
            others += members[kind] * widths[kind]
            factor[kind] = later[kind, widths[kind]]
            known = curves[source[kind], : count[source[kind]]]
            for position in range(widths[kind]):
                _sort_in(known[:, position], share[kind], gain[kind], paid)
    rates = np.empty(depth + 1)
    for width in range(depth + 1):
        for kind in range(2):
            if members[kind] and varied[kind]:
                factor[kind] = later[kind, width]
                known = curves[source[kind], : count[source[kind]]]
                if width > 0:
                    _sort_in(known[:, width - 1], share[kind], gain[kind], paid)
        rows = others + width * (members * varied).sum()
        spent = fixed + (draft[int(rows)] if rows > bs else 0.0)
        tokens, verified = (members * factor).sum(), float(bs)
        best = tokens / (spent + verify[bs])
        for place in range(BUCKETS - 1, -1, -1):
            if paid[place] == 0.0:
                continue
            tokens += gain[0, place] * factor[0] + gain[1, place] * factor[1]
            verified += paid[place]
            below = min(int(verified), len(verify) - 2)
            seconds = verify[below] + (verified - below) * (verify[below + 1] - verify[below])
            best = max(best, tokens / (spent + seconds))
        rates[width] = best
    return rates


@compiled
def _sort_in(survivals, share, gain, paid):
    """Add a position to the buckets: ``share`` of a token for each survival."""
    for survival in survivals:
        place = min(int(survival * BUCKETS), BUCKETS - 1)
        gain[place] += share * survival
        paid[place] += share


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
    """See :meth:`_Memory.take`. A position teaches in the measure that it was likely reached.

    Returns [bs] tokens drafted.
    """
    drafted = _drafted(confidence)
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
