"""Validation errors in the user's words: where, what was found, what is allowed, the nearest spelling; of YAML files,
and of a settings class that a script makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from genrl.config.errors import ConfigError, ImpossibleConfig, Origin, Origins, Problem, dotted, origin_of
from genrl.config.json_schemas import (
    Schema,
    branches,
    keys_in,
    keys_of,
    node_at,
    schema_of,
    tag_of,
    tag_values,
    value_at,
)
from genrl.config.method import KINDS, NO_METHOD, Method, kind_section
from genrl.config.run_config import RunConfig
from genrl.config.yaml_source import KeyPath

# What other tools call our keys: the second thing to look at after a misspelling.
OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "max_steps": "iterations",
    "num_epochs": "iterations",
    "epochs": "iterations",
    "steps": "sampling.num_inference_steps",
    "num_steps": "sampling.num_inference_steps",
    "num_images_per_prompt": "sampling.group_size",
    "num_image_per_prompt": "sampling.group_size",
    "cfg": "sampling.guidance_scale",
    "cfg_scale": "sampling.guidance_scale",
    "resolution": "sampling.height",
    "unique_sample_num_per_epoch": "sampling.prompts_per_iteration",
    "per_device_batch_size": "sampling.batch_size",
    "train_batch_size": "sampling.batch_size",
    "same_latent": "sampling.same_initial_noise",
    "gradient_step_per_epoch": "trainer.updates_per_iteration",
    "num_inner_epochs": "trainer.inner_epochs",
    "sde_type": "trainer.kernel",
    "dynamics_type": "trainer.kernel",
    "sde_window_size": "trainer.window.size",
    "num_sde_steps": "trainer.window.size",
    "global_std": "trainer.advantage_scale",
    "advantage_aggregation": "trainer.aggregate",
    "kl_beta": "trainer.kl_weight",
    "kl_type": "trainer.kl",
    "adv_clip_range": "trainer.advantage_clip",
    "trainer_type": "trainer.algorithm",
    "max_epochs": "iterations",
    "ema_decay": "ema.decay",
    "ema_update_interval": "ema.every",
    "lora_path": "model.lora.from",
    "resume_path": "model.lora.from",
    "finetune_type": "model.lora",
    "sde_steps": "trainer.window",
    "sde_window_range": "trainer.window",
    "num_batches_per_epoch": "sampling.prompts_per_iteration",
    "pretrained_model_name_or_path": "model.path",
    "model_name_or_path": "model.path",
    "lora_rank": "model.lora.rank",
    "r": "model.lora.rank",
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
TRL_NAMES: Mapping[str, tuple[str, ...]] = {
    "reward_funcs": ("rewards",),
    "train_dataset": ("prompts.train", "task.train"),
    "eval_dataset": ("prompts.eval", "task.eval"),
    "peft_config": ("model.lora", "vlm.lora"),
    "num_generations": ("sampling.group_size", "generation.group_size"),
    "max_completion_length": ("generation.max_new_tokens",),
}
"""Ours, for pipelines and for vision-language models. Looked at first: some are nearly the name of another key."""


def explain(error: ValidationError, data: Mapping[str, Any], origins: Origins, within: KeyPath = ()) -> list[Problem]:
    """Every problem of `error`, located in the files that `data` was read from. within: the section that was validated
    alone, if one was."""
    by_path: dict[KeyPath, Problem] = {}
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ImpossibleConfig):
            problems += [_impossible(keys, text, origins) for keys, text in cause.problems]
            continue
        path = _without_tags((*within, *item["loc"]), data)
        if item["type"].startswith("union_tag"):
            path = (*path, tag_of(node_at(path, data) or {}) or "")
        text = item["msg"] if item["type"] == NO_METHOD else _text(item["type"], path, data)
        by_path[path] = Problem(origin_of(path, origins), dotted(path), text)
    # A value that fits no branch of a union is reported once per branch: keep the most exact place.
    inner = [path for path in by_path if not any(other[: len(path)] == path for other in by_path if other != path)]
    return [by_path[path] for path in inner] + problems


def _impossible(keys: tuple[str, ...], text: str, origins: Origins) -> Problem:
    paths = [tuple(int(part) if part.isdecimal() else part for part in key.split(".")) for key in keys]
    written = [path for path in paths if path in origins]
    names = [key if path in origins else f"{key} (default)" for key, path in zip(keys, paths, strict=True)]
    return Problem(origin_of((written or paths)[0], origins), ", ".join(names), text)


def _without_tags(location: tuple[str | int, ...], data: Any) -> KeyPath:
    """Pydantic's location without the names of union branches, which are not in the file."""
    path: KeyPath = ()
    value, tag = data, None
    for part in location:
        if tag is not None and isinstance(value, Mapping) and value.get(tag) == part:
            tag = None
            continue
        if not isinstance(value, Mapping | list | tuple):
            continue  # "constrained-float", "tuple[...]": a branch
        if isinstance(value, list | tuple) and not (isinstance(part, int) and part < len(value)):
            continue
        path = (*path, part)
        value, tag = value_at((part,), value), tag_of(node_at(path, data) or {})
    return path


def _text(kind: str, path: KeyPath, data: Any) -> str:
    node = node_at(path, data)
    if kind == "extra_forbidden":
        return _unknown_key(path, data)
    if kind in ("missing", "union_tag_not_found"):
        about = node.get("description", "") if node else ""
        return f"missing, and it has no default; allowed: {allowed(node)}. {about}".rstrip()
    value = value_at(path, data)
    return f"found {_shown(value)}; allowed: {allowed(node)}{_hint(value, node)}"


def _unknown_key(path: KeyPath, data: Any) -> str:
    siblings = keys_of(path[:-1], data)
    everywhere = keys_in(schema_of(data))
    close = suggestions(str(path[-1]), path[:-1], siblings, everywhere)
    did_you_mean = f"; did you mean {' or '.join(close)}?" if close else ";"
    inside = f"keys of {dotted(path[:-1])}" if len(path) > 1 else "top-level keys"
    tags = {path[:end]: tag_of(node_at(path[:end], data) or {}) for end in range(1, len(path))}
    for section, tag in tags.items():
        other = [
            key for key in close if key.startswith(f"{dotted(section)}.") and key.rpartition(".")[2] not in siblings
        ]
        if other and tag is not None:
            named = value_at((*section, tag), data)
            did_you_mean = f"; it belongs to another {dotted(section)}.{tag} than {named!r};"
    return f"unknown key{did_you_mean} {inside}: {', '.join(siblings)}"


def suggestions(key: str, section: KeyPath, siblings: list[str], everywhere: Mapping[str, Schema]) -> list[str]:
    """Up to three full paths, of the keys `everywhere`, that the user may have meant by `key` in `section`."""

    def here(names: list[str]) -> list[str]:
        return [dotted((*section, name)) for name in names]

    if named := [path for path in TRL_NAMES.get(key, ()) if path in everywhere]:
        return named
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


def allowed(node: Schema | None) -> str:
    """What a value of this schema may be, in words."""
    if node is None:
        return "nothing"
    kinds: list[Schema] = node.get("anyOf", node.get("oneOf", []))
    if "discriminator" in node:
        alone = "a name, or " if any("enum" in kind for kind in kinds) else ""
        return f"{alone}a section with {tag_of(node)}: {' or '.join(sorted(tag_values(node)))}"
    if kinds:
        return " or ".join(dict.fromkeys(map(allowed, kinds)))
    if "enum" in node or "const" in node:
        names = node.get("enum", [node.get("const")])
        return f"one of {', '.join(map(str, names))}" if len(names) > 1 else str(names[0])
    kind = node.get("type")
    if kind == "array":
        if "prefixItems" in node:
            return f"a list [{', '.join(allowed(item) for item in node['prefixItems'])}]"
        least = f" of {node['minItems']} or more" if "minItems" in node else ""
        return f"a list{least}; each item: {allowed(node['items'])}"
    if kind == "object":
        if "minProperties" in node:
            return f"a section with {node['minProperties']} key or more"
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


def _shown(value: Any) -> str:
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"{value[:80]!r} (text)"
    if isinstance(value, int | float):
        return f"{value!r} (a {'whole ' if isinstance(value, int) else ''}number)"
    empty = "" if value else "n empty"
    return f"a{empty} list" if isinstance(value, list) else f"a{empty} section"


def _hint(value: Any, node: Schema | None) -> str:
    if node is None:
        return ""
    kinds = {branch.get("type") for branch in branches(node)}
    names = [name for branch in branches(node) for name in branch.get("enum", [])]
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
