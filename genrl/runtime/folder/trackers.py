"""Trackers, by accelerate: one run of theirs per run folder, also after a resume; numbers, pictures, films, tables.

The run folder's trackers.json holds what each tracker knows the run by. Without it, a resumed run is a second
one there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genrl.runtime.folder.run import Run, write_atomic

if TYPE_CHECKING:
    from PIL.Image import Image

PROJECT = "genrl"
MOST_ROWS = 1000
"""Rows of a table that are sent."""
Cell = str | float | None
Row = Sequence[Cell]


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError for an unknown tracker or a missing package, before anything is trained."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"trackers: unknown tracker {name!r}; allowed: {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
        if name in LoggerType.list() and name not in installed:
            package = name.replace("_", "-")
            raise ValueError(
                f"trackers: {name} is not installed. Run `pip install {package}`, or take it out of trackers."
            )


def start(name: str, run: Run, config: Mapping[str, object] | None, resumed_from: int) -> Any:
    """accelerate's tracker of that name, started: a new run there, or the one that trackers.json names.

    It writes into the run folder where it writes files. resumed_from: iterations done before. Raises ValueError where
    trackers.json cannot be read, or MLflow's server does not have the run that it names.
    """
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # accelerate's trackers write to a logger that needs it; shared with the Accelerator if there is one
    kind = LOGGER_TYPE_TO_CLASS[name]
    if name == "tensorboard":  # rows after the step that is resumed from are hidden; config.yaml holds the config
        tracker = kind("tensorboard", run.folder, purge_step=resumed_from + 1 if resumed_from else 0)
        tracker.start()
        return tracker
    if kind.requires_logging_directory:
        tracker = kind(run.folder.name, run.folder)
    else:
        tracker = kind(PROJECT, **_arguments(name, run))
    tracker_id = kept_ids(run).get(name)
    try:
        tracker.start()
    # SystemExit too: some of them call exit() where there is no login.
    except (Exception, SystemExit) as error:  # each package has its own
        raise ValueError(_not_started(name, error, run)) from error
    if name == "mlflow":
        _keep("mlflow", str(tracker.active_run.info.run_id), run)
    if config is not None and not (name == "mlflow" and tracker_id):  # which refuses another value of a key
        tracker.store_init_configuration(_flat(config))
    return tracker


def _arguments(name: str, run: Run) -> dict[str, str]:
    """What a tracker is started with, so that it goes on with the run that it knows."""
    title = run.folder.name
    match name:
        case "wandb":
            return {"name": title, "id": _own_id(name, run), "resume": "allow", "dir": str(run.folder)}
        case "swanlab":
            arguments = {"experiment_name": title, "id": _own_id(name, run), "resume": "allow"}
            return arguments | {"logdir": str(run.folder / "swanlog")}
        case "trackio":  # knows runs by their names, which two folders may share
            return {"name": f"{title}-{_own_id(name, run)[:6]}", "resume": "allow"}
        case "mlflow":  # chooses the id itself
            tracker_id = kept_ids(run).get(name)
            return {"run_name": title} | ({"run_id": tracker_id} if tracker_id else {})
    return {}


def _own_id(name: str, run: Run) -> str:
    """The tracker's id of this run; made and kept before it is used for the first time."""
    return kept_ids(run).get(name) or _keep(name, uuid.uuid4().hex[:21], run)


def _keep(name: str, value: str, run: Run) -> str:
    write_atomic(run.trackers, json.dumps(kept_ids(run) | {name: value}, indent=1))
    return value


def kept_ids(run: Run) -> dict[str, str]:
    """Tracker -> its id of this run, from trackers.json; {} where there is none. Raises ValueError for a broken one."""
    try:
        ids = json.loads(run.trackers.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        ids = None
    if not isinstance(ids, dict) or not all(isinstance(value, str) for value in ids.values()):
        raise ValueError(
            f"{run.trackers} cannot be read. It holds the ids by which trackers know this run: repair it, or "
            "delete it, and they begin a new run."
        )
    return ids


_LOGINS = {
    "wandb": "Run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline to send it later by `wandb sync`",
    "swanlab": "Run `swanlab login`, set SWANLAB_API_KEY, or SWANLAB_MODE=local",
    "mlflow": "Set MLFLOW_TRACKING_URI to a server that answers",
    "comet_ml": "Set COMET_API_KEY, or COMET_START_ONLINE=0",
}


def _not_started(name: str, error: BaseException, run: Run) -> str:
    tracker_id = kept_ids(run).get(name)
    if name == "mlflow" and tracker_id:
        return (
            f"trackers: MLflow does not go on with the run {tracker_id} that {run.trackers} names: {error}. Set "
            "MLFLOW_TRACKING_URI to the server that has it, or delete that file to begin a new run there."
        )
    how = _LOGINS.get(name, "Log in there as its pages say")
    reason = str(error).strip() or type(error).__name__
    return f"trackers: {name} does not start: {reason}. {how}; or take it out of trackers."


def log_picture(tracker: Any, step: int, name: str, picture: Image) -> None:
    """Hand a picture to a tracker that takes some; the others are not asked."""
    match tracker.name:
        case "tensorboard":
            import numpy as np

            tracker.log_images({name: np.asarray(picture.convert("RGB"))[None]}, step=step, dataformats="NHWC")
        case "wandb" | "swanlab":
            tracker.log_images({name: [picture]}, step=step)
        case "trackio":
            import trackio

            tracker.log({name: trackio.Image(picture)}, step=step)
        case "mlflow":
            import mlflow

            mlflow.log_image(picture, key=name, step=step)


def log_video(tracker: Any, step: int, name: str, file: Path) -> None:
    """A film in a gif file, to a tracker that takes films."""
    match tracker.name:
        case "wandb":
            import wandb

            tracker.log({name: wandb.Video(str(file), format="gif")}, step=step)
        case "swanlab":
            import swanlab

            tracker.log({name: swanlab.Video(str(file))}, step=step)
        case "trackio":
            import trackio

            tracker.log({name: trackio.Video(file)}, step=step)
        case "mlflow":
            tracker.log_artifact(str(file), artifact_path=f"{name}/step-{step:06d}")


def log_table(tracker: Any, step: int, name: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """The first `MOST_ROWS` rows, to a tracker that takes tables."""
    data = [list(row) for row in rows[:MOST_ROWS]]
    match tracker.name:
        case "tensorboard":
            lines = [columns, ["---"] * len(columns), *data]
            text = "\n".join(f"| {' | '.join(map(_in_markdown, line))} |" for line in lines)
            tracker.writer.add_text(name, text, step)
        case "wandb":
            tracker.log_table(name, columns=list(columns), data=data, step=step)
        case "swanlab":
            import swanlab

            table = swanlab.echarts.Table()
            table.add(list(columns), [[_shown(cell) for cell in row] for row in data])
            tracker.log({name: table}, step=step)
        case "trackio":
            import trackio

            tracker.log({name: trackio.Table(columns=list(columns), data=data)}, step=step)
        case "mlflow":
            import mlflow

            by_column = {column: [row[k] for row in data] for k, column in enumerate(columns)}
            mlflow.log_table(by_column, artifact_file=f"{name}/step-{step:06d}.json")


def _shown(cell: Cell) -> str:
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _in_markdown(cell: Cell) -> str:
    return " ".join(_shown(cell).replace("|", "\\|").split())


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, bool | int | float | str | None]:
    flat: dict[str, bool | int | float | str | None] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
    return flat
