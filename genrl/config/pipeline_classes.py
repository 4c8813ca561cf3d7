"""What a pipeline's class in diffusers says of itself, read from its source: no torch is imported for a check."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

CONSISTENCY = ("LCMScheduler", "TCDScheduler", "SCMScheduler")
"""Schedulers of consistency models."""
NOT_DDIM = (
    "a consistency model jumps to the clean picture in each step and noises it anew, which no kernel does; train the "
    "model that it was distilled from, or a few-step model of another scheduler"
)


class Source(NamedTuple):
    """Of a class and the classes it derives from, as far as they are diffusers' own."""

    methods: frozenset[str]
    arguments: frozenset[str]
    """Of `__call__`."""
    bases: frozenset[str]
    strength: float | None
    """By default, of a pipeline that cuts its schedule by it; None where it does not."""
    undecorated: bool
    """Whether `__call__` is without a decorator, such as `torch.no_grad()`."""


@cache
def source_of(name: str) -> Source | None:
    """None for a class that is not diffusers'."""
    if name not in _files():
        return None
    text = _files()[name].read_text(encoding="utf-8")
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    methods, arguments, bases = set[str](), set[str](), set[str]()
    strength: float | None = None
    decorated: bool | None = None
    for node in found.body:
        if isinstance(node, ast.FunctionDef):
            if node.name == "get_timesteps" and any(one.arg == "sigmas" for one in node.args.args):
                continue  # cuts the noise levels before the scheduler is asked, by another strength (LTX conditions)
            methods.add(node.name)
            if node.name == "__call__":
                arguments = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
                decorated = bool(node.decorator_list)
                strength = _default(node.args, "strength")
    for base in found.bases:
        own = base.id if isinstance(base, ast.Name) else ""
        bases.add(own)
        if inherited := source_of(own) if own else None:
            methods |= inherited.methods
            bases |= inherited.bases
            if decorated is None:
                arguments, decorated = set(inherited.arguments), not inherited.undecorated
                strength = inherited.strength
    strength = strength if "get_timesteps" in methods else None
    return Source(frozenset(methods), frozenset(arguments), frozenset(bases), strength, not decorated)


def _default(arguments: ast.arguments, name: str) -> float | None:
    """Of an argument that may be given by position, where it is a number."""
    named = [one.arg for one in arguments.args]
    found = dict(zip(reversed(named), reversed(arguments.defaults), strict=False)).get(name)
    return float(found.value) if isinstance(found, ast.Constant) and isinstance(found.value, (int, float)) else None


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
    for network in denoisers.values():
        own = source_of(network)
        if own is not None and "PeftAdapterMixin" not in own.bases:
            yield "model.lora", f"diffusers has no adapters for a {network}; write lora: null to train all weights"


def strength_problem(pipeline: str, arguments: Mapping[str, object]) -> str | None:
    """What is wrong with the `strength` among a call's arguments: that it has a meaning of its own here, or that the
    pipeline cuts its schedule although none is given."""
    found = source_of(pipeline)
    if found is None:
        return None
    given = arguments.get("strength")
    if given is None and found.strength is not None and found.strength < 1.0:
        return (
            f"a {pipeline} leaves out part of its schedule (strength {found.strength:g}) unless told; write 1, or "
            f"{found.strength:g} to have sampling.num_inference_steps left of a longer one"
        )
    if given not in (None, 1, 1.0) and "strength" in found.arguments and found.strength is None:
        return f"a {pipeline} does not cut its schedule by it, so steps would be counted wrongly; write 1"
    return None
