"""Text for a byte-level target, taken from what a Python installation already holds.

Three kinds, each a stream of byte values with an end-of-text token after every document:

- `python`: sources of the standard library and of installed packages;
- `prose`: readmes, licences and other documentation files of those packages;
- `chat`: optional JSONL files of questions (`{"turns": [..]}`) and answers
  (`{"prompt": .., "text": ..}`), so that the model has also seen plain English dialogue.

Evaluation prompts stay out: test and benchmark directories are skipped, and so is every
document that names one of the evaluation sets or shares ten consecutive words with a prompt.
"""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

EOS = 257
KINDS = ("python", "prose", "chat")
SKIPPED_DIRS = {"test", "tests", "testing", "_testing", "benchmark", "benchmarks", "bench",
                "_vendor",
                "__pycache__", "idle_test", "lib2to3", "eval", "evals"}
PROSE_SUFFIXES = {".md", ".rst", ".txt"}
EVAL_NAMES = re.compile(r"human[-_ ]?eval|gsm[-_ ]?8k|mt[-_ ]?bench|math[-_ ]?500", re.IGNORECASE)
WORD = re.compile(r"[a-z0-9]+")
NGRAM = 10


@dataclass(frozen=True)
class Document:
    kind: str
    group: str  # the package, for a cap per package
    text: str


def word_ngrams(text: str) -> set[int]:
    """Hashes of all runs of ten consecutive words."""
    words = WORD.findall(text.lower())
    return {hash(tuple(words[i : i + NGRAM])) for i in range(len(words) - NGRAM + 1)}


def forbidden_ngrams(prompt_files: Iterable[Path]) -> set[int]:
    """Word runs of evaluation prompts, without those shared by several (instruction wording)."""
    counts: Counter[int] = Counter()
    for path in prompt_files:
        for line in Path(path).read_text().splitlines():
            grams: set[int] = set()
            for turn in json.loads(line)["turns"]:
                grams |= word_ngrams(turn)
            counts.update(grams)
    return {gram for gram, count in counts.items() if count < 3}


def package_files(max_bytes: int = 200_000) -> Iterator[tuple[str, str, Path]]:
    """`(kind, package, path)` of the standard library, then of the installed packages."""
    paths = sysconfig.get_paths()
    stdlib, site = Path(paths["stdlib"]), Path(paths["purelib"])
    for root, whole in ((stdlib, "stdlib"), (site, None)):
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root)
            if whole and relative.parts[0] == "site-packages":
                continue
            if SKIPPED_DIRS & {part.lower() for part in relative.parts[:-1]} or not path.is_file():
                continue
            name = path.name.upper()
            if path.suffix == ".py":
                kind = "python"
            elif path.suffix.lower() in PROSE_SUFFIXES or name == "METADATA" or "LICENSE" in name:
                kind = "prose"
            else:
                continue
            if 200 <= path.stat().st_size <= max_bytes:
                yield kind, whole or relative.parts[0].split("-")[0], path


def chat_documents(files: Iterable[Path]) -> Iterator[Document]:
    """Questions alone, or `prompt` and `text` (an answer) one after the other."""
    for path in files:
        for line in Path(path).read_text().splitlines():
            row = json.loads(line)
            parts = [row["prompt"], row["text"]] if "text" in row else row["turns"]
            yield Document("chat", "chat", "\n\n".join(part.strip() for part in parts) + "\n")


def file_documents() -> Iterator[Document]:
    for kind, group, path in package_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if kind == "prose" and path.name == "METADATA":
            text = text.partition("\n\n")[2]  # the headers repeat; the description is a readme
        yield Document(kind, group, text)


def is_readable(text: str) -> bool:
    """Reject tables, generated code and foreign scripts."""
    lines = text.splitlines()
    if len(text) < 200 or not lines:
        return False
    ascii_share = sum(c < "\x7f" for c in text[:20_000]) / min(len(text), 20_000)
    digits = sum(c.isdigit() for c in text[:20_000]) / min(len(text), 20_000)
    return ascii_share > 0.98 and digits < 0.12 and max(map(len, lines)) < 400


def build(chat_files: Iterable[Path], prompt_files: Iterable[Path], group_cap: int = 3_000_000,
          holdout_every: int = 33) -> dict[tuple[str, str], np.ndarray]:
    """Collect, filter, de-duplicate and split the corpus.

    Returns `{(kind, "train" | "held_out"): uint16 stream}`. A document is dropped when more
    than half of its longer lines were seen before (copied files, repeated licences).
    """
    forbidden = forbidden_ngrams(prompt_files)
    seen_lines: set[bytes] = set()
    used: Counter[tuple[str, str]] = Counter()
    count: Counter[str] = Counter()
    streams: dict[tuple[str, str], list[np.ndarray]] = {}

    def documents() -> Iterator[Document]:
        yield from chat_documents(chat_files)
        yield from file_documents()

    for doc in tqdm(documents(), desc="corpus", unit=" files"):
        if doc.kind != "chat":
            if used[doc.kind, doc.group] >= group_cap and doc.group != "stdlib":
                continue
            if EVAL_NAMES.search(doc.text) or not is_readable(doc.text):
                continue
        if forbidden and not forbidden.isdisjoint(word_ngrams(doc.text)):
            continue
        keys = [hashlib.blake2b(line.strip().encode(), digest_size=8).digest()
                for line in doc.text.splitlines() if len(line.strip()) > 20]
        fresh = sum(key not in seen_lines for key in keys)
        if doc.kind != "chat" and (not keys or fresh * 2 < len(keys)):
            continue
        seen_lines.update(keys)
        data = doc.text.encode()
        used[doc.kind, doc.group] += len(data)
        count[doc.kind] += 1
        part = "held_out" if count[doc.kind] % holdout_every == 0 else "train"
        tokens = np.append(np.frombuffer(data, dtype=np.uint8).astype(np.uint16), np.uint16(EOS))
        streams.setdefault((doc.kind, part), []).append(tokens)
    return {key: np.concatenate(parts) for key, parts in streams.items()}


def save(streams: dict[tuple[str, str], np.ndarray], path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for (kind, part), tokens in streams.items():
        np.save(path / f"{kind}.{part}.npy", tokens)


class Corpus:
    """Random windows over saved streams (memory-mapped), mixed by `weights` per kind."""

    def __init__(self, path: Path, part: str, weights: dict[str, float]) -> None:
        self.streams = {}
        for kind in KINDS:
            file = Path(path) / f"{kind}.{part}.npy"
            if file.exists() and weights.get(kind, 0) > 0:
                self.streams[kind] = np.load(file, mmap_mode="r")
        if not self.streams:
            raise FileNotFoundError(f"{path} holds no corpus; run the `corpus` command first")
        self.kinds = list(self.streams)
        share = np.array([weights[kind] for kind in self.kinds], dtype=np.float64)
        self.shares = share / share.sum()

    def batch(self, rng: np.random.Generator, count: int, length: int) -> np.ndarray:
        """`[count, length]` int64 windows."""
        rows = np.empty((count, length), dtype=np.int64)
        for row, kind in zip(rows, rng.choice(len(self.kinds), size=count, p=self.shares),
                             strict=True):
            stream = self.streams[self.kinds[kind]]
            start = int(rng.integers(0, len(stream) - length))
            row[:] = stream[start : start + length]
        return rows
