"""Arguments that several commands take, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

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
    str, typer.Argument(metavar="MODEL", help="Pipeline folder, hub id (org/name), or the folder of a run.")
]
Lora = Annotated[str | None, typer.Option(help="LoRA folder or hub id; the default for a run is its newest adapter.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Denoising steps; default: the run's, or the pipeline's.")]
Guidance = Annotated[float | None, typer.Option(min=0, help="Default: the run's, or the pipeline's.")]
Height = Annotated[int | None, typer.Option(min=1, help="Pixels.")]
Width = Annotated[int | None, typer.Option(min=1, help="Pixels.")]
Dtype = Literal["float32", "bfloat16", "float16"]
Precision = Annotated[Dtype | None, typer.Option(help="Default: the run's, or float32.")]


def opened(file: Path, overrides: Sequence[str] | None) -> tuple[Path, list[str]]:
    """A configuration file and the changes to it; one on the hub is fetched. Raises ValueError where it cannot be."""
    given = list(overrides or ())
    name = file.as_posix()
    if not name.startswith("hub:"):  # hub.PREFIX, without its imports
        return file, given
    from genrl.runtime.folder import hub

    found, needed = hub.fetch(name)
    return found, needed + given


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
