"""`genrl plan`: how the samples of a group come about, and what that costs. No torch, no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import typer

from genrl.cli.arguments import ConfigFile, Overrides

if TYPE_CHECKING:
    from genrl.config import Config
    from genrl.config.estimate import Component, Plan
    from genrl.config.plans import Round
    from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO
    from genrl.diffusion.methods.spo.settings import SPO
    from genrl.diffusion.methods.talk2move.settings import Talk2Move


@runtime_checkable
class Stochastic(Protocol):
    """Settings of a method that samples with noise: a transition kernel and its level (None: the kernel's own)."""

    kernel: str
    noise_level: float | None


def add_to(app: typer.Typer) -> None:
    """Add this command to the `genrl` command."""
    app.command()(plan)


def plan(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the rollout tree of a configuration: its steps, branching, noise, trained edges and model calls.

    Example: `genrl plan configs/diffusion/tree_grpo.yaml sampling.group_size=81 trainer.window.size=4`

    One row is a run of steps that are alike. `states` are evaluated by the model, once each; `ways` is how many next
    states are sampled from each (shared prefixes are computed once); `noise` is the level of the noise, none where the
    step is deterministic; `trained` counts the transitions in the loss. A ratio below 1 is what the shared prefixes
    save against independent rollouts with as many samples. docs/trees.md explains the settings.
    """
    from genrl.cli.tables import printable
    from genrl.config import Config, VLAConfig, load
    from genrl.config.estimate import read_components
    from genrl.config.files import model_folder

    config = load(file, overrides or ())
    if not isinstance(config, Config):
        what = "a policy" if isinstance(config, VLAConfig) else "a vision-language model"
        text = f"{file} trains {what}; a plan shows how a pipeline samples; `genrl check` says what this run does"
        raise typer.BadParameter(text, param_hint="FILE")
    folder = model_folder(config)
    components = read_components(folder, config.model.variant) if folder else ()
    typer.echo(printable("\n".join(lines(config, components))))


def lines(config: Config, components: Sequence[Component] = ()) -> Iterator[str]:
    """What `genrl plan` prints."""
    from genrl.config.estimate import plan as estimate
    from genrl.config.plans import is_flow_grpo
    from genrl.diffusion.methods.dpo_offline.settings import OfflineDPO
    from genrl.diffusion.methods.spo.settings import SPO

    trainer, sampling = config.trainer, config.sampling
    cost = estimate(config, tuple(components))
    independent = float(cost.images * sampling.num_inference_steps * cost.guidance)
    if is_flow_grpo(trainer):
        yield from _forest(config, trainer, cost.guidance)
    elif isinstance(trainer, SPO):
        text, candidates = _candidates(config, trainer, cost.guidance)
        independent *= candidates
        yield from text
    elif isinstance(trainer, OfflineDPO):
        yield "dpo_offline samples nothing: its pictures are given"
    else:
        yield from _chains(config, cost.guidance)
    yield from _totals(config, cost, independent)


def _totals(config: Config, cost: Plan, independent: float) -> Iterator[str]:
    """Model calls of an iteration. independent: those of as many rollouts that share nothing."""
    from genrl.cli.tables import number
    from genrl.config.plans import is_flow_grpo

    prompts = f"{config.sampling.prompts_per_iteration} prompts x {config.sampling.group_size}"
    yield from ("", f"an iteration, {prompts} = {cost.images} images, mean of {config.iterations}:")
    yield (
        f"model calls in sampling: {number(cost.sample_calls)}, {cost.sample_calls / cost.images:.2f} per image; "
        f"independent rollouts: {number(independent)}, ratio {cost.sample_calls / independent:.3f}"
    )
    keeps_graph = is_flow_grpo(config.trainer) and config.trainer.keep_graph
    yield (
        f"model calls in training: {number(cost.train_calls)}, {cost.train_calls / cost.images:.2f} per image; "
        f"{number(cost.backward_calls)} {'of those in sampling' if keeps_graph else 'of them'} with gradient"
    )
    if cost.guidance > 1:
        yield "a step with guidance counts as two calls"


def _forest(config: Config, trainer: FlowGRPO, guidance: int) -> Iterator[str]:
    """The trees or chains of Flow-GRPO and the methods that add to it: the first and the last shape, and a table."""
    from genrl.config.estimate import replays_per_state
    from genrl.config.plans import is_talk2move, rounds
    from genrl.mdp.plan import describe

    shapes = rounds(config, trainer)
    yield from _exit(config, trainer) if is_talk2move(trainer) else _window(config, trainer, shapes)
    replays = replays_per_state(trainer, guidance)
    for shape in dict.fromkeys((shapes[0], shapes[-1])):
        if len(shapes) > 1:
            yield from ("", _place(trainer, shape))
        yield describe(shape.plan, shape.trained, calls_per_state=guidance, replays_per_state=replays)
    if len(shapes) > 1:
        yield from ("", *_table(shapes, guidance, replays))
    yield from _remarks(trainer)


def _candidates(config: Config, trainer: SPO, guidance: int) -> tuple[list[str], int]:
    """SPO's chain, which branches at every step, in words; and how many leaves it has."""
    from genrl.config.candidates import candidate_plan
    from genrl.mdp.plan import describe

    plan = candidate_plan(config.sampling, trainer, last=trainer.kernel == "ddim")
    replays = 2 * trainer.epochs * guidance
    text = describe(plan, plan.splits, calls_per_state=guidance, replays_per_state=replays)
    note = "states whose candidates score nearly alike are not trained: training calls are at most these"
    return [text, note], plan.leaves


def _chains(config: Config, guidance: int) -> Iterator[str]:
    """Independent samples."""
    from genrl.mdp.plan import describe, make_plan

    steps, trainer = config.sampling.num_inference_steps, config.trainer
    noise = {}
    if isinstance(trainer, Stochastic):
        noise = dict.fromkeys(range(steps - 1), trainer.noise_level or 0.0)
    chains = make_plan(steps, noise=noise, roots=config.sampling.group_size)
    yield describe(chains, range(len(noise)), calls_per_state=guidance).rsplit("\n", 1)[0]
    if not noise:
        yield f"{trainer.algorithm} trains on finished samples at noise levels, not on transitions"


def _exit(config: Config, trainer: Talk2Move) -> Iterator[str]:
    """Where the chain is left, in words."""
    from genrl.config.plans import exit_calls, latest_exit

    steps = config.sampling.num_inference_steps
    last = latest_exit(trainer, steps)
    calls = exit_calls(trainer, steps, last)
    yield f"{steps} steps, of which the first {last} are run, with noise; then a shortcut of {calls - last}"
    if trainer.exit_step is None:
        yield "the exit step is found by step_evaluation: all numbers are at most these"


def _window(config: Config, trainer: FlowGRPO, shapes: Sequence[Round]) -> Iterator[str]:
    """Where the noise is, in words."""
    window, steps = trainer.window, config.sampling.num_inference_steps
    if window is None:
        yield f"{steps} steps, all but the last with noise"
        return
    place = {
        "random": "sampled in each iteration, all places equally likely",
        "geometric": f"sampled in each iteration, each place {window.ratio:g} times as likely as the one before",
        "progressive": f"moving by {window.stride} every {window.every} iterations",
        "decaying": f"moving by {window.stride} every {window.every} iterations, faster after step {window.decay_from}",
        "backward": f"the last {window.shortest or window.size} steps before step {{}} at first, {window.size} at last",
    }[window.schedule].format(steps - 1 if window.high is None else window.high)
    yield f"{steps} steps, with noise in a window of {window.size}, {place if len(shapes) > 1 else 'which stays'}"
    if trainer.noise_outside_window:
        yield "the steps outside the window also have noise, and are not trained"


def _remarks(trainer: FlowGRPO) -> Iterator[str]:
    """What the table cannot say."""
    tree = trainer.tree
    if tree is not None and (tree.contrast is not None or (tree.prune is not None and tree.prune.width is not None)):
        yield "which leaves are trained depends on their scores: training calls are at most these"
    if trainer.layer_tuning is not None and trainer.layer_tuning.target == "best_path":
        yield "layer_tuning evaluates the best path once more, one state per trained step, before the updates"


def _place(trainer: FlowGRPO, shape: Round) -> str:
    """Title of a shape."""
    share = f"steps {_steps(shape.trained)} trained, in {shape.share:.1%} of the iterations"
    if trainer.window is not None and trainer.window.schedule in ("random", "geometric"):
        return f"{share} (expected)"
    return f"{share}, first in {shape.first}"


def _table(shapes: Sequence[Round], guidance: int, replays: int) -> Iterator[str]:
    """All shapes, one line each."""
    yield f"{'share':>6}  {'trained':>9}  {'calls':>7}  {'per image':>9}  {'ratio':>5}  {'training':>8}"
    for shape in shapes:
        calls, training = shape.plan.calls * guidance, shape.plan.training_calls(shape.trained) * replays
        yield (
            f"{shape.share:>6.1%}  {_steps(shape.trained):>9}  {calls:>7}  {calls / shape.plan.leaves:>9.2f}  "
            f"{shape.plan.calls / shape.plan.independent_calls:>5.3f}  {training:>8}"
        )


def _steps(steps: Sequence[int]) -> str:
    """0-2,5 and the like."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
