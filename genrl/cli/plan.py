"""`genrl plan`: how the samples of a group come about, and what that costs. No torch, no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from genrl.cli.arguments import ConfigFile, Overrides, opened

if TYPE_CHECKING:
    from genrl.diffusion.config.estimate import Component, Plan
    from genrl.diffusion.config.schema import Config


def add_to(app: typer.Typer) -> None:
    """Add this command to the `genrl` command."""
    app.command()(plan)


def plan(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the rollout tree of a configuration: its steps, branching, noise, trained edges and model calls.

    Example: `genrl plan tree_grpo.yaml sampling.group_size=81 trainer.window.size=4`

    One row is a run of steps that are alike. `states` are evaluated by the model, once each; `ways` is how many next
    states are sampled from each (shared prefixes are computed once); `noise` is the level of the noise, none where the
    step is deterministic; `trained` counts the transitions in the loss. A ratio below 1 is what the shared prefixes
    save against independent rollouts with as many samples.
    """
    from genrl.cli.diffusion import components_of
    from genrl.cli.tables import printable
    from genrl.config import load
    from genrl.diffusion.config.schema import Config
    from genrl.vla.config.schema import VLAConfig

    config = load(*opened(file, overrides))
    if not isinstance(config, Config):
        what = "a policy" if isinstance(config, VLAConfig) else "a vision-language model"
        text = f"{file} trains {what}; a plan shows how a pipeline samples; `genrl check` says what this run does"
        raise typer.BadParameter(text, param_hint="FILE")
    typer.echo(printable("\n".join(lines(config, components_of(config)))))


def lines(config: Config, components: Sequence[Component] = ()) -> Iterator[str]:
    """What `genrl plan` prints."""
    from genrl.diffusion.config.estimate import plan as estimate

    cost = estimate(config, tuple(components))
    yield from config.trainer.rollout(config, cost.guidance)
    yield from _totals(config, cost)


def _totals(config: Config, cost: Plan) -> Iterator[str]:
    """Model calls of an iteration."""
    from genrl.cli.tables import number

    independent = cost.independent_calls
    prompts = f"{config.sampling.prompts_per_iteration} prompts x {config.sampling.group_size}"
    yield from ("", f"an iteration, {prompts} = {cost.images} images, mean of {config.iterations}:")
    yield (
        f"model calls in sampling: {number(cost.sample_calls)}, {cost.sample_calls / cost.images:.2f} per image; "
        f"independent rollouts: {number(independent)}, ratio {cost.sample_calls / independent:.3f}"
    )
    which = "of those in sampling" if cost.kept else "of them"
    yield (
        f"model calls in training: {number(cost.train_calls)}, {cost.train_calls / cost.images:.2f} per image; "
        f"{number(cost.backward_calls)} {which} with gradient"
    )
    if cost.guidance > 1:
        yield "a step with guidance counts as two calls"
