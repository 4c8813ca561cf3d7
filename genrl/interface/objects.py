"""Live objects -> the names and sections of a configuration (`genrl_rewards.given` finds them again by these names)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from genrl.config.method import Kind, Method, built_in
from genrl.data.rows import is_path
from genrl.vlm.config.names import TASKS
from genrl_rewards.contract import name_of
from genrl_rewards.given import PREFIX, is_given

if TYPE_CHECKING:
    from genrl.config.sections import LoRA

Reward = str | Callable[..., Any] | Mapping[str, Any]
"""A name, a function, an object or class with `__call__`; or the keys of a reward, of which `name` may be any of
these."""
Rewards = Sequence[Reward] | Mapping[Any, float] | Reward
"""Some of them, or each with its weight."""
Rows = Sequence[str] | Sequence[Mapping[str, Any]] | Any
"""Texts, mappings with columns, or a `datasets.Dataset`."""

OURS = {
    "reward_funcs": "rewards",
    "train_dataset": "prompts (pictures) or tasks (a VLM)",
    "eval_dataset": "eval_prompts (pictures) or eval_tasks (a VLM)",
    "peft_config": "lora",
    "processing_class": "processor",
    "args": "method, sampling, generation, optimizer",
    "num_generations": "sampling={'group_size': ...} or generation={'group_size': ...}",
    "max_completion_length": "generation={'max_new_tokens': ...}",
    "learning_rate": "optimizer={'lr': ...}",
    "beta": "kl_weight of the method",
    "epsilon": "clip_range of the method",
    "max_steps": "iterations",
    "num_train_epochs": "iterations",
    "output_dir": "output",
    "callbacks": "on_iteration",
    "report_to": "config={'trackers': [...]}",
}
"""TRL's names -> what stands for them here."""
PLAIN_LORA = ("r", "lora_alpha", "target_modules", "use_dora", "use_rslora", "peft_type", "base_model_name_or_path")


@dataclass
class Lent:
    """The objects that a script hands over, by the names under which a configuration has them."""

    objects: dict[str, Any] = field(default_factory=dict)

    def name(self, thing: Any, label: str) -> str:
        """`python:label`, with a number behind where another object is called so."""
        base = PREFIX + label
        same = [name for name, held in self.objects.items() if held is thing and name.startswith(base)]
        if same:
            return same[0]
        taken = sum(name == base or name.startswith(f"{base}-") for name in self.objects)
        name = f"{base}-{taken + 1}" if taken else base
        self.objects[name] = thing
        return name


def source_name(thing: Any) -> str:
    """What a loaded model calls itself: where it was loaded from, or its class."""
    config = getattr(thing, "config", None)
    name = getattr(thing, "name_or_path", "") or getattr(config, "_name_or_path", "")
    return str(name or type(thing).__name__)


def pipeline_section(model: Any, lent: Lent) -> dict[str, Any]:
    """The section `model` of a hub id, a folder, or a loaded pipeline."""
    if isinstance(model, (str, Path)):
        return {"path": str(model)}
    dtype = str(getattr(model, "dtype", "torch.float32")).removeprefix("torch.")
    return {"path": lent.name(model, source_name(model)), "dtype": dtype}


def vlm_section(model: Any, processor: Any, lent: Lent) -> dict[str, Any]:
    """The section `vlm` of a hub id, a folder, or a loaded model with its processor. Raises ValueError for a model
    without a processor and the other way round."""
    if isinstance(model, (str, Path)):
        if processor is not None:
            raise ValueError(f"processor: that of {model} is loaded with it; give vlm as a loaded model too, or none")
        return {"path": str(model)}
    if processor is None:
        raise ValueError("vlm: a loaded model needs its processor: processor=AutoProcessor.from_pretrained(...)")
    from genrl.vlm.policies.loading import Loaded

    dtype = str(model.dtype).removeprefix("torch.")
    return {"path": lent.name(Loaded(model, processor), source_name(model)), "dtype": dtype}


def reward_sections(rewards: Rewards, lent: Lent) -> list[dict[str, Any]]:
    """The list `rewards`: of names, functions and objects, of their keys, or of both with their weights.

    Raises ValueError for what is no reward, or has no name to be logged by.
    """
    if not isinstance(rewards, Iterable) or isinstance(rewards, str):
        rewards = [rewards]
    if isinstance(rewards, Mapping):
        rewards = [{"name": reward, "weight": weight} for reward, weight in rewards.items()]
    sections = []
    for number, reward in enumerate(rewards):
        keys = dict(reward) if isinstance(reward, Mapping) else {"name": reward}
        thing = keys.get("name")
        if callable(thing):
            label = name_of(thing)
            if label == "<lambda>":
                text = "a lambda has no name, by which its scores would be logged; define it by def"
                raise ValueError(f"rewards[{number}]: {text}")
            keys["name"] = lent.name(thing, label)
        elif not isinstance(thing, str):
            kind = type(thing).__name__
            text = f"found an object of type {kind}; give a name, a function or an object to call"
            raise ValueError(f"rewards[{number}]: {text}")
        sections.append(keys)
    return sections


def rows_name(rows: Any, label: str, lent: Lent) -> str:
    """The name of a source of rows: of a file or hub id itself. Raises ValueError for no rows."""
    if isinstance(rows, (str, Path)):
        return str(rows)
    # A generator could be read only once, and rows are read to be checked and to be trained on.
    if not hasattr(rows, "column_names"):
        rows = list(rows)
    if not len(rows):
        raise ValueError(f"{label}: there are no rows in it")
    return lent.name(rows, label)


def as_jsonl(rows: Any, column: str) -> str | None:
    """Texts, or mappings of what JSON has, as lines of a prompt file; None for pictures, paths and tables."""
    if hasattr(rows, "column_names"):
        return None
    lines = [{column: row} if isinstance(row, str) else dict(row) for row in rows]
    if any(is_path(name) for line in lines for name in line):
        return None
    try:
        return "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    except (TypeError, ValueError):
        return None


def task_section(tasks: Any, eval_tasks: Any, lent: Lent) -> dict[str, Any]:
    """The section `task`: of a task by name or function, or of rows, a file or a hub id to train on and to judge by."""
    section: dict[str, Any] = {}
    built = callable(tasks) or (isinstance(tasks, str) and (tasks in TASKS.built_in or ".py:" in tasks))
    if built:
        section["name"] = lent.name(tasks, name_of(tasks)) if callable(tasks) else tasks
    elif tasks is not None:
        section["train"] = rows_name(tasks, "tasks", lent)
    if eval_tasks is not None:
        section["eval"] = rows_name(eval_tasks, "eval_tasks", lent)
    return section


def method_section(method: Method | type[Method] | str, kind: Kind, lent: Lent) -> dict[str, Any]:
    """The section `trainer` of a method's settings, or of its name (of a VLM also of a preset). One of the script's own
    is a class with its `train` and `loss` beside it. Raises ValueError for what is none."""
    if isinstance(method, str):
        # Only a VLM has presets, and a path with .py is a method of the user's own.
        preset = kind == "vlm" and method not in built_in("vlm") and ".py" not in method
        return {"preset" if preset else "algorithm": method}
    settings = method if isinstance(method, type) else type(method)
    if not issubclass(settings, Method):
        raise ValueError(f"method: a {settings.__name__} is none; give genrl.FlowGRPO(...), a name or a class of yours")
    if settings.kind != kind:
        raise ValueError(f"method: {settings.__name__} is a method for {settings.kind} runs, and this is a {kind} run")
    name = settings.model_fields["algorithm"].default
    if built_in(kind).get(name) is not settings:
        name = lent.name(settings, settings.__name__)
    return (keys_of(method) if isinstance(method, Method) else {}) | {"algorithm": name}


def lora_section(lora: Any) -> dict[str, Any] | None:
    """The section `lora` of our own settings, or of peft's LoraConfig. Raises ValueError for settings of peft's that
    training here does not have."""
    if lora is None or isinstance(lora, (BaseModel, Mapping)):
        return None if lora is None else keys_of(lora)
    # By its name, not its class: peft takes seconds to import, and a script without it has no such object.
    if getattr(lora, "peft_type", None) != "LORA":
        raise ValueError(
            f"lora: a {type(lora).__name__} is neither peft's LoraConfig nor genrl.LoRA; see docs/adapters.md"
        )
    plain, written = type(lora)(), vars(lora)
    other = [key for key, value in written.items() if key not in PLAIN_LORA and value != getattr(plain, key, value)]
    if other:
        why = "dropout would make the ratio differ from 1" if other[0] == "lora_dropout" else "leave it out"
        raise ValueError(f"lora: {other[0]} of peft's LoraConfig has no part in training here: {why}")
    form = "dora" if lora.use_dora else "rslora" if lora.use_rslora else None
    section: dict[str, Any] = {"rank": lora.r, "alpha": float(lora.lora_alpha)} | ({"type": form} if form else {})
    if isinstance(lora.target_modules, str):
        raise ValueError("lora: target_modules as a pattern is not read here; list the endings of the layers' names")
    if lora.target_modules:
        section["targets"] = sorted(lora.target_modules)
    return section


def keys_of(section: BaseModel | Mapping[str, Any] | LoRA) -> dict[str, Any]:
    """What was written of a section, as YAML would have it."""
    if isinstance(section, BaseModel):
        return section.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return dict(section)


def missing_objects(leaves: Mapping[str, Any], lent: Lent) -> list[str]:
    """`key: python:NAME` for each object that a configuration names and nobody lends."""
    return [f"{key}: {value}" for key, value in leaves.items() if is_given(value) and value not in lent.objects]


def refuse_unknown(names: Sequence[str]) -> None:
    """Raise TypeError for arguments that do not exist, with what TRL's stand for here."""
    if names:
        ours = [f"{name} is called {OURS[name]} here" for name in names if name in OURS]
        other = [f"there is no argument {name}" for name in names if name not in OURS]
        raise TypeError(f"genrl.train: {'; '.join([*ours, *other])}. help(genrl.train) lists all")
