"""Rules of the code base that a reader relies on."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import libraspec_sglang

ROOT = Path(libraspec_sglang.__file__).parent
FLOORS = [
    {"kernels"},
    {"controller", "tree"},
    {"options", "verify"},
    {"drafters"},
    {"engine", "cpu", "demo"},
    {"patches", "observe", "cli", "check"},
]
# The round writes traces, and the CPU runtime applies its patches: the two upward steps there are.
ALLOWED = {("engine", "observe"), ("cpu", "patches"), ("patches", "cpu"), ("engine", "patches")}


def floor(name):
    return next((i for i, names in enumerate(FLOORS) if name in names), None)


def imports(file):
    """Packages of ours that a file imports."""
    package = file.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = list(package[: len(package) - node.level])
                parts = base + (node.module or "").split(".") if node.module else base
                names = [parts[0]] if parts and parts[0] else [a.name for a in node.names]
            elif (node.module or "").startswith("libraspec_sglang"):
                parts = node.module.split(".")[1:]
                names = parts[:1] or [a.name for a in node.names]
            else:
                continue
            yield from names
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("libraspec_sglang."):
                    yield alias.name.split(".")[1]


def test_files_import_downwards_only():
    wrong, seen = [], 0
    for file in ROOT.rglob("*.py"):
        own = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if floor(own) is None or "shim" in file.parts:
            continue
        for name in imports(file):
            if floor(name) is None or name == own or (own, name) in ALLOWED:
                continue
            seen += 1
            if floor(name) > floor(own):
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert seen > 10
    assert not wrong


def test_controller_never_imports_sglang():
    for file in (ROOT / "controller").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.split(".")[0] == "sglang" for n in names), file.name


def test_importing_the_package_is_cheap():
    code = (
        "import sys, libraspec_sglang, libraspec_sglang.options;"
        "assert not {'torch', 'sglang'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_and_patches_install_under_our_name():
    import libraspec_sglang.kernels as kernels
    import libraspec_sglang.patches as patches

    assert kernels.__name__ == "libraspec_sglang.kernels"
    assert patches.apply_all


class TestContract:
    def test_holds_here(self):
        from libraspec_sglang.engine import contract

        assert contract.problems() == []

    def test_names_what_is_missing(self, monkeypatch):
        from libraspec_sglang.engine import contract

        where = "sglang.srt.speculative.spec_utils:draft_tp_context"
        monkeypatch.setitem(contract.FUNCTIONS, where, ("layout", "colour"))
        monkeypatch.setitem(contract.FUNCTIONS, "sglang.nowhere:f", ())
        found = contract.problems()
        assert f"{where} takes no 'colour'" in found
        assert "sglang.nowhere:f is missing" in found
        assert "pip install sglang==" in contract.explain(found)

    def test_another_version_is_one_message(self, monkeypatch):
        from libraspec_sglang.engine import contract

        monkeypatch.setattr(contract, "SUPPORTED", ("0.0.1",))
        with pytest.raises(ValueError, match=r"supports SGLang 0\.0\.1, but SGLang 0\.5\.23"):
            contract.require()

    def test_mismatch_registers_a_refusal_and_sglang_keeps_working(self):
        code = """
import libraspec_sglang; libraspec_sglang.enable_cpu()
from libraspec_sglang.engine import contract, plugin
contract.SUPPORTED = ("0.0.1",)
plugin.load()
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
algorithm = SpeculativeAlgorithm.from_string("LIBRASPEC")
try:
    algorithm.validate_server_args(None)
except ValueError as error:
    print("refused:", error)
print(SpeculativeAlgorithm.from_string("DFLASH").is_dflash())
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
        )
        assert "refused: libraspec-sglang supports SGLang 0.0.1" in done.stdout, done.stderr[-2000:]
        assert done.stdout.strip().endswith("True")
