"""Presets are files a user passes to SGLang's ``--config``."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[2] / "configs"

CODE = """
import sys, libraspec_sglang; libraspec_sglang.enable_cpu()
from sglang.srt.plugins import load_plugins; load_plugins()
from sglang.srt.server_args import prepare_server_args
from libraspec_sglang import options
args = prepare_server_args(["--config", sys.argv[1]])
print(args.speculative_algorithm, options.load().max_length, options.load().alpha)
"""


@pytest.mark.parametrize("preset", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_preset_is_accepted_by_sglangs_parser(preset):
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(preset)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-3:] == ["LIBRASPEC", "24", "2.2"]
