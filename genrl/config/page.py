"""docs/configuration.md, made from the schema: `python -m genrl.config.page > docs/configuration.md`."""

from __future__ import annotations

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from genrl.config.method import KINDS, Method, built_in, schema_class
from genrl.config.run_config import RunConfig
from genrl.config.section import Section

HEAD = """# Configuration

This page lists every key of a configuration. One YAML file describes a run, and its top-level sections decide what kind
of run it is: with `policy` it trains a policy in simulation, with `vlm` a vision-language model, otherwise a diffusion
pipeline. The file is validated before anything is loaded: an unknown key, a wrong type or settings that contradict each
other raise errors that name the file, the line, the key and the nearest legal value.

```bash
genrl check configs/quickstart.yaml             # validate, count model calls, estimate memory; no weights are read
genrl check configs/quickstart.yaml --explain   # every key with its value, default and meaning
genrl check mine.yaml --rows                    # every row and picture of the data; those that would fail
genrl check configs mine.yaml                   # folders and files: a line for each, all problems, exit code 2 for any
genrl train configs/quickstart.yaml optimizer.lr=1e-4 ema=null rewards.0.weight=2
genrl config schema > genrl.schema.json         # completion in editors
```

- **Overrides** are `key.sub=value` after the file, the value written as in YAML.
- **`include: base.yaml`** takes over one base file (which includes none itself); sections are merged, lists
  replaced, and a section with another `algorithm` or `kind` too.
- **Numbers** are read as YAML 1.2 does: `1e-4` is a number, `on` is text, `010` is 10.
- **Paths** are relative to the folder the command is run in.
- The **resolved configuration** is saved as `config.yaml` in the run folder and runs as it stands.
- With `genrl resume`, only some keys may be changed: `iterations`, `checkpoint`, `evaluation`, `trackers`, `output`,
  and where rewards and simulators run (`remote`, `isolate`, `outage`; `workers`, `timeout_s`) or samples
  are generated (`engine`).

`configs/quickstart.yaml`, `configs/ocr.yaml` and `configs/flow_grpo.yaml` run on the embedded model, and so do those
in `configs/diffusion/` that are named after a method alone: `mix_grpo`, `mix_grpo_flash`, `flow_grpo_fast`,
`tree_rpo`, `branch_grpo`, `tree_grpo`, `b2_diffurl`, `adv_grpo`, `dance_grpo`, `grpo_guard`, `ddpo`, `prdp`,
`paco_grpo`, `prompt_rl`, `spo`, `talk2move` and `talk2move_sft`. The others there, named after a published model, are
[recipes](recipes.md) with the field's defaults and their sources. They are validated and rehearsed with random weights;
we have trained none with the published ones.

Keys and defaults, made from the schemas in `genrl/config/`:
"""
TITLES = {"diffusion": "Diffusion pipelines", "vla": "Policies in simulation", "vlm": "Vision-language models"}


def markdown() -> str:
    """The page."""
    lines = [HEAD.rstrip("\n")]
    for kind in KINDS:
        root = schema_class(kind)
        lines += ["", f"## {TITLES[kind]}", "", " ".join((root.__doc__ or "").split())]
        _section(root, "", lines, {})
    return "\n".join(lines) + "\n"


def _section(section: type[Section], name: str, lines: list[str], known: dict[type[Section], str]) -> None:
    """A heading, the section's meaning, a table of its own keys, then its subsections. known: where the sections stand
    that are on the page; they are not written again."""
    known[section] = name
    if name:
        lines += ["", f"### {name}", "", " ".join((section.__doc__ or "").split())]
    lines += ["", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    below: list[tuple[type[Section], str]] = []
    functions: list[tuple[str, list[type[Section]]]] = []
    for own in section.in_order() if issubclass(section, RunConfig) else section.model_fields:
        field = section.model_fields[own]
        key, models = field.alias or own, _models(field.annotation)
        inner = [model for model in models if model not in known]
        default = "required" if field.is_required() else f"`{_shown(field.get_default(call_default_factory=True))}`"
        meaning = _cell(section.meaning(own))
        meaning += "".join(f" As `{known[model]}`." for model in models[:1] if model in known)
        lines.append(f"| `{key}` | {_type(field.annotation)} | {default} | {meaning} |")
        prefix = f"{name}.{key}" if name else key
        if len(inner) > 1 and all("name" in model.model_fields for model in inner):
            functions += [(prefix, inner)]
            known |= dict.fromkeys(inner, prefix)
        else:
            below += [(m, f"{prefix} ({_kind(m)})" if len(inner) > 1 else prefix) for m in inner]
    for prefix, models in functions:
        _functions(models, prefix, lines)
    for model, prefix in below:
        if model not in known:
            _section(model, prefix, lines, known)


def _functions(models: list[type[Section]], name: str, lines: list[str]) -> None:
    """A heading, and a table of functions by name with their constants."""
    lines += ["", f"### {name}", "", "| name | meaning | constants |", "| --- | --- | --- |"]
    for model in models:
        constants = [
            f"`{key}` {'required' if field.is_required() else f'`{_shown(field.default)}`'}: {model.meaning(key)}"
            for key, field in model.model_fields.items()
            if key != "name"
        ]
        cells = [f"`{_kind(model)}`", model.__doc__ or "", " ".join(constants)]
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")


def _cell(text: str) -> str:
    """On one line of a table. `[scores] [B]`, a name and its shape, would be a link to Markdown, `<name>` HTML."""
    parts = " ".join(text.replace("|", "/").replace("] [", "] \\[").split()).split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]  # the others are code
    return "`".join(parts)


def _kind(section: type[Section]) -> str:
    """What tells a section from the others that may stand in its place."""
    fields = section.model_fields
    return str(next(fields[key].default for key in ("algorithm", "kind", "name") if key in fields))


def _models(annotation: Any) -> list[type[Section]]:
    """The sections an annotation may hold; in place of the base class of a kind's methods, all of them."""
    if isinstance(annotation, type) and issubclass(annotation, Method):
        return list(built_in(annotation.kind).values())
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _type(annotation: Any) -> str:
    """The annotation in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_type, arguments)))
    if origin is tuple:
        if arguments[-1] is ...:
            return f"list of {_type(arguments[0])}"
        kinds = list(map(_type, arguments))
        return f"{len(kinds)} x {kinds[0]}" if len(set(kinds)) == 1 else f"[{', '.join(kinds)}]"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return {str: "text", bool: "true or false", int: "whole number", float: "number"}[annotation]


def _shown(value: Any) -> str:
    """A default as it would be written; a section's is the table below."""
    if isinstance(value, Section):
        return "see below"
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, default=lambda one: one.model_dump(exclude_defaults=True))  # of a section in a list


if __name__ == "__main__":
    print(markdown(), end="")
