"""Arguments that several commands take, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def at_hand(name: str | None) -> str | None:
    """A name as it was typed, or what comes with genrl under it where the current folder has nothing of that name."""
    from genrl.recipes import shipped

    return str(shipped(name) or name) if name and not Path(name).exists() else name


ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="YAML configuration: mine.yaml, or hub:org/name/config.yaml."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the file, for example optimizer.lr=1e-4 ema=null."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, for example runs/quickstart.")]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Pipeline folder, hub id (org/name), or the folder of a run.", callback=at_hand
    ),
]
Lora = Annotated[str | None, typer.Option(help="LoRA folder or hub id; the default for a run is its newest adapter.")]
Best = Annotated[bool, typer.Option("--best", help="Of a run: the checkpoint of its best evaluation, not the newest.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Denoising steps; default: the run's, or the pipeline's.")]
Guidance = Annotated[float | None, typer.Option(min=0, help="Default: the run's, or the pipeline's.")]
Height = Annotated[int | None, typer.Option(min=1, help="Pixels.")]
Width = Annotated[int | None, typer.Option(min=1, help="Pixels.")]
Dtype = Literal["float32", "bfloat16", "float16"]
Precision = Annotated[Dtype | None, typer.Option(help="Default: the run's, or float32.")]


def opened(file: Path, overrides: Sequence[str] | None) -> tuple[Path, list[str]]:
    """A configuration file and the changes to it; one on the hub is fetched, and `configs/...` outside a clone is that
    of the package. Raises ValueError where it cannot be."""
    settings = list(overrides or ())
    name = file.as_posix()
    if not name.startswith("hub:"):  # hub.PREFIX, without its imports
        return Path(at_hand(str(file)) or file), settings
    from genrl.runtime.folder import hub

    local_file, needed = hub.fetch(name)
    return local_file, needed + settings


def key_values(texts: Sequence[str] | None, example: str, param_hint: str | None = None) -> dict[str, Any]:
    """The values of `key=value` texts, each written as in YAML. Raises BadParameter for any other text."""
    from genrl.config.yaml_source import SourceError, parse

    values: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"{text!r} is not key=value, for example {example}", param_hint=param_hint)
        try:
            values[name] = parse(value).value
        except SourceError as error:
            raise typer.BadParameter(f"{text!r}: the value is not YAML: {error}", param_hint=param_hint) from None
    return values


def call_arguments(
    num_inference_steps: int | None,
    guidance_scale: float | None,
    height: int | None,
    width: int | None,
    further: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Arguments of the pipeline call; what was not given is left to the pipeline. further: `key=value` texts."""
    from genrl.diffusion import chosen

    arguments = chosen.call_arguments(num_inference_steps, guidance_scale, height, width)
    return arguments | key_values(further, "num_frames=33")


def refuse(given: Mapping[str, object], what: str) -> None:
    """Raise BadParameter naming those options that were given although they mean nothing for `what`."""
    if names := [name for name, value in given.items() if value]:
        verb, pronoun = ("are", "them") if len(names) > 1 else ("is", "it")
        text = f"{', '.join(names)} {verb} not for {what}: leave {pronoun} out"
        raise typer.BadParameter(text, param_hint=names[0])


def default_device() -> str:
    """The accelerator where there is one, else the CPU."""
    from genrl.runtime.weights import devices

    return devices.default_device()


def run_config(run: Path) -> Path:
    """The configuration file of a run folder. Raises BadParameter, naming the runs nearby, for any other folder."""
    if (run / "config.yaml").is_file():
        return run / "config.yaml"
    if run.name == "config.yaml" and run.is_file():
        raise typer.BadParameter(f"{run} is a file: give the run folder, {run.parent}", param_hint="RUN")
    from genrl.config.folders import runs_in

    around = run if run.is_dir() else run.parent
    raise typer.BadParameter(f"{run} is not a run folder: it has no config.yaml{runs_in(around)}", param_hint="RUN")


def best_of(run: Path | str, lora: str | None = None) -> int:
    """The step of a run's best evaluation, which is said. Raises BadParameter where it has none, or is no run, and for
    another adapter beside it."""
    from genrl.runtime.folder import checkpoint

    refuse({"--lora": lora}, "--best, which is a run's own")
    run_config(Path(run))
    try:
        step = checkpoint.best_step(Path(run) / "checkpoints")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--best") from None
    typer.echo(f"{run}: the best evaluation's checkpoint, after {step} iterations")
    return step


def is_policy(folder: Path) -> bool:
    """Whether a folder holds a policy in LeRobot's layout, or an OpenVLA."""
    from genrl.vla.config.files import is_openvla

    config = _model_config(folder)
    return "output_features" in config or is_openvla(config)


def is_vision_language(folder: Path) -> bool:
    """Whether a folder holds a vision-language model as transformers saves it."""
    return "vision_config" in _model_config(folder)


def _model_config(folder: Path) -> dict[str, object]:
    from genrl.config.folders import read_json

    return read_json(folder / "config.json")
