"""Pipelines as `genrl sample` and `genrl eval` are given them: a folder, a hub id, or the run that trained one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from genrl.cli.arguments import default_device, key_values

if TYPE_CHECKING:
    from genrl.cli.evaluate import Options
    from genrl.data.prompts import Prompt
    from genrl.diffusion.config.schema import Config
    from genrl.diffusion.rollout.scoring import Scorers


def call_arguments(
    num_inference_steps: int | None,
    guidance_scale: float | None,
    height: int | None,
    width: int | None,
    further: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Arguments of the pipeline call; what was not given is left to the pipeline. further: `key=value` texts."""
    from genrl.diffusion import chosen

    given = chosen.call_arguments(num_inference_steps, guidance_scale, height, width)
    return given | key_values(further, "num_frames=33")


BROKEN = 0.05
"""Share of pictures that are not finite above which an evaluation fails."""


def evaluate(name: str, options: Options) -> None:
    """Print the scores of a pipeline, or of a run's, over a prompt file, and write them to `options.out`."""
    from genrl.diffusion.chosen import choose, config_of

    config = config_of(name)
    source = options.prompts or (config.prompts.eval if config else None)
    if source is None:
        raise typer.BadParameter("give --prompts FILE (a run with prompts.eval has its own)")
    if not options.reward and not config:
        raise typer.BadParameter("give --reward NAME; `genrl rewards` lists them")
    rows = _rows(source, config, options)  # before torch is loaded
    chosen = choose(name, options.lora, options.dtype, options.call_arguments())

    from genrl.cli.tables import console, safe, scores_table, write_scores
    from genrl.diffusion.config.sections import EVALUATION_SEED, Evaluation
    from genrl.diffusion.rollout.rollout import check_inputs
    from genrl.diffusion.rollout.scoring import not_finite
    from genrl.diffusion.sample import evaluate_pipeline, load

    check_inputs(chosen.inputs, rows, source)
    own = Evaluation() if config is None else config.evaluation
    seed = EVALUATION_SEED if options.seed is None else options.seed
    num_prompts = len(rows)
    rows = [row for row in rows for _ in range(own.group_size)]
    scorers = named_rewards(options.reward) if options.reward or not config else rewards_of_run(config, Path(name))
    pipe = load(chosen.model, chosen.adapter)
    with closing(scorers):
        found = evaluate_pipeline(
            pipe,
            rows,
            scorers,
            batch_size=options.batch_size,
            seed=seed,
            num_pictures=0,
            arguments=chosen.arguments,
            inputs=chosen.inputs,
        )
    metrics = found.metrics
    table = scores_table(f"{name}, {num_prompts} prompts of {source}", "metric", "value")
    for metric, value in sorted(metrics.items()):
        table.add_row(safe(metric), f"{value:.4f}")
    console.print(table)
    record = {"model": chosen.model.path, "lora": chosen.adapter, "prompts": source, "num_prompts": num_prompts}
    write_scores(options.out, record | {"seed": seed, "arguments": chosen.arguments}, metrics)
    if found.scored.broken > BROKEN * len(rows):
        raise RuntimeError(not_finite(found.scored.broken, len(rows), pipe))


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


def rewards_of_run(config: Config, run: Path) -> Scorers:
    """The rewards of a run; one that is trained beside the model as its method finds it in the run (`load_trained`)."""
    from genrl.config.method import module_of
    from genrl.diffusion.rollout.scoring import open_scorers

    scorers = open_scorers(config, default_device())
    if config.trainer.trains_reward:
        module_of(config.trainer).load_trained(scorers, run)
    return scorers


def named_rewards(names: Sequence[str]) -> Scorers:
    """The rewards that `--reward` names, each labelled by the last part of its name."""
    import genrl_rewards
    from genrl.diffusion.rollout.scoring import plain

    opened: dict[str, genrl_rewards.Reward] = {}
    for name in names:
        label = name.rsplit(":", 1)[-1]
        label = f"{label}-{len(opened) + 1}" if label in opened else label
        opened[label] = genrl_rewards.load(name, device=default_device())
    return plain(opened)
