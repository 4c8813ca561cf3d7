"""Every public function of mdp and objectives is called by the package, not by tests alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("genrl/mdp", "genrl/objectives")

AWAITED = {
    "genrl.mdp.chains.noise_at_zero": "golden arrays of ReinFlow and of reversed time; policies like GR00T",
    "genrl.objectives.forward.matching.ema_decay": "Flow-GRPO's averaged weights as published have no key yet",
}
"""Public functions that nothing calls, and what will, or why they are there."""


def test_every_public_function_is_called_by_the_package(root: Path) -> None:
    texts = {path: path.read_text() for room in ("genrl", "rewards") for path in (root / room).rglob("*.py")}
    names = [room.partition("/")[2] for room in ROOMS]  # who calls a function of a room has its name
    files = {path: ast.parse(text) for path, text in texts.items() if any(name in f"{path} {text}" for name in names)}
    modules = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in files}
    public = {f"{modules[path]}.{name}" for path, tree in files.items() for name in defined(path, tree, root)}
    assert len(public) > 100, "nothing was looked at"
    uses = {path: set(referenced(tree, modules[path])) for path, tree in files.items()}
    outside = {name for path, names in uses.items() for _, name in names if not name.startswith(f"{modules[path]}.")}
    inside = {pair for path, names in uses.items() for pair in names if pair[1].startswith(f"{modules[path]}.")}
    called, found = outside | set(modules.values()), set[str]()  # what a module itself calls, it calls when imported
    while called != found:  # and what a called function calls in its own module is called
        called, found = called | {name for user, name in inside if user in called}, called
    unused = public - called
    assert unused == set(AWAITED), (
        f"tests alone call {sorted(unused - set(AWAITED))}; called by now: {sorted(set(AWAITED) - unused)}"
    )


def defined(path: Path, tree: ast.Module, root: Path) -> Iterator[str]:
    """Public functions of a module, if it is in one of the rooms."""
    if not str(path.relative_to(root)).startswith(ROOMS):
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name


def referenced(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """(where, what) of every name in code by its dotted path; where: the function or class around it, or the module."""
    names: dict[str, str] = {
        node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for top in tree.body:
        where = f"{module}.{top.name}" if isinstance(top, ast.FunctionDef | ast.ClassDef) else module
        own = where.rpartition(".")[2]
        for node in ast.walk(top):
            if isinstance(node, ast.Name) and node.id in names and node.id != own:
                yield where, names[node.id]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
                yield where, f"{names[node.value.id]}.{node.attr}"
