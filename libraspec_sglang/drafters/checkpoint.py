"""What a DFlash draft checkpoint says about itself, checked before an engine starts.

z-lab's layout: ``config.json`` with architecture ``DFlashDraftModel``, a ``block_size`` and a
``dflash_config`` naming the mask token and the target layers whose hidden states it reads; weights
without embedding and head, which are the target's. Checks that need no weights are made from
``config.json`` and the safetensors header, so a wrong file is named before anything is loaded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libraspec_sglang.controller import policies
from libraspec_sglang.controller.cost_file import Cost
from libraspec_sglang.options import OptionError, Options

ARCHITECTURE = "DFlashDraftModel"
HOT_TOKENS = "hot_token_ids.json"
MAX_BLOCK = 256
DRAFT_FLAG = "--speculative-draft-model-path"


@dataclass(frozen=True)
class DraftCheckpoint:
    """Fields of a draft checkpoint that lengths and heads depend on.

    Attributes:
        path: local directory.
        config: parsed ``config.json``.
        block_size: slots of a trained block, anchor included.
        hot_token_ids: sorted ids the head may be cut to, or None.
    """

    path: Path
    config: dict[str, Any]
    block_size: int
    hot_token_ids: list[int] | None


@dataclass(frozen=True)
class LengthPlan:
    """How long a round can get.

    Attributes:
        policy_name: the policy asked for.
        block_size: slots per trained block, anchor included.
        max_length: d_max, drafted tokens at most.
        static_length: length of the static policy.
        window: slots a round reserves per request: the anchor and the longest length.
        alpha: T / (tau c).
        wide: one wide first pass instead of further blocks.
        threshold: tau of ``failfast``.
        increment: N of ``failfast``.
    """

    policy_name: str
    block_size: int
    max_length: int
    static_length: int
    window: int
    alpha: float
    wide: bool
    threshold: float
    increment: int

    def policy(self, cost: Cost | None = None) -> policies.Policy:
        """The policy object. A block of B slots drafts n = B - 1 tokens (slot 0 is the anchor).

        Args:
            cost: what rounds cost on this machine, for ``libra``.
        """
        return policies.build(
            self.policy_name,
            block_size=self.block_size - 1,
            max_length=self.max_length,
            alpha=self.alpha,
            static_length=self.static_length,
            wide=self.wide,
            threshold=self.threshold,
            increment=self.increment,
            cost=cost,
        )


def plan_lengths(
    options: Options, block_size: int, *, host_timed: bool, ragged: bool = True
) -> LengthPlan:
    """Resolve the options' defaults.

    Args:
        options: as given.
        block_size: the checkpoint's, anchor included.
        host_timed: whether a round's parts can be timed with the host's clock (a CPU device).
        ragged: whether decided lengths are verified as they are. Where whole windows are verified
            instead, the default window is the block, which costs what DFLASH costs.

    Raises:
        OptionError: ``libra`` where it cannot measure and has no profile.
    """
    name = options.policy
    priced = host_timed or options.cost is not None
    if name == "auto":
        name = "libra" if priced else "libraspec"
    if name == "libra" and not priced:
        raise OptionError(
            "--libraspec-policy libra measures rounds with the host's clock, which a CUDA device "
            "does not follow; give it a profile (--libraspec-cost, made by `libraspec profile`) or "
            "use --libraspec-policy libraspec"
        )
    static = block_size - 1 if options.static_length is None else options.static_length
    most = options.max_length
    if most is None:
        most = max(1, block_size * 3 // 2 if ragged else block_size - 1)
    longest = {"static": max(1, static), "none": 1}.get(name, most)
    return LengthPlan(
        policy_name=name,
        block_size=block_size,
        max_length=most,
        static_length=static,
        window=1 + longest,
        alpha=options.alpha,
        wide=options.extension == "wide",
        threshold=options.threshold,
        increment=options.increment,
    )


def read(path: str | None, revision: str | None = None, block_size: int | None = None):
    """Read a draft checkpoint's configuration.

    Args:
        path: local directory or hub id, as given to ``--speculative-draft-model-path``.
        revision: hub revision.
        block_size: override of the checkpoint's block size (slots, anchor included).

    Raises:
        OptionError: no path, no config, another architecture, no mask token, no block size, or a
            block size larger than the checkpoint was trained for.
    """
    if not path:
        raise OptionError(f"LIBRASPEC needs a draft model: pass {DRAFT_FLAG} PATH_OR_HUB_ID")
    directory = _local(path, revision)
    config = _json(directory / "config.json", path)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        raise OptionError(
            f"{DRAFT_FLAG} {path}: architecture {architectures or 'missing'} is not a DFlash "
            f"drafter; expected {ARCHITECTURE} (z-lab's DFlash checkpoints)"
        )
    dflash = config.get("dflash_config") or {}
    if not isinstance(dflash, dict):
        raise OptionError(f"{directory / 'config.json'}: dflash_config must be an object")
    for kind in ("projector_type", "selector_rank", "conv_kernel_size"):
        if dflash.get(kind):
            raise OptionError(
                f"{DRAFT_FLAG} {path}: dflash_config.{kind} = {dflash[kind]!r}; LIBRASPEC drives "
                "plain DFlash drafters, use --speculative-algorithm DFLASH for this one"
            )
    if dflash.get("mask_token_id") is None and dflash.get("mask_token") is None:
        raise OptionError(
            f"{directory / 'config.json'}: dflash_config names neither mask_token_id nor "
            "mask_token; a DFlash drafter cannot draft without its mask token, add the id it was "
            "trained with"
        )
    _check_integers(directory / "config.json", dflash)
    trained = dflash.get("block_size", config.get("block_size"))
    if not _is_integer(trained) or not 2 <= trained <= MAX_BLOCK:
        raise OptionError(
            f"{directory / 'config.json'}: block_size {trained!r} must be an integer in "
            f"2..{MAX_BLOCK}"
        )
    if block_size is not None and not 2 <= block_size <= trained:
        raise OptionError(
            f"--speculative-dflash-block-size (or --speculative-num-draft-tokens) {block_size}: "
            f"this checkpoint supports 2 to {trained} (its trained block); longer drafts come "
            "from --libraspec-max-length"
        )
    return DraftCheckpoint(
        path=directory,
        config=config,
        block_size=block_size or trained,
        hot_token_ids=_hot_tokens(directory / HOT_TOKENS),
    )


def check_against_target(draft: DraftCheckpoint, target: dict[str, Any]) -> None:
    """Whether a drafter belongs to a target.

    Args:
        draft: the drafter.
        target: the target's ``config.json`` (text part) as a dict.

    Raises:
        OptionError: another hidden size, vocabulary or depth, a mask id outside the vocabulary,
            or missing tensors.
    """
    where = draft.path / "config.json"
    for field in ("hidden_size", "vocab_size"):
        ours, theirs = draft.config.get(field), target.get(field)
        if ours is not None and theirs is not None and ours != theirs:
            raise OptionError(
                f"{where}: {field} {ours} differs from the target's {theirs}; this drafter was "
                f"made for another target, pass its own with {DRAFT_FLAG}"
            )
    layers = target.get("num_hidden_layers")
    wanted = (draft.config.get("dflash_config") or {}).get("target_layer_ids") or []
    if layers is not None and wanted and max(wanted) > layers - 2:
        raise OptionError(
            f"{where}: target_layer_ids {wanted} reach past the target's last capturable layer "
            f"{layers - 2}; this drafter was made for a deeper target"
        )
    mask = (draft.config.get("dflash_config") or {}).get("mask_token_id")
    vocabulary = target.get("vocab_size")
    if mask is not None and vocabulary is not None and not 0 <= mask < vocabulary:
        raise OptionError(
            f"{where}: mask_token_id {mask} is outside the vocabulary 0..{vocabulary - 1}"
        )
    hot = draft.hot_token_ids
    if hot is not None and vocabulary is not None and hot[-1] >= vocabulary:
        raise OptionError(
            f"{draft.path / HOT_TOKENS}: token {hot[-1]} is outside the target's vocabulary of "
            f"{vocabulary}"
        )
    _check_tensors(draft)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_integers(file: Path, dflash: dict[str, Any]) -> None:
    """mask_token_id and target_layer_ids have the types everything after relies on."""
    mask = dflash.get("mask_token_id")
    if mask is not None and not (_is_integer(mask) and mask >= 0):
        raise OptionError(f"{file}: mask_token_id {mask!r} must be a token id")
    layers = dflash.get("target_layer_ids")
    if layers is None:
        return
    if not isinstance(layers, list) or not all(_is_integer(n) and n >= 0 for n in layers or [-1]):
        raise OptionError(f"{file}: target_layer_ids {layers!r} must be a list of layer numbers")


def _check_tensors(draft: DraftCheckpoint) -> None:
    files = sorted(draft.path.glob("*.safetensors"))
    if not files:
        if any(draft.path.glob("*.bin")):
            return
        raise OptionError(f"{draft.path}: no *.safetensors weights; the checkpoint is incomplete")
    shapes = {
        name.removeprefix("model."): shape for file in files for name, shape in _tensors(file)
    }
    layers = int(draft.config.get("num_hidden_layers", 0))
    have = {name.rpartition(".")[0] for name in shapes}
    needed = [("fc", "encoder.fc"), ("hidden_norm", "encoder.output_norm_enc"), ("norm",)]
    needed += [tuple(f"layers.{i}.{n}" for n in names) for i in range(layers) for names in _PARTS]
    missing = [names[0] for names in needed if not have & set(names)]
    if missing:
        raise OptionError(
            f"{draft.path}: missing tensors {', '.join(missing[:4])}"
            f"{' and more' if len(missing) > 4 else ''}; the checkpoint is incomplete, download it "
            "again"
        )
    for name, expected in _expected_shapes(draft.config, layers):
        if name in shapes and shapes[name] is not None and shapes[name] != expected:
            raise OptionError(
                f"{draft.path}: tensor {name} has shape {shapes[name]}, its config.json makes that "
                f"{expected}; configuration and weights are of different checkpoints"
            )


def _expected_shapes(config: dict[str, Any], layers: int) -> Iterator[tuple[str, list[int]]]:
    """Shapes of the tensors that have one name everywhere, as far as the configuration says."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    groups, inner = config.get("num_key_value_heads", heads), config.get("intermediate_size")
    if not all(_is_integer(n) and n > 0 for n in (hidden, heads, groups, inner)):
        raise OptionError(
            f"the draft's config.json: hidden_size {hidden!r}, num_attention_heads {heads!r}, "
            f"num_key_value_heads {groups!r} and intermediate_size {inner!r} must be positive "
            "integers"
        )
    head = config.get("head_dim") or hidden // heads
    captured = (config.get("dflash_config") or {}).get("target_layer_ids")
    if captured is not None:
        yield "fc.weight", [hidden, len(captured) * hidden]
    for i in range(layers):
        yield f"layers.{i}.self_attn.q_proj.weight", [heads * head, hidden]
        yield f"layers.{i}.self_attn.k_proj.weight", [groups * head, hidden]
        yield f"layers.{i}.self_attn.v_proj.weight", [groups * head, hidden]
        yield f"layers.{i}.self_attn.o_proj.weight", [hidden, heads * head]
        yield f"layers.{i}.mlp.gate_proj.weight", [inner, hidden]
        yield f"layers.{i}.mlp.down_proj.weight", [hidden, inner]


_PARTS = (
    ("input_layernorm",),
    ("post_attention_layernorm",),
    ("self_attn.q_proj", "self_attn.qkv_proj"),
    ("self_attn.k_proj", "self_attn.qkv_proj"),
    ("self_attn.v_proj", "self_attn.qkv_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.gate_up_proj"),
    ("mlp.up_proj", "mlp.gate_up_proj"),
    ("mlp.down_proj",),
)
"""What every layer has, under its own or a fused name."""


def _tensors(file: Path) -> list[tuple[str, list[int] | None]]:
    """(name, shape) of a safetensors file's tensors; no shape where weights are quantised."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > file.stat().st_size - 8:
                raise ValueError("its header is longer than the file; a git-lfs pointer?")
            header = json.loads(stream.read(size))
            if not isinstance(header, dict):
                raise ValueError("its header is not an object")
            header.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in header.values()]
            if 8 + size + max(ends, default=0) > file.stat().st_size:
                raise ValueError("it is cut off; download it again")
            plain = {"F64", "F32", "F16", "BF16"}
            return [
                (name, entry["shape"] if entry["dtype"] in plain else None)
                for name, entry in header.items()
            ]
    except (OSError, ValueError, LookupError, TypeError, struct.error) as error:
        raise OptionError(f"{file}: not a readable safetensors file ({error})") from None


def _local(path: str, revision: str | None) -> Path:
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists() or path.startswith((".", "/", "~")):
        raise OptionError(f"{DRAFT_FLAG} {path}: no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision))
    except Exception as error:
        raise OptionError(
            f"{DRAFT_FLAG} {path}: neither a directory nor a hub model ({error})"
        ) from None


def _json(file: Path, given: str) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OptionError(f"{DRAFT_FLAG} {given}: no config.json in {file.parent}") from None
    except (OSError, ValueError) as error:
        raise OptionError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise OptionError(f"{file}: must be a JSON object")
    return config


def _hot_tokens(file: Path) -> list[int] | None:
    if not file.exists():
        return None
    try:
        ids = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(ids, list) or not ids or not all(_is_integer(i) and i >= 0 for i in ids):
        raise OptionError(f"{file}: must be a non-empty list of token ids")
    return sorted(set(ids))
