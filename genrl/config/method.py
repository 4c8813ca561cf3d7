"""What every method declares of itself, without torch: its keys, what it refuses, what it costs, what it logs.

A method is a settings class (here) and a module with `train(run, settings)` and `loss(settings, policy, recorded)`:
`settings.py` and `train.py` in a folder below `genrl/*/methods/`, an installed entry point of the group `genrl.methods`
that names the settings class, or `path/file.py:Name`. Nothing else knows a method by name.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple

from genrl.config.plugins import Group, beside, find
from genrl.config.section import Section, Text

Kind = Literal["diffusion", "vla", "vlm"]
Finding = tuple[tuple[str, ...], str]
"""Keys concerned, and what is wrong with them and what to write instead."""

ENTRY_POINTS = "genrl.methods"


@dataclass(frozen=True)
class MetricDoc:
    """formula: how it is computed. reading: what to conclude from it. reproducible: equal in equal runs."""

    formula: str
    reading: str
    unit: str = ""
    reproducible: bool = True


class Method(Section):
    """Base of all settings classes of methods; `Config.trainer` is one. Subclass the one of your kind of run."""

    kind: ClassVar[Kind]
    title: ClassVar[str] = ""
    """Heading of its metrics in docs/metrics.md; empty = the name of the class."""
    metrics: ClassVar[Mapping[str, MetricDoc]] = {}
    """What it logs beside what every run logs."""

    algorithm: Text
    """Which method: a built-in name, an installed one, or path/file.py:Name."""

    def problems(self, config: Any) -> Iterator[Finding]:
        """Combinations of settings that cannot work, of this method."""
        return iter(())


class Code(NamedTuple):
    """The functions of a method's module."""

    train: Callable[[Any, Any], None]
    """(run, settings): all iterations that are left."""
    loss: Callable[[Any, Any, Any], Mapping[str, Any]]
    """(settings, policy, what was recorded) -> "loss" and other tensors by name."""
    module: ModuleType


def code_of(settings: Method) -> Code:
    """Import what a method runs. Raises ValueError, naming what is missing, for a file without the interface."""
    module = beside(sys.modules[type(settings).__module__], "train")
    missing = [name for name in ("train", "loss") if not callable(vars(module).get(name))]
    if missing:
        raise ValueError(
            f"trainer.algorithm: {settings.algorithm} has no {' and no '.join(missing)} in {module.__file__}; a method "
            "defines train(run, settings) and loss(settings, policy, recorded), see docs/extending.md"
        )
    return Code(module.train, module.loss, module)


@cache
def built_in(kind: Kind) -> dict[str, type[Method]]:
    """The methods of this package for a kind of run, by name: one settings class in each folder's `settings.py`."""
    package = import_module(f"genrl.{kind}.methods")
    found: dict[str, type[Method]] = {}
    for entry in pkgutil.iter_modules(package.__path__):
        if entry.ispkg:
            settings = import_module(f"{package.__name__}.{entry.name}.settings")
            for value in vars(settings).values():
                if isinstance(value, type) and issubclass(value, Method) and value.__module__ == settings.__name__:
                    found[value.model_fields["algorithm"].default] = value
    return found


def find_method(name: str, kind: Kind) -> type[Method]:
    """The settings class that `name` stands for. Raises ValueError for an unknown name, a file without the interface,
    and a method of another kind of run."""
    known = {key: f"{value.__module__}:{value.__name__}" for key, value in built_in(kind).items()}
    found = find(name, Group("method", known, ENTRY_POINTS))
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ValueError(
            f"{name} is no settings class of a method: derive it from genrl.config.method.{_BASES[kind]} and give it "
            "the key `algorithm`; docs/extending.md has a complete one"
        )
    if found.kind != kind:
        raise ValueError(f"{name} is a method for {found.kind} runs, and this is a {kind} run")
    return found


_BASES = {"diffusion": "DiffusionMethod", "vla": "VLAMethod", "vlm": "VLMMethod"}
