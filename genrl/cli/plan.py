"""The command `genrl plan`: how the samples of a group come about, and what that costs. No torch, no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from genrl.config import Config
    from genrl.config.estimate import Component


def add_to(app: typer.Typer) -> None:
    """Add this command to the `genrl` command."""
    app.command()(plan)


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML configuration, as for `genrl train`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the file, for example trainer.tree=null")
    ] = None,
) -> None:
    """Print the rollout tree of a configuration: its steps, branching, noise, trained edges and model calls.

    Example: `genrl plan configs/diffusion/tree_grpo.yaml sampling.group_size=81 trainer.window.size=4`

    One row is a run of steps that are alike. `states` are evaluated by the model, once each; `ways` is how many next
    states are drawn from each (what they share is run once); `noise` is the level of that draw, none where the step is
    deterministic; `trained` counts the transitions that the loss is made of. A ratio below 1 is what the shared
    beginnings save against independent rollouts with as many samples. docs/trees.md explains the settings.
    """
    from genrl.cli.tables import printable
    from genrl.config import Config, VLAConfig, load
    from genrl.config.estimate import read_components
    from genrl.config.files import model_folder

    config = load(file, overrides or ())
    if not isinstance(config, Config):
        what = "a policy" if isinstance(config, VLAConfig) else "a vision-language model"
        text = f"{file} trains {what}; the plan is one of a pipeline's samples: `genrl check` says what this run does"
        raise typer.BadParameter(text, param_hint="FILE")
    folder = model_folder(config)
    components = read_components(folder, config.model.variant) if folder else ()
    typer.echo(printable("\n".join(lines(config, components))))


def lines(config: Config, components: Sequence[Component] = ()) -> Iterator[str]:
    """What `genrl plan` prints."""
    from genrl.config.estimate import plan as estimate

    sampling, found = config.sampling, estimate(config, tuple(components))
    independent = config.trainer.independent_calls(config) * found.guidance
    yield from config.trainer.rollout(config, found.guidance)
    per = f"{sampling.prompts_per_iteration} prompts x {sampling.group_size}"
    yield from ("", f"an iteration, {per} = {found.images} images, mean of {config.iterations}:")
    yield (
        f"model calls in sampling: {_number(found.sample_calls)}, {found.sample_calls / found.images:.2f} per image; "
        f"independent rollouts: {_number(independent)}, ratio {found.sample_calls / independent:.3f}"
    )
    which = "of those in sampling" if config.trainer.keeps_graphs else "of them"
    yield (
        f"model calls in training: {_number(found.train_calls)}, {found.train_calls / found.images:.2f} per image; "
        f"{_number(found.backward_calls)} {which} with gradient"
    )
    if found.guidance > 1:
        yield "a step with guidance counts as two calls"


def _number(count: float) -> str:
    """With one decimal where it is a mean."""
    return f"{round(count, 1):,}".removesuffix(".0")
