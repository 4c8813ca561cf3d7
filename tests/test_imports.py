"""What starts without torch: configuration, data, the settings of all methods, and the commands before they are run.

Who may import whom is in pyproject.toml (import-linter), which counts imports within functions too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import importlib, pkgutil, sys
from genrl.config.kinds import KINDS
from genrl.config.method import built_in
heavy = {heavy!r}
for name in {packages!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(module.name)
        found = heavy & set(sys.modules)
        assert not found, (module.name, found)
for kind in KINDS if {methods!r} else ():
    for method in built_in(kind).values():
        assert not heavy & set(sys.modules), (method, heavy & set(sys.modules))
"""
HEAVY = {"torch", "diffusers", "transformers", "accelerate", "peft", "datasets"}


@pytest.mark.parametrize("packages", [("genrl.config", "genrl.data"), ("genrl.cli", "genrl.runtime.show.pages")])
def test_packages_import_no_torch_at_their_top(packages: tuple[str, ...], root: Path) -> None:
    program = PROGRAM.format(heavy=HEAVY, packages=packages, methods="genrl.config" in packages)
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LOOK_FOR_TORCHVISION = {"diffusers", "open_clip", "peft", "timm", "torchmetrics", "torchvision", "transformers"}


def test_what_imports_torchvision_makes_it_importable_first(root: Path) -> None:
    """Beside a CPU-only torch it may be broken (genrl_rewards.models.torchvision_compat): a module that imports a
    library which looks for it calls `ensure`, or a package around it does."""
    unguarded = []
    for file in [*(root / "genrl").rglob("*.py"), *(root / "rewards").rglob("*.py")]:
        source = file.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(source)))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        if LOOK_FOR_TORCHVISION & {name.split(".")[0] for name in names}:
            around = [parent / "__init__.py" for parent in file.parents if root in parent.parents]
            if not any("ensure()" in path.read_text(encoding="utf-8") for path in [file, *around]):
                unguarded.append(str(file.relative_to(root)))
    assert unguarded == []
