"""What deciding costs: policies on the host per round, and the kernels against their floors.

    python benchmarks/controller_kernel.py --json

1. Policies as the worker calls them where rounds run on a CPU: widths, lengths, and learning from
   the outcome. Rounds are made up: confidences that are right, in a text that is easy for a while
   and then hard. Microseconds of a round, the mean over rounds (some do more than others) in each
   of several repetitions, and of those the median. Exit status 1 when `libra` takes more than
   150 microseconds at batch 16.
2. The kernels of `kernels/length_controller.py`, in a CUDA graph, beside a pass that only reads the
   same logits (`amax`) and beside an empty launch. Without a CUDA device, the torch twins, which
   stand for nothing but themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from libraspec_sglang.controller import policies
from libraspec_sglang.controller.policy import Policy, RoundTimes
from libraspec_sglang.kernels import length_controller

NAMES = ("libra", "libraspec", "gemma", "failfast", "static")
DEPTH, BLOCK = 24, 15
LIMIT, LIMIT_BATCH = 150.0, 16  # microseconds, of libra
ROUNDS, REPEAT = 300, 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batches", default="1,4,16,64", help="batch sizes (default: 1,4,16,64)")
    parser.add_argument("--vocabulary", type=int, default=151936, help="default: 151936 (Qwen3)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args()
    torch.set_num_threads(1)
    batches = [int(b) for b in args.batches.split(",")]
    grid = [(name, bs) for name in NAMES for bs in batches]
    host = [{"policy": name, "batch": bs, "microseconds": host_round(name, bs)}
            for name, bs in tqdm(grid, desc="policies", disable=args.json)]  # fmt: skip
    kernels = [row for bs in tqdm(batches, desc="kernels", disable=args.json)
               for row in kernel_times(bs, args.vocabulary)]  # fmt: skip
    over = [r for r in host if r["policy"] == "libra" and r["batch"] == LIMIT_BATCH
            and r["microseconds"] > LIMIT]  # fmt: skip
    if args.json:
        print(json.dumps({"host": host, "kernels": kernels, "limit": LIMIT, "missed": over}))
    else:
        show(host, kernels, batches)
        print(f"\nlibra at batch {LIMIT_BATCH}, limit {LIMIT:g} us: "
              f"{'missed' if over else 'kept' if LIMIT_BATCH in batches else 'not measured'}")
    return 1 if over else 0


def host_round(name: str, bs: int) -> float:
    """Microseconds of a round's decisions and learning."""
    policy = policies.build(name, block_size=BLOCK, max_length=DEPTH, alpha=2.2, static_length=7,
                            wide=True)  # fmt: skip
    policy.prepare()
    rng = np.random.default_rng(0)
    play(policy, made_up(rng, bs))  # learns, compiles, fills caches
    repeats = [play(policy, made_up(rng, bs)) for _ in range(REPEAT)]
    return 1e6 * statistics.median(repeats)


def made_up(rng: np.random.Generator, bs: int) -> list[tuple[torch.Tensor, np.ndarray]]:
    """Rounds of (float32 [bs, D] confidences, [bs] tokens that would be accepted)."""
    easy, rounds = np.ones(bs, dtype=bool), []
    for _ in range(ROUNDS):
        easy ^= rng.random(bs) < 0.2
        chance = rng.beta(np.where(easy, 12, 2)[:, None], np.where(easy, 1, 2)[:, None],
                          (bs, DEPTH))  # fmt: skip
        right = np.cumprod(rng.random((bs, DEPTH)) < chance, axis=1).sum(axis=1)
        rounds.append((torch.from_numpy(chance.astype(np.float32)), right))
    return rounds


def play(policy: Policy, rounds: list[tuple[torch.Tensor, np.ndarray]]) -> float:
    """Seconds a round."""
    bs = len(rounds[0][1])
    requests, limits = [f"r{i}" for i in range(bs)], [DEPTH] * bs
    caps = torch.tensor(limits)
    spent = 0.0
    for chance, right in rounds:
        start = time.perf_counter()
        widths = policy.first_drafts(requests, limits)
        spent += time.perf_counter() - start
        drafted = drafts(chance, widths)  # the drafter's work
        start = time.perf_counter()
        lengths = policy.decide(drafted, caps, None) if drafted.shape[1] else torch.zeros_like(caps)
        spent += time.perf_counter() - start
        verified = np.minimum(lengths.numpy(), widths)
        accepted = np.minimum(verified, right)
        times = seconds(bs, widths, verified)
        start = time.perf_counter()
        if policy.learns:
            policy.learn(requests, drafted.numpy(), verified, accepted)
            policy.learn_times(times)
        spent += time.perf_counter() - start
    return spent / len(rounds)


def drafts(chance: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """[bs, widest] confidences, NaN beyond what each request drafted."""
    columns = torch.arange(max(widths))
    beyond = columns >= torch.tensor(widths)[:, None]
    return chance[:, : max(widths)].masked_fill(beyond, torch.nan)


def seconds(bs: int, widths: list[int], verified: np.ndarray) -> RoundTimes:
    """A machine on which rows cost."""
    drafted = sum(w + 1 for w in widths) if any(widths) else 0
    rows = bs + int(verified.sum())
    return RoundTimes(bs, drafted, 1e-3 + 1e-4 * drafted, rows, 1e-2 + 5e-4 * rows, 1e-3)


def kernel_times(bs: int, vocabulary: int) -> list[dict[str, Any]]:
    """Microseconds of each operation, and of what it cannot be faster than (CUDA only)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = bs * DEPTH
    logits = torch.randn(rows if device.type == "cuda" else bs, vocabulary, device=device,
                         dtype=torch.bfloat16)  # fmt: skip
    chance = torch.rand(bs, DEPTH, device=device)
    caps = torch.full((bs,), DEPTH, device=device)
    alpha = torch.full((bs,), 2.2, device=device)
    prices = torch.linspace(1.0, 3.0, rows + 1, dtype=torch.float64, device=device)
    ids = torch.empty(len(logits), dtype=torch.int64, device=device)
    own = torch.empty(len(logits), device=device)
    lengths = torch.empty(bs, dtype=torch.int32, device=device)
    largest = torch.empty(len(logits), dtype=logits.dtype, device=device)
    nothing = torch.empty(1, device=device)
    survival = chance.cumprod(dim=1)
    operations: list[tuple[str, Callable, Callable]] = [
        ("confidences", lambda: length_controller.confidences(logits, out=(ids, own)),
         lambda: torch.amax(logits, dim=1, out=largest)),
        ("lengths_algorithm_one", lambda: length_controller.lengths_algorithm_one(
            chance, alpha, caps, block_size=BLOCK, max_length=DEPTH, out=lengths),
         lambda: nothing.zero_()),
        ("lengths_batch", lambda: length_controller.lengths_batch(
            survival, caps, prices, out=lengths), lambda: nothing.zero_()),
    ]  # fmt: skip
    clock = on_cuda if device.type == "cuda" else on_host
    return [{"operation": name, "batch": bs, "rows": len(logits) if name == "confidences" else bs,
             "device": device.type, "microseconds": clock(run),
             "floor_microseconds": clock(floor) if device.type == "cuda" else None}
            for name, run, floor in operations]  # fmt: skip


def on_host(run: Callable) -> float:
    run()
    spent = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        run()
        spent.append(time.perf_counter() - start)
    return 1e6 * statistics.median(spent)


def on_cuda(run: Callable) -> float:
    """Microseconds within a CUDA graph of 20 of them, so launches from the host do not count."""
    run()
    torch.cuda.synchronize()
    graph, many = torch.cuda.CUDAGraph(), 20
    with torch.cuda.graph(graph):
        for _ in range(many):
            run()
    spent = []
    for _ in range(REPEAT):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(start.elapsed_time(end) / many)
    return 1e3 * statistics.median(spent)


def show(host: list[dict], kernels: list[dict], batches: list[int]) -> None:
    print("\npolicies on the host, microseconds a round")
    print(f"{'batch':24}" + "".join(f"{bs:>10}" for bs in batches))
    for name in NAMES:
        own = [r["microseconds"] for r in host if r["policy"] == name]
        print(f"{name:24}" + "".join(f"{us:10.1f}" for us in own))
    where = kernels[0]["device"]
    print(f"\noperations, microseconds ({'kernels' if where == 'cuda' else 'torch twins'}, {where};"
          f" {'floor in brackets' if where == 'cuda' else 'kernels not measured: no CUDA device'})")
    print(f"{'batch':24}" + "".join(f"{bs:>20}" for bs in batches))
    for name in dict.fromkeys(r["operation"] for r in kernels):
        own = [r for r in kernels if r["operation"] == name]
        cells = [f"{r['microseconds']:.1f}"
                 + (f" ({r['floor_microseconds']:.1f})" if r["floor_microseconds"] else "")
                 for r in own]  # fmt: skip
        print(f"{name:24}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
