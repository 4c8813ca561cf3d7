"""What the source of a reward declares, read without importing it (and so without torch)."""

from __future__ import annotations

import ast
import math
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

from rewards.contract import FROM_SAMPLER, IMAGE_COLUMNS


class Declared(NamedTuple):
    """What the source says; empty where it does not say it."""

    takes: tuple[str, ...] = ()
    """What it takes: parameter names of the function, or of the class's `__call__`."""
    range: str = ""
    """The class attribute `range`."""
    doc: str = ""
    """First line of the docstring."""
    gradients: bool | None = None
    """The attribute `differentiable`; None where the source cannot tell (a class that inherits)."""
    trainable: bool = False
    """Whether it is a class with `logits` (see `rewards.scorers.preference.adversary`)."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the prompt file that it asks for."""
        return tuple(IMAGE_COLUMNS.get(n, n) for n in self.takes if n in IMAGE_COLUMNS or n not in FROM_SAMPLER)


def declared(file: Path | None, attribute: str) -> Declared:
    """What the function or class `attribute` (a dotted path) of a source file declares; None: nothing."""
    module: list[ast.stmt] = ast.parse(file.read_bytes(), filename=str(file)).body if file is not None else []
    body = module
    found: ast.FunctionDef | ast.ClassDef | None = None
    for part in attribute.split("."):
        found = _definition(body, part)
        body = found.body if found is not None else []
    if found is None:
        return Declared()
    doc = (ast.get_docstring(found) or "").partition("\n")[0]
    if isinstance(found, ast.FunctionDef):
        marked = None if found.decorator_list else _marked(module, f"{attribute}.differentiable")
        return Declared(_taken(found.args), "", doc, gradients=marked)
    call = _definition(found.body, "__call__")
    takes = _taken(call.args)[1:] if isinstance(call, ast.FunctionDef) else ()
    marked = _marked(found.body, "differentiable") or (None if found.bases else False)
    trainable = _definition(found.body, "logits") is not None
    return Declared(takes, _text(found, "range"), doc, gradients=marked, trainable=trainable)


def lower_end(text: str) -> float | None:
    """The least score to expect by a `range` in words: of what is `usually` so, else of all; None = it does not say."""
    number = r"(-?(?:\d+\.?\d*|\.\d+))"
    found = re.search(f"usually {number}", text) or re.match(f"(?:about )?{number}", text)
    if found is not None:
        return float(found[1])
    return -math.inf if text.startswith("unbounded") else None


def _definition(body: list[ast.stmt], name: str) -> ast.FunctionDef | ast.ClassDef | None:
    definitions = (node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return next((node for node in definitions if node.name == name), None)


def _taken(arguments: ast.arguments) -> tuple[str, ...]:
    """Parameters without a default, and those that the sampler fills; `self` included."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    both = [*zip(plain, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return tuple(p.arg for p, default in both if default is None or p.arg in FROM_SAMPLER)


def _marked(body: list[ast.stmt], name: str) -> bool:
    """Whether these statements assign True to `name`."""
    found = (node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)
    return any(isinstance(node.value, ast.Constant) and node.value.value is True for node in found)


def _text(node: ast.ClassDef, name: str) -> str:
    for statement in node.body:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if named and isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return ""


def source_of(module: str) -> Path | None:
    """The source file of a module; unlike importlib's own `find_spec`, this imports no parent package either."""
    places: list[str] | None = None
    name, spec = "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = _find(name, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
    file = Path(spec.origin) if spec is not None and spec.origin else None
    return file if file is not None and file.suffix == ".py" and file.is_file() else None


def _find(name: str, places: list[str] | None) -> ModuleSpec | None:
    found = (finder.find_spec(name, places) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)
