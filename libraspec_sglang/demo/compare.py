"""`libraspec demo`: plain decoding, built-in DFLASH and LIBRASPEC on the same prompts in one run.

All engines are up at once and take turns on every slice of the prompts, so that a noisy machine
hurts all of them alike; what is compared is a ratio from one run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from libraspec_sglang import options

from .pairs import Pair
from .runner import Batch, EngineProcess

STARTING_AT_ONCE = 2
"""Engines start mostly on one core each."""
FULL_BATCHES = 4
"""Prompts per request in flight in a turn. At its end fewer are in flight than asked for: a short
turn measures that; during a long one the machine's speed changes."""
PROMPTS = Path(__file__).parent / "prompts.jsonl"


class PromptError(ValueError):
    """A prompt file cannot be used; the message names the file and line."""


@dataclass
class Tally:
    """Sums over the batches of one engine at one concurrency."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    decoded: int = 0
    verified: float = 0.0
    answers: dict[int, list[list[int]]] = field(default_factory=dict)
    """By prompt, one for each turn that had it."""

    def add(self, batch: Batch, first: int = 0) -> None:
        """Add a batch whose prompts are numbers ``first``, ``first + 1`` and so on."""
        self.seconds += batch.seconds
        for number, output in enumerate(batch.outputs, first):
            self.answers.setdefault(number, []).append(output)
        self.tokens += sum(len(o) for o in batch.outputs)
        self.decoded += sum(max(0, len(o) - 1) for o in batch.outputs)
        self.rounds += sum(batch.rounds)
        self.verified += sum(batch.verified)

    def identical(self, other: Tally) -> bool:
        """Whether every answer is the other's first to the same prompt."""
        return self.answers.keys() == other.answers.keys() and all(
            output == other.answers[number][0]
            for number, outputs in self.answers.items()
            for output in outputs
        )

    def row(self, name: str, concurrency: int) -> dict[str, Any]:
        """The run as the demo reports it.

        tau: tokens gained per decode round, bonus included (the first token of an answer comes
        from prefill and is left out). mean_verified: rows the target verified per round and
        request, the anchor's own included; 1 is plain decoding.
        """
        rounds = max(1, self.rounds)
        return {
            "name": name,
            "concurrency": concurrency,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else 0.0,
            "tau": self.decoded / rounds,
            "mean_verified": self.verified / rounds,
            "rounds": self.rounds,
        }


def read_prompts(path: Path, limit: int | None) -> list[str]:
    """First turns of a JSONL file with ``turns``; with a limit, spread over its datasets.

    Raises:
        PromptError: as of :func:`prompts_by_dataset`.
    """
    columns = list(prompts_by_dataset(path).values())
    mixed = [c[i] for i in range(max(map(len, columns))) for c in columns if i < len(c)]
    return mixed if limit is None else mixed[:limit]


def prompts_by_dataset(path: Path) -> dict[str, list[str]]:
    """First turns of a JSONL file with ``turns``, by their ``dataset``.

    Raises:
        PromptError: missing or empty file, or a row without turns.
    """
    rows: dict[str, list[str]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PromptError(f"--prompts {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PromptError(f"--prompts {path}: not UTF-8 text") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turn = row["turns"][0]
        except (ValueError, LookupError, TypeError):
            raise PromptError(
                f"--prompts {path}, line {number}: needs a JSON object with 'turns': [text, ...]"
            ) from None
        if not isinstance(row["turns"], list) or not isinstance(turn, str) or not turn:
            raise PromptError(f"--prompts {path}, line {number}: the first turn must be text")
        rows.setdefault(str(row.get("dataset", "")), []).append(turn)
    if not rows:
        raise PromptError(f"--prompts {path}: no prompts in it")
    return rows


def tokenize(pair: Pair, prompts: Sequence[str], room: int) -> list[list[int]]:
    """Token ids of the prompts as the target expects them, cut from the left to ``room`` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    ids = []
    for prompt in prompts:
        if pair.chat:
            turn = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        else:
            text = prompt
        ids.append(tokenizer(text, add_special_tokens=False)["input_ids"][-room:])
    return ids


def encode(target: str | Path, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts as they are."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def compare(
    pair: Pair,
    prompts: Sequence[str],
    *,
    concurrencies: Sequence[int],
    statics: Sequence[int],
    max_new_tokens: int,
    dtype: str,
    repeat: int = 1,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run the comparison.

    Args:
        pair: target and drafter.
        prompts: texts.
        concurrencies: requests in flight, one table section each.
        statics: block sizes of built-in DFLASH to run.
        max_new_tokens: per answer.
        dtype: ``float32`` (outputs comparable token for token) or ``bfloat16``.
        repeat: times every prompt is answered, in as many more turns.
        quiet: no progress bar.

    Returns:
        ``{"outputs_identical": bool, "runs": [...]}``, see :meth:`Tally.row`.

    Raises:
        RunnerError: an engine failed.
    """
    context = max_new_tokens + 64
    limit = json.loads((pair.target / "config.json").read_text())["max_position_embeddings"]
    if limit <= context:
        raise PromptError(f"--max-new-tokens {max_new_tokens}: the target's context is {limit}")
    ids = tokenize(pair, prompts, room=limit - context)
    most = max(len(p) for p in ids) + context
    base = {
        "model_path": str(pair.target),
        "dtype": dtype,
        "max_running_requests": max(max(concurrencies), 1),
        "max_total_tokens": max(8192, most * (max(concurrencies) + 2)),
        "skip_tokenizer_init": True,
        "sleep_on_idle": True,
        "disable_overlap_schedule": True,
        "log_level": "info",
    }
    draft = {"speculative_draft_model_path": str(pair.drafter)}
    setups: list[tuple[str, dict[str, Any]]] = [("plain", base)]
    for size in statics:
        dflash = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": size}
        setups.append((f"dflash-{size}", {**base, **draft, **dflash}))
    setups.append(("libraspec", {**base, **draft, "speculative_algorithm": "LIBRASPEC"}))

    # LibraSpec options set in this process's environment reach the engines too.
    own = options.load().model_dump(exclude={"trace"})
    logs = Path(tempfile.mkdtemp(prefix="libraspec-demo-"))
    with ExitStack() as stack:
        starting = [(name, arguments, own) for name, arguments in setups]
        engines = start(stack, starting, logs, ids[:1], quiet)
        tallies = take_turns(pair, engines, ids, concurrencies, max_new_tokens, repeat, quiet)
    reference = tallies[("plain", concurrencies[0])]
    return {
        "outputs_identical": all(t.identical(reference) for t in tallies.values()),
        "runs": [tallies[(e.name, c)].row(e.name, c) for c in concurrencies for e in engines],
    }


def start(
    stack: ExitStack,
    setups: Sequence[tuple[str, dict[str, Any], dict[str, Any]]],
    logs: Path,
    warm_up: Sequence[Sequence[int]],
    quiet: bool,
) -> list[EngineProcess]:
    """Started engines, each warmed up on the prompts ``warm_up``; they end with ``stack``.

    Args:
        setups: (name, engine arguments, LibraSpec options) per engine.
        logs: directory for ``NAME.log``.

    Raises:
        RunnerError: an engine did not start.
    """
    engines = []
    with tqdm(setups, desc="starting engines", disable=quiet, file=sys.stderr) as bar:
        for first in range(0, len(setups), STARTING_AT_ONCE):
            fresh = [
                stack.enter_context(EngineProcess(name, arguments, own, logs / f"{name}.log"))
                for name, arguments, own in setups[first : first + STARTING_AT_ONCE]
            ]
            for engine in fresh:
                engine.wait_ready()
                engine.generate(warm_up, max_new_tokens=8, concurrency=1)  # not counted
                bar.update()
            engines += fresh
    return engines


def take_turns(pair, engines, ids, concurrencies, max_new_tokens, repeat, quiet):
    """Sums per (engine name, concurrency); engines alternate over slices of the prompts.

    Every other turn goes in reverse order, so that a machine that gets slower or faster does so for
    all engines alike; prompts that fill one turn get two for that. A target that knows no chat
    continues text, and goes on where a document would end.
    """
    tallies: dict[tuple[str, int], Tally] = {}
    turns = []
    for concurrency in concurrencies:
        size = FULL_BATCHES * concurrency
        starts = list(range(0, len(ids), size))
        times = max(repeat, 2 if len(starts) == 1 else 1)
        for time, (turn, start) in product(range(times), enumerate(starts)):
            order = engines if (time + turn) % 2 == 0 else engines[::-1]
            turns.append((concurrency, start, ids[start : start + size], order))
    with tqdm(
        total=sum(len(part) * len(order) for _, _, part, order in turns),
        desc=f"answering (prompts x {len(engines)} engines)",
        unit="prompt",
        disable=quiet,
        file=sys.stderr,
    ) as bar:
        for concurrency, start, part, order in turns:
            for engine in order:
                batch = engine.generate(
                    part,
                    max_new_tokens=max_new_tokens,
                    concurrency=concurrency,
                    flush=True,
                    ignore_eos=not pair.chat,
                )
                tallies.setdefault((engine.name, concurrency), Tally()).add(batch, start)
                bar.update(len(part))
    return tallies


def table(result: dict[str, Any]) -> str:
    """The comparison as text, with each run's speed against plain decoding."""
    lines = []
    for concurrency in dict.fromkeys(r["concurrency"] for r in result["runs"]):
        runs = [r for r in result["runs"] if r["concurrency"] == concurrency]
        plain = next(r["tokens_per_s"] for r in runs if r["name"] == "plain")
        lines.append(f"\nconcurrency {concurrency}")
        lines.append(
            f"{'':12}{'tokens/s':>10}{'vs plain':>10}{'tau':>7}{'verified':>10}{'rounds':>8}"
        )
        lines += [
            f"{r['name']:12}{r['tokens_per_s']:10.1f}{r['tokens_per_s'] / plain:9.2f}x"
            f"{r['tau']:7.2f}{r['mean_verified']:10.2f}{r['rounds']:8d}"
            for r in runs
        ]
    same = "identical in all runs" if result["outputs_identical"] else "NOT identical"
    lines.append(f"\noutputs: {same}")
    lines.append("tau: tokens per round; verified: target rows per request and round (1 = plain)")
    return "\n".join(lines)
