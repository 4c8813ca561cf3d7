"""The JSON schemas of all kinds of runs, and the way to a key in them.

`data` is what a file says: its sections tell the kind of run, its `trainer.algorithm` the method, of which there are
those from outside too. In the schemas returned here all `$ref` are resolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from genrl.config.errors import dotted
from genrl.config.method import (
    KINDS,
    Kind,
    Method,
    built_in_names,
    class_of,
    installed,
    is_built_in,
    kind_of,
    schema_class,
)
from genrl.config.yaml_source import KeyPath

Schema = Mapping[str, Any]


def definitions(methods: tuple[type[Method], ...] = ()) -> dict[str, Any]:
    """Schemas of all kinds of runs and of their sections, by name, with `methods` from outside beside the built-in."""
    refs, schema = models_json_schema([(model, "validation") for model in (*map(schema_class, KINDS), *methods)])
    defs: dict[str, Any] = schema["$defs"]
    for method in methods:
        ref = refs[method, "validation"]
        for union in _unions(defs, set(built_in_names(method.kind))):
            union["oneOf" if "oneOf" in union else "anyOf"].append(ref)
            union["discriminator"]["mapping"][method.model_fields["algorithm"].default] = ref["$ref"]
    return defs


def with_installed(*others: type[Method]) -> dict[str, Any]:
    """`definitions` with the methods that other packages bring, and with `others` where they are not built in."""
    own = [method for method in others if not is_built_in(method)]
    brought = (method for kind in KINDS for method in installed(kind))
    return definitions(tuple(dict.fromkeys([*brought, *own])))


def json_schema(methods: Iterable[type[Method]] = ()) -> dict[str, Any]:
    """JSON schema of a configuration file of any kind, for completion and checks in editors; with `methods` from
    outside."""
    definitions = with_installed(*methods)
    include = {"type": "string", "description": "One base file, relative to this one; this file's values win."}
    for name in (schema_class(kind).__name__ for kind in KINDS):
        definitions[name]["properties"] = {"include": include, **definitions[name]["properties"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "genrl configuration",
        "if": {"required": ["policy"]},
        "then": {"$ref": "#/$defs/VLAConfig"},
        "else": {
            "if": {"required": ["vlm"]},
            "then": {"$ref": "#/$defs/VLMConfig"},
            "else": {"$ref": "#/$defs/Config"},
        },
        "$defs": definitions,
    }


def _unions(node: Any, names: set[str]) -> Iterator[dict[str, Any]]:
    """Places of a schema where a method is chosen."""
    if isinstance(node, Mapping):
        if isinstance(node, dict) and "discriminator" in node and names <= set(_tags(node)):
            yield node
        for child in node.values():
            yield from _unions(child, names)
    elif isinstance(node, list):
        for child in node:
            yield from _unions(child, names)


@cache
def _resolved(kind: Kind, methods: tuple[type[Method], ...] = ()) -> Schema:
    defs = definitions(methods)

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(child) for child in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:  # with the description of the place that refers to it
            node = {**defs[node["$ref"].rpartition("/")[2]], **{k: v for k, v in node.items() if k != "$ref"}}
        return {key: resolve(value) for key, value in node.items()}

    schema: Schema = resolve(defs[schema_class(kind).__name__])
    return schema


def method_of(data: Any) -> type[Method] | None:
    """The method that a file names; None where it names none, or an unknown one (which is told where it is named)."""
    trainer = data.get("trainer") if isinstance(data, Mapping) else None
    name = trainer.get("algorithm") if isinstance(trainer, Mapping) else None
    if not isinstance(name, str):
        return None
    try:
        return class_of(name, kind_of(data))
    except ValueError:
        return None


def schema_of(data: Any) -> Schema:
    """Schema of the file that says `data`."""
    kind, method = kind_of(data), method_of(data)
    return _resolved(kind) if method is None or is_built_in(method) else _resolved(kind, (method,))


def tag_of(section: Schema) -> str | None:
    """The key that says which of several kinds a section is, such as trainer.algorithm; None where there is one."""
    name: str | None = _union(section).get("discriminator", {}).get("propertyName")
    return name


def _union(section: Schema) -> Schema:
    """Schema of what a section is that may be null, or that may not be written whole."""
    if "discriminator" in section:
        return section
    return next((kind for kind in section.get("anyOf", ()) if "discriminator" in kind), section)


def _tags(section: Schema) -> Mapping[str, str]:
    discriminator = _union(section).get("discriminator")
    tags: Mapping[str, str] = discriminator.get("mapping", {}) if isinstance(discriminator, Mapping) else {}
    return tags


def tag_values(section: Schema) -> list[str]:
    """The values of that key."""
    return list(_tags(section))


def branches(node: Schema, value: Any = None) -> list[Schema]:
    """What a key may be, by kinds; of the kinds of a section the one that `value` names, where it names one."""
    alternatives: list[Schema] = node.get("anyOf", node.get("oneOf", []))
    if not alternatives:
        return [node]
    tag = tag_of(node)
    named = value.get(tag) if isinstance(value, Mapping) else None
    if tag is not None:
        kinds = [(branch, branch.get("properties", {}).get(tag, {})) for branch in alternatives]
        alternatives = [
            branch for branch, kind in kinds if named is not None and kind.get("const") == named
        ] or alternatives
    return [inner for branch in alternatives for inner in branches(branch, value)]


def keys_of(path: KeyPath, data: Any) -> list[str]:
    """Names of the keys that may stand in the section at `path`, of the kind that `data` names."""
    section = node_at(path, data)
    sections = branches(section, value_at(path, data)) if section else []
    return sorted({name for branch in sections for name in branch.get("properties", {})})


def node_at(path: KeyPath, data: Any) -> Schema | None:
    """Schema of the key at `path`, following the kinds that `data` names; None if there is no such key."""
    node: Schema | None = schema_of(data)
    value = data
    for depth, part in enumerate(path):
        if node is None:
            return None
        if part == (tag := tag_of(node)):
            return {"enum": tag_values(node), "description": f"Which of {dotted(path[:depth])}.", "tag": tag}
        node = next((child for branch in branches(node, value) if (child := _child(branch, part)) is not None), None)
        value = value_at((part,), value)
    return node


def value_at(path: KeyPath, data: Any) -> Any:
    """What `data` says at `path`; None where it says nothing."""
    for part in path:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _child(node: Schema, part: str | int) -> Schema | None:
    if isinstance(part, int):
        fixed: list[Schema] = node.get("prefixItems", [])
        every: Schema | None = node.get("items")
        return fixed[part] if part < len(fixed) else every
    child: Schema | None = node.get("properties", {}).get(part)
    if child is None and isinstance(each := node.get("additionalProperties"), Mapping):  # sections by any name
        child = dict(each)
    return child


def _walk(node: Schema, prefix: str) -> Iterator[tuple[str, Schema]]:
    for branch in branches(node):
        for name, child in branch.get("properties", {}).items():
            path = f"{prefix}.{name}".lstrip(".")
            yield path, child
            yield from _walk(child, path)
        if isinstance(branch.get("items"), Mapping):
            yield from _walk(branch["items"], f"{prefix}.0")


def keys_in(schema: Schema) -> dict[str, Schema]:
    """Every key below a schema by its dotted path (list items as 0), with its schema."""
    return dict(_walk(schema, ""))
