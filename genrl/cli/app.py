"""The command line. Every import beyond typer happens inside the commands: `--help` and `check` start without torch."""

from __future__ import annotations

import math
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import closing
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard

import typer
from typer.core import TyperGroup

from genrl.cli import plan as cli_plan
from genrl.cli import rewards as cli_rewards

if TYPE_CHECKING:
    from genrl.config import AnyConfig, Config, Model, VLAConfig, VLMConfig

PACKAGES = tuple(str(Path(__file__).resolve().parents[2] / name) + os.sep for name in ("genrl", "rewards"))


class _CleanErrors(TyperGroup):
    """Prints what the user must put right as one red text (exit code 2, or 1 once work had begun), no traceback.

    Such errors are those that a `raise` in this project's own code makes. Anything else is a defect and keeps its
    traceback; GENRL_DEBUG=1 keeps it always.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # these are RuntimeErrors, too
            raise
        except (ValueError, RuntimeError) as error:
            if os.environ.get("GENRL_DEBUG") or not _is_message(error):
                raise
            from genrl.cli.tables import printable

            typer.secho(printable(str(error)), fg=typer.colors.RED, err=True)
            raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None


app = typer.Typer(
    cls=_CleanErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Fine-tune generative models by reinforcement learning, from one YAML file: any diffusers pipeline, "
    "policies in simulation, vision-language models.\n\n"
    "First steps: `genrl check configs/quickstart.yaml`, then `genrl train configs/quickstart.yaml`; "
    "or `configs/vla/flow_sde.yaml`, `configs/vlm/quickstart.yaml`.",
)
config_app = typer.Typer(no_args_is_help=True, help="About configuration files.")
app.add_typer(config_app, name="config")

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="YAML configuration, for example configs/ocr.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the file, for example optimizer.lr=1e-4 ema=null."),
]
Edits = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Changes: iterations, checkpoint, evaluation, trackers, output, where rewards run."
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, for example runs/quickstart.")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Pipeline folder, hub id (org/name), or the folder of a run.")
]
Processes = Annotated[int, typer.Option("--nproc", min=1, help="Processes on this machine, one per device.")]
Lora = Annotated[str | None, typer.Option(help="LoRA folder or hub id; for a run its newest adapter is the default.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Denoising steps; default: the run's, or the pipeline's.")]
Guidance = Annotated[float | None, typer.Option(min=0, help="Default: the run's, or the pipeline's.")]
Height = Annotated[int | None, typer.Option(min=1, help="Pixels.")]
Width = Annotated[int | None, typer.Option(min=1, help="Pixels.")]
Precision = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Default: the run's, or float32.")
]
PipelineArgs = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Further pipeline arguments: num_frames=33 negative_prompt=blurry."),
]


@app.callback(invoke_without_command=True)
def _global(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        from genrl import __version__

        typer.echo(f"genrl {__version__}")
        raise typer.Exit


@app.command()
def train(
    file: ConfigFile,
    overrides: Overrides = None,
    nproc: Processes = 1,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Go on in this run folder with FILE as its configuration; see `genrl resume`."
        ),
    ] = None,
) -> None:
    """Train as a YAML file says.

    Example: `genrl train configs/quickstart.yaml iterations=50 optimizer.lr=1e-4`

    Several processes: `--nproc 2`, or start it yourself by torchrun or accelerate launch, on several machines too.
    """
    from genrl.config import load_located

    if resume:
        _run_config(resume)
    config, origins = load_located(file, overrides or ())
    _train(config, origins, resume, nproc)


@app.command()
def resume(run: RunFolder, overrides: Edits = None, nproc: Processes = 1) -> None:
    """Go on with an interrupted run from its newest complete checkpoint.

    Example: `genrl resume runs/quickstart iterations=200`
    """
    from genrl.config import load_located

    config, origins = load_located(_run_config(run), overrides or ())
    _train(config, origins, run, nproc)


@app.command()
def sample(
    model: ModelArgument,
    pipeline_args: PipelineArgs = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompts: Annotated[str | None, typer.Option(help="Prompt file (.txt, .jsonl), or data set id:split.")] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the pictures and the grid.")] = Path("samples"),
    lora: Lora = None,
    num_inference_steps: Steps = None,
    guidance_scale: Guidance = None,
    height: Height = None,
    width: Width = None,
    seed: Annotated[int, typer.Option(min=0, help="Noise of picture k is that of seed + k.")] = 0,
    dtype: Precision = "float32",
    rewriter: Annotated[
        Path | None, typer.Option(file_okay=False, help="Rewrite the prompts by a run's language model: RUN/rewriter.")
    ] = None,
) -> None:
    """Draw pictures from any pipeline, with or without a LoRA, from fixed noise.

    Example: `genrl sample runs/quickstart --prompt "two red circles and a blue square"`
    """
    if not prompt and not prompts:
        raise typer.BadParameter('give --prompt "text" (also several times) or --prompts FILE')
    texts = list(prompt or [])
    if prompts:
        from genrl.data.prompts import load as load_prompts

        texts += [row.text for row in load_prompts(prompts)]
    chosen, adapter, arguments = _pipeline_of(model, lora, dtype)
    arguments |= _arguments(num_inference_steps, guidance_scale, height, width, pipeline_args)

    from genrl.diffusion.sample import load
    from genrl.diffusion.sample import sample as draw

    writer = None
    if rewriter is not None:
        from genrl.diffusion.methods.prompt_rl.rewriter import load_rewriter

        writer = load_rewriter(rewriter)
    paths = draw(load(chosen, adapter), texts, out, seed=seed, arguments=arguments, rewriter=writer)
    typer.echo(f"{len(paths)} pictures and grid.png in {out}")


@app.command("eval")
def evaluate(
    model: ModelArgument,
    pipeline_args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Further pipeline arguments: num_frames=33; of a policy: changes to its configuration, as in train.",
        ),
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="Prompt file or data set; default: the run's.")] = None,
    reward: Annotated[
        list[str] | None, typer.Option(help="Name or file.py:Name; may be given several times; default: the run's.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Only the first ones; default: all.")] = None,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the scores as JSON into this file, too.")
    ] = None,
    lora: Lora = None,
    num_inference_steps: Steps = None,
    guidance_scale: Guidance = None,
    height: Height = None,
    width: Width = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures per call of the model.")] = 8,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the fixed noise, and of a policy's episodes (as in training).")
    ] = None,
    dtype: Precision = "float32",
    episodes: Annotated[int | None, typer.Option(min=1, help="Of a policy; default: the configuration's.")] = None,
    videos: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for films of a policy's successes and failures.")
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="YAML file that says the environment or task, for a model's folder.",
        ),
    ] = None,
) -> None:
    """Score a model by rewards over a prompt file, or a policy by its success in simulation, without exploration.

    Example: `genrl eval assets/tiny-t2i --prompts assets/prompts/words_eval.txt --reward ocr --out scores.json`

    A policy: `genrl eval runs/vla/flow_sde --episodes 1024 --videos films`, or a folder in the environment of a
    configuration: `genrl eval assets/tiny-vla --config configs/vla/flow_sde.yaml`

    A vision-language model by held-out questions: `genrl eval runs/vlm/grpo`, or a folder:
    `genrl eval assets/tiny-vlm --config configs/vlm/grpo.yaml`
    """
    settings = _policy_config_of(model, config_file, pipeline_args or ())
    if _is_vlm_run(settings):
        from genrl.cli.vlm import evaluate as ask

        if settings.environment is None:
            _refuse({"--episodes": episodes, "--videos": videos}, "a model that answers questions")
            return ask(Path(model), settings, questions=num_prompts, out=out)
        from genrl.cli.vlm import evaluate_agent

        _refuse({"--num-prompts": num_prompts}, "an agent")
        return evaluate_agent(Path(model), settings, episodes=episodes, out=out, films=videos)
    if settings is not None:
        given = {"--prompts": prompts, "--reward": reward, "--num-prompts": num_prompts, "--lora": lora}
        given |= {"--num-inference-steps": num_inference_steps, "--guidance-scale": guidance_scale}
        _refuse(given | {"--height": height, "--width": width}, "a policy")
        from genrl.cli.vla import evaluate as judge

        return judge(Path(model), settings, episodes=episodes, seed=seed, out=out, videos=videos)
    _refuse({"--episodes": episodes, "--videos": videos}, "a pipeline")
    given = _arguments(num_inference_steps, guidance_scale, height, width, pipeline_args)
    _evaluate_pipeline(
        model, prompts, reward, num_prompts, out, lora, given, batch_size, 1234 if seed is None else seed, dtype
    )


@app.command()
def check(
    file: ConfigFile,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="List every key: value, default, meaning.")] = False,
) -> None:
    """Validate a configuration and estimate its cost, without loading any weights.

    Example: `genrl check configs/quickstart.yaml sampling.group_size=16 --explain`
    """
    from genrl.cli import tables as cli_tables
    from genrl.config import check_files, load_located

    config, origins = load_located(file, overrides or ())
    notes = check_files(config, origins)
    if _is_vlm_run(config):
        from genrl.cli import vlm as cli_vlm

        cli_vlm.print_check(config, origins, notes)
    elif _is_policy_run(config):
        from genrl.cli import vla as cli_vla

        cli_vla.print_check(config, notes)
    else:
        cli_tables.print_check(config, notes)
    if explain:
        cli_tables.print_keys(config)


@app.command()
def export(
    run: RunFolder,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder to write; new or empty.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Checkpoint after so many iterations; default: newest.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Write the whole pipeline, with a LoRA merged into it.")] = False,
) -> None:
    """Write a run's model for plain diffusers: the LoRA or the whole pipeline, with a model card; or a policy.

    Example: `genrl export runs/quickstart --out my-lora`, then `pipe.load_lora_weights("my-lora")`

    A policy is written in LeRobot's layout: `genrl export runs/vla/flow_sde --out my-policy`; a vision-language model
    as transformers saves it (a LoRA as PEFT does; `--full` merges it).
    """
    from genrl.config import load

    config = load(_run_config(run))
    if _is_vlm_run(config):
        from genrl.cli.vlm import export as write_model

        typer.echo(f"written to {write_model(run, config, out, step, full=full)}")
        return
    if _is_policy_run(config):
        from genrl.cli.vla import export as write_policy

        _refuse({"--full": full}, "a policy, which is always written whole")
        typer.echo(f"written to {write_policy(run, out, step)}")
        return
    from genrl.diffusion.policy.export import export as write

    typer.echo(f"written to {write(run, out, step=step, full=full)}")


@app.command()
def report(run: RunFolder) -> None:
    """Make one offline HTML page of a run: curves, pictures, settings, timings.

    Example: `genrl report runs/quickstart`
    """
    _run_config(run)
    from genrl.runtime.report import write_report

    typer.echo(f"written to {write_report(run)}")


@app.command()
def replay(
    dump: Annotated[Path, typer.Argument(metavar="DUMP", help="Folder of a dump, RUN/dumps/step-...")],
    run: Annotated[Path | None, typer.Option(help="Run folder; default: the one that the dump is in.")] = None,
) -> None:
    """Run the micro-batch that stopped a run again, and show where its numbers stop being finite.

    Example: `genrl replay runs/quickstart/dumps/step-000012-loss-rank-0`
    """
    from genrl.cli import tables as cli_tables
    from genrl.config import Config, load

    file = (run or dump.resolve().parent.parent) / "config.yaml"
    if file.is_file() and not isinstance(load(file), Config):
        text = f"{dump} is of a run that trains no pipeline: read its dump.json and tensors.safetensors"
        raise typer.BadParameter(text, param_hint="DUMP")

    from genrl.diffusion.replay import replay as run_again

    cli_tables.print_replay(run_again(dump, run))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False,
) -> None:
    """Report versions, devices and back-ends, and what looks wrong with them.

    Example: `genrl doctor --json > doctor.json`
    """
    from genrl.cli.doctor import advice, examine

    found = examine()
    if as_json:
        import json

        typer.echo(json.dumps(found | {"advice": advice(found)}, indent=1))
    else:
        from genrl.cli import tables as cli_tables

        cli_tables.print_doctor(found, advice(found))


@app.command("rewards")
def list_rewards() -> None:
    """List the rewards that can be named in a configuration, built in and installed.

    Example: `genrl rewards`
    """
    from genrl.cli import tables as cli_tables

    cli_tables.print_rewards()


cli_plan.add_to(app)
cli_rewards.add_to(app)


@config_app.command("schema")
def schema() -> None:
    """Print the JSON schema of configuration files, for completion in editors.

    Example: `genrl config schema > genrl.schema.json`, and as the first line of a YAML file
    `# yaml-language-server: $schema=genrl.schema.json`
    """
    import json

    from genrl.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))


def _train(config: AnyConfig, origins: Any, run: Path | None, nproc: int) -> None:
    from genrl.cli.tables import printable
    from genrl.config import check_files
    from genrl.config.combinations import processes_problem

    inside = "RANK" in os.environ  # started by torchrun or accelerate: this is one of the processes
    if inside and nproc > 1:
        raise typer.BadParameter("--nproc starts processes, but this already is one of several: leave it out")
    problem = None if _is_policy_run(config) or _is_vlm_run(config) else processes_problem(config, nproc)
    if problem:
        raise typer.BadParameter(problem, param_hint="--nproc")
    is_main = int(os.environ.get("RANK", "0")) == 0
    for note in check_files(config, origins):
        if is_main and not note.startswith("output:"):  # a folder in use is an error of its own
            typer.secho(printable(note), fg=typer.colors.YELLOW, err=True)
    if run and is_main:
        saved = [path.name.removeprefix("step-") for path in run.glob("checkpoints/step-*")]
        done = max((int(step) for step in saved if step.isdigit()), default=0)  # others are of saves cut short
        if done >= config.iterations:
            more = f"genrl resume {run} iterations={done + 100}"
            note = f"{run} has done all of its {config.iterations} iterations; for more of them: {more}"
            typer.secho(printable(note), fg=typer.colors.YELLOW, err=True)
    if nproc > 1:
        _launch(nproc)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads of one process starve those of the next
    if _is_vlm_run(config):
        from genrl.vlm.train import train as train_model

        train_model(config, run)
        return
    if _is_policy_run(config):
        from genrl.vla.train import train as train_policy

        train_policy(config, run)
        return
    from genrl.diffusion.train import train as run_training

    run_training(config, run)


def _is_policy_run(config: AnyConfig) -> bool:
    from genrl.config import VLAConfig

    return isinstance(config, VLAConfig)


def _is_vlm_run(config: AnyConfig | None) -> TypeGuard[VLMConfig]:
    from genrl.config import VLMConfig

    return isinstance(config, VLMConfig)


def _policy_config_of(model: str, file: Path | None, overrides: Sequence[str]) -> VLAConfig | VLMConfig | None:
    """The configuration to judge a policy or a vision-language model by, changed by `overrides`: of its run, or of
    `--config`; None for what is neither."""
    from genrl.cli.vla import is_policy
    from genrl.cli.vlm import is_model
    from genrl.config import load

    path = Path(model)
    if not (path / "config.yaml").is_file() and is_model(path) and file is None:
        raise typer.BadParameter(
            f"{model} is a vision-language model: say what it is asked by --config FILE.yaml", param_hint="--config"
        )
    if not (path / "config.yaml").is_file() and is_policy(path) and file is None:
        raise typer.BadParameter(f"{model} is a policy: say where it acts by --config FILE.yaml", param_hint="--config")
    source = file or path / "config.yaml"
    config = load(source) if source.is_file() or file else None
    if config is not None and file is not None and _is_policy_run(config):
        if not is_policy(path) and not is_policy(path / "policy"):
            text = f"{model} is neither a policy's folder nor the run of one{_near(path)}"
            raise typer.BadParameter(text, param_hint="MODEL")
    known = config is not None and (_is_policy_run(config) or _is_vlm_run(config))
    if config is not None and not known and file is not None:
        raise typer.BadParameter(f"{file} trains no policy: it has no section policy or vlm", param_hint="--config")
    return load(source, overrides) if known else None


def _launch(nproc: int) -> None:
    """Become torchrun of this very command, without --nproc. (`accelerate launch` would import torchvision.)"""
    arguments, skip = [], False
    for argument in sys.argv[1:]:
        if skip or argument == "--nproc" or argument.startswith("--nproc="):
            skip = argument == "--nproc" and not skip
            continue
        arguments.append(argument)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    os.execv(sys.executable, [*command, "-m", "genrl", *arguments])


def _run_config(run: Path) -> Path:
    if (run / "config.yaml").is_file():
        return run / "config.yaml"
    if run.name == "config.yaml" and run.is_file():
        raise typer.BadParameter(f"{run} is a file: give the run folder, {run.parent}", param_hint="RUN")
    around = run if run.is_dir() else run.parent
    raise typer.BadParameter(f"{run} is not a run folder: it has no config.yaml{_runs_in(around)}", param_hint="RUN")


def _refuse(given: dict[str, object], what: str) -> None:
    """BadParameter for options that were given and mean nothing here."""
    if names := [name for name, value in given.items() if value]:
        raise typer.BadParameter(f"{', '.join(names)} is not for {what}: leave it out", param_hint=names[0])


def _near(path: Path) -> str:
    """Folders of a similar name, or the runs beside it."""
    around = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, [name for name in around if name != path.name], n=3, cutoff=0.5)
    near = [str(path.parent / name) for name in close]
    return f"; did you mean {' or '.join(near)}?" if near else _runs_in(path.parent)


def _runs_in(folder: Path) -> str:
    runs = sorted(str(file.parent) for depth in ("*", "*/*") for file in folder.glob(f"{depth}/config.yaml"))
    return f"; runs in {folder}: {', '.join(runs[:5])}" if runs else ""


def _evaluate_pipeline(
    model: str,
    prompts: str | None,
    reward: list[str] | None,
    num_prompts: int | None,
    out: Path | None,
    lora: str | None,
    given: dict[str, Any],
    batch_size: int,
    seed: int,
    dtype: str | None,
) -> None:
    """What `eval` does for a pipeline or its run; `given` are the arguments of the pipeline call."""
    config = _config_of(model)
    source = prompts or (config.prompts.eval if config else None)
    if source is None:
        raise typer.BadParameter("give --prompts FILE (a run with prompts.eval has its own)")
    if not reward and not config:
        raise typer.BadParameter("give --reward NAME; `genrl rewards` lists them")
    source_model, adapter, arguments = _pipeline_of(model, lora, dtype)
    arguments |= given

    import torch

    import rewards as reward_package
    from genrl.data.prompts import load as load_prompts
    from genrl.diffusion.rollout.scoring import open_scorers, plain
    from genrl.diffusion.sample import evaluate_pipeline, load

    rows = load_prompts(source, config.prompts.column if config else "prompt")[:num_prompts]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if config and not reward:
        scorers = open_scorers(config, device)
        if config.trainer.trains_reward:
            from genrl.config.method import module_of

            module_of(config.trainer).load_trained(scorers, Path(model))
    else:
        named: dict[str, reward_package.Reward] = {}
        for name in reward or ():
            label = name.rsplit(":", 1)[-1]
            label = f"{label}-{len(named) + 1}" if label in named else label
            named[label] = reward_package.load(name, device=device)
        scorers = plain(named)
    with closing(scorers):
        found = evaluate_pipeline(
            load(source_model, adapter),
            rows,
            scorers,
            batch_size=batch_size,
            seed=seed,
            num_pictures=0,
            arguments=arguments,
        )
    _print_scores(found.metrics, f"{model}, {len(rows)} prompts of {source}")
    if out:
        import json

        from genrl.runtime.run import write_atomic

        scores = {name: value if math.isfinite(value) else None for name, value in found.metrics.items()}
        record = {
            "model": source_model.path,
            "lora": adapter,
            "prompts": source,
            "num_prompts": len(rows),
            "seed": seed,
        }
        write_atomic(out, json.dumps(record | {"arguments": arguments, "scores": scores}, indent=1) + "\n")


def _config_of(model: str) -> Config | None:
    """The configuration of a run folder; None for a pipeline folder or hub id. BadParameter for neither."""
    from genrl.config import load
    from genrl.config.folders import looks_local

    path = Path(model)
    # runs/TYPO is written like a hub id; no hub id is beside runs. A single word may be either: the loader will say.
    local = looks_local(model) or any(path.parent.glob("*/config.yaml"))
    if not path.exists() and local and not re.fullmatch(r"[\w.-]+", model):
        raise typer.BadParameter(f"{model}: no such run or folder{_near(path)}", param_hint="MODEL")
    file = path / "config.yaml"
    config = load(file) if file.is_file() else None
    if config is not None and (_is_policy_run(config) or _is_vlm_run(config)):
        raise typer.BadParameter(f"{model} is the run of a policy, which draws no pictures", param_hint="MODEL")
    return config


def _pipeline_of(model: str, lora: str | None, dtype: str | None) -> tuple[Model, str | None, dict[str, Any]]:
    """(pipeline, adapter, arguments of the pipeline call) of what the user named."""
    from genrl.config import Model

    config = _config_of(model)
    if config is None:
        return Model(path=model, dtype=dtype or "float32"), lora, {}
    from genrl.runtime import checkpoint

    run, settings = Path(model), config.sampling
    saved = checkpoint.latest(run / "checkpoints")  # RUN/lora is of the end of a run, which may have gone on since
    adapters = [*([saved / "lora"] if saved else []), run / "lora"]
    newest = next((str(folder) for folder in adapters if folder.is_dir()), None)
    if lora is None and newest is None:
        if saved is None:
            raise typer.BadParameter(f"{run} holds no checkpoint yet: there is nothing trained in it")
        raise typer.BadParameter(f"{run} holds no LoRA; write its pipeline by `genrl export {run} --out FOLDER`")
    scale = settings.guidance_scale if config.evaluation.guidance_scale is None else config.evaluation.guidance_scale
    steps = config.evaluation.num_inference_steps or settings.num_inference_steps
    arguments = _arguments(steps, scale, settings.height, settings.width, None)
    if settings.num_frames is not None:
        arguments["num_frames"] = settings.num_frames
    chosen = config.model.model_copy(update={"dtype": dtype or config.model.dtype})
    return chosen, lora or newest, arguments | settings.pipeline_args


def _arguments(
    num_inference_steps: int | None,
    guidance_scale: float | None,
    height: int | None,
    width: int | None,
    further: list[str] | None,
) -> dict[str, Any]:
    """Arguments of the pipeline call; what was not given is left to the pipeline."""
    from genrl.config.yaml_source import SourceError, parse

    named = {
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        "height": height,
        "width": width,
    }
    arguments: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    for text in further or []:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"{text!r} is not key=value, for example num_frames=33")
        try:
            arguments[name] = parse(value).value
        except SourceError as error:
            raise typer.BadParameter(f"{text!r}: the value is not YAML: {error}") from None
    return arguments


def _print_scores(metrics: dict[str, float], title: str) -> None:
    from genrl.cli import tables as cli_tables

    cli_tables.print_scores(metrics, title)


def _is_message(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(PACKAGES) and (frames[-1].line or "").startswith("raise ")


def main() -> None:
    """Entry point of the `genrl` command."""
    app()


if __name__ == "__main__":
    main()
