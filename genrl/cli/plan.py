"""The command `genrl plan`: how the samples of a group come about, and what that costs. No torch, no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from genrl.config import Config
    from genrl.config.estimate import Component
    from genrl.config.plans import Round
    from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO
    from genrl.diffusion.methods.talk2move.settings import Talk2Move


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
    from genrl.config.candidates import candidate_plan
    from genrl.config.estimate import plan as estimate
    from genrl.config.estimate import replays_per_state
    from genrl.config.plans import is_flow_grpo, is_talk2move, rounds
    from genrl.mdp.plan import describe, make_plan

    trainer, sampling = config.trainer, config.sampling
    found = estimate(config, tuple(components))
    drawn = {"calls_per_state": found.guidance}
    independent = float(found.images * sampling.num_inference_steps * found.guidance)
    if is_flow_grpo(trainer):
        trains = rounds(config, trainer)
        yield from _exit(config, trainer) if is_talk2move(trainer) else _window(config, trainer, trains)
        replays = replays_per_state(trainer, found.guidance)
        for one in dict.fromkeys((trains[0], trains[-1])):
            if len(trains) > 1:
                yield from ("", _place(trainer, one))
            yield describe(one.plan, one.trained, **drawn, replays_per_state=replays)
        if len(trains) > 1:
            yield from ("", *_table(trains, found.guidance, replays))
        yield from _remarks(trainer)
    elif trainer.algorithm == "spo":
        crawl = candidate_plan(sampling, trainer, last=trainer.kernel == "ddim")
        independent *= crawl.leaves
        replays = 2 * trainer.epochs * found.guidance
        yield describe(crawl, crawl.splits, **drawn, replays_per_state=replays)
        yield "states whose candidates score nearly alike are not trained: training calls are at most these"
    elif trainer.algorithm == "dpo_offline":
        yield "dpo_offline samples nothing: its pictures are given"
    else:
        steps, level = sampling.num_inference_steps, getattr(trainer, "noise_level", None)
        trained = range(steps - 1) if hasattr(trainer, "kernel") else range(0)
        chains = make_plan(steps, noise=dict.fromkeys(trained, level or 0.0), roots=sampling.group_size)
        yield describe(chains, trained, **drawn).rsplit("\n", 1)[0]
        if not trained:
            yield f"{trainer.algorithm} trains on finished samples at noise levels, not on transitions"
    per = f"{sampling.prompts_per_iteration} prompts x {sampling.group_size}"
    yield from ("", f"an iteration, {per} = {found.images} images, mean of {config.iterations}:")
    yield (
        f"model calls in sampling: {_number(found.sample_calls)}, {found.sample_calls / found.images:.2f} per image; "
        f"independent rollouts: {_number(independent)}, ratio {found.sample_calls / independent:.3f}"
    )
    kept = is_flow_grpo(trainer) and trainer.keep_graph
    yield (
        f"model calls in training: {_number(found.train_calls)}, {found.train_calls / found.images:.2f} per image; "
        f"{_number(found.backward_calls)} {'of those in sampling' if kept else 'of them'} with gradient"
    )
    if found.guidance > 1:
        yield "a step with guidance counts as two calls"


def _exit(config: Config, trainer: Talk2Move) -> Iterator[str]:
    """Where the chain is left, in words."""
    from genrl.config.plans import exit_calls, latest_exit

    steps = config.sampling.num_inference_steps
    last = latest_exit(trainer, steps)
    calls = exit_calls(trainer, steps, last)
    yield f"{steps} steps, of which the first {last} are run, with noise; then a shortcut of {calls - last}"
    if trainer.exit_step is None:
        yield "the exit step is found by step_evaluation: all numbers are at most these"


def _window(config: Config, trainer: FlowGRPO, trains: Sequence[Round]) -> Iterator[str]:
    """Where the noise is, in words."""
    window, steps = trainer.window, config.sampling.num_inference_steps
    if window is None:
        yield f"{steps} steps, all but the last with noise"
        return
    place = {
        "random": "drawn in each iteration, all places alike",
        "geometric": f"drawn in each iteration, each place {window.ratio:g} times as likely as the one before",
        "progressive": f"moving by {window.stride} every {window.every} iterations",
        "decaying": f"moving by {window.stride} every {window.every} iterations, faster after step {window.decay_from}",
        "backward": f"the last {window.shortest or window.size} steps before step {{}} at first, {window.size} at last",
    }[window.schedule].format(steps - 1 if window.high is None else window.high)
    yield f"{steps} steps, with noise in a window of {window.size}, {place if len(trains) > 1 else 'which stays'}"
    if trainer.noise_outside_window:
        yield "the steps outside the window have noise, too, and are not trained"


def _remarks(trainer: FlowGRPO) -> Iterator[str]:
    """What the table cannot say."""
    tree = trainer.tree
    if tree is not None and (tree.contrast is not None or (tree.prune is not None and tree.prune.width is not None)):
        yield "which leaves are trained depends on their scores: training calls are at most these"
    if trainer.layer_tuning is not None and trainer.layer_tuning.target == "best_path":
        yield "layer_tuning evaluates the best path once more, one state per trained step, before the updates"


def _place(trainer: FlowGRPO, one: Round) -> str:
    """Title of a shape."""
    if trainer.window is not None and trainer.window.schedule in ("random", "geometric"):
        return f"steps {_steps(one.trained)} trained, in {one.share:.1%} of the iterations (expected)"
    return f"steps {_steps(one.trained)} trained, in {one.share:.1%} of the iterations, first in {one.first}"


def _table(trains: Sequence[Round], guidance: int, replays: int) -> Iterator[str]:
    """All shapes, one line each."""
    yield f"{'share':>6}  {'trained':>9}  {'calls':>7}  {'per image':>9}  {'ratio':>5}  {'training':>8}"
    for one in trains:
        calls, training = one.plan.calls * guidance, one.plan.training_calls(one.trained) * replays
        yield (
            f"{one.share:>6.1%}  {_steps(one.trained):>9}  {calls:>7}  {calls / one.plan.leaves:>9.2f}  "
            f"{one.plan.calls / one.plan.independent_calls:>5.3f}  {training:>8}"
        )


def _steps(steps: Sequence[int]) -> str:
    """0-2, 5 and the like."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _number(count: float) -> str:
    """With one decimal where it is a mean."""
    return f"{round(count, 1):,}".removesuffix(".0")
