#!/usr/bin/env python3
"""Train a DFlash drafter for a small Llama or Qwen3 target, on CPU.

A drafter learns from the target's own text (self-distillation), in three steps:

  1. generate: let the target answer prompts; hidden states and likely tokens are kept.
       python benchmarks/train_dflash.py generate --target TARGET --layers 1 8 15 22 28 \\
           --prompts questions.jsonl --out work/data --int8

  2. train: blocks of masked tokens are filled in from those hidden states. Resumes from its
     checkpoint when repeated, and reads answers that are generated meanwhile.
       python benchmarks/train_dflash.py train --target TARGET --data work/data \\
           --out work/run --mask-token-id 15

  3. export a directory that SGLang loads as --speculative-draft-model-path:
       python benchmarks/train_dflash.py export --run work/run --out my-drafter

`eval` measures any DFlash checkpoint against answers generated from held-out prompts: tokens
per round, acceptance and calibration by position.

Prompts are JSONL rows with "turns" (the first is used), "prompt" or "text". Each command
explains its options with --help.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from training.cli import main

if __name__ == "__main__":
    main(description=__doc__)
