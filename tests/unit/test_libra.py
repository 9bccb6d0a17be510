"""The policy made of costs, calibration and batch allocation."""

import numpy as np
import torch

from libraspec_sglang.controller.cost_file import Cost, Forward
from libraspec_sglang.controller.libra import Libra
from libraspec_sglang.controller.policy import RoundTimes, Sampled
from libraspec_sglang.kernels import length_controller
from libraspec_sglang.kernels import length_controller_reference as reference


def decide(libra, confidence, cap):
    caps = torch.full((len(confidence),), cap)
    return libra.decide(torch.from_numpy(confidence), caps).numpy()


def play(libra, rounds, *, accept, confidence, slope, draft_slope, bs=1, depth=24, base=1.0):
    """Run rounds against a made-up machine and text; returns (tokens, seconds, last width)."""
    requests = [f"r{i}" for i in range(bs)]
    tokens = seconds = 0.0
    width = 0
    for _ in range(rounds):
        width = libra.first_draft(requests, depth)
        q = np.tile(confidence[:width], (bs, 1))
        lengths = decide(libra, q, depth) if width else np.zeros(bs, dtype=int)
        taken = np.minimum(accept, lengths)
        verify_rows, draft_rows = int(bs + lengths.sum()), bs * (width + 1) if width else 0
        draft_time = 0.4 * base + draft_slope * draft_rows if width else 0.0
        verify_time = base + slope * verify_rows
        libra.learn(requests, q, lengths, taken)
        libra.learn_times(
            RoundTimes(bs, draft_rows, draft_time, verify_rows, verify_time, elsewhere=0.2)
        )
        tokens += float((1 + taken).sum())
        seconds += 0.2 + draft_time + verify_time
    return tokens, seconds, width


def stepped_profile():
    """Rows are free up to 4, then a step of the whole forward."""
    return Cost(
        version=1, device="d", target="t", drafter="f", measured=True, how="made up", elsewhere=0.2,
        verify=Forward(interpolation="step", rows=[4, 8, 16, 32], seconds=[1.0, 2.0, 4.0, 8.0]),
        draft=Forward(rows=[1], seconds=[0.4]),
    )  # fmt: skip


class TestLibra:
    def test_with_a_profile_the_first_round_is_decided_by_it(self):
        libra = Libra(block_size=15, max_length=24, cost=stepped_profile())
        assert libra.first_draft(["a"], 24) > 0
        lengths = decide(libra, np.full((1, 24), 0.8), 24)
        assert lengths.tolist() == [3]  # with its own row, the step

    def test_predictable_text_is_drafted_wide(self):
        libra = Libra(block_size=15, max_length=24)
        tokens, seconds, width = play(
            libra, 200, accept=24, confidence=np.full(24, 0.99), slope=0.005, draft_slope=0.002
        )
        assert width == 24
        assert tokens / seconds > 10 * (1 / 1.2)

    def test_hopeless_text_is_decoded_plainly_and_probed_rarely(self):
        libra = Libra(block_size=15, max_length=24)
        play(libra, 200, accept=0, confidence=np.full(24, 0.02), slope=0.05, draft_slope=0.02)
        tokens, seconds, _ = play(
            libra, 400, accept=0, confidence=np.full(24, 0.02), slope=0.05, draft_slope=0.02
        )
        plain = 1 / (0.2 + 1.0 + 0.05)
        assert tokens / seconds > 0.98 * plain  # never below plain decoding by more than 2 %

    def test_it_returns_to_drafting_when_text_becomes_predictable(self):
        libra = Libra(block_size=15, max_length=24)
        play(libra, 300, accept=0, confidence=np.full(24, 0.02), slope=0.05, draft_slope=0.02)
        *_, width = play(
            libra, 300, accept=24, confidence=np.full(24, 0.99), slope=0.005, draft_slope=0.002
        )
        assert width >= 15

    def test_a_trial_draft_is_verified_whole(self):
        """However little is expected of it: what is not verified teaches nothing."""
        libra = Libra(block_size=15, max_length=24)
        play(libra, 200, accept=0, confidence=np.full(24, 0.02), slope=0.05, draft_slope=0.02)
        trials = []
        for _ in range(200):
            widths = libra.first_drafts(["a", "b"], [24, 2])
            if any(widths):
                q = np.where(np.arange(3) < np.array(widths)[:, None], 0.02, np.nan)
                trials.append((widths, decide(libra, q, 24).tolist()))
        assert len(trials) >= 3
        assert all(lengths == widths == [3, 2] for widths, lengths in trials)

    def test_an_unlucky_start_is_made_up_for(self):
        """A first drafted round that compiles for seconds and accepts nothing, as any may."""
        libra = Libra(block_size=15, max_length=24)
        q = np.full((1, 15), 0.9)
        libra.learn(["a"], q, np.array([15]), np.array([0]))
        libra.learn_times(RoundTimes(1, 16, 2.0, 16, 3.0, elsewhere=0.002))
        text = {"accept": 8, "confidence": np.where(np.arange(24) < 8, 0.9, 0.1)}
        machine = {"slope": 0.0005, "draft_slope": 0.0001, "base": 0.02}
        play(libra, 100, **text, **machine)
        assert libra.first_draft(["a"], 24) >= 8

    def test_dear_verification_at_load_shortens(self):
        confidence = np.full(24, 0.8)
        lengths = {}
        for bs in (1, 32):
            libra = Libra(block_size=15, max_length=24)
            machine = {"slope": 0.02, "draft_slope": 0.002, "bs": bs}
            *_, width = play(libra, 200, accept=4, confidence=confidence, **machine)
            assert width > 0
            q = np.tile(confidence[:width], (bs, 1))
            lengths[bs] = decide(libra, q, 24).mean()
        assert lengths[32] < lengths[1]

    def test_what_plain_decoding_costs_is_looked_at_where_drafting_seems_to_pay(self):
        """Rows are dear, and rounds that draft alike would never show it: plain is found best."""
        libra = Libra(block_size=7, max_length=12)
        text = {"accept": 0, "confidence": np.full(12, 0.5), "depth": 12}
        *_, width = play(libra, 120, slope=0.3, draft_slope=0.0, bs=4, **text)
        assert width in (0, 3)  # plain, or a trial draft
        assert (
            np.diff(libra.verify_cost.seconds(4))[8] > 0.1
        )  # the prior alone says a tenth of that

    def test_a_machine_that_gets_slower_for_a_while_is_not_a_price_of_rows(self):
        """Twice as slow for 30 rounds at a time; what is known of rows stays right."""
        random = np.random.default_rng(0)
        libra = Libra(block_size=15, max_length=24)
        for turn in range(1200):
            pace = 2.0 if turn // 30 % 2 else 1.0
            rows = int(random.integers(2, 9)) + (8 if pace > 1.0 else 0)  # confounded with it
            times = [pace * t for t in (0.4, 1.0 + 0.01 * rows, 0.2)]
            libra.learn_times(RoundTimes(1, 16, times[0], rows, times[1], elsewhere=times[2]))
        seconds = libra.verify_cost.seconds(1)
        # At the usual pace, in between, ten rows cost 0.15. Without Elsewhere it would be 1.24.
        assert 0.05 < seconds[20] - seconds[10] < 0.4

    def test_within_two_percent_of_the_best_static_width_on_steady_text(self):
        """On text that never changes, no static length is better."""
        for accept, slope, draft_slope in ((3, 0.02, 0.01), (8, 0.01, 0.01), (1, 0.08, 0.03)):
            text = {"accept": accept, "confidence": np.where(np.arange(24) < accept, 0.97, 0.05)}
            machine = {"slope": slope, "draft_slope": draft_slope}
            libra = Libra(block_size=15, max_length=24)
            play(libra, 200, **text, **machine)
            tokens, seconds, _ = play(libra, 200, **text, **machine)
            static = max(
                (1 + min(accept, d))
                / (0.2 + (0.4 + draft_slope * (d + 1) if d else 0) + 1 + slope * (1 + d))
                for d in range(25)
            )
            assert tokens / seconds > 0.98 * static

    def test_a_request_inside_something_predictable_is_drafted_wider(self):
        """Spans of 24 tokens between stretches where one token is accepted."""
        random = np.random.default_rng(0)
        libra = Libra(block_size=15, max_length=24)
        left, widths = 0, {True: [], False: []}
        for turn in range(1500):
            width = libra.first_draft(["a"], 24)
            if turn > 1000:
                widths[libra._curves.kinds(["a"]) == [1]].append(width)
            if left == 0 and random.uniform() < 0.05:
                left = 48
            reach = left if left else 1
            q = np.where(np.arange(24) < reach, 0.95, 0.1)[None, :width]
            lengths = decide(libra, q, 24) if width else np.zeros(1, dtype=np.int64)
            accepted = np.minimum(lengths, reach)
            left = max(left - int(accepted[0]) - 1, 0)
            libra.learn(["a"], q, lengths, accepted)
            rows = int(lengths[0]) + 1
            draft = 0.2 + 0.06 * width if width else 0.0
            libra.learn_times(RoundTimes(1, width + 1, draft, rows, 1.0 + 0.02 * rows, 0.2))
        assert np.mean(widths[True]) > 2 * np.mean(widths[False])

    def test_each_request_is_drafted_as_wide_as_pays_for_its_kind(self):
        """One request of three accepts everything, the others nothing: their widths part."""
        random = np.random.default_rng(0)
        libra, requests, drafted = Libra(block_size=15, max_length=24), ["a", "b", "c"], []
        for turn in range(400):
            widths = libra.first_drafts(requests, [24, 24, 24])
            if turn >= 300:
                drafted.append(widths)
            reach = np.array([24, 0, 0])
            q = np.full((3, max(widths)), np.nan)
            for row, (width, far) in enumerate(zip(widths, reach, strict=True)):
                q[row, :width] = np.where(np.arange(width) < far, 0.95, 0.1)
            q += random.normal(0, 0.01, q.shape)
            lengths = decide(libra, q, 24) if any(widths) else np.zeros(3, dtype=np.int64)
            assert (lengths <= widths).all()  # nothing is verified that was not drafted
            libra.learn(requests, q, lengths, np.minimum(lengths, reach))
            rows, draft_rows = int(lengths.sum()) + 3, sum(widths) + 3 if any(widths) else 0
            draft = 0.4 + 0.02 * draft_rows if draft_rows else 0.0
            libra.learn_times(RoundTimes(3, draft_rows, draft, rows, 1.0 + 0.02 * rows, 0.2))
        assert np.median(drafted, axis=0).tolist() == [24, 0, 0]
        wider = [(b > 0) + (c > 0) for _, b, c in drafted]
        assert max(wider) == 1  # one request shows what a wider draft would bring

    def test_a_request_without_a_draft_teaches_nothing(self):
        libra = Libra(block_size=3, max_length=4)
        nan = [np.nan, np.nan]
        libra.learn(["a"], np.array([[0.5, 0.5]]), np.array([2]), np.array([2]))
        before = libra._curves._taken.copy()
        libra.learn(["a"], np.array([nan]), np.array([0]), np.array([0]))
        assert libra._curves.kinds(["a"]) == [1]
        assert (libra._curves._taken == before).all()
        libra.learn(["a", "b"], np.array([[0.5, np.nan], [0.5, 0.5]]), np.ones(2), np.ones(2))
        assert libra._curves.kinds(["a", "b"]) == [1, 0]  # of one token drafted, of two

    def test_nothing_is_verified_that_was_not_drafted(self):
        """A low confidence that often holds would make NaN, as no confidence, worth a row."""
        libra = Libra(block_size=3, max_length=4)
        for _ in range(60):
            libra.learn_times(RoundTimes(2, 10, 0.5, 6, 1.0, 0.1))
            low = np.full((2, 4), 0.02)
            decide(libra, low, 4)
            libra.learn(["a", "b"], low, np.full(2, 4), np.full(2, 4))
        lengths = decide(libra, np.array([[0.02, np.nan, np.nan], [np.nan] * 3]), 4)
        assert lengths.tolist() == [1, 0]

    def test_the_drafts_of_a_round_are_paid_for_as_they_were(self):
        """Rows that one request does not draft are not charged to the round."""
        dear = Cost(
            version=1, device="d", target="t", drafter="f", measured=True, how="made up",
            elsewhere=0.0, verify=Forward(rows=[1, 100], seconds=[1.0, 10.9]),
            draft=Forward(rows=[1, 100], seconds=[0.1, 10.0]),
        )  # fmt: skip
        libra = Libra(block_size=8, max_length=8, cost=dear)
        q = np.where(np.arange(8) < [[8], [0]], 0.8, np.nan)
        got = decide(libra, q, 8)
        tokens = 2 + np.concatenate(([0.0], np.cumsum(np.cumprod(q[0]))))
        rates = tokens / (dear.draft(2, np.array([10]), 0)[0] + 1.0 + 0.1 * (1 + np.arange(9)))
        assert got.tolist() == [int(rates.argmax()), 0]

    def test_a_request_that_may_draft_wider_shows_what_that_brings(self):
        libra = Libra(block_size=8, max_length=24)
        libra.learn_times(RoundTimes(2, 18, 0.5, 6, 1.0, 0.1))
        widths = [libra.first_drafts(["g", "a"], [0, 24]) for _ in range(60)]
        settled = np.median([w[1] for w in widths])
        assert max(w[1] for w in widths) > settled > 0

    def test_requests_that_sample_are_judged_by_their_own_kind(self):
        """The same confidences always hold for one and hardly ever for the other."""
        libra, batch = Libra(block_size=8, max_length=8), ["a", Sampled("b")]
        q = np.full((2, 8), 0.7)
        for _ in range(200):
            libra.first_drafts(batch, [8, 8])
            libra.learn_times(RoundTimes(2, 18, 0.1, 10, 1.0 + 0.02 * 10, 0.1))
            libra.learn(batch, q, np.array([8, 8]), np.array([8, 0]))
        widths = libra.first_drafts(batch, [8, 8])
        lengths = decide(libra, q, 8)
        assert (widths[0], lengths[0]) == (8, 8)
        assert lengths[1] == 0
        assert "greedy" in libra.report() and "sampled" in libra.report()
        # Alone, and the other way round, each is what it was.
        libra.first_drafts(batch[1:], [8])
        assert decide(libra, q[1:], 8).tolist() == [0]
        libra.first_drafts(batch[::-1], [8, 8])
        assert decide(libra, q, 8).tolist() == [0, 8]

    def test_on_a_device_it_decides_the_same(self, monkeypatch):
        """The twin of the kernel, on calibrated chances, a price with a bend and caps."""
        bent = Cost(
            version=1, device="d", target="t", drafter="f", measured=True, how="made up",
            elsewhere=0.1, verify=Forward(rows=[1, 6, 40], seconds=[1.0, 1.1, 6.0]),
            draft=Forward(rows=[1], seconds=[0.4]),
        )  # fmt: skip
        random, libra = np.random.default_rng(0), Libra(block_size=8, max_length=12, cost=bent)
        batch = ["a", Sampled("b"), "c"]
        for _ in range(40):
            q = random.uniform(0, 1, (3, 12)).astype(np.float32)
            libra.first_drafts(batch, [12] * 3)
            lengths = decide(libra, q, 12)
            right = (random.uniform(0, 1, q.shape) < q**2).cumprod(axis=1).sum(axis=1)
            libra.learn(batch, q, lengths, np.minimum(lengths, right))
        caps, drawn = torch.tensor([12, 12, 2]), random.uniform(0, 1, (50, 3, 12)) ** 0.5
        confidences = torch.from_numpy(drawn.astype(np.float32))
        host = [libra.decide(q, caps).tolist() for q in confidences]
        monkeypatch.setattr(length_controller, "on_device", lambda device: True)
        monkeypatch.setattr(length_controller, "lengths_batch", reference.lengths_batch)
        device = [libra.decide(q, caps).tolist() for q in confidences]
        assert device == host
        assert len({tuple(lengths) for lengths in host}) > 5

    def test_caps_are_each_request_s_own(self):
        libra = Libra(block_size=15, max_length=24)
        assert libra.first_drafts(["a", "b", "c"], [3, 0, 24]) == [3, 0, 15]

    def test_caps_bound_the_draft(self):
        libra = Libra(block_size=15, max_length=24)
        assert libra.first_draft(["a"], 3) == 3
        assert libra.first_draft(["a"], 0) == 0
