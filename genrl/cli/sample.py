"""`genrl sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from genrl.cli.arguments import (
    Best,
    Guidance,
    Height,
    Lora,
    ModelName,
    Precision,
    Steps,
    Width,
    best_of,
    call_arguments,
)  # fmt: skip


def add_to(app: typer.Typer) -> None:
    """Add this command to the `genrl` command."""
    app.command()(sample)


def sample(
    model: ModelName,
    pipeline_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Further pipeline arguments: num_frames=33 negative_prompt=blurry."),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompts: Annotated[str | None, typer.Option(help="Prompt file (.txt, .jsonl), or data set id:split.")] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the pictures and the grid.")] = Path("samples"),
    lora: Lora = None,
    best: Best = False,
    num_inference_steps: Steps = None,
    guidance_scale: Guidance = None,
    height: Height = None,
    width: Width = None,
    seed: Annotated[int, typer.Option(min=0, help="Picture k starts from the noise of seed + k.")] = 0,
    dtype: Precision = None,
    rewriter: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Rewrite the prompts with a run's language model: RUN/rewriter."),
    ] = None,
) -> None:
    """Generate pictures with any pipeline, with or without a LoRA, from fixed noise.

    Example: `genrl sample runs/quickstart --prompt "two red circles and a blue square"`
    """
    if bool(prompt) == bool(prompts):
        raise typer.BadParameter('give --prompt "text" (also several times) or --prompts FILE')

    from genrl.diffusion.chosen import adapter_of
    from genrl.interface.using import sample as generate

    arguments = call_arguments(num_inference_steps, guidance_scale, height, width, pipeline_args)
    lora = adapter_of(Path(model), best_of(model)) if best else lora
    pictures = generate(
        model, prompts or prompt, lora=lora, out=out, seed=seed, arguments=arguments, dtype=dtype, rewriter=rewriter
    )
    typer.echo(f"{len(pictures)} pictures and grid.png in {out}")
