"""What a pipeline's class in diffusers says of itself, read from its source: no torch is imported for a check."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """Of a class and the classes it derives from, as far as they are diffusers' own."""

    methods: frozenset[str]
    arguments: frozenset[str]
    """Of `__call__`."""
    bases: frozenset[str]
    undecorated: bool
    """Whether `__call__` is without a decorator, such as `torch.no_grad()`."""


@cache
def source_of(name: str) -> Source | None:
    """None for a class that is not diffusers'."""
    if name not in _files():
        return None
    text = _files()[name].read_text(encoding="utf-8")
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    methods, arguments, bases, decorated = set[str](), set[str](), set[str](), None
    for node in found.body:
        if isinstance(node, ast.FunctionDef):
            methods.add(node.name)
            if node.name == "__call__":
                arguments = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
                decorated = bool(node.decorator_list)
    for base in found.bases:
        own = base.id if isinstance(base, ast.Name) else ""
        bases.add(own)
        if inherited := source_of(own) if own else None:
            methods |= inherited.methods
            bases |= inherited.bases
            if decorated is None:
                arguments, decorated = set(inherited.arguments), not inherited.undecorated
    return Source(frozenset(methods), frozenset(arguments), frozenset(bases), not decorated)


@cache
def _files() -> dict[str, Path]:
    """Class -> file, of pipelines, networks and their mixins; not of what stands in for them without torch."""
    package = importlib.util.find_spec("diffusers")
    if package is None or package.origin is None:
        return {}
    folders = [Path(package.origin).parent / name for name in ("loaders", "models", "pipelines")]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    begins = re.compile(r"^class (\w+)", re.MULTILINE)
    return {name: file for file in files for name in begins.findall(file.read_text(encoding="utf-8"))}


def problems(pipeline: str, denoisers: dict[str, str], *, lora: bool) -> Iterator[tuple[str, str]]:
    """(key, text) of what keeps a pipeline of this class from training. denoisers: classes by component."""
    found = source_of(pipeline)
    if found is None:  # a class of its own, which only loading shows
        return
    if "prompt" not in found.arguments:
        yield "model.path", f"{pipeline} draws without a prompt; give a pipeline that takes one"
        return
    for method in ("prepare_latents", "encode_prompt"):
        if method not in found.methods:
            yield "model.path", f"{pipeline} has no `{method}`: its loop cannot be resumed from a recorded state"
    if found.undecorated:
        yield "model.path", f"{pipeline}.__call__ is not decorated by torch.no_grad(): nothing to replay with"
    if not lora:
        return
    if not any(base.endswith("LoraLoaderMixin") for base in found.bases):
        yield "model.lora", f"diffusers loads no LoRA into a {pipeline}; write lora: null to train all weights"
        return
    for network in denoisers.values():
        own = source_of(network)
        if own is not None and "PeftAdapterMixin" not in own.bases:
            yield "model.lora", f"diffusers has no adapters for a {network}; write lora: null to train all weights"
