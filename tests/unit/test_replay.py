"""Replay: the simulation, the oracles, explanations and the command."""

import itertools
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_traces import line, made_up, trace

from libraspec_sglang import cli
from libraspec_sglang.controller import cost_file
from libraspec_sglang.controller.cost_file import Cost, Forward
from libraspec_sglang.controller.policies import LibraSpec
from libraspec_sglang.observe import replay, replay_explain, replay_table, trace_reader
from libraspec_sglang.observe.replay import Prices, ReplayError, Schedule, Setting

H100 = Path(__file__).parents[2] / "configs" / "cost" / "h100.yaml"


def cost(verify=((1, 1.0), (2, 1.5)), draft=((1, 0.25),), **more):
    tables = {
        name: Forward(rows=[r for r, _ in points], seconds=[s for _, s in points])
        for name, points in (("verify", verify), ("draft", draft))
    }
    names = dict.fromkeys(("device", "target", "drafter", "how"), "made up")
    return Cost(version=1, measured=False, **names, **tables, **more)


class TestSchedule:
    def test_one_slot_plays_the_trace_in_order(self):
        rounds = made_up(1200)
        schedule = Schedule.of(rounds, 1)
        assert schedule.index[:, 0].tolist() == list(range(1200))
        assert np.array_equal(schedule.context, rounds.context)

    def test_slots_share_the_trace(self):
        rounds = made_up(4000)
        schedule = Schedule.of(rounds, 4)
        assert sorted(schedule.index.ravel().tolist()) == list(range(4000))
        assert np.array_equal(schedule.context, rounds.context[schedule.index].sum(axis=1))

    @given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 70))
    @settings(max_examples=25)
    def test_a_key_is_one_run_through_one_request(self, total, requests, batch):
        rounds = made_up(total, 2, requests=min(requests, total))
        with mock.patch.object(replay, "LEAST_ROUNDS", 150):
            schedule = Schedule.of(rounds, batch)
        assert len(schedule.index) == 150
        runs = {}
        for slot in range(batch):
            for step, key in enumerate(schedule.request[:, slot].tolist()):
                runs.setdefault(key, []).append((slot, step, schedule.index[step, slot]))
        for steps in runs.values():
            first = steps[0]
            for i, (slot, step, index) in enumerate(steps):
                assert (slot, step, index) == (first[0], first[1] + i, first[2] + i)
                assert rounds.request[index] == rounds.request[first[2]]


class TestSimulation:
    def test_narrow_rounds_bound_their_own_lengths(self, tmp_path):
        rounds = trace_reader.read(
            trace(tmp_path, line(confidence=(1.0,), verified=2, gained=2), line())
        )
        assert rounds.depth.tolist() == [1, 2]
        assert rounds.reached[0] == 1
        played = replay.play(
            Setting().policy("static", 2, cost()), rounds, Schedule.of(rounds, 1),
            Prices.of(cost(), 1, 2, 0.0),
        )  # fmt: skip
        assert played.lengths[:2, 0].tolist() == [1, 2]

    def test_figures_by_hand(self, tmp_path):
        """Two rounds, static 2: 1 and 3 tokens; 3 rows cost 2 s, the draft 0.25, elsewhere 0.5."""
        lines = (line(gained=1, context=100), line(gained=3, context=300))
        rounds = trace_reader.read(trace(tmp_path, *lines))
        prices = cost(elsewhere=0.5)
        (plain, static), _ = replay.evaluate(rounds, prices, ["none", "static:2"], 1, Setting())
        assert plain.tokens_per_s == pytest.approx(1 / 1.5)
        assert static.tokens_per_s == pytest.approx(4 / (2 * 2.75))
        assert static.eta == pytest.approx(4 / 5.5 * 1.5)
        assert (static.tau, static.mean_length, static.wasted) == (2.0, 2.0, 1.0)
        assert plain.wasted == 0.0

    def test_context_is_paid_in_both_forwards(self):
        rounds = made_up(1000, 2)
        forward = Forward(rows=[1], seconds=[1.0], per_context_token=0.01)
        prices = cost().model_copy(update={"verify": forward, "draft": forward})
        results, _ = replay.evaluate(rounds, prices, ["none", "static:1"], 1, Setting())
        context = rounds.context.mean()
        assert results[0].tokens_per_s == pytest.approx(1 / (1 + 0.01 * context))
        assert results[1].tokens_per_s == pytest.approx(results[1].tau / (2 + 0.02 * context))

    @pytest.mark.parametrize("batch", [1, 3, 64])
    def test_plain_decoding_is_the_unit(self, batch):
        results, _ = replay.evaluate(made_up(), cost_file.read(H100), ["none"], batch, Setting())
        assert results[0].eta == pytest.approx(1.0)
        assert (results[0].tau, results[0].mean_length) == (1.0, 0.0)

    @pytest.mark.parametrize("batch", [1, 5])
    def test_asked_all_at_once_or_round_by_round(self, batch):
        """A policy without memory decides the same."""

        class Stepwise(LibraSpec):
            learns = True

        rounds = made_up(2500)
        schedule, prices = Schedule.of(rounds, batch), Prices.of(cost(), batch, 8, 0.0)
        games = [
            replay.play(kind(4, 8, 2.2, 8), rounds, schedule, prices)
            for kind in (LibraSpec, Stepwise)
        ]
        assert len(np.unique(games[0].lengths)) > 3
        assert np.array_equal(games[0].lengths, games[1].lengths)
        assert np.array_equal(games[0].widths, games[1].widths)

    def test_a_policy_asked_for_twice_starts_afresh(self):
        rounds, prices = made_up(1500), cost_file.read(H100)
        for spec in ("libra", "gemma"):
            (first, again), _ = replay.evaluate(rounds, prices, [spec, spec], 4, Setting())
            assert first == again

    def test_the_block_size_is_the_traces_unless_given(self, tmp_path):
        file = tmp_path / "trace.jsonl"
        file.write_text('{"libraspec_trace": 1, "block_size": 8}\n' + line(confidence=(0.9,) * 12)
                        + "\n")  # fmt: skip
        for block, length in ((None, 7.0), (4, 3.0)):
            told = replay_table.run(file, H100, ["static"], [1], Setting(block))
            assert told["results"][0]["mean_length"] == length

    def test_gemma_follows_each_request_by_itself(self):
        rounds = made_up(1000, requests=2)
        schedule = Schedule.of(rounds, 2)
        policy = Setting(5, max_length=8).policy("gemma", 8, cost())
        game = replay.play(policy, rounds, schedule, Prices.of(cost(), 2, 8, 0.0))
        length = {}
        for keys, index, lengths in zip(
            schedule.request.tolist(), schedule.index, game.lengths, strict=True
        ):
            for key, i, n in zip(keys, index, lengths, strict=True):
                assert n == length.get(key, 4)
                length[key] = min(max(n + 2 if rounds.reached[i] >= n else n - 1, 1), 8)

    @pytest.mark.parametrize("batch", [1, 32])
    def test_libra_comes_close_to_the_expected_optimum(self, batch):
        """At 95 % of it (issue: the controller), with confidences that overstate."""
        names = ["static:4", "libra", "expected-optimal"]
        rounds = made_up(4000, 16, bias=0.5)
        results, _ = replay.evaluate(rounds, cost_file.read(H100), names, batch, Setting())
        static, libra, best = (r.tokens_per_s for r in results)
        assert libra >= 0.95 * best
        assert libra > static

    def test_unknown_policies_and_values(self):
        for spec, words in (
            ("best", "unknown policy 'best'; known: libra"),
            ("gemma:3", "gemma takes no value"),
            ("failfast:1.5", "--libraspec-threshold"),
            ("libraspec:0", "--libraspec-alpha"),
            ("static:x", "--libraspec-static-length"),
            ("", "unknown policy ''"),
        ):
            with pytest.raises(ReplayError, match=words):
                Setting().policy(spec, 8, cost())
        with pytest.raises(ReplayError, match="--libraspec-alpha"):
            Setting(alpha=-1.0).policy("libraspec", 8, cost())

    def test_values_reach_the_policy(self):
        assert Setting(alpha=1.5).policy("libraspec", 30, cost()).alpha == 1.5
        assert Setting(alpha=1.5).policy("libraspec:3", 30, cost()).alpha == 3.0
        assert Setting().policy("libraspec", 30, cost()).max_length == 24
        assert Setting().policy("libraspec", 7, cost()).max_length == 7
        assert Setting(max_length=5).policy("failfast:0.3", 7, cost()).max_length == 5
        assert Setting().policy("static:3", 7, cost()).length == 3


chances = st.lists(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), min_size=2, max_size=4)
stairs = st.lists(st.floats(0.01, 2.0), min_size=8, max_size=8)


def priced(steps, draft):
    verify = [(i + 1, 1.0 + s) for i, s in enumerate(np.cumsum(steps))]
    return cost(verify, ((1, draft), (8, 2 * draft)))


class TestOracles:
    @given(
        chances, stairs, st.floats(0.01, 2.0), st.integers(1, 2), st.sampled_from(replay.ORACLES)
    )
    @settings(max_examples=60)
    def test_equal_to_exhaustive_search(self, chance, steps, draft, batch, name):
        """Over every combination of lengths in every round, on any cost curve."""
        chance = np.array(chance[: 4 // batch], dtype=np.float32)
        total = len(chance)
        reached = (chance > 0.5).cumprod(axis=1).sum(axis=1)
        rounds = trace_reader.Rounds(
            chance, chance, np.full(total, 3), reached, np.zeros(total, dtype=int),
            np.zeros(total, dtype=int), 0, [],
        )  # fmt: skip
        with mock.patch.object(replay, "LEAST_ROUNDS", 1):
            schedule = Schedule.of(rounds, batch)
        prices = Prices.of(priced(steps, draft), batch, 3, 0.0)
        value = chance.cumprod(axis=1)
        if name == replay.CLAIRVOYANT:
            value = (np.arange(3) < reached[:, None]) * 1.0
        gain = np.concatenate([np.zeros((total, 1)), value.cumsum(axis=1)], axis=1)

        def rate(lengths, widths):
            tokens = (
                lengths.size
                + np.take_along_axis(gain[schedule.index], lengths[..., None], 2)[..., 0].sum()
            )
            rows = batch + lengths.sum(axis=1)
            return tokens / prices.seconds(rows, widths, schedule.context).sum()

        game = replay.play_oracle(name, rounds, schedule, prices)
        shape = schedule.index.shape
        best = 0.0
        for choice in itertools.product(range(4), repeat=shape[0] * shape[1]):
            lengths = np.array(choice).reshape(shape)
            widths = lengths.max(axis=1)
            if name == replay.ONE_WIDTH:
                widths[:] = widths.max()
            best = max(best, rate(lengths, widths))
        assert rate(game.lengths, game.widths) == pytest.approx(best, rel=1e-6)

    @given(st.integers(0, 10**6), stairs, st.floats(0.01, 2.0), st.integers(1, 3))
    @settings(max_examples=12)
    def test_no_policy_beats_the_clairvoyant(self, seed, steps, draft, batch):
        rounds = made_up(60, 6, seed)
        names = [*replay.ONLINE, *replay.ORACLES]
        with mock.patch.object(replay, "LEAST_ROUNDS", 60):
            results, _ = replay.evaluate(rounds, priced(steps, draft), names, batch, Setting(5))
        best = next(r for r in results if r.policy == replay.CLAIRVOYANT)
        assert best.deviation == 0.0 and best.wasted == 0.0
        for result in results:
            assert result.tokens_per_s <= best.tokens_per_s * (1 + 1e-9)

    def test_expected_optimum_is_best_among_those_who_do_not_know(self):
        rounds = made_up(20000, 8, bias=0.5)
        static = [f"static:{n}" for n in range(1, 9)]
        names = [*static, "libraspec", "gemma", "expected-one-width", "expected-optimal"]
        for batch in (1, 64):
            results, _ = replay.evaluate(rounds, cost_file.read(H100), names, batch, Setting())
            *others, one_width, best = (r.tokens_per_s for r in results)
            assert max(others) <= one_width * 1.005
            assert one_width <= best


class TestExplain:
    def explained(self, spec, batch=2, number=700):
        rounds, prices = made_up(1500), cost_file.read(H100)
        _, (game,) = replay.evaluate(rounds, prices, [spec], batch, Setting())
        told = replay_explain.explain(rounds, prices, spec, batch, Setting(), game, number)
        return told, game, rounds

    @pytest.mark.parametrize("spec", ["libra", "libraspec", "static:3", "expected-optimal", "none"])
    def test_lengths_are_those_of_the_round(self, spec):
        told, game, _ = self.explained(spec)
        assert [r["length"] for r in told["requests"]] == game.lengths[699].tolist()
        assert told["drafted"] == game.widths[699]
        for request in told["requests"]:
            assert sum(p["verified"] for p in request["positions"]) == request["length"]
        assert "round 700" in replay_explain.text(told)

    def test_libra_stops_where_a_token_no_longer_pays(self):
        told, *_ = self.explained("libra", batch=48)
        rate, stopped = told["expected_tokens_per_s"], 0
        for request in told["requests"]:
            for p in request["positions"]:
                if p["verified"]:
                    assert p["ratio"] >= rate * (1 - 1e-6)
                else:
                    assert p["ratio"] <= rate * (1 + 1e-6)
            stopped += "brings" in request["stopped"]
        assert stopped

    def test_survivals_multiply_and_costs_come_from_the_file(self):
        told, _, rounds = self.explained("static:3", batch=1)
        positions = told["requests"][0]["positions"]
        assert [p["survival"] for p in positions] == pytest.approx(
            rounds.chance[699, :3].cumprod().tolist()
        )
        slope = np.diff(cost_file.read(H100)(1, np.array([3, 4])))[0]
        assert positions[0]["cost_s"] == pytest.approx(slope)

    def test_positions_deeper_than_d_max_are_left_alone(self):
        rounds, prices, short = made_up(1500), cost_file.read(H100), Setting(max_length=2)
        _, (game,) = replay.evaluate(rounds, prices, ["libra"], 8, short)
        told = replay_explain.explain(rounds, prices, "libra", 8, short, game, 900)
        assert np.isfinite(told["expected_tokens_per_s"])

    def test_there_is_no_such_round(self):
        with pytest.raises(ReplayError, match="--explain 5000: at batch 2 the rounds are 1 to"):
            self.explained("none", number=5000)


class TestCommand:
    @pytest.fixture
    def file(self, tmp_path):
        rounds = made_up(300, 6)
        return trace(
            tmp_path,
            *(
                line(f"r{rounds.request[i]}", 7, int(rounds.reached[i]) + 1, q.tolist())
                for i, q in enumerate(rounds.confidence)
            ),
        )

    def test_json(self, file, capsys):
        words = ["replay", str(file), "--cost", str(H100), "--policy", "none,libraspec:1.8,libra"]
        assert cli.main([*words, "--batch", "1,4", "--json", "--explain", "3"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert [(r["policy"], r["batch"]) for r in report["results"]] == [
            (p, b) for b in (1, 4) for p in ("none", "libraspec:1.8", "libra")
        ]
        assert (report["rounds"], report["depth"], report["cost"]["measured"]) == (300, 6, False)
        assert [e["policy"] for e in report["explained"]] == ["none", "libraspec:1.8", "libra"]

    def test_table(self, file, capsys):
        file.write_text(file.read_text() + line("z", 2, 2, [0.9] * 6) + '\n{"requests')
        assert cli.main(["replay", str(file), "--cost", str(H100), "--max-length", "4"]) == 0
        out = capsys.readouterr().out
        assert "of 1806 drafted positions" in out and "derived, not measured" in out
        assert "note: line 303, the last, is cut off" in out
        assert "note: batch 1: a short trace; each round is played 3 times" in out
        for name in (*replay.ONLINE, replay.EXPECTED, replay.CLAIRVOYANT):
            assert f"  {name}" in out

    def test_a_cost_that_is_not_there_names_those_that_ship(self, file, capsys):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["replay", str(file), "--cost", "h200"])
        expected = "--cost: h200: no such file, nor a cost that ships (a100, b200, h100)"
        assert expected in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"trace": "none.jsonl"}, "none.jsonl: No such file"),
            ({"--policy": "libra,best"}, "unknown policy 'best'"),
            ({"--policy": "failfast:0"}, "--libraspec-threshold"),
            ({"--policy": "static:"}, "a value is missing"),
            ({"--batch": "100000"}, "at most 4096"),
            ({"--alpha": "0"}, "--libraspec-alpha"),
            ({"--max-length": "1000"}, "--libraspec-max-length"),
            ({"--explain": "9999"}, "the rounds are 1 to 1000"),
        ],
    )
    def test_bad_input_is_one_line_and_status_2(self, file, changed, words, capsys):
        given = {"trace": str(file), "--cost": str(H100), "--policy": "libraspec", **changed}
        flags = [part for k, v in given.items() if k != "trace" for part in (k, v)]
        assert cli.main(["replay", given["trace"], *flags]) == 2
        out, err = capsys.readouterr()
        assert words in err and err.startswith("libraspec: ") and err.count("\n") == 1
        assert not out

    def test_help_teaches(self, capsys):
        with pytest.raises(SystemExit):
            cli.main(["replay", "--help"])
        text = capsys.readouterr().out
        for word in ("--libraspec-policy static", "clairvoyant", "exchangeable", "deviation"):
            assert word in text
