"""`genrl init` and `genrl demo`: the recipes that come with the package."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genrl.cli.arguments import Overrides

if TYPE_CHECKING:
    from genrl.recipes import Recipe

TASKS = ("pictures", "edits", "videos", "language and vision", "tokens", "robots")
LOCAL = ("assets/", "runs/")
RIGHT = "eval/shapes/strict_mean"
USUAL = (0.75, 0.79)  # of the recipe `quickstart`; docs/diffusion_nft.md has the table


def add_to(app: typer.Typer) -> None:
    """Add these commands to the `genrl` command."""
    app.command()(demo)
    app.command()(init)


def demo(overrides: Overrides = None) -> None:
    """Train the embedded text-to-image model, minutes on two cores without a download: pictures, curves and a LoRA.

    Example: `genrl demo`, or in brief `genrl demo iterations=2`
    """
    from genrl.cli.train import start
    from genrl.recipes import find

    run = Path(f"runs/demo-{datetime.now():%Y%m%d-%H%M%S}")  # a demo never meets the folder of the one before
    start(find("quickstart").file, [f"output={run}", *(overrides or ())], None, None)
    if (run / "metrics.jsonl").exists():  # not where `output` was changed
        typer.echo(_what_it_learned(run))


def _what_it_learned(run: Path) -> str:
    """The share of held-out pictures that are right in everything, before and after, and what one would do next."""
    from genrl.config.errors import command
    from genrl.runtime.folder.run import read_metrics

    shares = [row[RIGHT] for row in read_metrics(run / "metrics.jsonl") if row.get(RIGHT) is not None]
    lines = []
    if len(shares) > 1:
        usual = f"other runs of the whole recipe: {USUAL[0]:.0%} to {USUAL[1]:.0%}"
        lines = [f"held-out pictures with everything right: {shares[0]:.0%} before, {shares[-1]:.0%} now ({usual})"]
    prompt = "two red stars and a blue circle"
    lines += ["next:", f"  {command('sample', run, '--prompt', prompt)}   # draw with the LoRA"]
    lines += [f"  {command('watch', run, '--open')}   # its curves and pictures in the browser"]
    lines += ["  genrl init   # the recipes for published models"]
    return "\n".join(lines)


def init(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A recipe; without it all are listed.")] = None,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write it.")] = Path(),
) -> None:
    """Write a recipe as a YAML file, with its prompts beside it; without a name list all recipes.

    Example: `genrl init sd35_medium_flow_grpo`, then `genrl check sd35_medium_flow_grpo.yaml`
    """
    from genrl.cli.tables import printable
    from genrl.config.errors import command
    from genrl.recipes import find, missing, write

    if name is None:
        _list()
        return
    try:
        recipe = find(name)
        written = write(recipe, to)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None
    lacking, file = missing(recipe, to), written[0]
    lines = [f"written: {', '.join(map(str, written))}"]
    lines += [f"data of your own: {', '.join(lacking)}; the file says which columns"] if lacking else []
    lines += [f"next: {command('check', file)}, then {command('train', file)}"]
    typer.echo(printable("\n".join(lines)))


def _list() -> None:
    """Print the recipes of published models by task; the others, which are for trying out, by name alone."""
    from rich.table import Table

    from genrl.cli.tables import console, safe
    from genrl.recipes import recipes

    listed = [(recipe, recipe.values) for recipe in recipes()]
    for task in TASKS:
        table = Table("recipe", "model", "card", title=task, title_justify="left", box=None, pad_edge=False)
        for recipe, values in listed:
            if _task(values) == task and (model := _model(values)) and not model.startswith(LOCAL):
                table.add_row(*map(safe, (recipe.name, model.rpartition("/")[2], _card(recipe))))
        if table.row_count:
            console.print(table, "")
    small = [recipe.name for recipe, values in listed if not _model(values) or _model(values).startswith(LOCAL)]
    console.print(f"small ones, on embedded models or new ones: {', '.join(small)}", "")
    console.print("card: on which it fits by the estimate of genrl check; +: and the activations of a UNet besides")
    console.print("genrl init NAME writes one of them into this folder")


def _card(recipe: Recipe) -> str:
    """The smallest card on which it fits as it is, by the estimate of `genrl check`; empty where there is none."""
    from genrl.cli import diffusion, vla, vlm
    from genrl.cli.tables import smallest
    from genrl.config import load
    from genrl.diffusion.config.memory_estimate import memory
    from genrl.diffusion.config.schema import Config
    from genrl.vla.config.schema import VLAConfig
    from genrl.vlm.config import memory_estimate as language
    from genrl.vlm.config.schema import VLMConfig

    config, many, more = load(recipe.file) if _model(recipe.values) else None, "", ""
    if isinstance(config, Config):
        components = diffusion.components_of(config)
        parts = memory(config, components) if components else []
        more = " +" if any(part.name == "unet" for part in components) else ""
    elif isinstance(config, VLMConfig):
        sizes, shards = vlm.sizes_of(config), config.distributed.fsdp
        parts = language.memory(config, sizes, vlm.PROCESSES if shards else 1) if sizes else []
        many = f"{vlm.PROCESSES} x " if shards else ""
    else:
        parts = vla.memory_of(config) if isinstance(config, VLAConfig) else []
    return many + smallest(sum(num_bytes for _, num_bytes in parts)) + more if parts else ""


def _task(values: Mapping[str, Any]) -> str:
    if "policy" in values:
        return "robots"
    if "vlm" in values:
        return "language and vision" if values["vlm"].get("output", "text") == "text" else "tokens"
    sampling = values.get("sampling", {})
    return "edits" if "inputs" in sampling else "videos" if "num_frames" in sampling else "pictures"


def _model(values: Mapping[str, Any]) -> str:
    """Hub id or folder; empty for a model that is made anew."""
    section = next((values[key] for key in ("model", "vlm", "policy") if key in values), None)
    return str((section or {}).get("path") or "")
