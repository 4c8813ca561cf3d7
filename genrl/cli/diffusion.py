"""What `genrl check` says of a run that trains a pipeline: the cost of an iteration, and the memory of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.table import Table

from genrl.cli.tables import memory_table, number, safe, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from genrl.diffusion.config.estimate import Component, Plan
    from genrl.diffusion.config.schema import Config

SHOWN = 8
"""Numbers of processes that are listed."""


def components_of(config: Config, *, ask: bool = False) -> tuple[Component, ...]:
    """The networks of the pipeline: of one that is not on this machine, as it was published, where that is known, or,
    if it is to be asked, as the hub's files say; else none."""
    from genrl.diffusion.config.estimate import published, read_components
    from genrl.diffusion.config.files import model_folder

    model = config.model
    if folder := model_folder(config):
        return read_components(folder, model.variant, model.without)
    if known := published(config.base):
        return tuple(part for part in known if part.name not in model.without)
    return _of_hub(config.base, model.revision, model.variant, model.without)[0] if ask else ()


@cache
def _of_hub(
    source: str, revision: str | None, variant: str | None, without: tuple[str, ...]
) -> tuple[tuple[Component, ...], str]:
    """The networks of a pipeline on the hub; or why none is known."""
    from genrl.config.folders import from_hub, is_hub_id
    from genrl.diffusion.config.estimate import read_components

    if not is_hub_id(source):
        return (), "is not on this machine"
    with TemporaryDirectory() as place:
        try:
            return read_components(from_hub(source, revision, Path(place)), variant, without), "holds no networks"
        except OSError as error:
            return (), f"is not on this machine, and {error}"


def held_out(config: Config) -> int | None:
    """Number of prompts for evaluation; None where no file says it."""
    from genrl.data.prompts import FILES, read

    source = config.prompts.eval
    if source is None or Path(source).suffix not in FILES or not Path(source).is_file():
        return None
    return len(read(source, config.prompts.column).rows)


def summary(config: Config, *, ask: bool = False) -> list[RenderableType]:
    """The plan of an iteration, the networks of the pipeline, and the memory of one process. ask: the hub, where
    nothing else says what the networks are."""
    from genrl.diffusion.config.estimate import plan
    from genrl.diffusion.config.files import model_folder
    from genrl.diffusion.config.memory_estimate import memory

    components, here = components_of(config, ask=ask), model_folder(config) is not None
    cost = plan(config, components, held_out(config))
    parts: list[RenderableType] = [_plan_table(config, cost)]
    if not components:
        if cost.guidance == 2:
            parts.append("guidance is counted as a second model call; where it is an input of the model, halve these")
        model = config.model
        why = _of_hub(config.base, model.revision, model.variant, model.without)[1] if ask and not here else ""
        why = why or ("holds no networks" if here else "is not on this machine")
        return [*parts, f"memory: not estimated, because {safe(config.model.path)} {safe(why)}"]
    if not here:
        parts.append(f"{safe(config.base)} is not on this machine: its networks are those that were published")
    parts += [_component_table(components), memory_table(memory(config, components))]
    if config.sampling.guidance_scale is None and cost.guidance == 2:
        parts.append("guidance_scale is the pipeline's default here, counted as two model calls per step")
    return parts


def cards(file: Path, overrides: Sequence[str], config: Config, card: float | None) -> list[RenderableType]:
    """Which cards the run fits on, with which changes; with `card`, in bytes, the changes one by one."""
    from genrl.cli.tables import card_tables
    from genrl.diffusion.config.memory_estimate import changes, memory

    if not (components := components_of(config, ask=True)):
        return []

    def peak(changed: Config) -> int:
        return sum(num_bytes for _, num_bytes in memory(changed, components))

    return card_tables(
        file, overrides, changes(config), peak, card, "sample smaller pictures, or lower model.lora.rank"
    )


def _plan_table(config: Config, cost: Plan) -> Table:
    from genrl.diffusion.config.combinations import even

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
