"""What `genrl check` and `eval` do with a vision-language model: one that answers questions, or an agent."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from genrl.cli.arguments import default_device
from genrl.cli.tables import add_course, console, safe, scores_table, write_scores

if TYPE_CHECKING:
    from rich.console import RenderableType

    from genrl.cli.evaluate import Options
    from genrl.config import VLMConfig
    from genrl.config.errors import Origins


def summary(config: VLMConfig, origins: Origins) -> list[RenderableType]:
    """What an iteration does, and what the method is made of. Raises ConfigError as `preset_of`, and ValueError for an
    environment that cannot be opened."""
    from genrl.vlm.methods.compose import preset_of
    from genrl.vlm.methods.recipe import extra_forwards

    preset = preset_of(config, origins)
    generation, trainer, table = config.generation, config.trainer, Table(title="one iteration", show_header=False)
    answers = _add_answers(table, config, preset.advantage)
    table.add_row("tokens", f"{answers * generation.max_new_tokens:,} at most", f"{generation.max_new_tokens} of each")
    table.add_row("updates", f"{trainer.updates * trainer.epochs:,}", f"{trainer.epochs} passes")
    for forward in extra_forwards(preset):
        table.add_row("further forward", forward.extra, f"picture: {forward.image}, model: {forward.model}")
    asked = "questions" if config.environment is None else "episodes"
    add_course(table, config.iterations, config.evaluation.every, f"{config.evaluation.questions:,} {asked}")
    method = Table(title=f"the method ({trainer.preset})", title_justify="left", show_header=False)
    for name, value in vars(preset).items():
        if value not in ((), None, False, ""):
            method.add_row(name, safe(_choice(value)))
    return [table, method]


def _add_answers(table: Table, config: VLMConfig, advantage: object) -> int:
    """The row of what the model generates in an iteration; returns how many answers that are."""
    from genrl.vlm.methods.recipe import CriticAdvantage

    starts, each, env = config.generation.prompts_per_iteration, config.generation.group_size, config.environment
    if env is None:
        table.add_row("answers", f"{starts * each:,}", f"{starts} questions x {each}")
        return starts * each
    from genrl.vlm.environments.opening import open_environment

    open_environment(env).close()  # raises for what cannot be opened
    if isinstance(advantage, CriticAdvantage):
        steps = env.parallel * env.steps
        table.add_row("steps", f"{steps:,}", f"{env.parallel} episodes side by side x {env.steps}, {env.name}")
        return steps
    table.add_row("episodes", f"{starts * each:,}", f"{starts} starts x {each}, {env.name}")
    return starts * each


def _choice(value: Any) -> str:
    """A part of the method as YAML has it."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_choice, value)) + "]"
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return str(value)
    parts: dict[str, Any] = vars(value)
    parts = {"name": parts["name"], **parts}
    return "{" + ", ".join(f"{key}: {_choice(part)}" for key, part in parts.items() if part is not None) + "}"


def evaluate(model: Path, config: VLMConfig, options: Options) -> None:
    """Print the accuracy of a model (a run's newest, or a folder's) on held-out questions, with its interval."""
    from genrl.runtime.progress import Progress
    from genrl.vlm.evaluate import figures, judge, shows_pictures
    from genrl.vlm.policies.folder import load_trained, open_policy
    from genrl.vlm.rollout import artefacts
    from genrl.vlm.rollout.data import Questions
    from genrl.vlm.rollout.rollout import open_rewards

    if options.num_prompts is not None:
        evaluation = config.evaluation.model_copy(update={"questions": options.num_prompts})
        config = config.model_copy(update={"evaluation": evaluation})
    device = default_device()
    is_run = (model / "config.yaml").is_file()
    policy = load_trained(config, model, device=device) if is_run else open_policy(config, device, str(model))
    asked = Questions(config, "eval")
    rewards = open_rewards(config)
    blind = config.evaluation.blind and config.vlm.output == "text" and shows_pictures(asked)
    with Progress(1, unit="answers") as progress:
        progress.phase("evaluating", len(asked) * (1 + blind))
        ask = judge if config.vlm.output == "text" else artefacts.judge
        judged = ask(policy, config, rewards, asked, range(len(asked)), advance=progress.advance)
        scores = figures(config, judged)
        if blind:
            unseen = judge(policy, config, rewards, asked, range(len(asked)), blind=True, advance=progress.advance)
            scores["eval/accuracy_blind"] = figures(config, unseen)["eval/accuracy_mean"]
    table = _table_of("right answers", "eval/accuracy", scores, f"{model}, {len(asked)} questions")
    if blind:
        table.add_row("with black pictures", f"{scores['eval/accuracy_blind']:.3f}", "")
    for label in (*config.reward_labels, "total"):
        table.add_row(safe(label), f"{scores[f'eval/{label}_mean']:.3f}", "")
    console.print(table)
    record = {"model": str(model), "task": config.task.model_dump(mode="json"), "questions": len(asked)}
    write_scores(options.out, record, scores)


def evaluate_agent(model: Path, config: VLMConfig, options: Options) -> None:
    """Print the success of a model (a run's newest, or a folder's) in held-out episodes, with its interval; strips of
    pictures of the first ones go into the folder `options.videos`."""
    from genrl.runtime.pictures import save_png
    from genrl.runtime.progress import Progress
    from genrl.vlm.environments.hosts import open_host
    from genrl.vlm.methods.agents.episodes import Table as Slots
    from genrl.vlm.methods.agents.evaluate import FILMED, figures_of, judge
    from genrl.vlm.methods.agents.train import settings_of
    from genrl.vlm.policies.folder import load_trained
    from genrl.vlm.policies.policy import Policy

    settings, number, films = settings_of(config), options.episodes or config.evaluation.questions, options.videos
    device = default_device()
    is_run = (model / "config.yaml").is_file()
    policy = load_trained(config, model, device=device) if is_run else Policy(str(model), device=device)
    with closing(open_host(settings)) as host, Progress(1, unit="episodes") as progress:
        progress.phase("acting", number)
        shown = FILMED if films else 0
        slots = Slots(settings, host)
        judged = judge(policy, config, slots, range(number), films=shown, advance=progress.advance)
    scores = figures_of(judged)
    table = _table_of("success", "eval/success", scores, f"{model}, {number} episodes")
    for name, value in scores.items():
        if name.endswith("_mean") and name != "eval/success_mean":
            table.add_row(safe(name.removeprefix("eval/").removesuffix("_mean")), f"{value:.3f}", "")
    console.print(table)
    if films:
        films.mkdir(parents=True, exist_ok=True)
        for place, (film, _) in enumerate(judged.films):
            save_png(film, films / f"episode-{place:02d}.png")
        typer.echo(f"{len(judged.films)} strips of episodes in {films}")
    record = {"model": str(model), "environment": settings.model_dump(mode="json"), "episodes": number}
    write_scores(options.out, record, scores)


def _table_of(what: str, name: str, scores: dict[str, float], title: str) -> Table:
    """A table of scores that begins with a share and its interval."""
    table = scores_table(title, "", "mean", "95 % interval")
    table.add_row(what, f"{scores[f'{name}_mean']:.3f}", f"{scores[f'{name}_low']:.3f} to {scores[f'{name}_high']:.3f}")
    return table
