"""The kinds of runs, and what every method of theirs declares of itself, without torch: its keys, what it refuses, what
it costs, what it logs.

A method is a settings class (here) and a module with `train(run, settings)` and `loss(settings, policy, recorded)`:
`settings.py` and `train.py` in a folder below `genrl/*/methods/`, an installed entry point of the group `genrl.methods`
that names the settings class, or `path/file.py:Name`. Nothing else knows a method by name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, create_model
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from genrl.config.errors import Finding
from genrl.config.plugins import Group, beside, find, names
from genrl.config.section import Section, Text

Kind = Literal["diffusion", "vla", "vlm"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class _Row(NamedTuple):
    """One kind. schema: "module:class" of its `RunConfig`; section: the one by which a file says it; method: the base
    class of its methods, in the same module."""

    schema: str
    section: str
    method: str


# The only place that names all kinds, and by strings: what a kind is made of is imported when a run of it is read, so
# that shared code imports no kind and no run pays for the others. Looked through in this order; a file with none of the
# sections is of the last kind.
_ROWS: Mapping[Kind, _Row] = {
    "vla": _Row("genrl.vla.config.schema:VLAConfig", "policy", "VLAMethod"),
    "vlm": _Row("genrl.vlm.config.schema:VLMConfig", "vlm", "VLMMethod"),
    "diffusion": _Row("genrl.diffusion.config.schema:Config", "model", "DiffusionMethod"),
}


def schema_class(kind: Kind) -> Any:
    """The class of a kind's configurations, a `RunConfig`."""
    module, _, name = _ROWS[kind].schema.partition(":")
    return getattr(import_module(module), name)


def method_base(kind: Kind) -> str:
    """What a method of this kind is derived from, as it is imported."""
    return f"{_ROWS[kind].schema.partition(':')[0]}.{_ROWS[kind].method}"


def kind_section(kind: Kind) -> str:
    """The section by which a file says that it is of this kind."""
    return _ROWS[kind].section


def kind_of(data: Any) -> Kind:
    """The kind of run that a file describes which says `data`."""
    named = (kind for kind, row in _ROWS.items() if isinstance(data, Mapping) and row.section in data)
    return next(named, "diffusion")


ENTRY_POINTS = "genrl.methods"
FUNCTIONS = {"train": "train(run, settings)", "loss": "loss(settings, policy, recorded)"}
CALLED = {"grpo": "flow_grpo", "nft": "diffusion_nft"}
"""Short names that everybody uses of methods for pipelines; `grpo` is a method of its own for policies."""
Takes = Literal["older_samples", "part_of_groups", "no_reward", "recorded_calls", "actors", "rescued"]
"""What only some methods can go with. older_samples: drawn by weights of earlier iterations (`staleness`);
part_of_groups: samples chosen by their rewards (`economy.keep`); no_reward: rewards that all have weight 0;
recorded_calls: CUDA graphs (`kernels.compile`), where each backward pass follows its model call at once; actors: copies
of the policy that act on Ray actors (`environment.workers: ray`); rescued: answers that help brought (`rescue`)."""
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

    takes: ClassVar[frozenset[Takes]] = frozenset()
    """What it can go with, of that which only some methods can."""

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
    return _settings_of(name, kind) if name in built_in_names(kind) else outside(name, kind)


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
def built_in_names(kind: Kind) -> tuple[str, ...]:
    """The methods of this package for a kind of run: the folders with a `settings.py`. None is imported."""
    folders = (Path(place) for place in import_module(f"genrl.{kind}.methods").__path__)
    return tuple(sorted(file.parent.name for folder in folders for file in folder.glob("*/settings.py")))


def built_in(kind: Kind) -> dict[str, type[Method]]:
    """The settings classes of all methods of this package for a kind of run, by name."""
    return {name: _settings_of(name, kind) for name in built_in_names(kind)}


def is_built_in(method: type[Method]) -> bool:
    """Whether a settings class is of this package."""
    return method.__module__.startswith(f"genrl.{method.kind}.methods.")


@cache
def _settings_of(name: str, kind: Kind) -> type[Method]:
    """The settings class of a method of this package: the one in its folder that has the folder's name."""
    settings = import_module(f"genrl.{kind}.methods.{name}.settings")
    classes = (value for value in vars(settings).values() if isinstance(value, type) and issubclass(value, Method))
    return next(value for value in classes if value.model_fields["algorithm"].default == name)


def headings(method: type[Method]) -> dict[str, Mapping[str, MetricDoc]]:
    """The `metrics` of a method and of each of its base classes, by their titles."""
    classes = [base for base in reversed(method.__mro__) if vars(base).get("metrics")]
    return {vars(base).get("title") or base.__name__: vars(base)["metrics"] for base in classes}


def metrics_of(method: type[Method]) -> dict[str, MetricDoc]:
    """All that a method logs beside what every run of its kind logs."""
    return {key: doc for entries in headings(method).values() for key, doc in entries.items()}


class ByName:
    """Annotation of a section `trainer`, whose type is the base class of a kind's methods: it is validated by the
    class that its `algorithm` names. Only that class is imported; for editors the schema is of all built-in ones."""

    def __get_pydantic_core_schema__(self, base: type[Method], handler: GetCoreSchemaHandler) -> CoreSchema:
        self.kind = base.kind
        return core_schema.no_info_wrap_validator_function(self._validated, handler(base))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        choices = {name: method.__pydantic_core_schema__ for name, method in built_in(self.kind).items()}
        return handler(core_schema.tagged_union_schema(choices, discriminator="algorithm"))

    def _validated(self, value: Any, as_base: Callable[[Any], Any]) -> Any:
        kind = self.kind
        if isinstance(value, Method):
            if value.kind != kind:
                raise ValueError(f"{value.algorithm} is a method for {value.kind} runs, and this is a {kind} run")
            return value
        if not isinstance(value, Mapping):
            return as_base(value)  # which raises
        name, wrong = value.get("algorithm"), None
        if not isinstance(name, str):
            wrong = PydanticCustomError("missing" if name is None else "not_a_name", "no name")
        else:
            try:
                method = class_of(name, kind)
            except ValueError as error:
                wrong = PydanticCustomError(NO_METHOD, "{text}", {"text": str(error)})
        if wrong is not None:
            details: list[InitErrorDetails] = [{"type": wrong, "loc": ("algorithm",), "input": name}]
            raise ValidationError.from_exception_data("trainer", details)
        return method.model_validate(value)


def outside(name: str, kind: Kind) -> type[Method]:
    """The settings class of a method that is not built in; its `algorithm` is the name as it was written."""
    return _named(name, find_method(name, kind))


@cache
def _named(name: str, method: type[Method]) -> type[Method]:
    literal: Any = (Literal[name], name)
    return create_model(
        method.__name__, __base__=method, __module__=method.__module__, __doc__=method.__doc__, algorithm=literal
    )


def installed(kind: Kind) -> list[type[Method]]:
    """The methods for a kind of run that other packages bring, those that can be used."""
    methods = []
    for name in names(Group("method", {}, ENTRY_POINTS)):
        with suppress(ValueError):  # told where it is used
            methods.append(outside(name, kind))
    return methods


def find_method(name: str, kind: Kind) -> type[Method]:
    """The settings class from outside that `name` stands for. Raises ValueError for an unknown name, a file without the
    interface, a method of another kind of run, and keys that hide what shared code asks or are named like a section."""
    method = find(name, Group("method", dict.fromkeys(built_in_names(kind), ""), ENTRY_POINTS))
    if not (isinstance(method, type) and issubclass(method, Method) and hasattr(method, "kind")):
        base = method_base(kind)
        raise ValueError(f"{name} is no settings class of a method: derive it from {base}, see docs/extending.md")
    if method.kind != kind:
        raise ValueError(f"{name} is a method for {method.kind} runs, and this is a {kind} run")
    _refuse_incomplete(name, method)
    _refuse_collisions(name, method, kind)
    return method


def _refuse_incomplete(name: str, method: type[Method]) -> None:
    """Raise ValueError where the functions of a method are not there, or take something else. Its train.py is not run,
    it may import torch."""
    module = sys.modules[method.__module__]
    file, defined = Path(getattr(module, "__file__", None) or module.__name__), set(vars(module))
    if file.stem == "settings":
        file, defined = file.with_name("train.py"), set()
    try:
        body = ast.parse(file.read_bytes()).body if file.is_file() else []
    except SyntaxError as error:
        raise ValueError(f"{name}: {file} is not Python: {error}") from None
    for node in body:
        if isinstance(node, ast.FunctionDef):
            takes = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
            num_arguments = FUNCTIONS.get(node.name, "").count(",") + 1
            least = len(takes) - len(node.args.defaults)
            fits = least <= num_arguments and (num_arguments <= len(takes) or node.args.vararg)
            if node.name in FUNCTIONS and not node.decorator_list and not fits:
                raise ValueError(
                    f"{name}: {file} defines {node.name}({', '.join(takes)}); {FUNCTIONS[node.name]} is called"
                )
        defined |= {node.name} if isinstance(node, ast.FunctionDef) else _bound(node)
    if missing := [function for function in FUNCTIONS if function not in defined]:
        raise ValueError(_incomplete(name, missing, str(file)))


def _bound(node: ast.stmt) -> set[str]:
    """Names that a statement assigns or imports."""
    imported = getattr(node, "names", []) if isinstance(node, ast.Import | ast.ImportFrom) else []
    stored = (name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
    return {alias.asname or alias.name for alias in imported} | set(stored)


def _refuse_collisions(name: str, method: type[Method], kind: Kind) -> None:
    sections = schema_class(kind).model_fields
    for key in method.model_fields:
        above = next((base.__name__ for base in method.__mro__ if key in vars(base)), None)
        if above is not None:
            raise ValueError(f"{name} has a key {key!r}, which hides what {above} declares; rename the key")
        if key in sections:
            raise ValueError(f"{name} has a key {key!r}, which is a section of every run; rename the key")
