"""``libra``: lengths from measured cost and calibrated survival, for the whole batch.

Where the paper puts the cost of verification into one number (alpha), this policy measures it: the
time of the target's forward and of the drafter's pass as functions of their rows, and the time a
round spends elsewhere. Each round it decides two things.

1. *How wide to draft*, before drafting. Recent survival curves say what a pass of each width would
   have brought; the width with the best expected rate is used. Curves of rounds that follow a draft
   accepted whole (the text is in the middle of something predictable) are kept apart from the
   others, and each request is expected to go on like its kind. Zero is a width: plain decoding.
   While it is chosen, a draft is tried now and then (further and further apart) to see whether the
   text has become predictable.
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
        self._widths = np.arange(max_length + 1)
        self._width = min(block_size, max_length)
        self._memory = _Memory(max_length)
        self._chance: np.ndarray | None = None
        self._probe_in, self._probe_gap = 0, FIRST_PROBE
        self._explore_in = EXPLORE_EVERY
        self._plain_in: dict[int, tuple[int, int]] = {}  # by batch size: rounds left, of how many
        self._settled, self._situation = 0, (0, 0)

    def prepare(self) -> None:
        """Compile the loops, on a policy that is thrown away."""
        other, requests = Libra(1, self.max_length), ["a"]
        drafted = torch.full((1, self.max_length), 0.5)
        for _ in range(2 * REFRESH_EVERY):
            other.first_draft(requests, 1)
            lengths = other.decide(drafted, torch.ones(1, dtype=torch.int64))
            other.learn(requests, drafted.numpy(), lengths.numpy(), lengths.numpy())
            other.learn_times(RoundTimes(1, 2, 1e-3, 2, 1e-3, 1e-3))

    # -- decisions -----------------------------------------------------------------------

    def first_draft(self, requests: Sequence[Hashable], cap: int) -> int:
        """Tokens to draft for each request this round.

        Args:
            requests: keys of the requests in the batch, one use per request (never reused).
            cap: the longest length any of them may verify.
        """
        if not self.verify_cost.known:
            return min(self._width, cap)
        situation = len(requests), self._memory.inside(requests)
        if self._settled > 0 and self._width and situation == self._situation:
            self._settled -= 1
            best = self._width
        else:
            best = self._best_width(*situation)
            self._settled, self._situation = WIDTH_EVERY - 1, situation
        if best and self._plain_is_due(len(requests)):
            return 0
        return min(self._explored(best) if best else self._probed(), cap)

    def _plain_is_due(self, batch: int) -> bool:
        """Whether this round shall show what plain decoding costs; further and further apart."""
        left, gap = self._plain_in.get(batch, (FIRST_PLAIN, FIRST_PLAIN))
        if left > 0:
            self._plain_in[batch] = left - 1, gap
            return False
        gap = min(2 * gap, LAST_PLAIN)
        self._plain_in[batch] = gap, gap
        return True

    def _explored(self, width: int) -> int:
        """A width that pays, or now and then one that may show that a wider one would."""
        self._width = width
        self._probe_in, self._probe_gap = 0, FIRST_PROBE
        self._explore_in -= 1
        if self._explore_in > 0:
            return width
        self._explore_in = EXPLORE_EVERY
        return min(int(width * EXPLORE_BY) + 1, self.max_length)

    def _probed(self) -> int:
        """Plain decoding, with a trial draft now and then, further and further apart."""
        self._probe_in -= 1
        if self._width and self._probe_in <= 0:  # the first plain round
            self._width, self._probe_in = 0, self._probe_gap
        if self._probe_in > 0:
            return 0
        self._probe_gap = min(self._probe_gap * 2, LAST_PROBE)
        self._probe_in = self._probe_gap
        return min(PROBE_WIDTH, self.max_length)

    def decide(
        self, confidence: torch.Tensor, caps: torch.Tensor, alpha: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Lengths with the best expected rate; alpha has no part in it."""
        bs, depth = confidence.shape
        self._chance = self.calibration.probability(confidence.cpu().numpy())
        spent = self.elsewhere.seconds(bs) + self.draft_cost.drafted(bs, bs * (depth + 1))
        lengths = _lengths(self._chance, caps.cpu().numpy(), spent, self.verify_cost.seconds(bs))
        return torch.from_numpy(lengths).to(confidence.device)

    def _best_width(self, batch: int, inside: int) -> int:
        """The width with the best expected rate over recent survival curves."""
        draft = self.draft_cost.seconds(batch)[batch * (self._widths + 1)]
        draft[0] = 0.0
        fixed, verify = self.elsewhere.seconds(batch), self.verify_cost.seconds(batch)
        rates = self._memory.rates(batch, inside, fixed, verify, draft)
        best = int(rates.argmax())
        return self._width if rates[best] < rates[self._width] * (1.0 + MARGIN) else best

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
            confidence: [bs, D] of the round's draft, D = 0 after a plain round.
            verified: [bs] drafted tokens verified.
            accepted: [bs] of them accepted.
        """
        if not confidence.shape[1]:
            return
        chance, self._chance = self._chance, None
        if chance is None:  # lengths were not ours to decide this round
            chance = self.calibration.probability(confidence)
        self.calibration.update(confidence, verified, accepted, chance)
        self._memory.take(requests, chance, accepted)

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
            f"over {self.calibration.observed} verified tokens; drafting {self._width} tokens"
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

    def inside(self, requests: Sequence[Hashable]) -> int:
        """How many of the requests had their last draft accepted whole."""
        return sum(request in self._inside for request in requests)

    def rates(
        self, batch: int, inside: int, fixed: float, verify: np.ndarray, draft: np.ndarray
    ) -> np.ndarray:
        """[D + 1] expected tokens per second of a round by the width it drafts.

        Args:
            batch: requests.
            inside: of them inside something predictable.
            fixed: seconds of a round outside both forwards.
            verify: [N (D + 1) + 1] seconds of the target's forward by rows.
            draft: [D + 1] seconds of a pass by width.
        """
        return _rates(self._curves, self._taken, batch, inside, fixed, verify, draft)

    def take(self, requests: Sequence[Hashable], chance: np.ndarray, accepted: np.ndarray) -> None:
        """Add a draft: calibrated chances [bs, D'], D' <= D, and [bs] tokens accepted."""
        kinds = np.array([request in self._inside for request in requests], dtype=np.int64)
        _take(chance, kinds, self._beyond, self._curves, self._taken)
        for request, whole in zip(requests, accepted >= chance.shape[1], strict=True):
            self._inside.pop(request, None)
            if whole:
                self._inside[request] = None
        while len(self._inside) > REQUESTS_REMEMBERED:
            del self._inside[next(iter(self._inside))]


def _profile(forward: Forward | None) -> Profile | None:
    if forward is None:
        return None
    return lambda batch, rows: forward(batch, rows, batch * TYPICAL_CONTEXT)


@compiled
def _lengths(chance, caps, spent, verify):
    """The batch's lengths where a round costs ``spent + verify[rows]`` seconds."""
    bs, depth = chance.shape
    limits = np.minimum(np.maximum(caps, 0), depth)
    survival = chance.copy()
    for request in range(bs):
        for position in range(1, depth):
            survival[request, position] *= survival[request, position - 1]
    return best_lengths(survival, limits, spent + verify[bs : bs + limits.sum() + 1])


@compiled
def _rates(curves, taken, bs, inside, fixed, verify, draft):
    """See :meth:`_Memory.rates`.

    For every width the best threshold on survival: tokens above it are verified. Positions are
    added width by width, survivals sorted into buckets, so all widths take one pass over them.
    """
    depth = curves.shape[2]
    curves, count = _younger(curves, taken)
    share = np.array([bs - inside, inside], dtype=np.float64)  # of the batch, by kind
    for kind in range(2):
        if count[kind] < ENOUGH_CURVES and count[1 - kind] > count[kind]:
            share[1 - kind] += share[kind]
            share[kind] = 0.0
    share /= np.maximum(count, 1)
    later = _taken_later(curves, count, share / bs)

    gain, paid = np.zeros(BUCKETS), np.zeros(BUCKETS)
    rates = np.empty(depth + 1)
    rates[0] = bs / (fixed + verify[bs])
    for position in range(depth):
        for kind in range(2):
            if share[kind] > 0.0:
                for survival in curves[kind, : count[kind], position]:
                    place = min(int(survival * BUCKETS), BUCKETS - 1)
                    gain[place] += share[kind] * survival
                    paid[place] += share[kind]
        spent = fixed + draft[position + 1]
        tokens = verified = float(bs)
        best = tokens / (spent + verify[bs])
        for place in range(BUCKETS - 1, -1, -1):
            if paid[place] == 0.0:
                continue
            tokens += gain[place]
            verified += paid[place]
            below = min(int(verified), len(verify) - 2)
            seconds = verify[below] + (verified - below) * (verify[below + 1] - verify[below])
            best = max(best, tokens / (spent + seconds))
        rates[position + 1] = best * later[position + 1]
    return rates


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
def _taken_later(curves, count, share):
    """[D + 1] factors by width for what a draft that ends early leaves to the next round.

    A span of L acceptable tokens is L + 1 tokens in one round if the draft is long enough, and in
    floor(L / (w + 1)) + 1 rounds of width w: no token is lost by drafting less, a round is spent.
    That holds in part (``CONTINUED``), and only as far as rounds inside a span do go better.
    """
    depth = curves.shape[2]
    mean = np.zeros((2, depth + 1))
    for kind in range(2):
        for position in range(depth):
            mean[kind, position + 1] = curves[kind, : count[kind], position].sum()
        mean[kind] /= max(count[kind], 1)
        mean[kind, 0] = 1.0
    factors = np.ones(depth + 1)
    if count.min() < ENOUGH_CURVES:
        return factors
    holds = CONTINUED * min(max(mean[1].sum() / mean[0].sum() - 1.0, 0.0), 1.0)
    survival = mean[0] * share[0] * count[0] + mean[1] * share[1] * count[1]
    for width in range(1, depth + 1):
        lost = survival[: width + 1].sum()
        found = survival.sum() / survival[:: width + 1].sum()
        factors[width] += holds * (found / lost - 1.0)
    return factors


@compiled
def _take(chance, kinds, beyond, curves, taken):
    """See :meth:`_Memory.take`. A position teaches in the measure that it was likely reached."""
    bs, drafted = chance.shape
    for index in range(bs):
        kind = kinds[index]
        if taken[kind] == 0:
            beyond[kind] = beyond[1 - kind]
        curve = curves[kind, taken[kind] % curves.shape[1]]
        taken[kind] += 1
        survival = 1.0
        for position in range(curves.shape[2]):
            p = beyond[kind, position]
            if position < drafted:
                p = chance[index, position]
                beyond[kind, position] += PACE / bs * survival * (p - beyond[kind, position])
            survival *= p
            curve[position] = survival
