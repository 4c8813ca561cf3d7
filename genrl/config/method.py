"""What every method declares of itself, without torch: its keys, what it refuses, what it costs, what it logs.

A method is a settings class (here) and a module with `train(run, settings)` and `loss(settings, policy, recorded)`:
`settings.py` and `train.py` in a folder below `genrl/*/methods/`, an installed entry point of the group `genrl.methods`
that names the settings class, or `path/file.py:Name`. Nothing else knows a method by name.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from symtable import symtable
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args

from pydantic import (
    Discriminator,
    SerializeAsAny,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from genrl.config.plugins import Group, beside, find, names
from genrl.config.section import Section, Text

Kind = Literal["diffusion", "vla", "vlm"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Finding = tuple[tuple[str, ...], str]
"""Keys concerned, and what is wrong with them and what to write instead."""

ENTRY_POINTS = "genrl.methods"
FUNCTIONS = {"train": "train(run, settings)", "loss": "loss(settings, policy, recorded)"}
NO_METHOD = "no_method"
"""Type of the validation error of a `trainer.algorithm` that names no method."""


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
    """What it logs beside what every run of its kind logs, and beside the `metrics` of its base classes."""
    moved: ClassVar[Mapping[str, str]] = {}
    """Keys, or `key: value`, that it no longer has -> what to write instead."""

    algorithm: Text = ""
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


def methods_of(config: Any) -> list[Method]:
    """The settings of the methods of a run: one, or of each of its stages."""
    return [part.trainer for part in getattr(config, "parts", (config,))]


def class_of(name: str, kind: Kind) -> type[Method]:
    """The settings class of this name, built in or from outside. Raises ValueError as `find_method`."""
    return built_in(kind).get(name) or outside(name, kind)


def module_of(settings: Method) -> ModuleType:
    """Import the module that a method's functions are in."""
    return beside(sys.modules[type(settings).__module__], "train")


def code_of(settings: Method) -> Code:
    """Import what a method runs. Raises ValueError, naming what is missing, for a file without the interface."""
    module = module_of(settings)
    if missing := [name for name in FUNCTIONS if not callable(vars(module).get(name))]:
        where = str(getattr(module, "__file__", None) or module.__name__)
        raise ValueError(_incomplete(settings.algorithm, missing, where))
    return Code(module.train, module.loss, module)


def _incomplete(name: str, missing: list[str], file: str) -> str:
    needs = " and ".join(FUNCTIONS[function] for function in missing)
    return f"{name} has no {' and no '.join(missing)} in {file}: a method defines {needs}, see docs/extending.md"


@cache
def built_in(kind: Kind) -> dict[str, type[Method]]:
    """The methods of this package for a kind of run, by name: one settings class in each folder's `settings.py`."""
    package = import_module(f"genrl.{kind}.methods")
    found: dict[str, type[Method]] = {}
    for entry in pkgutil.iter_modules(package.__path__):
        if entry.ispkg and find_spec(f"{package.__name__}.{entry.name}.settings"):
            settings = import_module(f"{package.__name__}.{entry.name}.settings")
            for value in vars(settings).values():
                if isinstance(value, type) and issubclass(value, Method) and value.__module__ == settings.__name__:
                    found[value.model_fields["algorithm"].default] = value
    return found


def headings(method: type[Method]) -> dict[str, Mapping[str, MetricDoc]]:
    """The `metrics` of a method and of each of its base classes, by their titles."""
    classes = [base for base in reversed(method.__mro__) if vars(base).get("metrics")]
    return {vars(base).get("title") or base.__name__: vars(base)["metrics"] for base in classes}


def metrics_of(method: type[Method]) -> dict[str, MetricDoc]:
    """All that a method logs beside what every run of its kind logs."""
    return {key: doc for entries in headings(method).values() for key, doc in entries.items()}


def union_of(kind: Kind) -> Any:
    """The type of a section that is one of the built-in methods, told apart by `algorithm`, or one from outside.

    Use it as the annotation of a field, under TYPE_CHECKING the base class of the kind's methods in its place.
    """
    classes = tuple(built_in(kind).values())
    every_key = SerializeAsAny()  # type: ignore[type-arg]  # an alias of the annotated type, to type checkers
    choose = (Discriminator("algorithm"), WrapValidator(partial(_method_of, kind)), every_key)
    return Annotated[Union[classes], *choose]  # noqa: UP007


def _method_of(kind: Kind, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate a section `trainer`: settings of a method from outside by its own class, others by the union."""
    if isinstance(value, Method):
        if value.kind != kind:
            raise ValueError(f"{value.algorithm} is a method for {value.kind} runs, and this is a {kind} run")
        return value
    name = value.get("algorithm") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or name in built_in(kind):
        return handler(value)
    try:
        method = outside(name, kind)
    except ValueError as error:
        wrong = PydanticCustomError(NO_METHOD, "{text}", {"text": str(error)})
        details: list[InitErrorDetails] = [{"type": wrong, "loc": ("algorithm",), "input": name}]
        raise ValidationError.from_exception_data("trainer", details) from None
    return method.model_validate(value)


def outside(name: str, kind: Kind) -> type[Method]:
    """The settings class of a method that is not built in; its `algorithm` is the name as it was written."""
    return _named(name, find_method(name, kind))


@cache
def _named(name: str, method: type[Method]) -> type[Method]:
    own: Any = (Literal[name], name)
    return create_model(
        method.__name__, __base__=method, __module__=method.__module__, __doc__=method.__doc__, algorithm=own
    )


def installed(kind: Kind) -> list[type[Method]]:
    """The methods for a kind of run that other packages bring, those that can be used."""
    found = []
    for name in names(Group("method", {}, ENTRY_POINTS)):
        with suppress(ValueError):  # told where it is used
            found.append(outside(name, kind))
    return found


def find_method(name: str, kind: Kind) -> type[Method]:
    """The settings class that `name` stands for. Raises ValueError for an unknown name, a file without the interface, a
    method of another kind of run, and keys that hide what shared code asks or are named like a section."""
    known = {key: f"{value.__module__}:{value.__name__}" for key, value in built_in(kind).items()}
    found = find(name, Group("method", known, ENTRY_POINTS))
    if not (isinstance(found, type) and issubclass(found, Method) and hasattr(found, "kind")):
        base = f"genrl.{kind}.config.method.{_BASES[kind]}"
        raise ValueError(f"{name} is no settings class of a method: derive it from {base}, see docs/extending.md")
    if found.kind != kind:
        raise ValueError(f"{name} is a method for {found.kind} runs, and this is a {kind} run")
    if name not in known:
        _refuse_incomplete(name, found)
        _refuse_collisions(name, found, kind)
    return found


_BASES = {"diffusion": "DiffusionMethod", "vla": "VLAMethod", "vlm": "VLMMethod"}


def _refuse_incomplete(name: str, method: type[Method]) -> None:
    """Raise ValueError where the functions of a method are not there. Its train.py is not run, it may import torch."""
    module = sys.modules[method.__module__]
    file, defined = Path(getattr(module, "__file__", None) or module.__name__), set(vars(module))
    if file.stem == "settings":
        file = file.with_name("train.py")
        try:
            table = symtable(file.read_text(encoding="utf-8"), str(file), "exec") if file.is_file() else None
        except SyntaxError as error:
            raise ValueError(f"{name}: {file} is not Python: {error}") from None
        symbols = table.get_symbols() if table else ()
        defined = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    if missing := [function for function in FUNCTIONS if function not in defined]:
        raise ValueError(_incomplete(name, missing, str(file)))


def _refuse_collisions(name: str, method: type[Method], kind: Kind) -> None:
    from genrl.config.json_schemas import roots

    sections = next(root for root in roots().values() if root.kind == kind).model_fields
    for key in method.model_fields:
        above = next((base.__name__ for base in method.__mro__ if key in vars(base)), None)
        if above is not None:
            raise ValueError(f"{name} has a key {key!r}, which hides what {above} declares; rename the key")
        if key in sections:
            raise ValueError(f"{name} has a key {key!r}, which is a section of every run; rename the key")
