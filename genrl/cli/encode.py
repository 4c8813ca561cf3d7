"""`genrl encode`: the encodings of a configuration's prompts, made before training."""

from __future__ import annotations

import typer

from genrl.cli.arguments import ConfigFile, Overrides, default_device, opened


def add_to(app: typer.Typer) -> None:
    """Add this command to the `genrl` command."""
    app.command()(encode)


def encode(file: ConfigFile, overrides: Overrides = None) -> None:
    """Encode all prompts of a configuration into its folder of encodings (`model.encodings`).

    Example: `genrl encode mine.yaml model.encodings=encodings`

    What is there is not encoded again. A run with `model.offload.text_encoders: encode_then_free` that finds all of its
    prompts there does not load its text encoders.
    """
    from rich.progress import Progress

    from genrl.cli.tables import console, size
    from genrl.config import check_files, load_located
    from genrl.diffusion.config.schema import Config

    config, origins = load_located(*opened(file, overrides))
    if not isinstance(config, Config):
        raise typer.BadParameter(f"{file} trains no pipeline, so there is nothing to encode", param_hint="FILE")
    check_files(config, origins)

    from genrl.diffusion import train

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("encoding", total=None)
        count, new, written = train.encode(
            config, default_device(), lambda done, total: bar.update(task, completed=done, total=total)
        )
    console.print(f"{count} prompts, {new} of them encoded now ({size(written)}): {config.model.encodings}")
