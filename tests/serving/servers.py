"""Servers for tests: processes started as users start them, with ``libraspec serve``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import requests

PLAIN = {"libraspec_max_length": 0}  # a request that verifies nothing is decoded plainly
PROMPT = "def read_lines(path):\n    "


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    def __init__(self, log, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "libraspec_sglang.cli", "serve", "--pair", "test",
                   "--dtype", "float32", "--host", "127.0.0.1", "--port", str(self.port),
                   "--max-total-tokens", "20000", "--max-running-requests", "8",
                   *flags]  # fmt: skip
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=stream, start_new_session=True
            )

    def wait(self, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if requests.get(f"{self.url}/health_generate", timeout=20).ok:
                    return
            except requests.RequestException:
                time.sleep(1)
        raise AssertionError(f"server not up: {self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def generate(self, text=PROMPT, **sampling):
        sampling = {"temperature": 0, "max_new_tokens": 40, **sampling}
        answer = requests.post(
            f"{self.url}/generate", json={"text": text, "sampling_params": sampling}, timeout=120
        )
        return answer


@contextmanager
def serving(log, *flags: str) -> Iterator[Server]:
    """A server that answers; ended afterwards, also where it does not get that far."""
    server = Server(log, *flags)
    try:
        server.wait()
        yield server
    finally:
        server.stop()
