"""The ``libraspec`` command: serve, demo, profile, replay, check, env."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import yaml

from . import __version__, options
from .cpu import enable


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:  # everything after it belongs to SGLang
        return _reported(_serve, arguments[1:])
    args, unknown = _parser().parse_known_args(arguments)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # shows its own usage
    return _reported(args.run, args)


def _reported(run, argument) -> int:
    """Errors a user can mend are one line; anything else keeps its traceback."""
    from .demo.compare import PromptError
    from .demo.runner import RunnerError
    from .demo.smollm2 import TargetError

    try:
        return run(argument)
    except (options.OptionError, PromptError, RunnerError, TargetError) as error:
        print(f"libraspec: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="libraspec",
        description="Block-diffusion speculative decoding for SGLang that verifies only the tokens "
        "worth verifying.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="SGLang's server with LIBRASPEC (takes every flag of sglang.launch_server)",
        add_help=False,
    )
    serve.set_defaults(run=lambda _: 0)

    demo = commands.add_parser(
        "demo",
        help="compare plain decoding, built-in DFLASH and LIBRASPEC on the same prompts",
        description="Starts one engine per setup, lets them take turns on the same prompts and "
        "prints tokens per second, tokens per round (tau), target rows verified per round, and "
        "whether all outputs are identical. The real pair's target (93 MB) is fetched once.",
    )
    demo.add_argument(
        "--pair",
        choices=("real", "test"),
        default="real",
        help="real: SmolLM2-135M-Instruct and its drafter; test: a small byte-level pair "
        "(default: real)",
    )
    demo.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="rows with 'turns': [text, ...] (default: 32 prompts that ship)",
    )
    demo.add_argument(
        "--limit",
        type=_positive,
        metavar="N",
        help="use the first N prompts, mixed over datasets (default: 8, all with --prompts)",
    )
    demo.add_argument(
        "--concurrency",
        type=_numbers,
        default=[1],
        metavar="1,4",
        help="requests in flight, one table each (default: 1)",
    )
    demo.add_argument(
        "--max-new-tokens",
        type=_positive,
        default=96,
        metavar="N",
        help="tokens per answer (default: 96)",
    )
    demo.add_argument(
        "--static",
        type=_blocks,
        metavar="2,4,8,16",
        help="block sizes of built-in DFLASH to run (default: the drafter's own)",
    )
    demo.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="float32 makes outputs comparable token for token (default)",
    )
    demo.add_argument(
        "--repeat",
        type=_positive,
        default=1,
        metavar="N",
        help="answer every prompt N times: steadier on a busy machine (default: 1; prompts that "
        "fill just one turn are answered twice, so that engines can swap places)",
    )
    demo.add_argument("--json", action="store_true", help="one JSON object on standard output")
    demo.set_defaults(run=_demo, parser=demo)

    _add_profile(commands)
    _add_replay(commands)

    check = commands.add_parser(
        "check",
        help="versions, contract, device, kernels; one line each, non-zero exit on a fault",
    )
    check.add_argument("--drafter", metavar="PATH", help="also check this draft checkpoint")
    check.add_argument("--target", metavar="PATH", help="... against this local target")
    check.set_defaults(run=_check, parser=check)

    env = commands.add_parser(
        "env",
        help='print the environment SGLang needs on this machine: eval "$(libraspec env)"',
    )
    env.set_defaults(run=_env, parser=env)
    return parser


def _add_profile(commands) -> None:
    profile = commands.add_parser(
        "profile",
        help="measure what rounds cost on this machine, for --libraspec-cost",
        description="Starts one engine and times rounds of many batch sizes and lengths, fits "
        "them and writes a small YAML file. `--libraspec-cost FILE` then lets policy 'libra' "
        "decide by it from the first round on (on a CUDA device it needs one); `libraspec replay "
        "--cost FILE` replays traces against it. Takes about two minutes on the pairs that ship. "
        "Nothing else should run meanwhile.",
    )
    profile.add_argument("--pair", choices=("real", "test"), default="real",
                         help="where no --model-path is given (default: real)")  # fmt: skip
    profile.add_argument("--model-path", metavar="PATH", help="another target")
    profile.add_argument(
        "--speculative-draft-model-path", metavar="PATH", help="... and its drafter"
    )
    profile.add_argument("--dtype", help="as for the server (default: float32 on a CPU, else auto)")
    profile.add_argument(
        "--engine",
        action="append",
        default=[],
        type=_engine_argument,
        metavar="KEY=VALUE",
        help="any other argument of sglang.Engine that the server is started with, such as "
        "tp_size=2; repeat as needed",
    )
    profile.add_argument("--batches", type=_numbers, default=[1, 2, 4, 8, 16], metavar="1,2,4",
                         help="requests at once (default: 1,2,4,8,16)")  # fmt: skip
    profile.add_argument("--max-rows", type=_positive, default=192, metavar="N",
                         help="rows of a round at most (default: 192)")  # fmt: skip
    profile.add_argument("--max-length", type=_positive, metavar="N",
                         help="drafted tokens at most (default: one and a half blocks, as the "
                         "server's)")  # fmt: skip
    profile.add_argument("--contexts", type=_numbers, default=[128, 768], metavar="N,N",
                         help="prompt tokens, short first (default: 128,768)")  # fmt: skip
    profile.add_argument("--out", type=Path, default=Path("cost.yaml"), metavar="FILE",
                         help="default: cost.yaml")  # fmt: skip
    profile.set_defaults(run=_profile, parser=profile)


def _add_replay(commands) -> None:
    replay = commands.add_parser(
        "replay",
        help="what other policies, batch sizes or machines would have made of a recorded trace",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_REPLAY_HELP,
    )
    replay.add_argument("trace", type=Path, metavar="TRACE", help="file of --libraspec-trace")
    replay.add_argument(
        "--cost",
        type=_cost,
        required=True,
        metavar="COST",
        help="what rounds cost: a YAML file, or a100, h100 or b200, which ship",
    )
    replay.add_argument(
        "--policy",
        type=_names,
        default="none,static,gemma,failfast,libraspec,libra-unprofiled,libra,expected-optimal,clairvoyant",
        metavar="A,B,...",
        help="policies, each as NAME or NAME:VALUE; default: %(default)s",
    )
    replay.add_argument(
        "--batch", type=_numbers, default=[1], metavar="N,N", help="batch sizes (default: 1)"
    )
    replay.add_argument(
        "--alpha", metavar="X", help="alpha of libraspec (default: 2.2; libraspec:X for several)"
    )
    replay.add_argument(
        "--max-length",
        type=_positive,
        metavar="N",
        help="d_max (default: one and a half blocks); static and the oracles do not heed it",
    )
    replay.add_argument(
        "--block-size",
        type=_block,
        metavar="N",
        help="the drafter's block, anchor included (default: the trace's)",
    )
    replay.add_argument(
        "--explain",
        type=_positive,
        metavar="N",
        help="also print, for round N of every policy at the first batch size, each request's "
        "survivals, marginal gain and cost, their ratio and where it stopped",
    )
    replay.add_argument("--json", action="store_true", help="one JSON object on standard output")
    replay.set_defaults(run=_replay, parser=replay)


_REPLAY_HELP = """\
Evaluate length policies offline: what they would have verified and gained on the rounds of a
recorded trace, paid by a cost file. Record the trace with every drafted token verified, so that
nothing about acceptance has to be guessed:

  libraspec serve --libraspec-policy static --libraspec-static-length 24 \\
      --libraspec-trace trace.jsonl
  libraspec replay trace.jsonl --cost h100 --batch 1,8,32,128
  libraspec replay trace.jsonl --cost h100 \\
      --policy static:3,static:7,libraspec:1.8,failfast:0.5,libra --explain 40

Policies: none, static[:LENGTH], gemma, failfast[:THRESHOLD], libraspec[:ALPHA], libra (which
has the cost file as its profile), libra-unprofiled (which learns costs from its rounds alone), and
three oracles: clairvoyant (knows what will be accepted), expected-optimal (knows every token's
probability; fitted on the whole trace), both before anything is drafted, and expected-one-width
(knows it once it is drafted, and drafts equally wide in every round; takes longer than the others
together, so it is not among the defaults). Columns: tokens/s of the batch; eta, over plain
decoding; tau, tokens per request and round; length, drafted tokens verified; wasted, of them not
accepted; deviation, mean absolute difference of the length from the clairvoyant's.

Batches are formed by walking through the trace with N requests side by side. A round's acceptance
is taken from the trace whatever was accepted before it: rounds are exchangeable samples.
"""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _numbers(text: str) -> list[int]:
    try:
        return [_positive(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,4,16") from None


def _blocks(text: str) -> list[int]:
    sizes = _numbers(text)
    if max(sizes) > 64 or min(sizes) < 2:
        raise argparse.ArgumentTypeError("block sizes are 2 to 64")
    return sizes


def _block(text: str) -> int:
    blocks = _blocks(text)
    if len(blocks) > 1:
        raise argparse.ArgumentTypeError("must be one number")
    return blocks[0]


def _cost(text: str) -> Path:
    if Path(text).exists():
        return Path(text)
    folder = Path(str(resources.files("libraspec_sglang.configs") / "cost"))
    shipped = {file.stem: file for file in folder.glob("*.yaml")}
    if text not in shipped:
        names = ", ".join(sorted(shipped))
        raise argparse.ArgumentTypeError(f"{text}: no such file, nor a cost that ships ({names})")
    return shipped[text]


def _engine_argument(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not key.isidentifier() or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, yaml.safe_load(value)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _serve(arguments: list[str]) -> int:
    """Fill in what is missing, then become SGLang's server."""
    given = {a.split("=", 1)[0] for a in arguments}
    if given & {"-h", "--help"}:
        print(_SERVE_HELP, flush=True)
    options.check_cli_flags(arguments)
    pair = "real"
    if "--pair" in given:
        pair, arguments = _take_pair(arguments)
    named = given & {"--model-path", "--model", "--config"}
    if named and "--pair" in given:
        raise options.OptionError(f"--pair and {', '.join(sorted(named))} both name a model")
    if not named and not given & {"-h", "--help"}:
        from .demo.pairs import resolve

        chosen = resolve(pair)
        arguments = [*arguments, "--model-path", str(chosen.target)]
        if "--speculative-draft-model-path" not in given:
            arguments += ["--speculative-draft-model-path", str(chosen.drafter)]
            given.add("--speculative-draft-model-path")
        if enable.wanted() and "--dtype" not in given:
            arguments += ["--dtype", "float32"]  # bfloat16 has no fast path on a CPU, and ties
    if "--speculative-draft-model-path" in given and "--speculative-algorithm" not in given:
        arguments = [*arguments, "--speculative-algorithm", "LIBRASPEC"]
    os.environ.update(enable.environment())
    command = [sys.executable, "-m", "sglang.launch_server", *arguments]
    print("libraspec:", shlex.join(command), file=sys.stderr, flush=True)
    os.execv(command[0], command)


_SERVE_HELP = """libraspec serve [--pair real|test] [any flag of sglang.launch_server]

Without --model-path the shipped pair is served with --speculative-algorithm LIBRASPEC; with a
--speculative-draft-model-path of your own, LIBRASPEC is the default algorithm. On a machine
without a GPU the CPU runtime is set up first. SGLang's own help follows.
"""


def _take_pair(arguments: list[str]) -> tuple[str, list[str]]:
    parser = argparse.ArgumentParser(prog="libraspec serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--pair", choices=("real", "test"))
    found, rest = parser.parse_known_args(arguments)
    return found.pair, rest


def _demo(args: argparse.Namespace) -> int:
    from .demo import compare, pairs
    from .drafters import checkpoint

    options.load()
    file = args.prompts or compare.PROMPTS
    limit = args.limit if args.limit is not None or args.prompts else 8
    prompts = compare.read_prompts(file, limit)
    pair = pairs.resolve(args.pair)
    result = compare.compare(
        pair,
        prompts,
        concurrencies=args.concurrency,
        statics=args.static or [checkpoint.read(str(pair.drafter)).block_size],
        max_new_tokens=args.max_new_tokens,
        dtype=args.dtype,
        repeat=args.repeat,
    )
    print(json.dumps(result) if args.json else compare.table(result))
    return 0


def _profile(args: argparse.Namespace) -> int:
    from .controller import cost_file
    from .demo import compare, pairs
    from .drafters import checkpoint
    from .observe import profile

    if (args.model_path is None) != (args.speculative_draft_model_path is None):
        raise options.OptionError("--model-path and --speculative-draft-model-path go together")
    if not args.out.parent.is_dir():
        raise options.OptionError(f"--out {args.out}: no such directory")
    target, drafter = args.model_path, args.speculative_draft_model_path
    if target is None:
        pair = pairs.resolve(args.pair)
        target, drafter = str(pair.target), str(pair.drafter)
    block = checkpoint.read(drafter).block_size
    server = checkpoint.plan_lengths(options.Options(), block, host_timed=True)
    longest = args.max_length or server.max_length
    engine = {
        "model_path": target,
        "speculative_draft_model_path": drafter,
        "speculative_algorithm": "LIBRASPEC",
        "max_running_requests": max(args.batches),
        "skip_tokenizer_init": True,
        "disable_overlap_schedule": True,
    }
    if enable.wanted():
        most = max(args.contexts) + 16 + 6 * longest
        engine |= {"dtype": "float32", "max_total_tokens": most * (max(args.batches) + 2)}
    if args.dtype:
        engine["dtype"] = args.dtype
    engine |= dict(args.engine)
    try:
        cost = profile.measure(
            engine,
            compare.encode(target, compare.read_prompts(compare.PROMPTS, None)),
            sorted(set(args.batches)),
            longest,
            args.max_rows,
            sorted(set(args.contexts)),
        )
    except profile.ProfileError as error:
        print(f"libraspec: {error}", file=sys.stderr)
        return 1
    cost_file.write(cost, args.out)
    print(profile.table(cost))
    print(f"\nwritten to {args.out}; use it with --libraspec-cost {args.out}")
    return 0


def _replay(args: argparse.Namespace) -> int:
    from .controller.cost_file import CostError
    from .observe import replay, replay_table
    from .observe.trace_reader import TraceError

    setting = replay.Setting(args.block_size, args.max_length, args.alpha)
    try:
        report = replay_table.run(
            args.trace, args.cost, args.policy, args.batch, setting, explain=args.explain
        )
    except (CostError, TraceError, replay.ReplayError) as error:
        print(f"libraspec: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report) if args.json else replay_table.table(report))
    return 0


def _check(args: argparse.Namespace) -> int:
    from .check import run_checks

    faults = 0
    for result in run_checks(args.drafter, args.target):
        print(f"{'ok   ' if result.ok else 'FAULT'} {result.name}: {result.detail}")
        faults += not result.ok
    return 1 if faults else 0


def _env(args: argparse.Namespace) -> int:
    options.load()  # a variable that is none, or out of range, is better found here
    for name, value in enable.environment().items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
