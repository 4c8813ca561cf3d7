"""Validation errors in the user's words: where, what was found, what is allowed, the nearest spelling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic.json_schema import models_json_schema

from genrl.config.combinations import ImpossibleConfig
from genrl.config.errors import Origins, Problem, dotted, origin_of
from genrl.config.yaml_source import KeyPath

Schema = Mapping[str, Any]

# What other tools call our keys: the second thing to look at after a misspelling.
OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "max_steps": "iterations",
    "num_epochs": "iterations",
    "epochs": "iterations",
    "steps": "sampling.num_inference_steps",
    "num_steps": "sampling.num_inference_steps",
    "num_images_per_prompt": "sampling.group_size",
    "num_generations": "sampling.group_size",
    "num_image_per_prompt": "sampling.group_size",
    "cfg": "sampling.guidance_scale",
    "cfg_scale": "sampling.guidance_scale",
    "resolution": "sampling.height",
    "pretrained_model_name_or_path": "model.path",
    "model_name_or_path": "model.path",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "target_modules": "model.lora.targets",
    "mixed_precision": "model.autocast",
    "torch_dtype": "model.dtype",
    "eta": "trainer.noise_level",
    "epsilon": "trainer.clip_range",
    "adv_clip_max": "trainer.advantage_clip",
    "max_grad_norm": "optimizer.max_grad_norm",
    "output_dir": "output",
    "report_to": "trackers",
    "dataset": "prompts.train",
    "reward_fn": "rewards",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "eval_freq": "evaluation.every",
    "eval_steps": "evaluation.every",
}


def explain(error: ValidationError, data: Mapping[str, Any], origins: Origins) -> list[Problem]:
    """Every problem of `error`, located in the files that `data` was read from."""
    found: dict[KeyPath, Problem] = {}
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ImpossibleConfig):
            problems += [_impossible(keys, text, origins) for keys, text in cause.problems]
            continue
        path = _without_tags(item["loc"], data)
        if item["type"].startswith("union_tag"):
            path = (*path, _tag(_section(path[0], data)))
        text = _text(item["type"], path, data)
        found[path] = Problem(origin_of(path, origins), dotted(path), text)
    # A value that fits no branch of a union is reported once per branch: keep the most exact place.
    inner = [path for path in found if not any(other[: len(path)] == path for other in found if other != path)]
    return [found[path] for path in inner] + problems


def _impossible(keys: tuple[str, ...], text: str, origins: Origins) -> Problem:
    paths = [tuple(int(part) if part.isdecimal() else part for part in key.split(".")) for key in keys]
    written = [path for path in paths if path in origins]
    names = [key if path in origins else f"{key} (default)" for key, path in zip(keys, paths, strict=True)]
    return Problem(origin_of((written or paths)[0], origins), ", ".join(names), text)


def _without_tags(location: tuple[str | int, ...], data: Any) -> KeyPath:
    """Pydantic's location without the names of union branches, which are not in the file."""
    path: KeyPath = ()
    tags = _tags(_section(location[0], data)) if location else {}
    for depth, part in enumerate(location):
        if depth == 1 and part in tags:
            continue
        if isinstance(data, Mapping) and part in data:
            data = data[part]
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif not isinstance(data, Mapping):
            continue  # "constrained-float", "tuple[...]": a branch
        path = (*path, part)
    return path


def _text(kind: str, path: KeyPath, data: Any) -> str:
    node = node_at(path, data)
    if kind == "extra_forbidden":
        return _unknown_key(path, data)
    if kind in ("missing", "union_tag_not_found"):
        about = node.get("description", "") if node else ""
        return f"missing, and it has no default; allowed: {allowed(node)}. {about}".rstrip()
    value = _value_at(path, data)
    return f"found {_shown(value)}; allowed: {allowed(node)}{_hint(value, node)}"


def _unknown_key(path: KeyPath, data: Any) -> str:
    siblings = keys_of(path[:-1], data)
    close = suggestions(str(path[-1]), path[:-1], siblings, all_keys(root_of(data)))
    did_you_mean = f"; did you mean {' or '.join(close)}?" if close else ";"
    inside = f"keys of {dotted(path[:-1])}" if len(path) > 1 else "top-level keys"
    tag = _tag(_section(path[0], data)) if len(path) > 1 else None
    other = [key for key in close if key.startswith(f"{path[0]}.") and key.rpartition(".")[2] not in siblings]
    if other and tag is not None:
        did_you_mean = f"; it belongs to another {path[0]}.{tag} than {data[path[0]].get(tag)!r};"
    return f"unknown key{did_you_mean} {inside}: {', '.join(siblings)}"


def suggestions(key: str, section: KeyPath, siblings: list[str], everywhere: Mapping[str, Schema]) -> list[str]:
    """Up to three full paths, of the keys `everywhere`, that the user may have meant by `key` in `section`."""

    def here(names: list[str]) -> list[str]:
        return [dotted((*section, name)) for name in names]

    near = get_close_matches(key, siblings, n=2, cutoff=0.75)
    other_names = {name: path for name, path in OTHER_NAMES.items() if path in everywhere}
    if dotted((*section, key)) not in everywhere:  # else it is another trainer's
        near = near or [name for name in siblings if name.startswith(f"{key}_")]
    if near:
        return here(near)
    same = [path for path in everywhere if path.rpartition(".")[2] == key]
    same = [path for path in same if path.count(".") == min(p.count(".") for p in same)]  # before a method's own
    if same or key in other_names:
        return list(dict.fromkeys([*same, *([other_names[key]] if key in other_names else [])]))[:3]
    near = get_close_matches(key, siblings, n=1, cutoff=0.6)
    if near:
        return here(near)
    leaves = {path.rpartition(".")[2] for path in everywhere}
    far = get_close_matches(key, sorted(leaves), n=1, cutoff=0.6) + get_close_matches(key, other_names, n=1, cutoff=0.8)
    named = [other_names[name] for name in far if name in other_names]
    return list(dict.fromkeys([*named, *(path for path in everywhere if path.rpartition(".")[2] in far)]))[:3]


def root_of(data: Any) -> str:
    """Which kind of run a file describes: one with the section `policy` trains a policy, one with `vlm` a
    vision-language model, any other a pipeline."""
    if not isinstance(data, Mapping):
        return "Config"
    return "VLAConfig" if "policy" in data else "VLMConfig" if "vlm" in data else "Config"


@cache
def _definitions() -> Mapping[str, Schema]:
    """The schemas of all sections of all kinds of runs, by name."""
    from genrl.config.schema import Config
    from genrl.config.vla import VLAConfig
    from genrl.config.vlm import VLMConfig

    roots = (Config, VLAConfig, VLMConfig)
    definitions: Mapping[str, Schema] = models_json_schema([(root, "validation") for root in roots])[1]["$defs"]
    return definitions


def _section(name: str | int, data: Any) -> Schema:
    """Schema of a top-level section; {} for one that there is not."""
    section: Schema = _definitions()[root_of(data)]["properties"].get(name, {})
    return section


def _tag(section: Schema) -> str | None:
    """The key that says which of several kinds a section is, such as trainer.algorithm; None where there is one."""
    name: str | None = section.get("discriminator", {}).get("propertyName")
    return name


def _tags(section: Schema) -> Mapping[str, str]:
    """The values of that key."""
    tags: Mapping[str, str] = section.get("discriminator", {}).get("mapping", {})
    return tags


def resolve(node: Schema) -> Schema:
    """The node a `$ref` points to, with the description of the place that refers to it."""
    if "$ref" not in node:
        return node
    target = _definitions()[node["$ref"].rpartition("/")[2]]
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def _branches(node: Schema) -> list[Schema]:
    return [resolve(branch) for branch in node.get("anyOf", node.get("oneOf", [node]))]


def keys_of(path: KeyPath, data: Any) -> list[str]:
    """Names of the keys that may stand in the section at `path`, of the kind that `data` names."""
    section = node_at(path, data)
    branches = _branches(section) if section else []
    if len(path) == 1:
        branches = _of_kind(branches, path[0], data)
    return sorted({name for branch in branches for name in branch.get("properties", {})})


def _of_kind(branches: list[Schema], name: str | int, data: Any) -> list[Schema]:
    """Those of the kind that `data` names, where the top-level section is of one of several kinds; else all."""
    tag = _tag(_section(name, data))
    section = data.get(name) if isinstance(data, Mapping) else None
    named = section.get(tag) if isinstance(section, Mapping) else None
    return [branch for branch in branches if tag and branch["properties"][tag].get("const") == named] or branches


def node_at(path: KeyPath, data: Any) -> Schema | None:
    """Schema of the key at `path`, following the kinds that `data` names; None if there is no such key."""
    node: Schema | None = _definitions()[root_of(data)]
    for depth, part in enumerate(path):
        branches = _branches(resolve(node)) if node else []
        if depth == 1 and (tag := _tag(_section(path[0], data))) is not None:
            if part == tag:
                return {"enum": list(_tags(_section(path[0], data))), "description": f"Which {path[0]}."}
            branches = _of_kind(branches, path[0], data)
        node = next((child for branch in branches if (child := _child(branch, part)) is not None), None)
    return resolve(node) if node else None


def _child(node: Schema, part: str | int) -> Schema | None:
    if isinstance(part, int):
        fixed: list[Schema] = node.get("prefixItems", [])
        every: Schema | None = node.get("items")
        return fixed[part] if part < len(fixed) else every
    child: Schema | None = node.get("properties", {}).get(part)
    return child


def _walk(node: Schema, prefix: str) -> Iterator[tuple[str, Schema]]:
    for branch in _branches(resolve(node)):
        for name, child in branch.get("properties", {}).items():
            path = f"{prefix}.{name}".lstrip(".")
            yield path, resolve(child)
            yield from _walk(child, path)
        if isinstance(branch.get("items"), Mapping):
            yield from _walk(branch["items"], f"{prefix}.0")


@cache
def all_keys(root: str = "Config") -> Mapping[str, Schema]:
    """Every key of every section of a kind of run (`root_of`) by its dotted path (list items as 0), with its schema."""
    return dict(_walk(_definitions()[root], ""))


def allowed(node: Schema | None) -> str:
    """What a value of this schema may be, in words."""
    if node is None:
        return "nothing"
    if "discriminator" in node:
        key = node["discriminator"]["propertyName"]
        return f"a section with {key}: {' or '.join(sorted(node['discriminator']['mapping']))}"
    if "anyOf" in node or "oneOf" in node:
        return " or ".join(dict.fromkeys(allowed(branch) for branch in _branches(node)))
    node = resolve(node)
    if "enum" in node or "const" in node:
        names = node.get("enum", [node.get("const")])
        return f"one of {', '.join(map(str, names))}" if len(names) > 1 else str(names[0])
    kind = node.get("type")
    if kind == "array":
        if "prefixItems" in node:
            return f"a list [{', '.join(allowed(item) for item in node['prefixItems'])}]"
        return f"a list; each item: {allowed(node['items'])}"
    if kind == "object":
        return f"a section with the keys {', '.join(node['properties'])}" if "properties" in node else "a section"
    words = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
    return words.get(str(kind), "null") + _range(node)


def _range(node: Schema) -> str:
    parts = []
    if "minimum" in node:
        parts.append(f"from {node['minimum']:g}" if "exclusiveMaximum" in node else f"of {node['minimum']:g} or more")
    if "exclusiveMinimum" in node:
        parts.append(f"above {node['exclusiveMinimum']:g}")
    if "exclusiveMaximum" in node:
        parts.append(f"to below {node['exclusiveMaximum']:g}")
    return " " + " ".join(parts) if parts else ""


def _value_at(path: KeyPath, data: Any) -> Any:
    for part in path:
        data = data[part]
    return data


def _shown(value: Any) -> str:
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"{value[:80]!r} (text)"
    if isinstance(value, int | float):
        return f"{value!r} (a {'whole ' if isinstance(value, int) else ''}number)"
    return "a list" if isinstance(value, list) else "a section"


def _hint(value: Any, node: Schema | None) -> str:
    if node is None:
        return ""
    kinds = {branch.get("type") for branch in _branches(node)}
    names = [name for branch in _branches(node) for name in branch.get("enum", [])]
    if isinstance(value, str) and names:
        close = get_close_matches(value, names, n=1, cutoff=0.5)
        return f"; did you mean {close[0]}?" if close else ""
    if isinstance(value, str) and "boolean" in kinds and value.lower() in ("on", "off", "yes", "no"):
        return f"; write {'true' if value.lower() in ('on', 'yes') else 'false'}"
    if isinstance(value, str) and kinds & {"integer", "number"} and value.replace("_", "").replace(".", "").isdecimal():
        return f"; write {value.replace('_', '')} without quotes or underscores"
    if isinstance(value, str) and kinds & {"integer", "number"} and value[:1].isdecimal():
        return "; write the number without quotes or units"
    if not isinstance(value, list) and "array" in kinds:
        return "; a list is written [a, b], or one '- item' per line"
    if isinstance(value, int | float) and kinds == {"string"}:
        return f"; write it in quotes if meant: '{value}'"
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return f"; write {int(value)}"
    return ""
