"""A YAML file, an optional base file and `key=value` overrides -> one validated Config, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from genrl.config.errors import ConfigError, Origin, Origins, Problem, dotted, locate
from genrl.config.folders import nearest_beside
from genrl.config.method import Kind, schema_class
from genrl.config.method import kind_of as kind_of_data
from genrl.config.run_config import RunConfig
from genrl.config.yaml_source import Dumper, KeyPath, SourceError, parse, read
from genrl_rewards.given import PREFIX

OBJECTS = f"""\
# {PREFIX}NAME was an object of a Python script: genrl.resume(RUN, ...) takes it again; `genrl resume RUN KEY=VALUE`
# puts what can be loaded in its place.
"""


@dataclass
class _Tree:
    """Nested values and where each of them was written."""

    value: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and validate a configuration file: of a policy's run where it has the section `policy`, of a
    vision-language model's where it has `vlm`, else a pipeline's.

    `overrides` are `key.sub=value` texts (list items by index: `rewards.0.weight=2`), applied last. `include: FILE`
    in the file names one base file, relative to it: sections are merged (those of another algorithm or kind replaced),
    lists and values replaced. Where the file names no `output`, it is the file's path below its folder `configs`,
    below `runs` and without ending: `configs/vlm/grpo.yaml` trains into `runs/vlm/grpo`. What a file names by a path is
    looked up from the current folder, and else from the file's (`places`). ConfigError lists everything that is wrong.
    """
    return load_located(path, overrides)[0]


def load_located(path: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, Origins]:
    """Do as `load`, and say where each key was written: for messages of later checks (`check_files`)."""
    path = Path(path)
    tree = _with_base(_read(path), path)
    problems = [problem for text in overrides if (problem := _override(tree, text))]
    if problems:
        raise ConfigError(problems)
    tree.value.setdefault("output", str(_default_output(path)))
    locate(tree.value, tree.origins)
    return _validated(tree)


def load_given(
    base: str | Path | Mapping[str, Any] | None, sections: Mapping[str, Any], caller: str
) -> tuple[RunConfig, Origins]:
    """A configuration that a script puts together: `sections` on top of a file or of a mapping of keys. caller: how
    messages name the place. Raises ConfigError as `load`."""
    if isinstance(base, str | Path):
        tree = _with_base(_read(Path(base)), Path(base))
        tree.value.setdefault("output", str(_default_output(Path(base))))
    else:
        tree = _of_objects(base or {}, caller)
    _merge(tree, deepcopy(dict(sections)), _of_objects(sections, caller), ())
    locate(tree.value, tree.origins)
    return _validated(tree)


def kind_of(path: str | Path) -> Kind:
    """Kind of the run that a file describes, whatever else it lacks. Raises ConfigError where it cannot be read."""
    return kind_of_data(_with_base(_read(Path(path)), Path(path)).value)


def _of_objects(value: Mapping[str, Any], caller: str) -> _Tree:
    def places(node: Any, path: KeyPath) -> Iterator[KeyPath]:
        yield path
        items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
        for key, below in items:
            yield from places(below, (*path, key))

    return _Tree(deepcopy(dict(value)), {path: Origin(caller) for path in places(value, ())})


def _validated(tree: _Tree) -> tuple[RunConfig, Origins]:
    schema: type[RunConfig] = schema_class(kind_of_data(tree.value))
    value = schema.completed(tree.value)
    try:
        return schema.model_validate(value), tree.origins
    except ValidationError as error:
        from genrl.config.messages import explain  # the schemas of all kinds, which a valid file does not need

        raise ConfigError(explain(error, value, tree.origins)) from None


def dump(config: RunConfig) -> str:
    """The configuration as YAML, with its defaults; `load` of it gives an equal one."""
    values = config.model_dump(mode="json")
    values = {key: values[key] for key in config.in_order()}
    text = yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    return OBJECTS + text if PREFIX in text else text


def _default_output(path: Path) -> Path:
    """`runs/` and the path below the nearest folder `configs` without ending, so that files of one name do not meet;
    of a file elsewhere its name alone."""
    parts = path.resolve().with_suffix("").parts
    above = max((k for k, part in enumerate(parts[:-1]) if part == "configs"), default=len(parts) - 2)
    return Path("runs", *parts[above + 1 :])


def _read(path: Path) -> _Tree:
    try:
        source = read(path)
    except FileNotFoundError:
        raise ConfigError([Problem(Origin(str(path)), "", f"no such file{nearest_beside(path, _is_yaml)}")]) from None
    except OSError as error:
        raise ConfigError([Problem(Origin(str(path)), "", f"cannot be read: {error.strerror}")]) from None
    except SourceError as error:
        raise ConfigError([Problem(Origin(str(path), line), "", text) for line, text in error.problems]) from None
    if not isinstance(source.value, dict):
        problem = "the file is empty" if source.value is None else "found no `key: value` at the top level"
        raise ConfigError([Problem(Origin(str(path), 1), "", f"{problem}; `genrl init quickstart` writes one")])
    return _Tree(source.value, {key: Origin(str(path), line) for key, line in source.lines.items()})


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") and path.is_file()


def _with_base(tree: _Tree, path: Path) -> _Tree:
    if "include" not in tree.value:
        return tree
    include = tree.value.pop("include")
    origin = tree.origins[("include",)]
    if not isinstance(include, str):
        raise ConfigError([Problem(origin, "include", "must be the name of one base file")])
    base_path = path.parent / include
    if not base_path.is_file():
        from genrl.recipes import shipped  # not at the top: it reads YAML, by this package

        base_path = shipped(include) or base_path
    if not base_path.is_file():
        text = f"no such file: {base_path} (the name is relative to {path}){nearest_beside(base_path, _is_yaml)}"
        raise ConfigError([Problem(origin, "include", text)])
    base = _read(base_path)
    if "include" in base.value:
        text = f"a base file may not include another; copy what is needed into {path}"
        raise ConfigError([Problem(base.origins[("include",)], "include", text)])
    _merge(base, tree.value, tree, ())
    base.origins[()] = tree.origins[()]
    return base


def _merge(base: _Tree, new: dict[str, Any], tree: _Tree, at: KeyPath) -> None:
    target = _get(base.value, at)
    for key, value in new.items():
        path = (*at, key)
        if isinstance(value, dict) and isinstance(target.get(key), dict) and _same_kind(value, target[key]):
            base.origins[path] = tree.origins[path]
            _merge(base, value, tree, path)
            continue
        # What is replaced has no place any more: messages would send people to lines that mean nothing.
        for old in [old for old in base.origins if old[: len(path)] == path]:
            del base.origins[old]
        target[key] = value
        base.origins.update({k: origin for k, origin in tree.origins.items() if k[: len(path)] == path})


def _same_kind(new: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether two sections may be merged: keys of one algorithm, or kind of sampler, mean nothing to another."""
    return all(new.get(tag, old.get(tag)) == old.get(tag, new.get(tag)) for tag in ("algorithm", "kind"))


def _get(value: Any, path: KeyPath) -> Any:
    for key in path:
        value = value[key]
    return value


def _override(tree: _Tree, text: str) -> Problem | None:
    """Apply one `key.sub=value` to `tree` in place; what is wrong with it, if anything."""
    origin = Origin(f"override {text!r}")
    name, equals, raw = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        return Problem(origin, "", "an override is key=value, for example optimizer.lr=1e-4")
    if keys[0] == "include":
        return Problem(origin, "include", "cannot be overridden; write it in the file")
    try:
        value = parse(raw).value
    except SourceError as error:
        return Problem(origin, name, f"the value is not YAML: {error}")
    node: Any = tree.value
    path: KeyPath = ()
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        step: str | int = key
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                here = dotted(path)
                text = f"{here} is a list of {len(node)}: write {here}.0 to {here}.{len(node) - 1}"
                return Problem(origin, name, text if node else f"{here} is an empty list")
            step = int(key)
        elif not isinstance(node, dict):
            return Problem(origin, name, f"{dotted(path)} is {node!r}, not a section: it has no keys")
        path = (*path, step)
        if last:
            node[step] = value
        elif isinstance(node, dict) and node.get(key) is None:
            # A section that was null or missing begins empty; validation says what else it needs.
            node[step] = {}
        node = node[step]
        tree.origins[path] = origin
    for old in [old for old in tree.origins if len(old) > len(path) and old[: len(path)] == path]:
        del tree.origins[old]
    return None
