"""Folders that commands are given: of runs, of models, and new ones; and what to say of a name that is none."""

from __future__ import annotations

from pathlib import Path

import typer


def run_config(run: Path) -> Path:
    """The configuration file of a run folder. Raises BadParameter, naming the runs nearby, for any other folder."""
    if (run / "config.yaml").is_file():
        return run / "config.yaml"
    if run.name == "config.yaml" and run.is_file():
        raise typer.BadParameter(f"{run} is a file: give the run folder, {run.parent}", param_hint="RUN")
    from genrl.config.folders import runs_in

    around = run if run.is_dir() else run.parent
    raise typer.BadParameter(f"{run} is not a run folder: it has no config.yaml{runs_in(around)}", param_hint="RUN")


def best_of(run: Path | str) -> int:
    """The step of a run's best evaluation, which is said. Raises BadParameter where it has none, or is no run."""
    from genrl.runtime.folder import checkpoint

    run_config(Path(run))
    try:
        step = checkpoint.best_step(Path(run) / "checkpoints")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--best") from None
    typer.echo(f"{run}: the best evaluation's checkpoint, after {step} iterations")
    return step


def check_new(out: Path) -> None:
    """Raise BadParameter where the folder to write has something in it."""
    if out.exists() and any(out.iterdir()):
        raise typer.BadParameter(f"{out} is not empty: give a new folder", param_hint="--out")


def is_policy(folder: Path) -> bool:
    """Whether a folder holds a policy in LeRobot's layout, or an OpenVLA."""
    from genrl.vla.config.openvla import is_openvla

    config = _model_config(folder)
    return "output_features" in config or is_openvla(config)


def is_vision_language(folder: Path) -> bool:
    """Whether a folder holds a vision-language model as transformers saves it."""
    return "vision_config" in _model_config(folder)


def _model_config(folder: Path) -> dict[str, object]:
    from genrl.config.folders import read_json

    return read_json(folder / "config.json")
