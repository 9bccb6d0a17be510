"""One SGLang engine in a process of its own, driven over pipes.

SGLang keeps its configuration in process globals, so engines that are to be compared in one run
each get a process. ``python -m libraspec_sglang.demo.runner`` reads one JSON object per line from
standard input and answers with one on standard output: first the engine's arguments, then work.
Everything else the engine prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libraspec_sglang.cpu import enable


@dataclass(frozen=True)
class Batch:
    """Answers to one batch of prompts.

    Attributes:
        seconds: wall clock from the first request to the last answer.
        outputs: output token ids per prompt.
        rounds: decode rounds per prompt (decode steps for plain decoding).
        verified: rows the target verified per prompt, anchors included.
    """

    seconds: float
    outputs: list[list[int]]
    rounds: list[int]
    verified: list[float]


class RunnerError(RuntimeError):
    """An engine did not start or died; the message ends with the end of its log."""


class EngineProcess:
    """A started engine. Use as a context manager; the process ends with it."""

    def __init__(self, name: str, engine_args: dict[str, Any], options: dict[str, Any], log: Path):
        """Start (not yet ready; see :meth:`wait_ready`).

        Args:
            name: for messages.
            engine_args: ``sglang.Engine`` keyword arguments.
            options: LibraSpec options (see ``options.py``) of this engine.
            log: file for the engine's output.
        """
        self.name = name
        self._log = log
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith("LIBRASPEC_") or k in _KEPT
        }
        environment.update(enable.environment())
        environment.update(
            {f"LIBRASPEC_{k.upper()}": str(v) for k, v in options.items() if v is not None}
        )
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "libraspec_sglang.demo.runner"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=environment,
                text=True,
                start_new_session=True,
            )
        self._send({"engine": engine_args})

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Block until the engine serves.

        Raises:
            RunnerError: it did not start.
        """
        self._receive()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        concurrency: int,
        temperature: float = 0.0,
        flush: bool = False,
    ) -> Batch:
        """Answer prompts, at most ``concurrency`` at a time.

        Args:
            prompts: token ids per prompt.
            flush: empty the radix cache first.
        """
        self._send(
            {
                "prompts": [list(p) for p in prompts],
                "max_new_tokens": max_new_tokens,
                "concurrency": concurrency,
                "temperature": temperature,
                "flush": flush,
            }
        )
        return Batch(**self._receive())

    def close(self) -> None:
        """End the engine and its children."""
        if self._process.poll() is None:
            try:
                self._process.stdin.close()
                self._process.wait(timeout=20)
            except (subprocess.TimeoutExpired, OSError):
                os.killpg(self._process.pid, 9)
                self._process.wait()

    def _send(self, message: dict) -> None:
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._failure() from None

    def _receive(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        answer = json.loads(line)
        if "error" in answer:
            raise RunnerError(f"engine {self.name}: {answer['error']}")
        return answer

    def _failure(self) -> RunnerError:
        self.close()
        lines = self._log.read_text(errors="replace").splitlines()
        telling = [s for s in lines if "Error" in s or "error:" in s][-3:] or lines[-5:]
        return RunnerError(
            f"engine {self.name} ended early:\n  "
            + "\n  ".join(telling)
            + f"\nfull log: {self._log}"
        )


_KEPT = ("LIBRASPEC_CPU", "LIBRASPEC_CACHE")


def _serve() -> None:
    """Child side."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints is log

    def answer(message: dict) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    arguments = json.loads(sys.stdin.readline())["engine"]
    enable.enable_cpu()
    import sglang

    engine = sglang.Engine(**arguments)
    answer({"ready": True})
    try:
        for line in sys.stdin:
            try:
                answer(_run(engine, **json.loads(line)))
            except Exception as error:
                answer({"error": f"{type(error).__name__}: {error}"})
    finally:
        engine.shutdown()


def _run(engine, prompts, max_new_tokens, concurrency, temperature, flush) -> dict:
    if flush:
        engine.flush_cache()
    sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    gate = asyncio.Semaphore(concurrency)

    async def one(ids: list[int]) -> dict:
        async with gate:
            return await engine.async_generate(input_ids=ids, sampling_params=sampling)

    async def every() -> list[dict]:
        return await asyncio.gather(*(one(ids) for ids in prompts))

    start = time.perf_counter()
    answers = engine.loop.run_until_complete(every())
    seconds = time.perf_counter() - start
    outputs, rounds, verified = [], [], []
    for answer in answers:
        ids, meta = answer["output_ids"], answer["meta_info"]
        steps = meta.get("spec_verify_ct", len(ids) - 1)
        width = meta.get("spec_cap_length")
        if width is None:  # built-in algorithms verify the same number of rows every round
            proposed = meta.get("spec_num_proposed_drafts", 0)
            width = 1 + proposed / steps if steps else 1.0
        outputs.append(ids)
        rounds.append(steps)
        verified.append(width * steps)
    return {"seconds": seconds, "outputs": outputs, "rounds": rounds, "verified": verified}


if __name__ == "__main__":
    _serve()
