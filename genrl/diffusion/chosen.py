"""A pipeline as a user names it: a hub id, a folder, the run that trained one, or a loaded one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from genrl.config import load
from genrl.config.errors import command
from genrl.config.folders import looks_local, near
from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import Model
from genrl.runtime.folder import checkpoint


class Chosen(NamedTuple):
    """A pipeline and how it is called."""

    model: Model
    adapter: str | None
    """Folder or hub id of its LoRA."""
    arguments: dict[str, Any]
    """Of the pipeline call."""
    inputs: Mapping[str, str] = MappingProxyType({})
    """Those that are pictures of the prompt's row, with their columns."""


def config_of(name: str) -> Config | None:
    """The configuration of a run folder; None for a pipeline folder or hub id. Raises ValueError for neither."""
    path = Path(name)
    # runs/TYPO is written like a hub id; no hub id is beside runs. A single word may be either: the loader will say.
    local = looks_local(name) or any(path.parent.glob("*/config.yaml"))
    if not path.exists() and local and not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"{name}: no such run or folder{near(path)}")
    file = path / "config.yaml"
    config = load(file) if file.is_file() else None
    if config is not None and not isinstance(config, Config):
        raise ValueError(f"{name} is not the run of a pipeline, so no pictures can be sampled from it")
    return config


def choose(name: str, lora: str | None, dtype: str | None, given: Mapping[str, Any]) -> Chosen:
    """What the user named: of a run, its pipeline with the newest adapter, called as its evaluations are.

    given: arguments of the call, which win. Raises ValueError where there is no such run, or nothing trained in it.
    """
    config = config_of(name)
    if config is None:
        return Chosen(Model.model_validate({"path": name, "dtype": dtype or "float32"}), lora, dict(given))
    settings, evaluation = config.sampling, config.evaluation
    scale = settings.guidance_scale if evaluation.guidance_scale is None else evaluation.guidance_scale
    steps = evaluation.num_inference_steps or settings.num_inference_steps
    height, width = evaluation.height or settings.height, evaluation.width or settings.width
    arguments = call_arguments(settings.scheduled(steps), scale, height, width)
    if settings.num_frames is not None:
        arguments["num_frames"] = settings.num_frames
    adapter = lora or adapter_of(Path(name))
    model = config.model.model_copy(update={"dtype": dtype or config.model.dtype})
    return Chosen(model, adapter, arguments | settings.pipeline_args | dict(given), settings.inputs)


def call_arguments(
    num_inference_steps: int | None, guidance_scale: float | None, height: int | None, width: int | None
) -> dict[str, Any]:
    """Arguments of the pipeline call; what was not given is left to the pipeline."""
    named = {
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        "height": height,
        "width": width,
    }
    return {name: value for name, value in named.items() if value is not None}


def adapter_of(run: Path, step: int | None = None) -> str:
    """The adapter of a run's checkpoint, None = the newest. Raises ValueError where there is none."""
    folders = run / "checkpoints"
    saved = checkpoint.latest(folders) if step is None else checkpoint.of_step(folders, step)
    # RUN/lora is of the end of a run, which may have gone on since
    for folder in [*([saved / "lora"] if saved else []), *([run / "lora"] if step is None else [])]:
        if folder.is_dir():
            return str(folder)
    if saved is None:
        raise ValueError(f"{run} holds no checkpoint yet: there is nothing trained in it")
    raise ValueError(f"{run} holds no LoRA; write its pipeline by `{command('export', run)} --out FOLDER`")
