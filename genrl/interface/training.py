"""`genrl.train` and `genrl.resume`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias

from genrl.config import RunConfig
from genrl.config.errors import Origins
from genrl.config.loading import kind_of, load, load_given
from genrl.config.method import Kind, Method
from genrl.config.method import kind_of as kind_of_data
from genrl.config.section import Section
from genrl.config.yaml_source import plain
from genrl.diffusion.config.schema import Config
from genrl.interface.objects import (
    Lent,
    Rewards,
    Rows,
    as_jsonl,
    keys_of,
    lora_section,
    method_section,
    missing_objects,
    pipeline_section,
    refuse_unknown,
    reward_sections,
    rows_name,
    source_name,
    task_section,
    vlm_section,
)
from genrl.runtime.folder.contents import leaves as leaves_of
from genrl.runtime.folder.run import Script
from genrl_rewards.given import given, is_given, lending

if TYPE_CHECKING:
    from genrl.runtime.loop.loop import Loop

logger = logging.getLogger(__name__)
OnIteration = Callable[["Loop", Mapping[str, float]], None]
Keys: TypeAlias = Section | Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """What a run came to, finished or not."""

    folder: Path
    """The run folder."""
    model: Any
    """What was trained, in memory: the pipeline with its LoRA on, the model of transformers, or the policy."""
    metrics: list[dict[str, Any]]
    """The rows of metrics.jsonl, one per iteration: `pandas.DataFrame(result.metrics)`."""
    lora: Path | None
    """Folder of the LoRA, for `pipe.load_lora_weights`; None where all weights were trained, or it is no pipeline."""
    complete: bool
    """False where it was interrupted: `genrl.resume(result.folder, ...)` goes on."""

    def __repr__(self) -> str:
        state = "complete" if self.complete else "interrupted: genrl.resume goes on"
        lora = f", LoRA in {self.lora}" if self.lora else ""
        steps = self.metrics[-1]["step"] if self.metrics else 0
        return f"<Result: {self.folder}, {steps} iterations, {state}{lora}>"

    @property
    def pipeline(self) -> Any:
        """The trained pipeline; its own scheduler is back in it."""
        return self.model

    @property
    def policy(self) -> Any:
        """The trained policy."""
        return self.model


def train(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    model: Any = None,
    vlm: Any = None,
    processor: Any = None,
    policy: Any = None,
    environment: Any = None,
    prompts: str | Path | Rows | None = None,
    eval_prompts: str | Path | Rows | None = None,
    tasks: str | Path | Callable[..., Any] | Rows | None = None,
    eval_tasks: str | Path | Rows | None = None,
    rewards: Rewards | None = None,
    method: Method | type[Method] | str | None = None,
    lora: Any | None | EllipsisType = ...,
    sampling: Keys | None = None,
    generation: Keys | None = None,
    optimizer: Keys | None = None,
    evaluation: Keys | None = None,
    iterations: int | None = None,
    seed: int | None = None,
    output: str | Path | None = None,
    on_iteration: OnIteration | None = None,
    **unknown: object,
) -> Result:
    """Train a model by reinforcement learning; returns when it is done, or was interrupted and has saved.

    Exactly one of these, unless `config` has it: `model`, a diffusers pipeline; `vlm`, a model of transformers (with
    its `processor`); `policy` in an `environment`. Each is a hub id, a folder or the loaded object, which is trained in
    place.

    prompts, eval_prompts: of a pipeline: texts, rows with columns, a `datasets.Dataset`, a file or `id:split`. tasks,
    eval_tasks: of a VLM: the same with `prompt`, `image` and what rewards ask for, or a task (`"count"`, a function).
    environment: a gymnasium id, a simulator's name, or a function that makes a gymnasium environment.
    rewards: names, functions and objects, in a list or with their weights in a mapping; a reward is called with what
    its parameters name. method: `genrl.FlowGRPO(...)` and others, a name, or a class of yours. lora: peft's LoraConfig,
    `genrl.LoRA(...)`, or None to train all weights. sampling, generation, optimizer, evaluation: these sections of a
    configuration, `genrl.Sampling(...)` or a mapping. config: a YAML file or a mapping of its keys, for all else; what
    is given here wins. on_iteration: called after each iteration with the loop and what was logged, of which
    `step` counts iterations.

    The run folder (`output`) is that of `genrl train`; its config.yaml has `python:NAME` where an object was given, and
    `resume` takes the objects again. Without `evaluation` and held-out prompts nothing is evaluated. A first Ctrl-C (or
    the notebook's stop button) ends the iteration, saves and returns; a second one raises KeyboardInterrupt at once.

    Raises ConfigError or ValueError, before anything is loaded, for what cannot work, and TypeError for an argument
    that there is not.

    >>> def warm(images):
    ...     return images[:, 0].mean(dim=(1, 2)) - images[:, 2].mean(dim=(1, 2))
    >>> result = genrl.train(
    ...     model="assets/tiny-t2i", prompts=["a red cube"], rewards=[warm], method="diffusion_nft",
    ...     sampling={"num_inference_steps": 2, "group_size": 4, "prompts_per_iteration": 2}, iterations=1,
    ...     output=folder,
    ... )
    >>> result.complete, result.lora.name
    (True, 'lora')
    """
    refuse_unknown(list(unknown))
    lent = Lent()
    kind = _kind(config, model=model, vlm=vlm, policy=policy, environment=environment)
    sections: dict[str, Any] = {}
    trained = {"diffusion": "model", "vlm": "vlm", "vla": "policy"}[kind]
    if model is not None:
        sections["model"] = pipeline_section(model, lent)
    if vlm is not None:
        sections["vlm"] = vlm_section(vlm, processor, lent)
    if policy is not None:
        path = str(policy) if isinstance(policy, (str, Path)) else lent.name(policy, source_name(policy))
        sections["policy"] = {"path": path}
    if lora is not ...:
        sections.setdefault(trained, {})["lora"] = lora_section(lora)
    if environment is not None:
        sections["environment"] = _environment(environment, lent)
    sources = {"train": prompts, "eval": eval_prompts}
    names = {name: rows_name(rows, f"prompts-{name}", lent) for name, rows in sources.items() if rows is not None}
    if names:
        sections["prompts"] = names
    if tasks is not None or eval_tasks is not None:
        sections["task"] = task_section(tasks, eval_tasks, lent)
    if rewards is not None:
        sections["rewards"] = reward_sections(rewards, lent)
    if method is not None:
        sections["trainer"] = method_section(method, kind, lent)
    written = {"sampling": sampling, "generation": generation, "optimizer": optimizer, "evaluation": evaluation}
    sections |= {name: keys_of(value) for name, value in written.items() if value is not None}
    numbers = {"iterations": iterations, "seed": seed, "output": None if output is None else str(output)}
    sections |= {name: value for name, value in numbers.items() if value is not None}
    with lending(lent.objects):
        composed, origins = _composed(config, sections, kind)
        _check(composed, origins)
        # After the check, whose messages are to name what the script gave and not a file of ours.
        composed, files = _written(composed)
        return _run(composed, None, Script(on_iteration, files))


def resume(
    run: str | Path,
    *,
    model: Any = None,
    vlm: Any = None,
    processor: Any = None,
    policy: Any = None,
    environment: Any = None,
    prompts: Rows | None = None,
    eval_prompts: Rows | None = None,
    tasks: Callable[..., Any] | Rows | None = None,
    eval_tasks: Rows | None = None,
    rewards: Rewards | None = None,
    method: type[Method] | Method | None = None,
    iterations: int | None = None,
    on_iteration: OnIteration | None = None,
) -> Result:
    """Go on with an interrupted run from its newest complete checkpoint, or with a finished one to more `iterations`.

    The live objects that `train` was given are given again, the model as it was before training; what the run folder
    names needs nothing. Raises ValueError for objects that are missing, naming them.
    """
    file = Path(run) / "config.yaml"
    if not file.is_file():
        raise ValueError(f"{run} is not a run folder: it has no config.yaml")
    lent = Lent()
    if rewards is not None:
        reward_sections(rewards, lent)
    leaves = leaves_of(plain(file.read_text(encoding="utf-8")))
    for key, thing in {
        "model.path": model,
        "vlm.path": None if vlm is None else _loaded(vlm, processor),
        "policy.path": policy,
        "environment.name": environment.get("name") if isinstance(environment, Mapping) else environment,
        "prompts.train": prompts,
        "prompts.eval": eval_prompts,
        "task.name": tasks,
        "task.train": tasks,
        "task.eval": eval_tasks,
        "trainer.algorithm": type(method) if isinstance(method, Method) else method,
    }.items():
        if thing is not None and is_given(leaves.get(key)):
            lent.objects[str(leaves[key])] = thing
    if missing := missing_objects(leaves, lent):
        raise ValueError(f"{run} was trained with objects that are to be handed over again: {'; '.join(missing)}")
    with lending(lent.objects):
        config = load(file, () if iterations is None else (f"iterations={iterations}",))
        _check(config, {})
        return _run(config, Path(run), Script(on_iteration))


def _check(config: RunConfig, origins: Origins) -> None:
    from genrl.config import check_files

    for note in check_files(config, origins):
        if not note.startswith("output:"):  # a folder in use is an error of its own
            logger.warning(note)


def _written(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """Prompts that are plain text or JSON as files of the run folder (name -> content), which the configuration then
    names: nobody has to hand them over again."""
    files = {}
    if isinstance(config, Config):
        changes = {}
        for key in ("train", "eval"):
            source = getattr(config.prompts, key)
            text = as_jsonl(given(source), config.prompts.column) if is_given(source) else None
            if text is not None:
                name = f"{key}_prompts.jsonl"
                files[name], changes[key] = text, str(Path(config.output) / name)
        config = config.model_copy(update={"prompts": config.prompts.model_copy(update=changes)})
    return config, files


def _run(config: RunConfig, folder: Path | None, script: Script) -> Result:
    # Before torch is imported, as it reads it once: threads that spin while they wait starve those of other processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from genrl.runtime.folder import checkpoint
    from genrl.runtime.folder.run import Run, read_metrics
    from genrl.runtime.loop.frame import run

    ended = run(config, folder, script)
    made, saved = Run(ended.folder), checkpoint.latest(Run(ended.folder).checkpoints)
    # The folder's own LoRA is written at the end; what an interrupted run has is in its newest checkpoint.
    places = [made.lora] if ended.is_complete or saved is None else [saved / "lora"]
    lora = next((place for place in places if place.is_dir()), None)
    return Result(ended.folder, ended.trained, read_metrics(made.metrics), lora, ended.is_complete)


def _kind(config: Any, **given: Any) -> Kind:
    """Kind of the run. Raises ValueError where it is none or several."""
    kinds: dict[str, Kind] = {"model": "diffusion", "vlm": "vlm", "policy": "vla"}
    trained = {kind for name, kind in kinds.items() if given[name] is not None}
    if len(trained) > 1:
        raise ValueError("genrl.train: give one of model, vlm and policy, found several")
    if trained:
        return trained.pop()
    held = None
    if config is not None:
        held = kind_of(config) if isinstance(config, (str, Path)) else kind_of_data(config)
    if given["environment"] is not None:  # an agent acts in one, too
        return "vlm" if held == "vlm" else "vla"
    if held is None:
        raise ValueError("genrl.train: say what is trained: model (a diffusers pipeline), vlm, or policy")
    return held


def _composed(config: Any, sections: dict[str, Any], kind: Kind) -> tuple[RunConfig, Origins]:
    """The configuration, and where its keys were written. Of a new folder where nobody names one."""
    if isinstance(config, (str, Path)):
        return load_given(config, sections, "genrl.train")
    base = dict(config or {})
    source = {"diffusion": "prompts", "vlm": "task", "vla": "environment"}[kind]
    sources = [keys for keys in (base.get(source), sections.get(source)) if isinstance(keys, Mapping)]
    judged = any(keys.get("eval") or keys.get("name") for keys in sources)
    # A script that gives no held-out prompts means no evaluation; in a file the same is more likely forgotten.
    if kind != "vla" and "evaluation" not in {**base, **sections} and not judged:
        sections["evaluation"] = {"every": 0}
    if "output" not in {**base, **sections}:
        # Each process would name a folder after its own clock.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("output: name the run folder, which all processes have to agree on")
        trainer = sections.get("trainer") or base.get("trainer")
        trainer = trainer if isinstance(trainer, Mapping) else {}  # what else it may be is refused with the rest
        name = str(trainer.get("algorithm") or trainer.get("preset") or kind).rpartition(":")[2]
        sections["output"] = f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}"
    return load_given(config, sections, "genrl.train")


def _environment(environment: Any, lent: Lent) -> dict[str, Any]:
    """The section `environment`. Raises ValueError for an environment that is made already."""
    keys = dict(environment) if isinstance(environment, Mapping) else {"name": environment}
    name = keys.get("name", "")
    if not callable(name) and not isinstance(name, (str, Path)):
        text = f"give a function that makes it, since every slot has its own, or its name, not a {type(name).__name__}"
        raise ValueError(f"environment: {text}")
    if callable(name):
        label = str(getattr(name, "__name__", type(name).__name__)).strip("<>")
        keys["name"] = lent.name(name, label)
    elif name:
        keys["name"] = str(name)
    return keys


def _loaded(model: Any, processor: Any) -> Any:
    lent = Lent()
    vlm_section(model, processor, lent)
    return next(iter(lent.objects.values()), None)
