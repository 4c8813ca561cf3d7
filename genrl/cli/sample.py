"""`genrl sample` and `genrl collect`: what a model generates, pictures, or answers to learn from.

`genrl plan`: how the samples of a group come about, and what that costs. No torch, no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from genrl.cli.arguments import (
    Best,
    ConfigFile,
    Guidance,
    Height,
    Lora,
    ModelName,
    Overrides,
    Precision,
    Steps,
    Width,
    at_hand,
    best_of,
    call_arguments,
    default_device,
    opened,
)  # fmt: skip

if TYPE_CHECKING:
    from genrl.diffusion.config.estimate import Component, Plan
    from genrl.diffusion.config.schema import Config


def add_to(app: typer.Typer) -> None:
    """Add these commands to the `genrl` command."""
    app.command()(sample)
    app.command()(collect)
    app.command()(plan)


def sample(
    model: ModelName,
    pipeline_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Further pipeline arguments: num_frames=33 negative_prompt=blurry."),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Prompt file (.txt, .jsonl), or data set id:split.", callback=at_hand)
    ] = None,
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
    lora = adapter_of(Path(model), best_of(model, lora)) if best else lora
    pictures = generate(
        model, prompts or prompt, lora=lora, out=out, seed=seed, arguments=arguments, dtype=dtype, rewriter=rewriter
    )
    typer.echo(f"{len(pictures)} pictures and grid.png in {out}")


def collect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Run folder, or a model's folder or hub id.")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for train.jsonl and its pictures.")] = Path(
        "collected"
    ),
    samples: Annotated[int, typer.Option(min=1, help="Answers sampled for each question.")] = 8,
    keep: Annotated[int, typer.Option(min=1, help="Most answers kept for a question.")] = 1,
    threshold: Annotated[float, typer.Option(help="Least weighted sum of the rewards.")] = 1.0,
    choose: Annotated[
        Literal["shortest", "random"], typer.Option(help="Which of those that reach it are kept.")
    ] = "shortest",
    config_file: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="YAML file with questions and rewards; default: the run's."),
    ] = None,
) -> None:
    """Sample answers to the training questions and keep good ones, as data for supervised fine-tuning.

    Example: `genrl collect runs/vlm/grpo --samples 8 --threshold 1.2 --out data/own`, then
    `genrl train vlm_sft.yaml task.name=null task.train=data/own/train.jsonl trainer.target=response`
    """
    from genrl.cli.tables import console, safe
    from genrl.config import check_files, load_located
    from genrl.runtime.loop.progress import Progress
    from genrl.vlm.collect import FILE, Rule
    from genrl.vlm.collect import collect as gather
    from genrl.vlm.config.schema import VLMConfig
    from genrl.vlm.policies.folder import load_trained, open_policy

    is_run = (Path(model) / "config.yaml").is_file()
    file = config_file or (Path(model) / "config.yaml" if is_run else None)
    if file is None:
        raise typer.BadParameter(f"{model} is no run: say what it is asked by --config FILE.yaml", param_hint="MODEL")
    config, origins = load_located(file, list(overrides or ()))
    if not isinstance(config, VLMConfig) or config.environment is not None or config.vlm.makes or not config.rewards:
        text = f"{file}: needs a vision-language model that answers questions with text, and rewards"
        raise typer.BadParameter(text, param_hint="--config")
    check_files(config, origins)
    policy = load_trained(config, Path(model), device=default_device()) if is_run else None
    policy = policy or open_policy(config, default_device(), model)
    rule = Rule(samples, keep, threshold, choose)
    with Progress(1, unit="answers") as progress:
        counts = gather(
            policy, config, out, rule, begin=lambda total: progress.phase("answering", total), advance=progress.advance
        )
    console.print(f"questions: {counts.answered:,} of {counts.questions:,} have an answer that was kept")
    console.print(f"answers: {counts.passed:,} of {counts.samples:,} reach {threshold:g}, {counts.kept:,} kept")
    console.print(f"data: {safe(str(out / FILE))} (trainer.target: response)")


def plan(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the rollout tree of a configuration: its steps, branching, noise, trained edges and model calls.

    Example: `genrl plan tree_grpo.yaml sampling.group_size=81 trainer.window.size=4`

    One row is a run of steps that are alike. `states` are evaluated by the model, once each; `ways` is how many next
    states are sampled from each (shared prefixes are computed once); `noise` is the level of the noise, none where the
    step is deterministic; `trained` counts the transitions in the loss. A ratio below 1 is what the shared prefixes
    save against independent rollouts with as many samples.
    """
    from genrl.cli.diffusion import components_of
    from genrl.cli.tables import printable
    from genrl.config import load
    from genrl.diffusion.config.schema import Config
    from genrl.vla.config.schema import VLAConfig

    config = load(*opened(file, overrides))
    if not isinstance(config, Config):
        what = "a policy" if isinstance(config, VLAConfig) else "a vision-language model"
        text = f"{file} trains {what}; a plan shows how a pipeline samples; `genrl check` says what this run does"
        raise typer.BadParameter(text, param_hint="FILE")
    typer.echo(printable("\n".join(lines(config, components_of(config)))))


def lines(config: Config, components: Sequence[Component] = ()) -> Iterator[str]:
    """What `genrl plan` prints."""
    from genrl.diffusion.config.estimate import plan as estimate

    cost = estimate(config, tuple(components))
    yield from config.trainer.rollout(config, cost.guidance)
    yield from _totals(config, cost)


def _totals(config: Config, cost: Plan) -> Iterator[str]:
    """Model calls of an iteration."""
    from genrl.cli.tables import number

    independent = cost.independent_calls
    prompts = f"{config.sampling.prompts_per_iteration} prompts x {config.sampling.group_size}"
    yield from ("", f"an iteration, {prompts} = {cost.images} images, mean of {config.iterations}:")
    yield (
        f"model calls in sampling: {number(cost.sample_calls)}, {cost.sample_calls / cost.images:.2f} per image; "
        f"independent rollouts: {number(independent)}, ratio {cost.sample_calls / independent:.3f}"
    )
    which = "of those in sampling" if cost.kept else "of them"
    yield (
        f"model calls in training: {number(cost.train_calls)}, {cost.train_calls / cost.images:.2f} per image; "
        f"{number(cost.backward_calls)} {which} with gradient"
    )
    if cost.guidance > 1:
        yield "a step with guidance counts as two calls"
