"""`genrl collect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from genrl.cli.arguments import Overrides, default_device


def add_to(app: typer.Typer) -> None:
    """Add this command to the `genrl` command."""
    app.command()(collect)


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
