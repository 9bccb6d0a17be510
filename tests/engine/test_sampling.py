"""Sampled output has the target's distribution, with and without speculation.

The crafted pair of ``tiny.py`` makes every token a draw from a known distribution, so plain and
speculative output are each tested against the truth, and against each other, with chi-square.
"""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from engines import engine
from scipy import stats

DRAWS = 20_000
LENGTH = 250
SETTINGS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.15},
}
# The chance that a right implementation fails one comparison; 15 comparisons are made.
SIGNIFICANCE = 1e-5


def expected(setting: dict) -> np.ndarray:
    """[VOCAB, VOCAB] p(next | current) under a sampling setting, from its definition."""
    p = tiny.transitions().numpy() ** (1.0 / setting["temperature"])
    p /= p.sum(1, keepdims=True)
    for row in p:
        order = np.argsort(-row)
        if "top_k" in setting:
            row[order[setting["top_k"] :]] = 0
        if "top_p" in setting:
            before = np.cumsum(row[order]) - row[order]
            row[order[before > setting["top_p"]]] = 0
        if "min_p" in setting:
            row[row < setting["min_p"] * row.max()] = 0
    return p / p.sum(1, keepdims=True)


def requests(setting: dict) -> list[dict]:
    sampling = {**setting, "max_new_tokens": LENGTH, "ignore_eos": True}
    return [
        {"input_ids": [i % tiny.VOCAB, (i * 7) % tiny.VOCAB], "sampling_params": sampling}
        for i in range(DRAWS // (LENGTH - 1) + 1)
    ]


def counts(answers: list[dict]) -> np.ndarray:
    """[VOCAB, VOCAB] transitions of the decoded part (the first token comes from prefill)."""
    table = np.zeros((tiny.VOCAB, tiny.VOCAB))
    for answer in answers:
        ids = answer["output_ids"]
        np.add.at(table, (ids[:-1], ids[1:]), 1)
    return table


def fits(table: np.ndarray, truth: np.ndarray) -> float:
    """p-value of the transition counts under the truth; small cells are merged per row."""
    statistic, freedom = 0.0, 0
    for seen, p in zip(table, truth, strict=True):
        want = seen.sum() * p
        assert seen[p == 0].sum() == 0, "a token outside the allowed set was produced"
        big = want >= 5
        groups = [(seen[i], want[i]) for i in np.flatnonzero(big)]
        rest = seen[~big & (p > 0)].sum(), want[~big & (p > 0)].sum()
        if rest[1] > 0:
            groups.append(rest)
        if len(groups) < 2:
            continue
        statistic += sum((s - w) ** 2 / w for s, w in groups if w > 0)
        freedom += len(groups) - 1
    return float(stats.chi2.sf(statistic, freedom))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Answers to every setting with and without drafts, plus seeded runs of two engines."""
    logs = tmp_path_factory.mktemp("sampling")
    target, drafter = tiny.write_pair(logs)
    given = {
        "target": target,
        "drafter": drafter,
        "sampling_backend": "pytorch",
        "max_running_requests": 96,
    }
    out: dict[str, dict] = {}
    options = {"policy": "libraspec", "alpha": 3.0}
    with engine(logs, "speculative", options=options, **given) as process:
        for name, params in (("plain", {"libraspec_max_length": 0}), ("speculative", None)):
            out[name] = {
                key: process.ask(requests({**setting, "custom_params": params}), concurrency=96)[1]
                for key, setting in SETTINGS.items()
            }
    for name, algorithm in (("plain seeded", None), ("speculative seeded", "LIBRASPEC")):
        with engine(
            logs, name, algorithm=algorithm, enable_deterministic_inference=True, **given
        ) as process:
            if algorithm:
                out["refused"] = process.ask([MIN_P], concurrency=1)[1]
            out[name] = [_seeded(process, concurrency) for concurrency in (1, 8)]
    return out


MIN_P = {"input_ids": [1, 2], "sampling_params": {"temperature": 0.9, "min_p": 0.1}}


def _seeded(process, concurrency):
    asked = [
        {
            "input_ids": [i, 2],
            "sampling_params": {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 60,
                                "sampling_seed": 100 + i, "ignore_eos": True},
        }
        for i in range(8)
    ]  # fmt: skip
    return [a["output_ids"] for a in process.ask(asked, concurrency=concurrency)[1]]


@pytest.mark.parametrize("key", SETTINGS)
@pytest.mark.parametrize("name", ["plain", "speculative"])
def test_against_the_truth(answers, name, key):
    table = counts(answers[name][key])
    assert table.sum() >= DRAWS
    assert fits(table, expected(SETTINGS[key])) > SIGNIFICANCE


@pytest.mark.parametrize("key", SETTINGS)
def test_plain_against_speculative(answers, key):
    tables = np.stack([counts(answers[n][key]).ravel() for n in ("plain", "speculative")])
    tables = tables[:, tables.sum(0) >= 10]
    assert stats.chi2_contingency(tables).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("key", SETTINGS)
def test_drafts_were_accepted_and_rejected_at_every_depth(answers, key):
    histogram = np.zeros(32)
    for answer in answers["speculative"][key]:
        seen = answer["meta_info"]["spec_correct_drafts_histogram"]
        histogram[: len(seen)] += seen
    assert (histogram[:4] > 50).all()


def test_the_statistic_notices_a_wrong_distribution(answers):
    """A wrong acceptance rule favours drafted tokens; a quarter more of them must show."""
    table = counts(answers["speculative"]["temperature 1"])
    truth = expected(SETTINGS["temperature 1"])
    truth[:, tiny.FAVOURITE] /= 1.25
    assert fits(table, truth / truth.sum(1, keepdims=True)) < SIGNIFICANCE


def test_what_sglang_cannot_sample_with_a_seed_is_refused_and_the_server_goes_on(answers):
    assert "min_p does not go with" in str(answers["refused"])
    assert all(answers["speculative seeded"])


def test_a_seed_reproduces_the_answer_with_and_without_speculation(answers):
    plain, ours = answers["plain seeded"], answers["speculative seeded"]
    assert plain[0] == plain[1]
    assert ours[0] == ours[1] == plain[0]
