"""Two ranks (gloo, one core each) decide and accept as one."""

import os
import textwrap

import pytest
from engines import encode, engine

# A rank of its own mind: what it drafts, decides and chooses differs from the other's.
DRIFT = """
    import importlib.machinery, os, sys

    NAME = "libraspec_sglang.engine.worker"

    class Finder:
        def find_spec(self, name, path, target=None):
            if name != NAME:
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            load = spec.loader.exec_module
            def exec_module(module):
                load(module)
                drift(module)
            spec.loader.exec_module = exec_module
            return spec

    def drift(module):
        worker = module.LibraSpecWorker
        start, choose = worker.__init__, module.choose
        rounds = [0]

        def init(self, *args, **kwargs):
            start(self, *args, **kwargs)
            if self._tp_group.rank_in_group == 0:
                return
            policy = self._policy
            decide, first = policy.decide, policy.first_drafts
            policy.decide = lambda *a: (decide(*a) + 2) % 5
            policy.first_drafts = lambda *a: [(n + 3) % 7 for n in first(*a)]
            def other(*args, **kwargs):
                rounds[0] += 1
                with open(os.environ["DRIFT_FILE"], "w") as file:
                    file.write(str(rounds[0]))
                return (choose(*args, **kwargs) + 1) % 256
            module.choose = other

        worker.__init__ = init

    sys.meta_path.insert(0, Finder())
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a core for each rank")
def test_ranks_that_drift_apart_answer_as_one(tmp_path, prompt_texts, monkeypatch):
    prompts = encode(prompt_texts, room=200)[:8]
    with engine(tmp_path, "plain", algorithm=None) as plain:
        expected = plain.generate(prompts, max_new_tokens=40, concurrency=4, ignore_eos=True)
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(DRIFT))
    drifted = tmp_path / "drifted"
    monkeypatch.setenv("DRIFT_FILE", str(drifted))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    with engine(tmp_path, "two", tp_size=2) as two:
        got = two.generate(prompts, max_new_tokens=40, concurrency=4, ignore_eos=True)
    assert got.outputs == expected.outputs
    assert sum(got.rounds) < 0.9 * sum(expected.rounds)  # it did speculate
    assert int(drifted.read_text()) > 20
