"""What `genrl check`, `eval` and `export` do with a policy in simulation. No torch before a policy is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from genrl.cli.tables import add_course, console, memory_table, safe, scores_table, write_scores
from genrl_rewards.given import is_given

if TYPE_CHECKING:
    from rich.console import RenderableType

    from genrl.cli.evaluate import Options
    from genrl.vla.config.memory_estimate import Known
    from genrl.vla.config.schema import VLAConfig
    from genrl.vla.evaluate import Judged

PROCESSES = 8
"""In how many the memory of a run in shards is counted."""


def summary(config: VLAConfig) -> list[RenderableType]:
    """What an iteration does."""
    table = Table(title="one iteration", show_header=False)
    for row in config.trainer.plan(config, config.environment.chunk or _horizon(config)):
        table.add_row(*row)
    add_course(table, config.iterations, config.evaluation.every, f"{config.evaluation.episodes:,} episodes")
    return [table]


def memory_of(config: VLAConfig, *, ask: bool = False) -> list[tuple[str, int]]:
    """(what, bytes) of the memory of one process; nothing where it is not known. ask: the hub, for a policy that is
    neither here nor known."""
    from genrl.vla.config.memory_estimate import memory

    known = _known(config, ask=ask)[0]
    return [] if known is None else memory(config, known, PROCESSES if config.distributed.fsdp else 1)


def cards(file: Path, overrides: Sequence[str], config: VLAConfig, card: float | None) -> list[RenderableType]:
    """The memory of one process, and which cards the run fits on; with `card`, in bytes, the changes one by one. Of a
    policy whose size is not known, why."""
    from genrl.cli.tables import card_tables
    from genrl.vla.config.memory_estimate import changes, memory

    known, why = _known(config, ask=True)
    if known is None:
        return [f"memory: not estimated, because {safe(why)}"]
    count = PROCESSES if config.distributed.fsdp else 1

    def peak(changed: VLAConfig) -> int:
        return sum(num_bytes for _, num_bytes in memory(changed, known, count))

    table = memory_table(memory(config, known, count))
    of = [f"of one of {count} processes"] if count > 1 else []
    otherwise = "train in several processes (distributed.fsdp), or act in fewer environment.num_envs"
    return [table, *of, *card_tables(file, overrides, changes(config), peak, card, otherwise)]


@cache
def _asked(source: str) -> tuple[Known | None, str]:
    """The policy of a hub id by its JSON files and headers; or why it is not known."""
    from genrl.config.folders import from_hub
    from genrl.vla.config.memory_estimate import in_folder

    with TemporaryDirectory() as place:
        try:
            return in_folder(from_hub(source, None, Path(place))), f"the type of {source} is not counted"
        except OSError as error:
            return None, f"{source} is not on this machine, and {error}"


def _known(config: VLAConfig, *, ask: bool) -> tuple[Known | None, str]:
    """The policy of a run by its weights' shapes; or why it is not known."""
    from genrl.config.folders import is_hub_id
    from genrl.vla.config.memory_estimate import in_folder, published

    source = config.policy.path
    if source is None or is_given(source) or config.trainer.rows_per_pass is None:
        return None, "it is for policies with a folder, and methods that train on decisions or frames"
    folder = next(
        (f for f in (Path(source).expanduser(), Path(source) / "policy") if (f / "config.json").is_file()), None
    )
    if folder is not None:
        return in_folder(folder), f"a policy of {folder} is small, or of a type that is not counted"
    if known := published(source):
        return known, ""
    return _asked(source) if ask and is_hub_id(source) else (None, f"{source} is not on this machine")


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
    from genrl.runtime.show.compare.statistics import wilson
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
