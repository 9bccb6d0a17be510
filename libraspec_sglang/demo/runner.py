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
import uuid
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

    @classmethod
    def of(cls, seconds: float, answers: Sequence[dict[str, Any]]) -> Batch:
        """From an engine's answers, as :meth:`EngineProcess.ask` returns them."""
        metas = [a["meta_info"] for a in answers]
        outputs = [a["output_ids"] for a in answers]
        rounds = [m.get("spec_verify_ct", len(o) - 1) for m, o in zip(metas, outputs, strict=True)]
        verified = [rows_per_round(m, n) * n for m, n in zip(metas, rounds, strict=True)]
        return cls(seconds, outputs, rounds, verified)


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
        flush: bool = False,
        ignore_eos: bool = False,
    ) -> Batch:
        """Answer prompts greedily, at most ``concurrency`` at a time.

        Args:
            prompts: token ids per prompt.
            flush: empty the radix cache first.
            ignore_eos: go on to ``max_new_tokens`` past an end token.
        """
        sampling = {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": ignore_eos,
        }
        requests = [{"input_ids": list(p), "sampling_params": sampling} for p in prompts]
        seconds, answers = self.ask(requests, concurrency=concurrency, flush=flush)
        return Batch.of(seconds, answers)

    def ask(
        self, requests: Sequence[dict[str, Any]], *, concurrency: int, flush: bool = False
    ) -> tuple[float, list[dict[str, Any]]]:
        """Send requests, at most ``concurrency`` at a time.

        Args:
            requests: ``sglang.Engine.generate`` keyword arguments; ``abort_after`` (seconds)
                aborts a request that is still running then.

        Returns:
            (wall-clock seconds, answers in order); an answer that the engine refused is
            ``{"error": message}``.
        """
        self._send({"requests": list(requests), "concurrency": concurrency, "flush": flush})
        answer = self._receive()
        return answer["seconds"], answer["answers"]

    def state(self) -> dict[str, Any]:
        """The scheduler's internal state and load, as ``/server_info`` and ``/v1/loads`` show."""
        self._send({"state": True})
        return self._receive()["state"]

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


_KEPT = ("LIBRASPEC_CPU", "LIBRASPEC_CPU_GRAPHS", "LIBRASPEC_CACHE")
FLUSH_SECONDS = 60.0


def rows_per_round(meta: dict[str, Any], rounds: int) -> float:
    """Rows verified per round by an answer's ``meta_info``; built-in algorithms verify the same
    number every round."""
    if "spec_cap_length" in meta:
        return meta["spec_cap_length"]
    return 1.0 + (meta.get("spec_num_proposed_drafts", 0) / rounds if rounds else 0.0)


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
            message = json.loads(line)
            try:
                if "state" in message:
                    answer({"state": _state(engine)})
                else:
                    answer(_ask(engine, **message))
            except Exception as error:
                answer({"error": f"{type(error).__name__}: {error}"})
    finally:
        engine.shutdown()


def _state(engine) -> dict:
    load = engine.loop.run_until_complete(engine.tokenizer_manager.get_loads())[0]
    return {**engine.get_server_info()["internal_states"][0], **load.to_dict({"core"})}


def _ask(engine, requests: list[dict], concurrency: int, flush: bool) -> dict:
    if flush:  # refused while a request is still being finished, so with time to wait for it
        emptying = engine.tokenizer_manager.flush_cache(timeout_s=FLUSH_SECONDS)
        if not engine.loop.run_until_complete(emptying).success:
            raise RuntimeError(f"the radix cache was not emptied within {FLUSH_SECONDS} s")
    gate = asyncio.Semaphore(concurrency)

    async def one(request: dict) -> dict:
        abort_after = request.pop("abort_after", None)
        async with gate:
            if abort_after is not None:
                request["rid"] = uuid.uuid4().hex
                asyncio.get_running_loop().call_later(
                    abort_after, engine.tokenizer_manager.abort_request, request["rid"]
                )
            try:
                reply = await engine.async_generate(**request)
            except ValueError as error:
                return {"error": str(error)}
            return {k: reply[k] for k in ("output_ids", "meta_info", "text") if k in reply}

    async def every() -> list[dict]:
        return await asyncio.gather(*(one(r) for r in requests))

    start = time.perf_counter()
    answers = engine.loop.run_until_complete(every())
    return {"seconds": time.perf_counter() - start, "answers": answers}


if __name__ == "__main__":
    _serve()
