"""Finding what a configuration names, by one rule: a built-in, an installed entry point, or `path/file.py:Name`.

Methods, transition kernels, policies and tasks are found here; rewards, which stand alone, by the same rule in
`genrl_rewards.loading`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from genrl_rewards.given import given, is_given

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger(__name__)


class Group(NamedTuple):
    """One sort of thing that can be named. built_in: name -> "module:attribute"; entry_points: their group."""

    what: str
    built_in: Mapping[str, str]
    entry_points: str


def find(name: str, group: Group) -> Any:
    """The object that `name` stands for, one that a script hands over (`python:NAME`) too. Raises ValueError saying
    what is wrong, the nearest names, and how to name a file."""
    if is_given(name):
        return given(name)
    if name.rpartition(":")[0].endswith(".py") or name.endswith(".py"):
        return _from_file(name, group)
    if name in group.built_in:
        module, _, attribute = group.built_in[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    for point in _installed(group):
        if point.name == name:
            try:
                return point.load()
            except Exception as error:  # another package's code
                text = f"{group.what} {name!r} ({point.value}) cannot be imported: {type(error).__name__}: {error}"
                raise ValueError(text) from error
    available = names(group)
    close = get_close_matches(name, available, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ValueError(
        f"unknown {group.what} {name!r}; {hint}they are: {', '.join(available)}; or name a file: path/file.py:Name"
    )


def names(group: Group) -> list[str]:
    """Built-in and installed names, sorted."""
    return sorted({*group.built_in, *(point.name for point in _installed(group))})


def _installed(group: Group) -> list[EntryPoint]:
    from importlib.metadata import entry_points  # slow, and what is built in does not need it

    return list(entry_points(group=group.entry_points))


def _from_file(name: str, group: Group) -> Any:
    path, _, attribute = name.rpartition(":") if not name.endswith(".py") else (name, "", "")
    file = Path(path)
    if not file.is_file():
        beside = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        close = get_close_matches(file.name, beside, n=1, cutoff=0.5)
        hint = f"; did you mean {file.parent / close[0]}?" if close else ""
        raise ValueError(f"{group.what} file {path!r} does not exist (looked from {Path.cwd()}){hint}")
    module = import_file(file)
    defined = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    if not attribute:
        raise ValueError(f"say which {group.what} of {path!r} is meant: {path}:Name; it defines: {', '.join(defined)}")
    if attribute not in vars(module):
        close = get_close_matches(attribute, defined, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"{path} has no {attribute!r}; {hint}it defines: {', '.join(defined) or 'nothing'}")
    return vars(module)[attribute]


def import_file(file: Path) -> ModuleType:
    """Run a user's file as a module of its own, once per content. Raises ValueError where it cannot be run."""
    path = file.resolve()
    digest = hashlib.sha256(path.read_bytes() + str(path).encode()).hexdigest()
    name = f"genrl_file_{path.stem}_{digest[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    logger.info("running the code of %s (sha256 of path and content %s)", path, digest)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} ends in .py, so there is a loader for it"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look classes up by their module's name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def beside(module: ModuleType, name: str) -> ModuleType:
    """The module `name` beside one that is called `settings`, in its package or folder; of any other, itself."""
    file = Path(getattr(module, "__file__", None) or module.__name__)  # a notebook has no file
    if file.stem != "settings":
        return module
    package, _, own = module.__name__.rpartition(".")
    if package:
        return importlib.import_module(f"{package}.{name}")
    if not file.with_name(f"{name}.py").is_file():
        raise ValueError(f"{file} has no {name}.py beside it")
    return import_file(file.with_name(f"{name}.py"))
