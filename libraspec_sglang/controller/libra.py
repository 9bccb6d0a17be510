"""``libra``: lengths from measured cost and calibrated survival, for the whole batch.

Where the paper puts the cost of verification into one number (alpha), this policy measures it: the
time of the target's forward and of the drafter's pass as functions of their rows, and the time a
round spends elsewhere. Each round it decides two things.

1. *How wide to draft*, before drafting. Recent survival curves say what a pass of each width would
   have brought; the width with the best expected rate is used. Curves of rounds that follow a draft
   accepted whole (the text is in the middle of something predictable) are kept apart from the
   others, and those of requests that sample from those of requests that do not; each request is
   expected to go on like its kind, and drafted as wide as pays for that kind. Zero is a width:
   plain decoding. While it is chosen, a draft is tried now and then (further and further apart) to
   see whether the text has become predictable.
2. *How many tokens to verify*, after drafting: :func:`batch.allocate` on the calibrated survivals.

On a CPU everything is host arithmetic in small compiled loops. On a device the second decision is
one kernel (:mod:`libraspec_sglang.kernels.length_controller`): confidences stay there, and the host
sends along what it knows, the calibration's tables and the cost of so many rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from libraspec_sglang.kernels import length_controller
from libraspec_sglang.upload import upload_together

from .batch import best_lengths
from .calibration import BINS, REFRESH_EVERY, Calibration
from .compiled import compiled
from .cost import BatchCost, Elsewhere, Profile
from .cost_file import Cost, Forward
from .curves import KINDS, SAMPLED, Curves, tokens_drafted
from .policy import Policy, RoundTimes

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
"""Tokens of a trial draft. All are verified: nothing else shows what is accepted and what it costs.
"""
WIDTH_EVERY = 6
"""Rounds a chosen width stands, while the batch is of the same size and kinds."""
MARGIN = 0.01
"""Expected gain in rate below which the width stays as it is."""
TYPICAL_CONTEXT = 512
"""Tokens of context a request is taken to have in a profile; rounds shift it to the real ones."""


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
        self.calibrations = Calibration(max_length), Calibration(max_length)
        """Of requests that do not sample, and of those that do."""
        verify, draft = (cost.verify, cost.draft) if cost is not None else (None, None)
        self.verify_cost = BatchCost(0.01, max_length, _profile(verify))
        self.draft_cost = BatchCost(0.01, max_length, _profile(draft))
        self.elsewhere = Elsewhere(cost.elsewhere if cost is not None else 0.0)
        self._width = [min(block_size, max_length)] * KINDS  # by kind of round
        self._curves = Curves(max_length)
        self._kinds: list[int] = []  # of the requests last asked about
        self._chance: np.ndarray | None = None
        self._drafting, self._trial = True, False
        self._probe_in, self._probe_gap = 0, FIRST_PROBE
        self._explore_in = EXPLORE_EVERY
        self._plain_in: dict[int, tuple[int, int]] = {}  # by batch size: rounds left, of how many
        self._plain_far = False
        self._settled, self._situation = 0, ()

    def prepare(self) -> None:
        """Compile the loops, on a policy that is thrown away."""
        other, requests = Libra(1, self.max_length), ["a"]
        drafted = torch.full((1, self.max_length), 0.5)
        for _ in range(2 * REFRESH_EVERY):
            other.first_drafts(requests, [1])
            lengths = other.decide(drafted, torch.ones(1, dtype=torch.int64))
            other.learn(requests, drafted.numpy(), lengths.numpy(), lengths.numpy())
            other.learn_times(RoundTimes(1, 2, 1e-3, 2, 1e-3, 1e-3))

    def pay_by_tiers(self, tiers: Sequence[int]) -> None:
        """See :meth:`Policy.pay_by_tiers`; what a pass pays for anyway is then filled."""
        self.verify_cost.tiers = np.asarray(tiers)

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
        kinds = self._kinds = self._curves.kinds(requests)
        self._trial = False
        if not self.verify_cost.known:
            return [self._width[kind] for kind in kinds]
        members = [0] * KINDS
        for request, kind in enumerate(kinds):
            if caps is None or caps[request] > 0:
                members[kind] += 1
        situation = len(kinds), sum(members), *(number > 0 for number in members)
        if self._settled > 0 and self._drafting and situation == self._situation:
            self._settled -= 1
        else:
            self._settle(len(kinds), np.array(members), equal=caps is None)
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
        self._trial = True
        return min(PROBE_WIDTH, self.max_length)

    def decide(
        self, confidence: torch.Tensor, caps: torch.Tensor, alpha: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Lengths with the best expected rate, or a whole trial; alpha has no part in it."""
        if self._trial:
            drafted = confidence.isfinite().cumprod(dim=1)[:, :PROBE_WIDTH].sum(dim=1)
            self._chance = None
            return torch.minimum(drafted, caps.to(drafted.dtype))
        on_device = length_controller.on_device(confidence.device)
        if on_device and confidence.numel() <= length_controller.LARGEST_BATCH:
            return self._decide_on_device(confidence, caps)
        bs, values = len(confidence), confidence.cpu().numpy()
        self._chance = self._probability(values, self._kinds)
        lengths = _lengths(
            values, self._chance, caps.cpu().numpy(), self.elsewhere.seconds(bs),
            self.draft_cost.curve(bs), self.verify_cost.curve(bs),
        )  # fmt: skip
        return torch.from_numpy(lengths).to(confidence.device)

    def _decide_on_device(self, confidence: torch.Tensor, caps: torch.Tensor) -> torch.Tensor:
        """The same where every request drafted D tokens: one transfer, one launch, no waiting."""
        bs, depth = confidence.shape
        self._chance = None
        most = bs * (depth + 1)
        spent = self.elsewhere.seconds(bs) + self.draft_cost.seconds(bs)[most]
        seconds = spent + self.verify_cost.seconds(bs)[bs : most + 1]
        tables = [calibration.tables() for calibration in self.calibrations]
        parts = [np.concatenate([table[k].ravel() for table in tables]) for k in range(2)]
        parts += [_sampled(self._kinds).astype(np.float64), seconds]
        base, slope, which, seconds = upload_together(parts, confidence.device)
        shape = len(tables), -1, BINS
        return length_controller.lengths_batch(
            confidence, caps, seconds, tables=(base.view(shape), slope.view(shape), which)
        )

    def _probability(self, confidence: np.ndarray, kinds: Sequence[int]) -> np.ndarray:
        """[bs, D] chances of acceptance, each request by the calibration it belongs to."""
        if max(kinds, default=0) < SAMPLED:
            return self.calibrations[0].probability(confidence)
        chance = self.calibrations[1].probability(confidence)
        if min(kinds) < SAMPLED:
            greedy = ~_sampled(kinds)
            chance[greedy] = self.calibrations[0].probability(confidence[greedy])
        return chance

    def _settle(self, batch: int, members: np.ndarray, equal: bool) -> None:
        """Choose the widths with the best expected rate over recent survival curves.

        Of the batch's requests, ``members`` by kind are able to draft.

        One kind after the other, requests inside first; all at once where they must be ``equal``.
        """
        draft, verify = self.draft_cost.seconds(batch), self.verify_cost.seconds(batch)
        fixed = self.elsewhere.seconds(batch)
        present = [kind for kind in (1, 3, 0, 2) if members[kind]]
        for kinds in [list(range(KINDS))] if equal else [[kind] for kind in present]:
            varied = np.zeros(KINDS, dtype=bool)
            varied[kinds] = True
            widths = np.array(self._width)
            rates = self._curves.rates(batch, members, widths, varied, fixed, verify, draft)
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
        kinds = self._curves.kinds(requests)
        if chance is None:  # lengths were not ours to decide this round
            chance = self._probability(confidence, kinds)
        if (min(kinds) >= SAMPLED) == (max(kinds) >= SAMPLED):
            calibration = self.calibrations[int(kinds[0] >= SAMPLED)]
            calibration.update(confidence, verified, accepted, chance)
        else:
            sampled = _sampled(kinds)
            for calibration, own in zip(self.calibrations, (~sampled, sampled), strict=True):
                calibration.update(confidence[own], verified[own], accepted[own], chance[own])
        self._curves.take(requests, kinds, confidence, chance, accepted)

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
        said = []
        for name, calibration, widths in zip(
            ("greedy", "sampled"),
            self.calibrations,
            (self._width[:2], self._width[2:]),
            strict=True,
        ):
            if calibration.observed:
                before, after = calibration.error()
                said.append(
                    f"{name}: calibration error of the drafter's confidences {before:.3f}, as used "
                    f"{after:.3f}, over {calibration.observed} verified tokens; drafting "
                    f"{widths[0]} tokens, {widths[1]} after a draft accepted whole"
                )
        return "; ".join(said)


def _profile(forward: Forward | None) -> Profile | None:
    if forward is None:
        return None
    return lambda batch, rows: forward(batch, rows, batch * TYPICAL_CONTEXT)


def _sampled(kinds: Sequence[int]) -> np.ndarray:
    return np.array([kind >= SAMPLED for kind in kinds])


@compiled
def _lengths(confidence, chance, caps, fixed, draft, verify):
    """The batch's lengths; ``fixed`` seconds pass outside the two forwards.

    draft, verify: :meth:`BatchCost.curve`. A request drafted as many tokens as have a confidence.
    """
    drafted = tokens_drafted(confidence)
    limits = np.maximum(np.minimum(drafted, caps), 0)
    bs = len(limits)
    x, start, slope, _ = draft
    spent = fixed + start + slope * x[bs + drafted.sum()]
    x, start, slope, plain = verify
    seconds = np.empty(limits.sum() + 1)
    for more in range(len(seconds)):
        seconds[more] = spent + start + slope * x[bs + more]
    seconds[0] = spent + plain
    survival = chance.copy()
    for request in range(bs):
        for position in range(1, survival.shape[1]):
            survival[request, position] *= survival[request, position - 1]
    return best_lengths(survival, limits, seconds)
