"""Pipelines as `genrl sample` and `genrl eval` are given them: a folder, a hub id, or the run that trained one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from genrl.cli.arguments import Dtype, default_device, key_values
from genrl.cli.folders import near

if TYPE_CHECKING:
    from genrl.cli.evaluate import Options
    from genrl.config import Config, Model
    from genrl.data.prompts import Prompt
    from genrl.diffusion.rollout.scoring import Scorers


class Chosen(NamedTuple):
    """A pipeline and how it is called."""

    model: Model
    adapter: str | None
    """Folder or hub id of its LoRA."""
    arguments: dict[str, Any]
    """Of the pipeline call."""
    inputs: Mapping[str, str] = MappingProxyType({})
    """Those that are pictures of the prompt's row, with their columns."""


def config_of(name: str) -> Config | None:
    """The configuration of a run folder; None for a pipeline folder or hub id. Raises BadParameter for neither."""
    from genrl.config import Config, load
    from genrl.config.folders import looks_local

    path = Path(name)
    # runs/TYPO is written like a hub id; no hub id is beside runs. A single word may be either: the loader will say.
    local = looks_local(name) or any(path.parent.glob("*/config.yaml"))
    if not path.exists() and local and not re.fullmatch(r"[\w.-]+", name):
        raise typer.BadParameter(f"{name}: no such run or folder{near(path)}", param_hint="MODEL")
    file = path / "config.yaml"
    config = load(file) if file.is_file() else None
    if config is not None and not isinstance(config, Config):
        text = f"{name} is not the run of a pipeline, so no pictures can be sampled from it"
        raise typer.BadParameter(text, param_hint="MODEL")
    return config


def choose(name: str, lora: str | None, dtype: Dtype | None, given: dict[str, Any]) -> Chosen:
    """What the user named: of a run, its pipeline with the newest adapter, called as its evaluations are.

    given: arguments of the call, which win. Raises BadParameter where there is no such run, or nothing trained in it.
    """
    from genrl.config import Model

    config = config_of(name)
    if config is None:
        return Chosen(Model(path=name, dtype=dtype or "float32"), lora, given)
    settings, own = config.sampling, config.evaluation
    scale = settings.guidance_scale if own.guidance_scale is None else own.guidance_scale
    steps = own.num_inference_steps or settings.num_inference_steps
    height, width = own.height or settings.height, own.width or settings.width
    arguments = call_arguments(settings.scheduled(steps), scale, height, width)
    if settings.num_frames is not None:
        arguments["num_frames"] = settings.num_frames
    adapter = lora or _newest_adapter(Path(name))
    model = config.model.model_copy(update={"dtype": dtype or config.model.dtype})
    return Chosen(model, adapter, arguments | settings.pipeline_args | given, settings.inputs)


def _newest_adapter(run: Path) -> str:
    from genrl.runtime import checkpoint

    saved = checkpoint.latest(run / "checkpoints")  # RUN/lora is of the end of a run, which may have gone on since
    for folder in [*([saved / "lora"] if saved else []), run / "lora"]:
        if folder.is_dir():
            return str(folder)
    if saved is None:
        raise typer.BadParameter(f"{run} holds no checkpoint yet: there is nothing trained in it")
    raise typer.BadParameter(f"{run} holds no LoRA; write its pipeline by `genrl export {run} --out FOLDER`")


def call_arguments(
    num_inference_steps: int | None,
    guidance_scale: float | None,
    height: int | None,
    width: int | None,
    further: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Arguments of the pipeline call; what was not given is left to the pipeline. further: `key=value` texts."""
    named = {
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        "height": height,
        "width": width,
    }
    given = {name: value for name, value in named.items() if value is not None}
    return given | key_values(further, "num_frames=33")


def evaluate(name: str, options: Options) -> None:
    """Print the scores of a pipeline, or of a run's, over a prompt file, and write them to `options.out`."""
    config = config_of(name)
    source = options.prompts or (config.prompts.eval if config else None)
    if source is None:
        raise typer.BadParameter("give --prompts FILE (a run with prompts.eval has its own)")
    if not options.reward and not config:
        raise typer.BadParameter("give --reward NAME; `genrl rewards` lists them")
    rows = _rows(source, config, options)  # before torch is loaded
    chosen = choose(name, options.lora, options.dtype, options.call_arguments())

    from genrl.cli.tables import console, safe, scores_table, write_scores
    from genrl.config.schema import Evaluation
    from genrl.diffusion.rollout.rollout import check_inputs
    from genrl.diffusion.sample import evaluate_pipeline, load

    check_inputs(chosen.inputs, rows, source)
    own = Evaluation() if config is None else config.evaluation
    seed = own.seed if options.seed is None else options.seed
    num_prompts = len(rows)
    rows = [row for row in rows for _ in range(own.group_size)]
    scorers = _named(options.reward) if options.reward or not config else _of_run(config, Path(name))
    with closing(scorers):
        metrics = evaluate_pipeline(
            load(chosen.model, chosen.adapter),
            rows,
            scorers,
            batch_size=options.batch_size,
            seed=seed,
            num_pictures=0,
            arguments=chosen.arguments,
            inputs=chosen.inputs,
        ).metrics
    table = scores_table(f"{name}, {num_prompts} prompts of {source}", "metric", "value")
    for metric, value in sorted(metrics.items()):
        table.add_row(safe(metric), f"{value:.4f}")
    console.print(table)
    record = {"model": chosen.model.path, "lora": chosen.adapter, "prompts": source, "num_prompts": num_prompts}
    write_scores(options.out, record | {"seed": seed, "arguments": chosen.arguments}, metrics)


def _rows(source: str, config: Config | None, options: Options) -> list[Prompt]:
    """The prompts in the sizes that the run draws them in; of a plain pipeline, those that their columns say. One size
    for all where the user gives it."""
    from genrl.data.prompts import load
    from genrl.data.sizes import NAMES, sized

    rows = load(source, config.prompts.column if config else "prompt")[: options.num_prompts]
    if not options.call_arguments().keys().isdisjoint(NAMES):
        return rows
    buckets = config.sampling.buckets if config else "rows"
    if buckets == "rows" and not any(name in row.columns for row in rows for name in NAMES):
        return rows  # a plain list, or another file than the run's
    return sized(rows, buckets, config.sampling.picture_column if config else None, source)


def _of_run(config: Config, run: Path) -> Scorers:
    """The rewards of a run; one that is trained beside the model as the newest checkpoint has it."""
    from genrl.config.method import module_of
    from genrl.diffusion.rollout.scoring import open_scorers

    scorers = open_scorers(config, default_device())
    if config.trainer.trains_reward:
        module_of(config.trainer).load_trained(scorers, run)
    return scorers


def _named(names: Sequence[str]) -> Scorers:
    """The rewards that `--reward` names, each labelled by the last part of its name."""
    import rewards
    from genrl.diffusion.rollout.scoring import plain

    opened: dict[str, rewards.Reward] = {}
    for name in names:
        label = name.rsplit(":", 1)[-1]
        label = f"{label}-{len(opened) + 1}" if label in opened else label
        opened[label] = rewards.load(name, device=default_device())
    return plain(opened)
