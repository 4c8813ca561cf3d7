"""From a name in the configuration to a reward: a built-in one, an installed entry point, or a file of your own.

`resolve` says where a name leads without importing anything; `load` imports and builds the reward.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from genrl_rewards.built_in import BUILT_IN, BuiltIn
from genrl_rewards.contract import Reward, is_trainable, nearest
from genrl_rewards.declared import Declared, declared, declared_by, parse, source_of
from genrl_rewards.extras import install
from genrl_rewards.given import PREFIX, given, is_given

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger(__name__)

ENTRY_POINTS = "genrl.rewards"
EMPTY: Mapping[str, object] = MappingProxyType({})


class Origin(NamedTuple):
    """Where a reward's name leads: `where` is the name of a module or the path of a file; of a script's object both
    say what it is called there."""

    name: str
    kind: Literal["built-in", "entry point", "file", "object"]
    where: str
    attribute: str


class Listed(NamedTuple):
    """A row of `listing`."""

    name: str
    origin: str
    doc: str
    range: str
    needs: str


def listing() -> list[Listed]:
    """Every reward that can be named: the built-in ones, then the installed entry points. Imports none of them."""
    rows = []
    for name, entry in BUILT_IN.items():
        says = declared(source_of(entry.module), entry.attribute)
        rows.append(Listed(name, "built-in", says.doc, entry.range, entry.needs or ", ".join(says.takes)))
    for point in sorted(_installed(), key=lambda p: p.name):
        package = point.dist.name if point.dist is not None else point.module
        says = declared(source_of(point.module), point.attr)
        takes = ", ".join(says.takes)
        rows.append(Listed(point.name, f"entry point of {package}", says.doc or point.value, says.range, takes))
    return rows


def declaration(origin: Origin) -> Declared:
    """What a reward's source declares, without importing it; empty if the source is not found or does not say."""
    if origin.kind == "object":
        return declared_by(given(origin.name), trainable=is_trainable(given(origin.name)))
    says = declared(Path(origin.where) if origin.kind == "file" else source_of(origin.where), origin.attribute)
    entry = BUILT_IN.get(origin.name) if origin.kind == "built-in" else None
    return says if entry is None else says._replace(range=entry.range)


def resolve(name: str) -> Origin:
    """Find what a reward's name leads to, without importing it (and so without torch).

    `name` is a built-in reward, an entry point of the group `genrl.rewards`, `path/to/file.py:Name`, relative to the
    current directory, or `python:Name`, which a script hands over (`genrl_rewards.given`). Raises ValueError for an
    unknown name (with the nearest one), a missing file, a name that is not defined in the file, and a name that two
    installed packages claim.
    """
    if is_given(name):
        given(name)
        return Origin(name, "object", "the script", name.removeprefix(PREFIX))
    # Before the names: no built-in reward has a dot, and a file's error is then about the file.
    if ".py" in name:
        return _resolve_file(name)
    if name in BUILT_IN:
        return Origin(name, "built-in", BUILT_IN[name].module, BUILT_IN[name].attribute)
    points = _installed()
    claims = [point for point in points if point.name == name]
    if len(claims) > 1:
        packages = " and by ".join(sorted(f"{p.module} ({p.dist.name if p.dist else 'unknown'})" for p in claims))
        raise ValueError(f"reward {name!r} is claimed by {packages}; uninstall or rename one")
    if claims:
        return Origin(name, "entry point", claims[0].module, claims[0].attr)
    available = sorted({*BUILT_IN, *(point.name for point in points)})
    raise ValueError(
        f"unknown reward {name!r}.{nearest(name, available)} Known: {', '.join(available)}; "
        "or name a file of your own as path/to/file.py:Name"
    )


def _installed() -> list[EntryPoint]:
    """The entry points of this group, from the metadata of all installed packages: slow, and so is their reader."""
    from importlib.metadata import entry_points

    return list(entry_points(group=ENTRY_POINTS))


def _resolve_file(name: str) -> Origin:
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        path, attribute = name, ""
    file = Path(path)
    if not file.is_file():
        if not file.parent.is_dir():
            raise ValueError(f"reward file {path!r}: there is no folder {str(file.parent)!r} in {Path.cwd()}")
        hint = nearest(file.name, [p.name for p in file.parent.glob("*.py")])
        raise ValueError(f"reward file {path!r} does not exist (looked from {Path.cwd()}).{hint}")
    defined, imported = _names(parse(file.read_bytes(), path, "reward file"))
    defines = f"It defines: {', '.join(n for n in defined if not n.startswith('_')) or 'nothing'}"
    if not attribute:
        raise ValueError(f"say which reward of {path!r} is meant: {path}:Name. {defines}")
    if attribute not in defined and attribute not in imported and "*" not in imported:
        raise ValueError(f"reward file {path!r} has no {attribute!r}.{nearest(attribute, defined)} {defines}")
    return Origin(name, "file", str(file.resolve()), attribute)


def _names(tree: ast.Module) -> tuple[list[str], set[str]]:
    """The names that a module's top level may define itself, in order, and the names that it imports."""
    defined: dict[str, None] = {}
    imported: set[str] = set()
    for statement in tree.body:
        definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        # Names may be defined below an `if` or `try` of the top level; those within a function or class are its own.
        for node in [statement] if definition else ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined[node.name] = None
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined[node.id] = None
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return list(defined), imported


def load(name: str, args: Mapping[str, object] = EMPTY, *, device: str = "cpu", dtype: str | None = None) -> Reward:
    """Import and build a reward.

    A class is constructed with `args`, and with `device` and `dtype` (`float32`, `bfloat16`, `float16`; None: its own
    default) if its constructor has these parameters and `args` does not set them. A function gets `args` as its
    options (its parameters with a default).
    Raises ValueError as `resolve` does, and for a missing extra (with the pip command), for something that is neither
    a function nor a class, for arguments that do not fit, and for a dtype if the reward has no such parameter.
    """
    origin = resolve(name)
    if origin.kind == "built-in":
        _require_extra(BUILT_IN[name], name)
    target = given(name) if origin.kind == "object" else _attribute(origin)
    if inspect.isclass(target):
        return _construct(target, name, args, device, dtype)
    if not callable(target):
        raise ValueError(f"reward {name!r} is a {type(target).__name__}; it must be a function or a class")
    if args and origin.kind == "object" and not inspect.isfunction(target):
        raise ValueError(f"reward {name!r} is made already, by the script: leave args out")
    if dtype is not None:
        raise ValueError(_no_dtype(name, dtype))
    return with_options(target, name, args) if args else target


def _attribute(origin: Origin) -> Any:
    """What a module or file has by the name. Raises ValueError where it has no such thing."""
    target: Any = _import_file(origin) if origin.kind == "file" else importlib.import_module(origin.where)
    for part in origin.attribute.split("."):
        # `vars`, not `getattr`: nothing that the module merely inherits or makes on demand.
        if part not in vars(target):
            raise ValueError(f"reward {origin.name!r}: {origin.where} has no {part!r}.{nearest(part, vars(target))}")
        target = vars(target)[part]
    return target


def missing_packages(packages: tuple[str, ...]) -> str:
    """Names of the packages (import names) that are not installed, separated by commas."""
    return ", ".join(package for package in packages if importlib.util.find_spec(package) is None)


def _require_extra(entry: BuiltIn, name: str) -> None:
    missing = missing_packages(entry.packages)
    if missing:
        raise ValueError(f"reward {name!r} needs {missing}, which is not installed here: {install(entry.extra)}")


def _import_file(origin: Origin) -> ModuleType:
    """Run the user's file as a module of its own, and log its path and hash."""
    path = Path(origin.where)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    logger.info("reward %s runs the code of %s (sha256 %s)", origin.name, path, digest)
    # With a hash of the path: two files `reward.py` in two folders are two modules.
    module_name = f"genrl_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, f"{path} ends in .py, so there is a loader for it"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling of the user's classes look it up by name
    spec.loader.exec_module(module)
    return module


def _no_dtype(name: str, dtype: str) -> str:
    return f"reward {name!r} cannot be run in {dtype}: its constructor has no parameter `dtype`. Leave dtype out"


def _construct(target: type, name: str, args: Mapping[str, object], device: str, dtype: str | None) -> Reward:
    if "__call__" not in dir(target):
        raise ValueError(f"reward {name!r} is a class without __call__(self, images, prompts)")
    signature = inspect.signature(target)
    arguments = dict(args)
    if "device" in signature.parameters:
        arguments.setdefault("device", device)
    if dtype is not None:
        if "dtype" not in signature.parameters:
            raise ValueError(_no_dtype(name, dtype))
        arguments.setdefault("dtype", dtype)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(_misfit(name, error, args, list(signature.parameters))) from error
    reward: Reward = target(**arguments)
    return reward


def with_options(function: Reward, name: str, args: Mapping[str, object]) -> Reward:
    """A function with some of its options set. Raises ValueError for a name that is not an option of it."""
    parameters = inspect.signature(function).parameters.values()
    options = [p.name for p in parameters if p.default is not p.empty]
    if not set(args) <= set(options):
        why = "args of a function are its parameters with a default"
        raise ValueError(_misfit(name, why, args, options))
    return functools.partial(function, **args)


def _misfit(name: str, why: object, args: Mapping[str, object], known: list[str]) -> str:
    unknown = [key for key in args if key not in known]
    hint = nearest(unknown[0], known) if unknown else ""
    takes = f"It takes: {', '.join(known)}" if known else "It takes none"
    return f"args of reward {name!r} do not fit: {why}.{hint} {takes}"
