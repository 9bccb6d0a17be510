"""What rounds are timed on, in words: a cost file is for this machine and these models."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from libraspec_sglang.controller import cost_file
from libraspec_sglang.options import OptionError, Options


def device_name(device: str, ranks: int = 1) -> str:
    """The device as a cost file names it: ``NVIDIA H100 80GB HBM3 x 2``.

    Args:
        device: torch device string of the worker.
        ranks: tensor-parallel size.
    """
    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_processor()}, threads {torch.get_num_threads()}"
    return name if ranks == 1 else f"{name} x {ranks}"


def model_name(config: Mapping[str, Any], dtype: torch.dtype, quantization: str | None) -> str:
    """A model's shape: what its cost follows from, whatever directory it lies in.

    Args:
        config: fields of ``config.json``, of the text model.
        dtype: of its weights.
        quantization: SGLang's name of it, if any.
    """
    parts = [
        (config.get("architectures") or ["?"])[0],
        f"{config.get('num_hidden_layers')} layers",
        f"hidden {config.get('hidden_size')}",
        f"MLP {config.get('intermediate_size')}",
        f"vocabulary {config.get('vocab_size')}",
        str(dtype).removeprefix("torch."),
    ]
    return ", ".join(parts + ([quantization] if quantization else []))


def circumstances(
    device: str,
    ranks: int,
    target: Any,
    draft: Mapping[str, Any],
    draft_dtype: torch.dtype,
    draft_vocabulary: int | None,
) -> dict[str, str]:
    """Device, target and drafter, as traces and cost files say them.

    Args:
        device: torch device string of the worker.
        ranks: tensor-parallel size.
        target: SGLang's ``ModelConfig``.
        draft: fields of the drafter's ``config.json``.
        draft_dtype: of the drafter's weights.
        draft_vocabulary: ids its head knows; None: all.
    """
    drafter = model_name(draft, draft_dtype, quantization=None)
    return {
        "device": device_name(device, ranks),
        "target": model_name(target.hf_text_config.to_dict(), target.dtype, target.quantization),
        "drafter": f"{drafter}, draft vocabulary {draft_vocabulary or 'all'}",
    }


def cost(options: Options, circumstances: Mapping[str, str]) -> cost_file.Cost | None:
    """The profile that ``--libraspec-cost`` names, if any.

    Raises:
        OptionError: it cannot be read, or is of another machine or model.
    """
    if options.cost is None:
        return None
    try:
        profile = cost_file.read(options.cost)
        if not options.cost_unchecked:
            profile.check(**circumstances)
    except cost_file.CostError as error:
        raise OptionError(f"--libraspec-cost {options.cost}: {error}") from None
    return profile


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
