"""What `genrl check` says of a run that trains a pipeline: the cost of an iteration, and the memory of one process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from genrl.cli.tables import memory_table, number, safe, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from genrl.diffusion.config.estimate import Component, Plan
    from genrl.diffusion.config.memory_estimate import Step
    from genrl.diffusion.config.schema import Config

SHOWN = 8
"""Numbers of processes that are listed."""


def components_of(config: Config) -> tuple[Component, ...]:
    """The networks of the pipeline: of one that is not on this machine, as it was published, where that is known."""
    from genrl.diffusion.config.estimate import read_components
    from genrl.diffusion.config.files import model_folder
    from genrl.diffusion.config.published import published

    if folder := model_folder(config):
        return read_components(folder, config.model.variant, config.model.without)
    return tuple(part for part in published(config.base) if part.name not in config.model.without)


def held_out(config: Config) -> int | None:
    """Number of prompts for evaluation; None where no file says it."""
    from genrl.data.prompts import FILES, read

    source = config.prompts.eval
    if source is None or Path(source).suffix not in FILES or not Path(source).is_file():
        return None
    return len(read(source, config.prompts.column).rows)


def summary(config: Config) -> list[RenderableType]:
    """The plan of an iteration, the networks of the pipeline, and the memory of one process."""
    from genrl.diffusion.config.estimate import plan
    from genrl.diffusion.config.files import model_folder
    from genrl.diffusion.config.memory_estimate import memory

    components = components_of(config)
    cost = plan(config, components, held_out(config))
    parts: list[RenderableType] = [_plan_table(config, cost)]
    if not components:
        if cost.guidance == 2:
            parts.append("guidance is counted as a second model call; where it is an input of the model, halve these")
        where = "is not on this machine" if model_folder(config) is None else "holds no networks"
        return [*parts, f"memory: not estimated, because {safe(config.model.path)} {where}"]
    if model_folder(config) is None:
        parts.append(f"{safe(config.base)} is not on this machine: its networks are those that were published")
    parts += [_component_table(components), memory_table(memory(config, components))]
    if config.sampling.guidance_scale is None and cost.guidance == 2:
        parts.append("guidance_scale is the pipeline's default here, counted as two model calls per step")
    return parts


def cards(file: Path, overrides: Sequence[str], config: Config, card: float | None) -> list[RenderableType]:
    """Which cards the run fits on, with which changes; with `card`, in bytes, the changes one by one."""
    from genrl.diffusion.config.memory_estimate import CARDS, fitting, steps

    components = components_of(config)
    if not components:
        return []
    plan = steps(file, overrides, components, card or CARDS[0] * 10**9)
    if card is not None:
        return _changes_table(plan, fitting(plan, card), size(round(card)))
    table = Table("card", "fits", title="cards", title_justify="left")
    for gigabytes in CARDS:
        enough = fitting(plan, gigabytes * 10**9)
        changes = [step.change for step in enough or () if step.change]
        answer = "no" if enough is None else f"with {', '.join(changes)}" if changes else "yes"
        table.add_row(f"{gigabytes} GB", answer)
    return [table]


def card_bytes(text: str) -> float:
    """Bytes of a card's memory as `--memory` is written. Raises BadParameter for what is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:GB)?", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise typer.BadParameter(f"{text!r} is no size of memory; write for example 24GB", param_hint="--memory")
    return float(match[1]) * 10**9


def _changes_table(found: Sequence[Step], enough: Sequence[Step] | None, card: str) -> list[RenderableType]:
    """The changes in their order, with the estimate after each, and whether that is enough."""
    listed = found if enough is None else enough
    table = Table("change", "estimate", title=f"on {card}", title_justify="left")
    for step in listed:
        table.add_row(safe(step.change) or "as it is", size(step.num_bytes))
    if enough is None:
        return [table, "it does not fit with all of these; sample smaller pictures, or lower model.lora.rank"]
    return [table, "it fits" + (f" with the {len(enough) - 1} changes above" if len(enough) > 1 else " as it is")]


def _plan_table(config: Config, cost: Plan) -> Table:
    from genrl.diffusion.config.shares import even

    sampling = config.sampling
    mean = "" if cost.trained_steps.is_integer() else " on average"
    step = f" x {cost.guidance} (guidance)" if cost.guidance > 1 else ""
    each = cost.sample_calls / cost.guidance / cost.images
    shared = each != sampling.num_inference_steps  # by trees, or by a tail in fewer steps
    calls = f"{number(each)} calls" if shared else f"{sampling.num_inference_steps} steps"
    table = Table(title="one iteration", title_justify="left", show_header=False)
    prompts = f"{sampling.prompts_per_iteration} prompts x {sampling.group_size} each"
    table.add_row("samples", f"{cost.images:,}", prompts)
    shares = [str(count * config.distributed.context) for count in islice(even(config), SHOWN + 1)]
    more = ", ..." if len(shares) > SHOWN else ""
    equal = f"; equal work for {', '.join(shares[:SHOWN])}{more} processes" if len(shares) > 1 else ""
    table.add_row("micro-batches", f"{cost.micro_batches:,}", f"of {sampling.batch_size} samples{equal}")
    table.add_row(
        "model calls, sampling",
        number(cost.sample_calls),
        f"{cost.images} samples x {calls}{step}{mean if shared else ''}",
    )
    table.add_row(
        "model calls, training",
        number(cost.train_calls),
        f"{number(cost.trained_steps)} trained steps{mean}; {number(cost.backward_calls)} "
        f"{'of sampling ' if cost.kept else ''}with gradient cost about 3 times",
    )
    table.add_row("optimiser steps", number(config.optimizer_steps / config.iterations), "")
    table.add_section()
    table.add_row("iterations", f"{config.iterations:,}", f"{cost.optimizer_steps:,} optimiser steps in all")
    calls = f"{cost.evaluation_calls:,} model calls each"
    table.add_row("evaluations", f"{cost.evaluations:,}", calls if cost.evaluations else "off")
    table.add_row("model calls of the run", f"{cost.total_calls(config.iterations):,}", "forward, counted per sample")
    return table


def _component_table(components: Sequence[Component]) -> Table:
    table = Table("component", "class", "parameters", "on disk", "note", title="model", title_justify="left")
    for part in components:
        row = (part.name, part.kind, f"{part.num_parameters:,}", size(part.num_file_bytes), part.note)
        table.add_row(*map(safe, row))
    return table
