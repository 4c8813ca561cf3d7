"""What `genrl check`, `eval` and `export` do with a vision-language model's run."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from pydantic import BaseModel

if TYPE_CHECKING:
    from genrl.config import VLMConfig
    from genrl.config.errors import Origins


def print_check(config: VLMConfig, origins: Origins, notes: list[str]) -> None:
    """Remarks, what an iteration does, and what the method is made of."""
    from rich.table import Table

    from genrl.cli.tables import console, safe

    console.print("[green]valid[/green]")
    for note in notes:
        console.print(f"[yellow]{safe(note)}[/yellow]")
    if config.environment is not None:
        from genrl.vlm.environments.opening import open_environment

        open_environment(config.environment).close()  # raises for what cannot be opened
    method, table = config.trainer, Table(title="one iteration", show_header=False)
    for row in method.iteration(config):
        table.add_row(*map(safe, row))
    table.add_row("iterations", f"{config.iterations:,}", "")
    every = config.evaluation.every
    number = 1 + math.ceil(config.iterations / every) if every else 0
    asked = "episodes" if method.acts else "questions"
    table.add_row("evaluations", f"{number:,}", f"of {config.evaluation.questions:,} {asked}" if every else "off")
    console.print(table)
    recipe = method.recipe(config)
    made = Table(title=f"the method ({safe(method.name)})", title_justify="left", show_header=False)
    for field in dataclasses.fields(recipe) if recipe is not None else ():
        value = getattr(recipe, field.name)
        if value not in ((), None, False, ""):
            made.add_row(field.name, safe(written(value)))
    if made.row_count:
        console.print(made)


def written(value: Any) -> str:
    """A function, or several, as YAML has them."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(written, value)) + "]"
    if not isinstance(value, BaseModel):
        return str(value)
    constants = [f"{key}: {one}" for key, one in value.model_dump(mode="json").items() if one is not None]
    return "{" + ", ".join(constants) + "}"


def evaluate(model: Path, config: VLMConfig, *, questions: int | None, out: Path | None) -> None:
    """Accuracy of a model (a run's newest, or a folder's) on held-out questions, with its interval."""
    import torch
    from rich.table import Table

    from genrl.cli.tables import console, safe
    from genrl.runtime.progress import Progress
    from genrl.vlm.evaluate import figures, judge, shows_pictures
    from genrl.vlm.policies.contract import SequencePolicy
    from genrl.vlm.policies.folder import load_trained, open_policy
    from genrl.vlm.rollout import artefacts
    from genrl.vlm.rollout.data import Questions
    from genrl.vlm.rollout.rollout import open_rewards

    if questions is not None:
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"questions": questions})})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_run = (model / "config.yaml").is_file()
    policy = load_trained(config, model, device=device) if is_run else open_policy(config, device, str(model))
    asked = Questions(config, "eval")
    opened = open_rewards(config)
    blind = config.evaluation.blind and shows_pictures(asked) and not isinstance(policy, SequencePolicy)
    with Progress(1, unit="answers") as progress:
        progress.phase("evaluating", len(asked) * (1 + blind))
        numbers = range(len(asked))
        if isinstance(policy, SequencePolicy):
            found = artefacts.judge(policy, config, opened, asked, numbers, advance=progress.advance)
        else:
            found = judge(policy, config, opened, asked, numbers, advance=progress.advance)
        scores = figures(config, found)
        if blind:
            unseen = judge(policy, config, opened, asked, range(len(asked)), blind=True, advance=progress.advance)
            scores["eval/accuracy_blind"] = figures(config, unseen)["eval/accuracy_mean"]
    table = Table("", "mean", "95 % interval", title=safe(f"{model}, {len(asked)} questions"), title_justify="left")
    low, high = scores["eval/accuracy_low"], scores["eval/accuracy_high"]
    table.add_row("right answers", f"{scores['eval/accuracy_mean']:.3f}", f"{low:.3f} to {high:.3f}")
    if blind:
        table.add_row("with black pictures", f"{scores['eval/accuracy_blind']:.3f}", "")
    for label in (*config.reward_labels, "total"):
        table.add_row(safe(label), f"{scores[f'eval/{label}_mean']:.3f}", "")
    console.print(table)
    if out:
        from genrl.runtime.run import write_atomic

        record = {"model": str(model), "task": config.task.model_dump(mode="json"), "questions": len(asked)}
        finite = {name: value if math.isfinite(value) else None for name, value in scores.items()}
        write_atomic(out, json.dumps(record | {"scores": finite}, indent=1) + "\n")


def evaluate_agent(
    model: Path, config: VLMConfig, *, episodes: int | None, out: Path | None, films: Path | None
) -> None:
    """Success of a model (a run's newest, or a folder's) in held-out episodes, with its interval; strips of pictures of
    the first ones go into the folder `films`."""
    import torch
    from rich.table import Table

    from genrl.cli.tables import console, safe
    from genrl.runtime.pictures import save_png
    from genrl.runtime.progress import Progress
    from genrl.vlm.environments.hosts import open_host
    from genrl.vlm.episodes.episodes import Table as Slots
    from genrl.vlm.episodes.evaluate import FILMED, figures_of, judge
    from genrl.vlm.episodes.opening import settings_of
    from genrl.vlm.policies.folder import load_trained
    from genrl.vlm.policies.policy import Policy

    settings, number = settings_of(config), episodes or config.evaluation.questions
    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_run = (model / "config.yaml").is_file()
    policy = load_trained(config, model, device=device) if is_run else Policy(str(model), device=device)
    host = open_host(settings)
    try:
        with Progress(1, unit="episodes") as progress:
            progress.phase("acting", number)
            shown = FILMED if films else 0
            slots = Slots(settings, host)
            found = judge(policy, config, slots, range(number), films=shown, advance=progress.advance)
    finally:
        host.close()
    scores = figures_of(found)
    table = Table("", "mean", "95 % interval", title=safe(f"{model}, {number} episodes"), title_justify="left")
    table.add_row(
        "success",
        f"{scores['eval/success_mean']:.3f}",
        f"{scores['eval/success_low']:.3f} to {scores['eval/success_high']:.3f}",
    )
    for name, value in scores.items():
        if name.endswith("_mean") and name != "eval/success_mean":
            table.add_row(safe(name.removeprefix("eval/").removesuffix("_mean")), f"{value:.3f}", "")
    console.print(table)
    if films:
        films.mkdir(parents=True, exist_ok=True)
        for place, (film, _) in enumerate(found.films):
            save_png(film, films / f"episode-{place:02d}.png")
        typer.echo(f"{len(found.films)} strips of episodes in {films}")
    if out:
        from genrl.runtime.run import write_atomic

        record = {"model": str(model), "environment": settings.model_dump(mode="json"), "episodes": number}
        write_atomic(out, json.dumps(record | {"scores": scores}, indent=1) + "\n")


def is_model(path: Path) -> bool:
    """Whether a folder holds a vision-language model as transformers saves it."""
    file = path / "config.json"
    if not file.is_file():
        return False
    try:
        return "vision_config" in json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False


def export(run: Path, config: VLMConfig, out: Path, step: int | None, *, full: bool) -> Path:
    """The model of a run's checkpoint as transformers saves it; of a LoRA the adapter, or with `full` merged."""
    from genrl.vlm.policies.folder import load_trained, save_model

    if out.exists() and any(out.iterdir()):
        raise typer.BadParameter(f"{out} is not empty: give a new folder", param_hint="--out")
    return save_model(load_trained(config, run, step), config.vlm.path, out, full=full)
