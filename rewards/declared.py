"""What the source of a reward declares, read without importing it (and so without torch)."""

from __future__ import annotations

import ast
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

from rewards.contract import FROM_SAMPLER


class Declared(NamedTuple):
    """Texts for `genrl rewards`; empty where the source does not say it."""

    needs: str = ""
    """What it takes: parameter names of the function, or of the class's `__call__`."""
    range: str = ""
    """The class attribute `range`."""
    doc: str = ""
    """First line of the docstring."""


def declared(module: str, attribute: str) -> Declared:
    """What the function or class `attribute` of `module` declares; nothing where its source is not found."""
    file = _source(module)
    if file is None:
        return Declared()
    body = ast.parse(file.read_bytes(), filename=str(file)).body
    found = next(
        (node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == attribute), None
    )
    if found is None:
        return Declared()
    doc = (ast.get_docstring(found) or "").partition("\n")[0]
    if isinstance(found, ast.FunctionDef):
        return Declared(", ".join(_taken(found.args)), "", doc)
    calls = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__call__"]
    takes = ", ".join(_taken(calls[0].args)[1:]) if calls else ""
    return Declared(takes, _text(found, "range"), doc)


def _taken(arguments: ast.arguments) -> list[str]:
    """Parameters without a default, and those that the sampler fills; `self` included."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    both = [*zip(plain, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [parameter.arg for parameter, default in both if default is None or parameter.arg in FROM_SAMPLER]


def _text(node: ast.ClassDef, name: str) -> str:
    for statement in node.body:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if named and isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return ""


def _source(module: str) -> Path | None:
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
