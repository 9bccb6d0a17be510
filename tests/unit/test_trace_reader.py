"""Reading traces back: order, what is imputed, and messages for bad files."""

import json
import math

import numpy as np
import pytest
from made_up_traces import HEADER, line, trace

from libraspec_sglang.observe import trace_reader
from libraspec_sglang.observe.trace import TraceWriter
from libraspec_sglang.observe.trace_reader import TraceError


class TestReading:
    def test_rounds_are_grouped_by_request_in_order(self, tmp_path):
        both = {
            "requests": ["b", "a"],
            "verified": [3, 2],
            "gained": [3, 1],
            "context": [7, 8],
            "confidence": [[0.9, 0.8], [0.7, 0.6]],
        }
        first = line("a", 3, 2, (0.1, 0.2), 5)
        rounds = trace_reader.read(trace(tmp_path, first, json.dumps(both)))
        assert rounds.request.tolist() == [0, 0, 1]
        assert rounds.context.tolist() == [5, 8, 7]
        assert rounds.confidence == pytest.approx(np.array([[0.1, 0.2], [0.7, 0.6], [0.9, 0.8]]))
        assert rounds.reached.tolist() == [1, 0, 2]
        assert rounds.imputed == 0

    def test_it_reads_what_the_server_writes(self, tmp_path):
        writer = TraceWriter(str(tmp_path / "t"), {"policy": "static"})
        writer.round(
            requests=["x", "y", "z"], verified=[3, 2, 1], gained=[1, 1, 1], context=[4, 5, 6],
            confidence=[[0.25, math.nan], [0.5, math.nan], [math.nan] * 2], laps={},
        )  # fmt: skip
        writer.close()
        rounds = trace_reader.read(tmp_path / "t")
        # NaN that was verified is a token without confidence; beyond, one that was not drafted.
        assert rounds.confidence.tolist() == [[0.25, 0.0], [0.5, 0.0]]
        assert rounds.depth.tolist() == [2, 1]
        assert "1 rounds without a draft" in rounds.notes[0]

    def test_plain_rounds_are_left_out_and_counted(self, tmp_path):
        rounds = trace_reader.read(trace(tmp_path, line(verified=1, confidence=()), line()))
        assert len(rounds) == 1
        assert "1 rounds without a draft" in rounds.notes[0]

    def test_only_what_follows_a_round_accepted_whole_is_imputed(self, tmp_path):
        """Sure drafts are drawn accepted, hopeless ones missed; a seen miss needs no draw."""
        teach = [line(verified=5, gained=5, confidence=[0.99] * 4)] * 400
        teach += [line(verified=5, gained=1, confidence=[0.01] * 4)] * 400
        censored = [
            line("sure", verified=2, gained=2, confidence=[0.99] * 4),
            line("hopeless", verified=1, gained=1, confidence=[0.01] * 4),
            line("seen", verified=3, gained=2, confidence=[0.99] * 4),
        ]
        rounds = trace_reader.read(trace(tmp_path, *teach, *censored))
        assert rounds.reached[-3:].tolist() == [4, 0, 1]
        assert rounds.imputed == 3 + 1
        again = trace_reader.read(trace(tmp_path, *teach, *censored))
        assert np.array_equal(again.reached, rounds.reached)

    def test_imputed_rounds_accept_as_often_as_their_probability_says(self, tmp_path):
        lines = [line(verified=1, gained=1, confidence=(0.3,))] * 4000
        truth = [line(verified=1, confidence=(0.3,), probability=[[0.8]])] * 4000
        fitted, given = (trace_reader.read(trace(tmp_path, *rows)) for rows in (lines, truth))
        assert fitted.reached.mean() == pytest.approx(0.3, abs=0.03)
        assert given.reached.mean() == pytest.approx(0.8, abs=0.03)
        assert fitted.imputed == given.imputed == 4000
        assert "the trace's own" in given.notes[0]

    def test_true_probabilities_stay_with_their_rounds(self, tmp_path):
        rows = [line(name, probability=[[p, 0.5]]) for name, p in (("a", 0.1), ("b", 0.2))]
        rows.append(line("a", probability=[[0.3, 0.5]]))
        rounds = trace_reader.read(trace(tmp_path, *rows))
        assert rounds.chance[:, 0] == pytest.approx([0.1, 0.3, 0.2])

    def test_the_fit_finds_an_overconfident_drafter(self):
        random = np.random.default_rng(3)
        q = random.uniform(0, 1, (20000, 3)).astype(np.float32)
        accepted = (random.random(q.shape) < q / 2).cumprod(axis=1).sum(axis=1)
        chance = trace_reader._fitted(q, np.full(20000, 3), accepted)
        assert np.abs(chance - q / 2)[:, 0].mean() < 0.02
        assert np.abs(chance - q / 2).mean() < 0.05

    def test_a_cut_last_line_is_skipped_with_a_note(self, tmp_path):
        file = trace(tmp_path, line(), line())
        file.write_text(file.read_text()[:-30])
        rounds = trace_reader.read(file)
        assert len(rounds) == 1
        assert "line 3, the last, is cut off" in rounds.notes[0]

    def test_probabilities_of_a_part_are_not_used_silently(self, tmp_path):
        rounds = trace_reader.read(trace(tmp_path, line(probability=[[0.5, 0.5]]), line()))
        assert "some rounds have no 'probability'" in rounds.notes[0]


BAD_TRACES = [
    ("", ":1: an empty file"),
    (HEADER + "\n", ":1: a trace without rounds"),
    (HEADER, ":1: a trace without rounds"),
    ('{"libraspec_tr', ":1: not JSON"),
    ('{"a": 1}\n', ":1: not a LibraSpec trace"),
    ('{"libraspec_trace": 2}\n', ":1: trace version 2 is newer"),
    (f"{HEADER}\n{line()}\nnot json\n{line()}\n", ":3: not JSON"),
    (f"{HEADER}\n{line()}\nnot json\n", ":3: not JSON"),
    (f'{HEADER}\n{{"requests": ["a"]}}\n', ":2: the round has no 'verified'"),
    (f"{HEADER}\n[]\n", ":2: malformed round"),
    (f"{HEADER}\n{line(verified=4)}\n", ":2: malformed round: needs 1 <= gained"),
    (f"{HEADER}\n{line(gained=0)}\n", ":2: malformed round: needs 1 <= gained"),
    (f"{HEADER}\n{line(confidence=(0.5, None))}\n", ":2: malformed round"),
    (f"{HEADER}\n{line(context='x')}\n", ":2: malformed round"),
    (f"{HEADER}\n{line(context=-1)}\n", ":2: malformed round: context -1 is negative"),
    (f"{HEADER}\n{line(context=10**30)}\n", ":2: malformed round"),
    (f"{HEADER}\n{'[' * 100_000}\n", ":2: not JSON"),
    ('{"libraspec_trace": 0}\n', ":1: not a LibraSpec trace"),
    ('{"libraspec_trace": 1, "block_size": 1}\n', ":1: block_size 1"),
    (f"{HEADER}\n{line(probability=[[0.5]])}\n", ":2: malformed round: 'probability'"),
    (f"{HEADER}\n{line(probability=[[0.5, 1.5]])}\n", ":2: malformed round: 'probability' must"),
    (f"{HEADER}\n{line(verified=1, confidence=())}\n", ":2: none of its 1 rounds drafted"),
]


@pytest.mark.parametrize(("content", "words"), BAD_TRACES)
def test_bad_traces_name_file_and_line(tmp_path, content, words):
    file = tmp_path / "trace.jsonl"
    file.write_text(content)
    with pytest.raises(TraceError) as caught:
        trace_reader.read(file)
    assert f"{file}{words}" in str(caught.value)
