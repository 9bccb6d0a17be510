"""`train_dflash.py generate`: the target's own answers, with what a drafter trains on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .decode import Engine, common_prefix
from .store import done_indices, write_shard
from .target import CausalLM


@dataclass(frozen=True)
class Prompt:
    index: int  # position in the interleaved list: stable across resumptions
    kind: int  # number of the file it came from
    text: str  # as the user wrote it
    ids: list[int]  # with the chat template


def interleave(files: list[list[str]]) -> list[tuple[int, str]]:
    """Round robin over the files until all are used up, as `(file, text)`."""
    longest = max(map(len, files), default=0)
    return [(kind, rows[i]) for i in range(longest) for kind, rows in enumerate(files)
            if i < len(rows)]


def load_prompts(paths: list[Path], target: Path, limit: int | None = None,
                 raw: bool = False) -> list[Prompt]:
    """Read JSONL prompts (`turns`, `prompt` or `text`) and apply the chat template, if any."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    files = []
    for path in paths:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
        texts = [row["turns"][0] if "turns" in row else row.get("prompt") or row["text"]
                 for row in rows]
        files.append(texts[:limit])
    chat = not raw and getattr(tokenizer, "chat_template", None)
    prompts = []
    for index, (kind, text) in enumerate(interleave(files)):
        rendered = text
        if chat:
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        prompts.append(Prompt(index, kind, text, ids))
    return prompts


def temperature_of(index: int, share: float, temperature: float, seed: int) -> float:
    """Greedy, or `temperature` for a fixed pseudo-random `share` of the prompts."""
    return temperature if np.random.default_rng((seed, index)).random() < share else 0.0


def run(args: argparse.Namespace) -> None:
    """Generate until the prompts or the minutes run out; a repeated call continues."""
    from transformers import AutoTokenizer

    prompts = load_prompts(args.prompts, args.target, args.limit, args.raw)
    kept = [p for p in prompts if len(p.ids) <= args.max_prompt]
    done = done_indices(args.out)
    todo = [p for p in kept if p.index not in done]
    print(f"{len(prompts)} prompts, {len(prompts) - len(kept)} too long, {len(done)} done before")
    if not todo:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    model = CausalLM.from_pretrained(args.target)
    engine = Engine(model, min(args.slots, len(todo)), args.max_prompt + args.max_new,
                    tuple(args.layers), int8=args.int8)
    engine.share_prefix(common_prefix([p.ids for p in kept]))
    engine.drop_exact()
    del model
    by_index = {p.index: p for p in todo}

    def jobs() -> Iterator[tuple[int, list[int], float]]:
        for p in todo:
            yield p.index, p.ids, temperature_of(p.index, args.sampled, args.temperature, args.seed)

    buffer = []
    tokens = 0

    def flush() -> None:
        write_shard(args.out, buffer, [by_index[a.index].kind for a in buffer])
        with (args.out / "answers.jsonl").open("a") as file:
            for a in buffer:
                text = tokenizer.decode(a.ids[a.prompt_len :], skip_special_tokens=True)
                row = {"index": a.index, "kind": by_index[a.index].kind,
                       "temperature": a.temperature, "prompt": by_index[a.index].text, "text": text}
                file.write(json.dumps(row) + "\n")
        buffer.clear()

    bar = tqdm(total=len(kept), initial=len(done), desc="answers", mininterval=10)
    for answer in engine.run(jobs(), args.max_new, seed=args.seed + len(done)):
        buffer.append(answer)
        tokens += len(answer.ids) - answer.prompt_len
        bar.set_postfix(tokens=tokens, rate=f"{tokens / bar.format_dict['elapsed']:.0f}/s",
                        refresh=False)
        bar.update(1)
        if len(buffer) >= args.shard:
            flush()
        if args.minutes and bar.format_dict["elapsed"] > 60 * args.minutes:
            break
    if buffer:
        flush()
    bar.close()
