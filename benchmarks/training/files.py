"""Checkpoints and small files, written so that a kill at any moment leaves a whole one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


def write_json(path: Path, value: Any) -> None:
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The checkpoint, or None if there is none yet."""
    path = Path(path)
    return torch.load(path, weights_only=False) if path.exists() else None
