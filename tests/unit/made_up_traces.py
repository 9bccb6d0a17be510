"""Traces and rounds for tests, without an engine."""

import json

import numpy as np

from libraspec_sglang.observe import trace_reader

HEADER = '{"libraspec_trace": 1}'


def line(request="a", verified=3, gained=1, confidence=(0.5, 0.5), context=10, **more):
    """A round of one request; verified and gained as in a trace, anchor and bonus included."""
    return json.dumps(
        {
            "requests": [request],
            "verified": [verified],
            "gained": [gained],
            "context": [context],
            "confidence": [list(confidence)],
            "seconds": {},
            **more,
        }
    )


def trace(tmp_path, *lines):
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join((HEADER, *lines)) + "\n")
    return file


def made_up(total=400, depth=8, seed=0, requests=10, bias=1.0):
    """Rounds with known chances, half of them easy, and confidences chance ** bias."""
    random = np.random.default_rng(seed)
    level = np.where(random.random(total) < 0.5, 0.92, 0.4)[:, None]
    chance = (level + random.normal(0, 0.05, (total, depth))).clip(0.02, 0.99).astype(np.float32)
    hits = random.random((total, depth)) < chance
    return trace_reader.Rounds(
        confidence=chance**bias,
        chance=chance,
        depth=np.full(total, depth),
        reached=hits.cumprod(axis=1).sum(axis=1),
        context=random.integers(100, 900, total),
        request=np.arange(total) * requests // total,
        imputed=0,
        notes=[],
    )
