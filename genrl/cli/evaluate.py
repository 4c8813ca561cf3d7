"""`genrl eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genrl.cli.arguments import (
    Best,
    Dtype,
    Guidance,
    Height,
    Lora,
    ModelName,
    Precision,
    Steps,
    Width,
    at_hand,
    best_of,
    call_arguments,
    is_policy,
    is_vision_language,
    refuse,
)  # fmt: skip

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig
    from genrl.vlm.config.schema import VLMConfig

Further = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Further pipeline arguments: num_frames=33; for a policy: changes to its configuration, as in train.",
    ),
]
Rewards = Annotated[
    list[str] | None, typer.Option(help="Name or file.py:Name; may be given several times; default: the run's.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Seed of the fixed noise, and of a policy's episodes (as in training).")
]
Out = Annotated[Path | None, typer.Option(dir_okay=False, help="Also write the scores to this file, as JSON.")]
Videos = Annotated[
    Path | None, typer.Option(file_okay=False, help="Folder for films of a policy's successes and failures.")
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="YAML file that names the environment or task, for a model's folder."
    ),
]


@dataclass(frozen=True)
class Options:
    """What `genrl eval` was given beside the model; None where it was not given."""

    further: list[str]
    prompts: str | None
    reward: list[str]
    num_prompts: int | None
    out: Path | None
    lora: str | None
    num_inference_steps: int | None
    guidance_scale: float | None
    height: int | None
    width: int | None
    batch_size: int
    seed: int | None
    dtype: Dtype | None
    episodes: int | None
    videos: Path | None
    best: bool

    def call_arguments(self) -> dict[str, Any]:
        """Arguments of the pipeline call."""
        return call_arguments(self.num_inference_steps, self.guidance_scale, self.height, self.width, self.further)

    def step(self, model: Path) -> int | None:
        """The checkpoint to take of a run, None = the newest."""
        return best_of(model) if self.best else None

    def refuse_all_but(self, what: str, *takes: str) -> None:
        """Raise BadParameter for options that were given and mean nothing for `what`, which takes these."""
        # changes to the configuration, options with defaults, and what all take
        takes += ("further", "out", "batch_size", "best")
        refuse({f"--{name.replace('_', '-')}": value for name, value in vars(self).items() if name not in takes}, what)


def add_to(app: typer.Typer) -> None:
    """Add this command to the `genrl` command."""
    app.command("eval")(evaluate)


def evaluate(
    model: ModelName,
    pipeline_args: Further = None,
    prompts: Annotated[
        str | None, typer.Option(help="Prompt file or data set; default: the run's.", callback=at_hand)
    ] = None,
    reward: Rewards = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Only the first ones; default: all.")] = None,
    out: Out = None,
    lora: Lora = None,
    best: Best = False,
    num_inference_steps: Steps = None,
    guidance_scale: Guidance = None,
    height: Height = None,
    width: Width = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures per call of the model.")] = 8,
    seed: Seed = None,
    dtype: Precision = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="Of a policy; default: the configuration's.")] = None,
    videos: Videos = None,
    config_file: SettingsFile = None,
) -> None:
    """Score a model by rewards over a prompt file, or a policy by its success in simulation, without exploration.

    Example: `genrl eval runs/quickstart --prompts prompts/words_eval.txt --reward ocr --out scores.json`

    A policy: `genrl eval runs/vla/flow_sde --episodes 1024 --videos films`, or a folder in the environment of a
    configuration: `genrl eval assets/tiny-vla --config flow_sde.yaml`

    A vision-language model by held-out questions: `genrl eval runs/vlm/grpo`, or a folder:
    `genrl eval assets/tiny-vlm --config vlm_grpo.yaml`
    """
    options = Options(
        further=pipeline_args or [], prompts=prompts, reward=reward or [], num_prompts=num_prompts, out=out, lora=lora,
        num_inference_steps=num_inference_steps, guidance_scale=guidance_scale, height=height, width=width,
        batch_size=batch_size, seed=seed, dtype=dtype, episodes=episodes, videos=videos, best=best,
    )  # fmt: skip
    settings = _settings_of(model, config_file, options.further)
    if settings is None:
        refuse({"--episodes": episodes, "--videos": videos}, "a pipeline")
        return _evaluate_pipeline(model, options)
    _evaluate_policy(Path(model), settings, options)


def _evaluate_pipeline(name: str, options: Options) -> None:
    """Print the scores of a pipeline, or of a run's, over a prompt file, and write them to `options.out`."""
    from genrl.diffusion.chosen import adapter_of
    from genrl.interface.using import judge_pipeline

    metrics = judge_pipeline(
        name, options.prompts, [{"name": reward} for reward in options.reward], options.call_arguments(),
        lora=adapter_of(Path(name), best_of(name, options.lora)) if options.best else options.lora, dtype=options.dtype,
        num_prompts=options.num_prompts, batch_size=options.batch_size, seed=options.seed,
    )  # fmt: skip

    from genrl.cli.tables import console, safe, scores_table, write_scores

    table = scores_table(f"{name}, {metrics.prompts} prompts of {metrics.source}", "metric", "value")
    for metric, value in sorted(metrics.metrics.items()):
        table.add_row(safe(metric), f"{value:.4f}")
    console.print(table)
    record: dict[str, Any] = {
        "model": metrics.chosen.model.path,
        "lora": metrics.chosen.adapter,
        "prompts": metrics.source,
    }
    record |= {"num_prompts": metrics.prompts, "seed": metrics.seed, "arguments": metrics.chosen.arguments}
    write_scores(options.out, record, metrics.metrics)
    if metrics.fault:
        raise RuntimeError(metrics.fault)


def _evaluate_policy(model: Path, settings: VLAConfig | VLMConfig, options: Options) -> None:
    from genrl.runtime.weights.devices import tf32
    from genrl.vla.config.schema import VLAConfig

    with tf32(settings.tf32):
        if isinstance(settings, VLAConfig):
            from genrl.cli import vla

            options.refuse_all_but("a policy", "episodes", "seed", "videos")
            return vla.evaluate(model, settings, options)
        from genrl.cli import vlm

        if settings.environment is None:
            options.refuse_all_but("a model that answers questions", "num_prompts")
            return vlm.evaluate(model, settings, options)
        options.refuse_all_but("an agent", "episodes", "videos")
        return vlm.evaluate_agent(model, settings, options)


def _settings_of(model: str, file: Path | None, overrides: Sequence[str]) -> VLAConfig | VLMConfig | None:
    """The configuration to evaluate a policy or a vision-language model by, changed by `overrides`: that of its run, or
    of `--config`; None for a pipeline or the run of one. Raises BadParameter where the two do not fit."""
    from genrl.config import load
    from genrl.diffusion.config.schema import Config
    from genrl.vla.config.schema import VLAConfig
    from genrl.vlm.config.schema import VLMConfig

    path = Path(model)
    if file is None and not (path / "config.yaml").is_file():
        if is_vision_language(path):
            text = f"{model} is a vision-language model: say what it is asked by --config FILE.yaml"
            raise typer.BadParameter(text, param_hint="--config")
        if is_policy(path):
            text = f"{model} is a policy: say where it acts by --config FILE.yaml"
            raise typer.BadParameter(text, param_hint="--config")
        return None
    source = file or path / "config.yaml"
    config = load(source)  # without the changes: those of a pipeline are arguments of its call
    if isinstance(config, Config):
        if file is not None:
            text = f"{file} trains no policy: it has no section policy or vlm"
            raise typer.BadParameter(text, param_hint="--config")
        return None
    if file is not None and isinstance(config, VLAConfig) and not is_policy(path) and not is_policy(path / "policy"):
        from genrl.config.folders import near

        text = f"{model} is neither a policy's folder nor the run of one{near(path)}"
        raise typer.BadParameter(text, param_hint="MODEL")
    changed = load(source, overrides)
    assert isinstance(changed, VLAConfig | VLMConfig)
    return changed
