"""`genrl sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from genrl.cli.arguments import Best, Guidance, Height, Lora, ModelName, Precision, Steps, Width
from genrl.cli.folders import best_of


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
    if not prompt and not prompts:
        raise typer.BadParameter('give --prompt "text" (also several times) or --prompts FILE')
    texts, rows = list(prompt or []), []
    if prompts:
        from genrl.data.prompts import load as load_prompts

        rows = load_prompts(prompts)
        texts += [row.text for row in rows]

    from genrl.cli.pipelines import call_arguments
    from genrl.diffusion.chosen import choose

    given = call_arguments(num_inference_steps, guidance_scale, height, width, pipeline_args)
    chosen = choose(model, lora, dtype, given, best_of(model) if best else None)

    if chosen.inputs and prompt:
        columns = ", ".join(chosen.inputs.values())
        text = f"{model} is given pictures with each prompt; give --prompts FILE.jsonl with the columns {columns}"
        raise typer.BadParameter(text, param_hint="--prompt")

    from genrl.diffusion.policy.rewriter import load_rewriter
    from genrl.diffusion.rollout.rollout import batch_inputs, check_inputs
    from genrl.diffusion.sample import load
    from genrl.diffusion.sample import sample as generate

    check_inputs(chosen.inputs, rows, str(prompts))
    writer = None if rewriter is None else load_rewriter(rewriter)
    pipe = load(chosen.model, chosen.adapter)
    pictures = batch_inputs(chosen.inputs, rows)
    paths = generate(pipe, texts, out, seed=seed, arguments=chosen.arguments, inputs=pictures, rewriter=writer)
    typer.echo(f"{len(paths)} pictures and grid.png in {out}")
