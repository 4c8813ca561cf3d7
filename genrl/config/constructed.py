"""What is wrong with a settings class that a script makes, in the words in which a YAML file's keys are explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from genrl.config.errors import ConfigError, Origin
from genrl.config.json_schemas import Schema, schema_of
from genrl.config.messages import explain
from genrl.config.method import KINDS, Method, kind_section
from genrl.config.run_config import RunConfig
from genrl.config.yaml_source import KeyPath


def explained(section: type[Any], values: Mapping[str, Any], error: ValidationError) -> ConfigError | None:
    """The error in those words; None of a class that is no section of a configuration."""
    within, data = _place(section, values)
    if data is None:
        return None
    called = f"genrl.{section.__name__}"
    return ConfigError(explain(error, data, {within[:end]: Origin(called) for end in range(len(within) + 1)}, within))


def _place(section: type[Any], values: Mapping[str, Any]) -> tuple[KeyPath, dict[str, Any] | None]:
    """Path of the section in a configuration, and one that says nothing else."""
    if issubclass(section, RunConfig):
        return (), dict(values)
    if issubclass(section, Method):
        if not section.model_fields["algorithm"].default:  # a base class
            return (), None
        named = {"algorithm": section.model_fields["algorithm"].default, **values}
        return ("trainer",), {kind_section(section.kind): {}, "trainer": named}
    for kind in reversed(KINDS):
        data: dict[str, Any] = {kind_section(kind): {}}
        for path in _paths(schema_of(data), section.__name__, ()):
            node = data
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = dict(values)
            return path, data
    return (), None


def _paths(node: Schema, title: str, path: KeyPath) -> Iterator[tuple[str, ...]]:
    """Paths to each section of this class."""
    for key, child in node.get("properties", {}).items():
        for branch in (child, *child.get("anyOf", ())):
            if branch.get("title") == title:
                yield (*map(str, path), key)
            else:
                yield from _paths(branch, title, (*path, key))
