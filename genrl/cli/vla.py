"""What `genrl check`, `eval` and `export` do with a policy in simulation. No torch before a policy is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from genrl.cli.tables import add_course, console, safe, scores_table, write_scores

if TYPE_CHECKING:
    from rich.console import RenderableType

    from genrl.cli.evaluate import Options
    from genrl.vla.config.schema import VLAConfig
    from genrl.vla.evaluate import Judged


def summary(config: VLAConfig) -> list[RenderableType]:
    """What an iteration does."""
    table = Table(title="one iteration", show_header=False)
    for row in config.trainer.plan(config, config.environment.chunk or _horizon(config)):
        table.add_row(*row)
    add_course(table, config.iterations, config.evaluation.every, f"{config.evaluation.episodes:,} episodes")
    return [table]


def _horizon(config: VLAConfig) -> int | None:
    """Actions in a chunk, as the policy's folder says."""
    from genrl.config.folders import read_json

    if config.policy.new is not None:
        return config.policy.new.horizon
    if config.policy.oft is not None:
        return config.policy.oft.chunk
    path = Path(config.policy.path or "")
    settings = read_json(path / "config.json") or read_json(path / "policy" / "config.json")
    return settings.get("chunk_size") or settings.get("horizon")


def evaluate(model: Path, config: VLAConfig, options: Options) -> None:
    """Print the success of a policy (a run's newest, or a folder's) over seeded episodes, per instruction."""
    from genrl.runtime.loop.progress import Progress
    from genrl.vla.data.videos import write_clips
    from genrl.vla.evaluate import success_rates
    from genrl.vla.train import judge_policy

    given = {"episodes": options.episodes, "seed": options.seed}
    changes = {name: value for name, value in given.items() if value is not None}
    changes["videos"] = config.evaluation.videos if options.videos else 0
    settings = config.model_copy(update={"evaluation": config.evaluation.model_copy(update=changes)})
    with Progress(1, unit="episodes") as progress:
        judged = judge_policy(settings, model, progress, options.step(model))
    episodes = len(judged.success)
    console.print(_by_instruction(judged, f"{model}, {episodes} episodes of {config.environment.name}"))
    if options.videos:
        written = write_clips(options.videos, judged.clips, fps=4)
        typer.echo(f"{len(written)} films and pictures in {options.videos}")
    record: dict[str, object] = {"policy": str(model), "environment": config.environment.model_dump(mode="json")}
    record |= {"seed": settings.evaluation.seed, "episodes": episodes}
    write_scores(options.out, record | {"lost": judged.lost}, success_rates(judged))
    if judged.lost > LOST * (episodes + judged.lost):
        raise RuntimeError(
            f"{judged.lost} of {episodes + judged.lost} episodes were lost with their simulators, which are in no "
            "figure above: see what they say, or raise environment.timeout_s"
        )


LOST = 0.05
"""Share of lost episodes above which an evaluation fails."""


def _by_instruction(judged: Judged, title: str) -> Table:
    from genrl.runtime.show.intervals import wilson
    from genrl.vla.evaluate import by_task

    table = scores_table(title, "instruction", "success", "95 % interval", "episodes")

    def add(name: str, rate: float, episodes: int) -> None:
        low, high = wilson(round(rate * episodes), episodes)
        table.add_row(safe(name), f"{rate:.3f}", f"{low:.3f} to {high:.3f}", f"{episodes:,}")

    if not judged.measured:
        table.add_row("all", "not measured", "environment.success_key is null", f"{len(judged.success):,}")
        return table
    for name, (rate, episodes) in by_task(judged).items():
        add(name, rate, episodes)
    table.add_section()
    if judged.lost:
        table.add_row("lost with the simulator, in no rate", "", "", f"{judged.lost:,}")
    if not judged.success:
        return table
    add("all", sum(judged.success) / len(judged.success), len(judged.success))
    return table
