"""Policies run over a trace's rounds against a cost file: what each would have brought.

What is simulated. A policy meets the trace's rounds in order, each request's own, and verifies
what it decides; it gains the tokens that the trace says would be accepted, and pays what the cost
file says. For batch N, N slots walk through the trace side by side, from N evenly spaced rounds on;
a slot that reaches the next request starts a new one. Short traces are gone through repeatedly, so
that policies that learn get to. All policies see the same rounds.

What is approximate. After accepting more or fewer tokens than in the trace a policy would draft
from another position; replay takes rounds as exchangeable samples of the request instead. Tokens
that a shorter length left unverified are therefore not drafted again, which is slightly hard on
short lengths. A narrower draft is taken to have the confidences of the first positions of the
traced one. All requests of a batch are drafted equally wide, as on CUDA. Acceptance that the trace
did not observe is drawn (see :mod:`.trace_reader`).

Three oracles, possible only here: ``clairvoyant`` knows what will be accepted, ``expected-optimal``
knows each token's probability, both before anything is drafted, so that they draft just as wide as
a round deserves. ``expected-one-width`` learns the probabilities from the draft, as policies do,
and drafts equally wide in every round: the best that is left where rounds are exchangeable. All
maximise tokens per second over the whole replay (Dinkelbach's iteration: a token is worth 1, a
second the rate so far, until the rate stands), so in replay no policy can beat the first where more
rows never cost less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from libraspec_sglang.controller.compiled import compiled
from libraspec_sglang.controller.cost_file import Cost, Forward
from libraspec_sglang.controller.libra import Libra
from libraspec_sglang.controller.policy import Policy, RoundTimes
from libraspec_sglang.drafters import checkpoint
from libraspec_sglang.options import OptionError, load

from .trace_reader import Rounds

CLAIRVOYANT, EXPECTED, ONE_WIDTH = "clairvoyant", "expected-optimal", "expected-one-width"
ORACLES = (CLAIRVOYANT, EXPECTED, ONE_WIDTH)
ANY_WIDTH = -1
UNPROFILED = "libra-unprofiled"
ONLINE = ("libra", UNPROFILED, "libraspec", "failfast", "gemma", "static", "none")
PARAMETER = {"static": "static_length", "libraspec": "alpha", "failfast": "threshold"}
"""What VALUE stands for in a policy given as NAME:VALUE."""
UNKNOWN_BLOCK = 16
"""Slots of a block where neither the user nor the trace says."""
LARGEST_BATCH = 4096
LEAST_ROUNDS = 1000
"""Rounds of a batch that are played at least; a learning policy's start is among them."""
CHUNK = 2048
"""Rounds a policy without memory is asked about at once."""


class ReplayError(ValueError):
    """A policy or setting that replay cannot run. The message names it."""


@dataclass(frozen=True)
class Schedule:
    """Which round of the trace each slot plays when.

    Attributes:
        index: int64 [steps, N] into the trace's rounds.
        request: int64 [steps, N] a key per request and slot, never used again.
        context: int64 [steps] committed tokens of the whole batch.
    """

    index: np.ndarray
    request: np.ndarray
    context: np.ndarray

    @classmethod
    def of(cls, rounds: Rounds, batch: int) -> Schedule:
        """N = ``batch`` slots, spread evenly over the trace."""
        total = len(rounds)
        steps = max(-(-total // batch), LEAST_ROUNDS)
        start = np.arange(batch) * total // batch
        walked = start + np.arange(steps)[:, None]
        index, lap = walked % total, walked // total
        requests = int(rounds.request[-1]) + 1
        slot = np.arange(batch) * (int(lap.max()) + 1)
        key = (slot + lap) * requests + rounds.request[index]
        return cls(index, key, rounds.context[index].sum(axis=1))


@dataclass(frozen=True)
class Prices:
    """A cost file at one batch size, as tables; seconds.

    Attributes:
        verify: [N (D + 1) + 1] target's forward by rows, context apart.
        draft: [D + 1] drafting pass by tokens drafted per request, context apart; 0 at 0.
        verify_context: per token of context.
        draft_context: per token of context, in rounds that draft.
        elsewhere: per round.
    """

    verify: np.ndarray
    draft: np.ndarray
    verify_context: float
    draft_context: float
    elsewhere: float

    @classmethod
    def of(cls, cost: Cost, batch: int, depth: int, context: float) -> Prices:
        """Tables for ``batch`` requests that draft at most ``depth`` tokens each.

        What a row costs per token of context is taken at the mean ``context`` of the batch.
        """

        def table(forward: Forward, rows: np.ndarray) -> np.ndarray:
            return forward(batch, rows, context) - forward.per_context_token * context

        draft = table(cost.draft, batch * np.arange(1, depth + 2))
        draft[0] = 0.0
        return cls(
            table(cost.verify, np.arange(batch * (depth + 1) + 1)),
            draft,
            cost.verify.per_context_token,
            cost.draft.per_context_token,
            cost.elsewhere,
        )

    def seconds(self, rows: np.ndarray, widths: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Of whole rounds: rows verified, tokens drafted per request, context of the batch."""
        drafting = self.draft[widths] + (widths > 0) * self.draft_context * context
        return self.elsewhere + drafting + self.verify[rows] + self.verify_context * context


@dataclass(frozen=True)
class Played:
    """What a policy did: tokens drafted per request [steps], verified lengths [steps, N]."""

    widths: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Setting:
    """How policies are built.

    Attributes:
        block_size: slots of the drafter's block, anchor included; None: the trace's.
        max_length: d_max; cut to what the trace drafted.
        alpha: of ``libraspec``, as a number or its text, or None for the default.
    """

    block_size: int | None = None
    max_length: int | None = None
    alpha: float | str | None = None

    def policy(self, spec: str, depth: int, cost: Cost) -> Policy:
        """The policy called ``spec``: NAME or NAME:VALUE, as :data:`PARAMETER` reads it.

        Args:
            spec: an online policy. ``libra`` has the cost file as its profile,
                ``libra-unprofiled`` learns costs from the rounds alone.
            depth: D, the trace's.
            cost: of the machine that is replayed.

        Raises:
            ReplayError: unknown, or its parameter is out of range.
        """
        name, colon, value = spec.partition(":")
        if name in ORACLES or (colon and not value):
            raise ReplayError(f"policy {spec!r}: a value is {'not taken' if value else 'missing'}")
        if name not in ONLINE:
            raise ReplayError(f"unknown policy {spec!r}; known: {', '.join((*ONLINE, *ORACLES))}")
        if colon and name not in PARAMETER:
            raise ReplayError(f"policy {spec!r}: {name} takes no value")
        if name == UNPROFILED:
            name, cost = "libra", None
        given = {
            "policy": name,
            "alpha": self.alpha,
            "max_length": self.max_length,
            "extension": "wide",  # a trace holds what one pass drafted
        }
        if colon:
            given[PARAMETER[name]] = value
        try:
            chosen = load(_as_environment(given))
        except OptionError as error:
            raise ReplayError(f"policy {spec!r}: {error}") from None
        block = self.block_size or UNKNOWN_BLOCK
        most = checkpoint.plan_lengths(chosen, block, host_timed=True).max_length
        chosen = chosen.model_copy(update={"max_length": min(most, depth)})
        return checkpoint.plan_lengths(chosen, block, host_timed=True).policy(cost)


def _as_environment(given: dict[str, object]) -> dict[str, str]:
    return {f"LIBRASPEC_{k.upper()}": str(v) for k, v in given.items() if v is not None}


def play(
    policy: Policy, rounds: Rounds, schedule: Schedule, prices: Prices, steps: int | None = None
) -> Played:
    """Let ``policy`` decide every round, or the first ``steps``."""
    steps = len(schedule.index) if steps is None else steps
    if policy.learns:
        return _play_learning(policy, rounds, schedule, prices, steps)
    depth = rounds.confidence.shape[1]
    width = min(policy.first_draft(("any",), depth), depth)
    caps = torch.from_numpy(rounds.depth)
    drafted = torch.from_numpy(rounds.confidence[:, :width])
    parts = [
        policy.decide(q, most, None)
        for q, most in zip(drafted.split(CHUNK), caps.split(CHUNK), strict=True)
    ]
    # A request's length depends on nothing but its own round here.
    lengths = torch.cat(parts).numpy()[schedule.index[:steps]]
    return Played(np.full(steps, width), lengths)


def _play_learning(
    policy: Policy, rounds: Rounds, schedule: Schedule, prices: Prices, steps: int
) -> Played:
    batch, depth = schedule.index.shape[1], rounds.confidence.shape[1]
    lengths, widths = np.zeros((steps, batch), dtype=np.int64), np.zeros(steps, dtype=np.int64)
    for step in range(steps):
        index, requests = schedule.index[step], schedule.request[step].tolist()
        context = int(schedule.context[step])
        caps = rounds.depth[index]
        width = min(policy.first_draft(requests, int(caps.max())), depth)
        confidence = rounds.confidence[index, :width]
        if width:
            decided = policy.decide(torch.from_numpy(confidence), torch.from_numpy(caps), None)
            lengths[step] = decided.numpy()
        widths[step], length = width, lengths[step]
        rows = batch + int(length.sum())
        policy.learn(requests, confidence, length, np.minimum(length, rounds.reached[index]))
        policy.learn_times(
            RoundTimes(
                batch=batch,
                draft_rows=batch * (width + 1) if width else 0,
                draft_seconds=prices.draft[width] + prices.draft_context * context,
                verify_rows=rows,
                verify_seconds=prices.verify[rows] + prices.verify_context * context,
                elsewhere=prices.elsewhere,
            )
        )
    return Played(widths, lengths)


def play_oracle(name: str, rounds: Rounds, schedule: Schedule, prices: Prices) -> Played:
    """The best lengths for what the oracle ``name`` knows."""
    position = np.arange(rounds.confidence.shape[1])
    if name == CLAIRVOYANT:
        survival = (position < rounds.reached[:, None]).astype(np.float32)
    else:
        survival = rounds.chance.cumprod(axis=1)
    widths = range(len(position) + 1) if name == ONE_WIDTH else (ANY_WIDTH,)
    plays = [_play_best(survival, width, schedule, prices) for width in widths]
    return max(plays, key=lambda play: play[1])[0]


def _play_best(
    survival: np.ndarray, width: int, schedule: Schedule, prices: Prices
) -> tuple[Played, float]:
    """The lengths of the highest expected rate, and that rate."""
    batch = schedule.index.shape[1]
    rate = 0.0
    while True:
        lengths, widths, expected = _best(
            survival, schedule.index, schedule.context, prices.verify, prices.draft,
            prices.draft_context, rate, width,
        )  # fmt: skip
        played = Played(widths, lengths)
        seconds = prices.seconds(batch + lengths.sum(axis=1), widths, schedule.context)
        new = expected / seconds.sum()
        if new <= rate * (1 + 1e-9):
            return played, new
        rate = new


@compiled
def _best(survival, index, context, verify, draft, draft_context, rate, only):
    """Lengths that maximise expected tokens less ``rate`` times seconds, round by round.

    survival: [T, D], never increasing along D. only: the width of every round, or ANY_WIDTH.
    Returns lengths [steps, N], widths [steps] and the expected tokens of all rounds, bonus tokens
    included.
    """
    steps, batch = index.shape
    depth = survival.shape[1]
    lengths = np.zeros((steps, batch), dtype=np.int64)
    widths = np.zeros(steps, dtype=np.int64)
    value = np.empty(batch * depth)
    owner = np.empty(batch * depth, dtype=np.int64)
    place = np.empty(batch * depth, dtype=np.int64)
    total = 0.0
    for step in range(steps):
        count = 0
        for slot in range(batch):
            for position in range(depth):
                p = survival[index[step, slot], position]
                if not p > 0.0:
                    break
                value[count], owner[count], place[count] = -p, slot, position
                count += 1
        order = np.argsort(value[:count], kind="mergesort")
        first, last = 1, 0 if count == 0 else place[:count].max() + 1
        best, best_tokens, best_width, best_rows = -rate * verify[batch], 0.0, 0, 0
        if only != ANY_WIDTH:
            first, last, best_width = max(only, 1), only, only
            if only > 0:  # also where nothing is verified
                best -= rate * (draft[only] + draft_context * context[step])
        for width in range(first, last + 1):
            fixed = draft[width] + draft_context * context[step]
            tokens, rows = 0.0, 0
            for entry in order:
                if place[entry] >= width:
                    continue
                tokens -= value[entry]
                rows += 1
                worth = tokens - rate * (fixed + verify[batch + rows])
                if worth > best:
                    best, best_tokens, best_width, best_rows = worth, tokens, width, rows
        widths[step] = best_width
        total += batch + best_tokens
        for entry in order:
            if best_rows == 0:
                break
            if place[entry] < best_width:
                lengths[step, owner[entry]] += 1
                best_rows -= 1
    return lengths, widths, total


@dataclass(frozen=True)
class Result:
    """A policy at one batch size.

    Attributes:
        policy: as asked for.
        batch: N.
        tokens_per_s: of the whole batch.
        eta: tokens_per_s over plain decoding's under the same cost.
        tau: tokens per request and round, bonus included.
        mean_length: drafted tokens verified per request and round.
        wasted: of them not accepted, per request and round.
        deviation: mean absolute difference of the length from the clairvoyant oracle's.
        calibration: expected calibration error of the confidences and of what the policy made of
            them, where it learns that.
    """

    policy: str
    batch: int
    tokens_per_s: float
    eta: float
    tau: float
    mean_length: float
    wasted: float
    deviation: float
    calibration: tuple[float, float] | None = None


def evaluate(
    rounds: Rounds, cost: Cost, policies: Sequence[str], batch: int, setting: Setting
) -> tuple[list[Result], list[Played]]:
    """Every policy at batch size N, in the order asked for.

    Raises:
        ReplayError: as of :meth:`Setting.policy`.
    """
    if batch > LARGEST_BATCH:
        raise ReplayError(f"--batch {batch}: at most {LARGEST_BATCH}")
    depth = rounds.confidence.shape[1]
    online = [None if s in ORACLES else setting.policy(s, depth, cost) for s in policies]
    schedule = Schedule.of(rounds, batch)
    prices = Prices.of(cost, batch, depth, schedule.context.mean())
    clairvoyant = play_oracle(CLAIRVOYANT, rounds, schedule, prices)
    games = []
    for spec, policy in zip(policies, online, strict=True):
        if spec == CLAIRVOYANT:
            games.append(clairvoyant)
        elif spec in ORACLES:
            games.append(play_oracle(spec, rounds, schedule, prices))
        else:
            games.append(play(policy, rounds, schedule, prices))
    results = [
        replace(
            _score(spec, game, clairvoyant, rounds, schedule, prices),
            calibration=policy.calibrations[0].error() if isinstance(policy, Libra) else None,
        )
        for spec, game, policy in zip(policies, games, online, strict=True)
    ]
    return results, games


def _score(
    spec: str,
    game: Played,
    clairvoyant: Played,
    rounds: Rounds,
    schedule: Schedule,
    prices: Prices,
) -> Result:
    steps, batch = schedule.index.shape
    accepted = np.minimum(game.lengths, rounds.reached[schedule.index])
    rows = batch + game.lengths.sum(axis=1)
    nothing = np.zeros(steps, dtype=np.int64)
    seconds = prices.seconds(rows, game.widths, schedule.context).sum()
    plain = prices.seconds(nothing + batch, nothing, schedule.context).sum()
    tau = 1.0 + float(accepted.mean())
    return Result(
        policy=spec,
        batch=batch,
        tokens_per_s=float(steps * batch * tau / seconds),
        eta=float(tau * plain / seconds),
        tau=tau,
        mean_length=float(game.lengths.mean()),
        wasted=float((game.lengths - accepted).mean()),
        deviation=float(np.abs(game.lengths - clairvoyant.lengths).mean()),
    )
