"""What `genrl check`, `eval` and `export` do with a policy's run. No torch before a policy is loaded."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from genrl.config import VLAConfig
    from genrl.vla.evaluate import Judged


def print_check(config: VLAConfig, notes: list[str]) -> None:
    """Remarks, and what an iteration does."""
    from rich.table import Table

    from genrl.cli.tables import console, safe

    console.print("[green]valid[/green]")
    for note in notes:
        console.print(f"[yellow]{safe(note)}[/yellow]")
    table = Table(title="one iteration", show_header=False)
    for row in config.trainer.plan(config, config.environment.chunk or _horizon(config)):
        table.add_row(*row)
    table.add_row("iterations", f"{config.iterations:,}", "")
    every = config.evaluation.every
    number = 1 + math.ceil(config.iterations / every) if every else 0
    table.add_row("evaluations", f"{number:,}", f"of {config.evaluation.episodes:,} episodes" if every else "off")
    console.print(table)


def _horizon(config: VLAConfig) -> int | None:
    """Actions of a chunk, as the policy's folder says."""
    if config.policy.new is not None:
        return config.policy.new.horizon
    path = Path(config.policy.path or "")
    file = next((f for f in (path / "config.json", path / "policy" / "config.json") if f.is_file()), None)
    found = json.loads(file.read_text(encoding="utf-8")) if file else {}
    return found.get("chunk_size") or found.get("horizon")


def is_policy(path: Path) -> bool:
    """Whether a folder holds a policy in LeRobot's layout."""
    file = path / "config.json"
    if not file.is_file():
        return False
    try:
        return "output_features" in json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False


def evaluate(
    model: Path, config: VLAConfig, *, episodes: int | None, seed: int | None, out: Path | None, videos: Path | None
) -> None:
    """Success of a policy (a run's newest, or a folder's) over seeded episodes, per instruction, with intervals."""
    from genrl.cli.tables import console
    from genrl.runtime.progress import Progress
    from genrl.vla.data.videos import write_clips
    from genrl.vla.evaluate import success_rates
    from genrl.vla.train import judge_policy

    changes: dict[str, object] = {} if episodes is None else {"episodes": episodes}
    changes |= {} if seed is None else {"seed": seed}
    changes |= {"videos": config.evaluation.videos if videos else 0}
    settings = config.model_copy(update={"evaluation": config.evaluation.model_copy(update=changes)})
    with Progress(1, unit="episodes") as progress:
        found = judge_policy(settings, model, progress)
    console.print(_table(found, f"{model}, {len(found.success)} episodes of {config.environment.name}"))
    if videos:
        written = write_clips(videos, found.clips, fps=4)
        typer.echo(f"{len(written)} films and pictures in {videos}")
    if out:
        from genrl.runtime.run import write_atomic

        record: dict[str, object] = {"policy": str(model), "environment": config.environment.model_dump(mode="json")}
        record |= {"seed": settings.evaluation.seed, "episodes": len(found.success), "scores": success_rates(found)}
        write_atomic(out, json.dumps(record, indent=1) + "\n")


def _table(found: Judged, title: str) -> object:
    from rich.table import Table

    from genrl.cli.tables import safe
    from genrl.runtime.intervals import wilson
    from genrl.vla.evaluate import by_task

    table = Table("instruction", "success", "95 % interval", "episodes", title=safe(title), title_justify="left")
    for text, (rate, number) in by_task(found).items():
        low, high = wilson(round(rate * number), number)
        table.add_row(safe(text), f"{rate:.3f}", f"{low:.3f} to {high:.3f}", f"{number:,}")
    table.add_section()
    low, high = wilson(sum(found.success), len(found.success))
    rate = sum(found.success) / len(found.success)
    table.add_row("all", f"{rate:.3f}", f"{low:.3f} to {high:.3f}", f"{len(found.success):,}")
    return table


def export(run: Path, out: Path, step: int | None) -> Path:
    """The policy of a run's checkpoint as a folder in LeRobot's layout; DPPO's frozen half in its `first_steps`."""
    from genrl.vla.policies.folder import FIRST_STEPS, save_policy
    from genrl.vla.setup import load_trained

    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: give a new folder")
    save_policy(load_trained(run, step=step), out)
    if (run / "policy" / FIRST_STEPS).is_dir():
        shutil.copytree(run / "policy" / FIRST_STEPS, out / FIRST_STEPS)
    return out
