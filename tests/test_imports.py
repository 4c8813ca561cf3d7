"""What starts without torch: configuration, data, the settings of all methods, and the commands before they are run.

Who may import whom is in pyproject.toml (import-linter), which counts imports within functions too.
"""

import ast
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from genrl.quiet import MEANINGLESS
from tests.conftest import ROOT

PROGRAM = """
import importlib, pkgutil, sys
from genrl.config.method import KINDS
from genrl.config.method import built_in
heavy = {heavy!r}
for name in {packages!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(module.name)
        loaded = heavy & set(sys.modules)
        assert not loaded, (module.name, loaded)
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


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for room in ("genrl", "rewards")
        for path in (ROOT / room).rglob("*.py")
    }


LOOK_FOR_TORCHVISION = {"diffusers", "open_clip", "peft", "timm", "torchmetrics", "torchvision", "transformers"}


def test_what_imports_torchvision_makes_it_importable_first(trees: dict[Path, ast.Module]) -> None:
    """Beside a CPU-only torch it may be broken (genrl_rewards.models.torchvision_compat): a module that imports a
    library which looks for it calls `ensure`, or a package around it does."""
    unguarded = []
    for file, tree in trees.items():
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        if LOOK_FOR_TORCHVISION & {name.split(".")[0] for name in names}:
            around = [parent / "__init__.py" for parent in file.parents if ROOT in parent.parents]
            if not any("ensure()" in path.read_text(encoding="utf-8") for path in [file, *around]):
                unguarded.append(str(file.relative_to(ROOT)))
    assert unguarded == []


def test_language_models_import_peft_where_adapters_are_trained(trees: dict[Path, ast.Module]) -> None:
    """It costs a run without them 1.4 s of a processor. diffusers imports it itself, for pipelines."""
    for file, tree in trees.items():
        if file.relative_to(ROOT).parts[:2] in {("genrl", room) for room in ("vlm", "vla", "runtime")}:
            for node in tree.body:
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
                assert not any(str(name).split(".")[0] == "peft" for name in names), file


# -- After `import genrl` a torchvision that does not fit is mended before diffusers or transformers import it
BROKEN = """
import torch
if not hasattr(torch.ops.torchvision, "nms"):
    raise RuntimeError("operator torchvision::nms does not exist")
"""


ENSURED = "import genrl\nfrom genrl_rewards.models.torchvision_compat import ensure\nensure()"


@pytest.mark.parametrize("before", ["import genrl", ENSURED, "pass"])
def test_a_torchvision_without_its_operators_is_imported(before: str, tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(BROKEN)
    code = f"{before}\nimport torchvision"
    start = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True)
    assert (done.returncode == 0) == (before != "pass"), done.stderr


# -- Every public function of mdp and objectives is called by the package, not by tests alone
ROOMS = ("genrl/mdp", "genrl/objectives")

AWAITED = {
    "genrl.mdp.chains.noise_at_zero": "golden arrays of ReinFlow and of reversed time; policies like GR00T",
    "genrl.objectives.matching.ema_decay": "Flow-GRPO's averaged weights as published have no key yet",
}
"""Public functions that nothing calls, and what will, or why they are there."""


def test_every_public_function_is_called_by_the_package(trees: dict[Path, ast.Module]) -> None:
    """By its name, in code outside its own body; docstrings and comments do not count."""
    public, used = dict[str, str](), Counter[str]()
    for path, tree in trees.items():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in tree.body:
            used.update(names := set(named(node)))
            if isinstance(node, ast.FunctionDef):
                used.subtract({node.name} & names)
                if str(path.relative_to(ROOT)).startswith(ROOMS) and not node.name.startswith("_"):
                    public[f"{module}.{node.name}"] = node.name
    assert len(public) > 100, "nothing was looked at"
    assert {place for place, name in public.items() if not used[name]} == set(AWAITED)


def named(tree: ast.AST) -> Iterator[str]:
    """Names and attributes that code uses; an import is no use."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node.id if isinstance(node, ast.Name) else node.attr


# -- Which warnings of other packages are left out
LINES = {
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects. This may affect",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community: no such file",
    "torch.utils._pytree": "<enum 'A'> is an Enum subclass and is now natively supported by torch.compile as",
    "transformers.utils.import_utils": "`A` requires torchvision (not installed); falling back to `B` for",
    "torchao": "Failed to load /a/torchao/_C_mxfp8.so: Could not load this library: /a/torchao/_C_mxfp8.so",
}


def test_only_these_lines_are_left_out(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built for CUDA is missed where that is."""
    assert LINES.keys() == MEANINGLESS.keys()
    for name in LINES.keys() - {"torchao"}:
        assert shown(name, caplog, LINES[name], "`A` requires librosa") == ["`A` requires librosa"]
    lines = [LINES["torchao"], "Failed to load /a/torchao/_C.so: Could not load this library: /a/torchao/_C.so"]
    for cuda in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        assert shown("torchao", caplog, *lines) == (lines if cuda else lines[1:])


def shown(name: str, caplog: pytest.LogCaptureFixture, *lines: str) -> list[str]:
    caplog.clear()
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)  # some roots of these loggers do not propagate
    try:
        for line in lines:
            logger.warning(line)
    finally:
        logger.removeHandler(caplog.handler)
    return list(dict.fromkeys(record.getMessage() for record in caplog.records))
