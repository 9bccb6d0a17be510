"""The demo's bookkeeping, the command line's messages, and traces; no engine."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from libraspec_sglang import cli
from libraspec_sglang.demo import compare
from libraspec_sglang.demo.runner import Batch, EngineProcess, RunnerError, rows_per_round
from libraspec_sglang.observe.trace import RoundClock, TraceWriter


def write(path, rows):
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return path


def test_prompts_are_mixed_over_datasets(tmp_path):
    rows = [{"dataset": d, "turns": [f"{d}{i}", "second"]} for d in "ab" for i in range(3)]
    file = write(tmp_path / "p.jsonl", rows)
    assert compare.read_prompts(file, None) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert compare.read_prompts(file, 3) == ["a0", "b0", "a1"]


def test_shipped_prompts_cover_four_datasets():
    assert len(compare.read_prompts(compare.PROMPTS, None)) == 32
    sets = {json.loads(line)["dataset"] for line in compare.PROMPTS.read_text().splitlines()}
    assert len(sets) == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no prompts in it"),
        ('{"turns": []}', "line 1: needs a JSON object with 'turns'"),
        ('{"turns": ["a"]}\nnot json', "line 2"),
        ('{"turns": [5]}', "the first turn must be text"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path, content, words):
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    with pytest.raises(compare.PromptError, match=words):
        compare.read_prompts(file, None)
    with pytest.raises(compare.PromptError, match="No such file"):
        compare.read_prompts(tmp_path / "none.jsonl", None)


def test_tally_reports_tokens_per_round_without_the_prefill_token():
    tally = compare.Tally()
    tally.add(Batch(seconds=2.0, outputs=[[1] * 9, [1] * 5], rounds=[4, 2], verified=[20.0, 4.0]))
    row = tally.row("libraspec", 4)
    assert row == {
        "name": "libraspec",
        "concurrency": 4,
        "tokens_per_s": 7.0,
        "tau": 2.0,
        "mean_verified": 4.0,
        "rounds": 6,
    }


def test_tallies_are_identical_prompt_by_prompt_however_they_were_cut():
    def tally(*turns):
        made = compare.Tally()
        for first, outputs in turns:
            made.add(Batch(1.0, outputs, [1] * len(outputs), [1.0] * len(outputs)), first)
        return made

    plain = tally((0, [[1], [2]]), (2, [[3]]))
    assert tally((0, [[1], [2], [3]]), (0, [[1], [2], [3]])).identical(plain)
    assert not tally((0, [[1], [2], [3]]), (0, [[1], [2], [4]])).identical(plain)
    assert not tally((0, [[1], [2]])).identical(plain)


@pytest.mark.parametrize(
    ("prompts", "repeat", "turns"),
    [
        (3, 1, [("ab", 3), ("ba", 3)]),  # they fill one turn: twice, so that engines swap places
        (8, 1, [("ab", 4), ("ba", 4)]),
        (8, 2, [("ab", 4), ("ba", 4), ("ba", 4), ("ab", 4)]),
    ],
)
def test_engines_swap_places_from_turn_to_turn(prompts, repeat, turns):
    asked = []

    class Engine:
        def __init__(self, name):
            self.name = name

        def generate(self, part, **_):
            asked.append((self.name, part))
            return Batch(1.0, part, [1] * len(part), [1.0] * len(part))

    ids, pair = [[i] for i in range(prompts)], SimpleNamespace(chat=True)
    tallies = compare.take_turns(pair, [Engine("a"), Engine("b")], ids, [1], 4, repeat, quiet=True)
    pairs = [asked[i : i + 2] for i in range(0, len(asked), 2)]
    assert [(first[0] + second[0], len(first[1])) for first, second in pairs] == turns
    assert all(first[1] == second[1] for first, second in pairs)
    assert tallies["a", 1].identical(tallies["b", 1])
    assert sorted(tallies["a", 1].answers) == list(range(prompts))


def test_table_compares_with_plain_and_says_whether_outputs_agree():
    runs = [
        {"name": n, "concurrency": 1, "tokens_per_s": s, "tau": 1.0, "mean_verified": 1.0,
         "rounds": 3}
        for n, s in (("plain", 50.0), ("libraspec", 120.0))
    ]  # fmt: skip
    text = compare.table({"outputs_identical": False, "runs": runs})
    assert "2.40x" in text
    assert "NOT identical" in text


def test_rows_per_round_of_built_in_algorithms():
    assert rows_per_round({"spec_cap_length": 3.5}, 10) == 3.5
    assert rows_per_round({"spec_num_proposed_drafts": 70}, 10) == 8.0
    assert rows_per_round({}, 10) == 1.0


def test_an_engine_that_fails_shows_the_end_of_its_log(tmp_path):
    engine = EngineProcess("broken", {"model_path": "/nowhere"}, {}, tmp_path / "log")
    with engine, pytest.raises(RunnerError, match="engine broken ended early"):
        engine.wait_ready()


class TestCommandLine:
    def test_numbers(self):
        assert cli._numbers("1,4,16") == [1, 4, 16]
        with pytest.raises(Exception, match="at least 1"):
            cli._numbers("0")

    @pytest.mark.parametrize("words", [["demo", "--limit", "0"], ["demo", "--pair", "huge"], []])
    def test_bad_arguments_exit_with_usage(self, words, capsys):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 2
        assert "usage: libraspec" in capsys.readouterr().err

    def test_bad_option_is_one_line(self, monkeypatch, capsys):
        monkeypatch.setenv("LIBRASPEC_ALPHA", "none")
        assert cli.main(["demo"]) == 1
        assert capsys.readouterr().err.startswith("libraspec: --libraspec-alpha (or LIBRASPEC_")

    def test_env_is_shell(self):
        done = subprocess.run(
            [sys.executable, "-m", "libraspec_sglang.cli", "env"], capture_output=True, text=True
        )
        assert done.returncode == 0
        for line in done.stdout.splitlines():
            assert line.startswith("export ")

    @pytest.mark.parametrize("name", ["LIBRASPEC_ALPHA", "LIBRASPEC_ALPHAA"])
    def test_env_refuses_a_variable_that_cannot_be(self, name, monkeypatch, capsys):
        monkeypatch.setenv(name, "0")
        assert cli.main(["env"]) == 1
        out, err = capsys.readouterr()
        assert not out and name in err

    def test_check_passes_here_and_fails_on_a_bad_drafter(self, tmp_path):
        command = [sys.executable, "-m", "libraspec_sglang.cli", "check"]
        good = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert good.returncode == 0, good.stdout
        assert good.stdout.count("ok ") == 6
        bad = subprocess.run(
            [*command, "--drafter", str(tmp_path)], capture_output=True, text=True, timeout=300
        )
        assert bad.returncode == 1
        assert "FAULT drafter" in bad.stdout and "no config.json" in bad.stdout


def test_the_clock_waits_for_a_device_at_every_lap():
    """Or the time of a launch would be taken for the time of the work."""
    waited = []
    clock = RoundClock(lambda: waited.append(len(waited)))
    clock.start()
    clock.lap("draft")
    clock.lap("verify")
    assert waited == [0, 1, 2]
    assert clock.rounds == 1


def test_profile_names_what_goes_together(tmp_path, capsys):
    assert cli.main(["profile", "--model-path", "x"]) == 1
    assert "--speculative-draft-model-path go together" in capsys.readouterr().err
    assert cli.main(["profile", "--out", str(tmp_path / "no" / "cost.yaml")]) == 1
    assert "no such directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["profile", "--engine", "tp_size"])
    assert "'tp_size' is not KEY=VALUE" in capsys.readouterr().err


def test_trace_has_a_header_and_a_line_per_round(tmp_path):
    writer = TraceWriter(str(tmp_path / "t.jsonl"), {"policy": "libra"})
    clock = RoundClock()
    assert clock.start() is None
    clock.lap("draft")
    clock.lap("verify")
    clock.lap("draft")
    assert set(clock.laps) == {"draft", "verify"}
    assert clock.start() >= 0
    clock.pause()
    assert clock.start() is None
    writer.round(
        requests=["a"], verified=[3], gained=[2], context=[10], confidence=[[0.123456, 0.9]],
        laps={"draft": 0.0123},
    )  # fmt: skip
    writer.close()
    header, row = (json.loads(s) for s in (tmp_path / "t.jsonl").read_text().splitlines())
    assert header == {"libraspec_trace": 1, "policy": "libra"}
    assert row["confidence"] == [[0.1235, 0.9]]
    assert row["seconds"] == {"draft": 0.0123}
