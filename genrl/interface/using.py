"""`genrl.evaluate`, `genrl.sample`, `genrl.score` and `genrl.export`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from genrl.config import RunConfig
from genrl.config.loading import load, load_given
from genrl.config.sections import labels_of
from genrl.interface.objects import Lent, Rewards, Rows, pipeline_section, reward_sections, rows_name
from genrl_rewards.given import is_given, lending

if TYPE_CHECKING:
    from PIL.Image import Image

    from genrl.data.prompts import Prompt
    from genrl.diffusion.chosen import Chosen
    from genrl.diffusion.config.schema import Config
    from genrl.diffusion.rollout.scoring import Scorers
    from genrl.vla.config.schema import VLAConfig
    from genrl.vlm.config.schema import VLMConfig

Form = Literal["diffusers", "kohya", "comfyui"]


def sample(
    model: Any,
    prompts: str | Path | Rows,
    *,
    lora: str | Path | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    height: int | None = None,
    width: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    rewriter: str | Path | None = None,
) -> list[Image]:
    """One picture (PIL) per prompt: prompt k from `torch.Generator().manual_seed(seed + k)`, as plain diffusers does.

    model: a loaded pipeline, a hub id, a folder, or the run folder of one, which is then called as it was evaluated.
    prompts: texts, rows, a `datasets.Dataset` or a file. lora: a folder or hub id. out: also write them there, with
    prompts.json and grid.png. arguments: further ones of the pipeline's call. dtype: float32, bfloat16 or float16; that
    of the run by default. rewriter: folder of a run's language model, which rewrites the prompts. Raises ValueError for
    what does not fit.

    >>> pictures = genrl.sample("assets/tiny-t2i", ["a red cube", "two blue stars"], num_inference_steps=2)
    >>> [picture.size for picture in pictures]
    [(64, 64), (64, 64)]
    """
    from genrl.diffusion.chosen import config_of

    lent, call = Lent(), _call(num_inference_steps, guidance_scale, height, width, arguments)
    name, source = _name(model, lent), rows_name(prompts, "prompts", lent)
    with lending(lent.objects):
        rows = sized_rows(source, None if is_given(name) else config_of(name), call)
        chosen = _chosen(name, lora, call, dtype)

        from genrl.diffusion import sample as drawing
        from genrl.diffusion.policy.loading import check_call_arguments
        from genrl.diffusion.policy.rewriter import load_rewriter
        from genrl.diffusion.rollout.rollout import batch_inputs, check_inputs

        check_inputs(chosen.inputs, rows, source)
        texts, inputs, sizes = [row.text for row in rows], batch_inputs(chosen.inputs, rows), [row.size for row in rows]
        pipe = drawing.load(chosen.model, chosen.adapter)
    check_call_arguments(pipe, [name for given in (chosen.arguments, *sizes) for name in given], section=None)
    writer, call = None if rewriter is None else load_rewriter(Path(rewriter)), chosen.arguments
    if out is None:
        texts = texts if writer is None else drawing.rewritten(writer, pipe, texts, seed, call, inputs)
        return list(drawing.pictures_of(pipe, texts, seed, call, inputs, sizes))
    from PIL.Image import open as open_image

    paths = drawing.sample(
        pipe, texts, Path(out), seed=seed, arguments=call, inputs=inputs, sizes=sizes, rewriter=writer
    )
    return [open_image(path) for path in paths]


def evaluate(
    model: Any,
    prompts: str | Path | Rows | None = None,
    rewards: Rewards | None = None,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    lora: str | Path | None = None,
    batch_size: int = 8,
    seed: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    height: int | None = None,
    width: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Figures of a model on what it is not trained on: `{"eval/<reward>_mean": ...}` of a pipeline over one picture per
    prompt, from fixed noise; accuracy of a vision-language model; success of a policy in simulation.

    Of a pipeline, model, prompts and the arguments of the call are as in `sample`; of a run, prompts, rewards and seed
    are its own where they are not given. Of a vision-language model or a policy, model is a run folder, or a folder
    with the `config` (a YAML file or mapping) that says what it is asked or where it acts. Raises ValueError for what
    does not fit.

    >>> def bright(images):
    ...     return images.mean(dim=(1, 2, 3))
    >>> scores = genrl.evaluate("assets/tiny-t2i", ["a red cube"], bright, num_inference_steps=2)
    >>> 0 < scores["eval/bright_mean"] < 1
    True
    """
    settings, call = _settings(model, config), _call(num_inference_steps, guidance_scale, height, width, arguments)
    if settings is not None:
        given = {"prompts": prompts, "rewards": rewards, "lora": lora, "seed": seed, **call}
        if wrong := [key for key, value in given.items() if value is not None]:
            raise ValueError(f"genrl.evaluate: {', '.join(wrong)}: of a pipeline; here the configuration says them")
        return _of_policy(Path(model), settings)
    lent = Lent()
    name, sections = _name(model, lent), None if rewards is None else reward_sections(rewards, lent)
    source = None if prompts is None else rows_name(prompts, "prompts", lent)
    with lending(lent.objects):
        return judge_pipeline(name, source, sections, call, lora=lora, batch_size=batch_size, seed=seed).metrics


def _settings(model: Any, config: str | Path | Mapping[str, Any] | None) -> VLAConfig | VLMConfig | None:
    """The configuration to evaluate a policy or vision-language model by; None for a pipeline."""
    from genrl.diffusion.config.schema import Config
    from genrl.vla.config.schema import VLAConfig
    from genrl.vlm.config.schema import VLMConfig

    file = Path(model) / "config.yaml" if isinstance(model, (str, Path)) else None
    if config is None and (file is None or not file.is_file()):
        return None
    loaded = load_given(file if config is None else config, {}, "genrl.evaluate")[0]
    if config is not None and (isinstance(loaded, Config) or file is None):
        raise ValueError("config: says what a folder's vision-language model or policy is evaluated by; leave it out")
    return loaded if isinstance(loaded, VLAConfig | VLMConfig) else None


def _of_policy(model: Path, config: VLAConfig | VLMConfig) -> dict[str, float]:
    from genrl.runtime.loop.progress import Progress
    from genrl.runtime.weights.devices import tf32
    from genrl.vla.config.schema import VLAConfig

    with tf32(config.tf32), Progress(1, unit="answers") as progress:
        if isinstance(config, VLAConfig):
            from genrl.vla.evaluate import success_rates
            from genrl.vla.train import judge_policy

            return dict(success_rates(judge_policy(config, model, progress)))
        from genrl.runtime.weights.devices import default_device
        from genrl.vlm.evaluate import held_out
        from genrl.vlm.policies.folder import load_trained, open_policy

        if config.environment is not None:
            raise ValueError(f"{model}: an agent is evaluated by `genrl eval`")
        is_run = (model / "config.yaml").is_file()
        device = default_device()
        policy = load_trained(config, model, device=device) if is_run else open_policy(config, device, str(model))
        return held_out(policy, config, lambda total: progress.phase("evaluating", total), progress.advance)[0]


class Judged(NamedTuple):
    """The figures of a pipeline, and what they are of."""

    metrics: dict[str, float]
    chosen: Chosen
    source: str
    """The prompts."""
    prompts: int
    seed: int
    fault: str | None
    """What is wrong where more than `BROKEN` of the pictures are not finite."""


BROKEN = 0.05
"""Share of pictures that are not finite above which an evaluation fails."""


def judge_pipeline(
    name: str,
    source: str | None,
    rewards: Sequence[Mapping[str, Any]] | None,
    given: Mapping[str, Any],
    *,
    lora: str | Path | None = None,
    dtype: str | None = None,
    num_prompts: int | None = None,
    batch_size: int = 8,
    seed: int | None = None,
) -> Judged:
    """Score a pipeline over a source of prompts, or as its run was evaluated where these are None. rewards: sections of
    a configuration. given: arguments of the pipeline's call; num_prompts: only the first ones. Raises ValueError where
    there are no prompts or rewards, and for what does not fit."""
    from genrl.diffusion.chosen import config_of

    config = None if is_given(name) else config_of(name)
    source = source or (config.prompts.eval if config else None)
    if source is None:
        raise ValueError("give prompts (--prompts FILE); a run with prompts.eval has its own")
    if not rewards and config is None:
        raise ValueError("give rewards (--reward NAME; `genrl rewards` lists them); a run has its own")
    rows = sized_rows(source, config, given)[:num_prompts]  # before torch is loaded
    chosen = _chosen(name, lora, given, dtype)

    from genrl.diffusion.config.sections import Evaluation
    from genrl.diffusion.rollout.rollout import check_inputs
    from genrl.diffusion.rollout.scoring import not_finite
    from genrl.diffusion.sample import evaluate_pipeline, load

    check_inputs(chosen.inputs, rows, source)
    settings = Evaluation() if config is None else config.evaluation
    seed = settings.seed if seed is None else seed
    scorers = scorers_of(rewards) if rewards or config is None else rewards_of_run(config, Path(name))
    pipe, every = load(chosen.model, chosen.adapter), [row for row in rows for _ in range(settings.group_size)]
    with closing(scorers):
        evaluated = evaluate_pipeline(
            pipe,
            every,
            scorers,
            batch_size=batch_size,
            seed=seed,
            num_pictures=0,
            arguments=chosen.arguments,
            inputs=chosen.inputs,
        )
    broken = evaluated.scored.broken
    fault = not_finite(broken, len(every), pipe) if broken > BROKEN * len(every) else None
    return Judged(evaluated.metrics, chosen, source, len(rows), seed, fault)


def sized_rows(source: str, config: Config | None, given: Mapping[str, Any]) -> list[Prompt]:
    """The prompts in the sizes that the run draws them in; of a plain pipeline, those that their columns say. One size
    for all where the user gives it."""
    from genrl.data.prompts import load
    from genrl.data.sizes import NAMES, sized

    rows = load(source, config.prompts.column if config else "prompt")
    if not given.keys().isdisjoint(NAMES):
        return rows
    buckets = config.sampling.buckets if config else "rows"
    if buckets == "rows" and not any(name in row.columns for row in rows for name in NAMES):
        return rows  # a plain list, or another file than the run's
    return sized(rows, buckets, config.sampling.picture_column if config else None, source)


def scorers_of(rewards: Sequence[Mapping[str, Any]] | None) -> Scorers:
    """Rewards by their sections of a configuration, each labelled as in a run."""
    from genrl.diffusion.rollout.scoring import plain
    from genrl.runtime.weights.devices import default_device
    from genrl_rewards.loading import load

    sections = rewards or ()
    opened = [load(keys["name"], keys.get("args", {}), device=default_device()) for keys in sections]
    return plain(dict(zip(labels_of([str(keys["name"]) for keys in sections]), opened, strict=True)))


def rewards_of_run(config: Config, run: Path) -> Scorers:
    """The rewards of a run; one that is trained beside the model as its method finds it in the run (`load_trained`)."""
    from genrl.config.method import module_of
    from genrl.diffusion.rollout.scoring import open_scorers
    from genrl.runtime.weights.devices import default_device

    scorers = open_scorers(config, default_device())
    if config.trainer.rewards_are == "trained":
        module_of(config.trainer).load_trained(scorers, run)
    return scorers


def score(
    images: Any,
    rewards: Rewards,
    prompts: Sequence[str] | str = "",
    *,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, list[float | None]]:
    """Scores of pictures by reward, one per picture; None where a reward has none.

    images: PIL pictures, paths of files, or float [N, 3, H, W] in [0, 1]. prompts: one per picture, or one for all.
    columns: further ones that rewards ask for, a value per picture. Raises ValueError for what does not fit.

    >>> def wide(images):
    ...     return [float(images.shape[3] > images.shape[2])] * len(images)
    >>> genrl.score(["assets/before_after.png"], wide)
    {'wide': [1.0]}
    """
    import numpy as np
    import torch

    from genrl.runtime.weights.devices import default_device
    from genrl_rewards.contract import score as ask
    from genrl_rewards.loading import load as load_reward
    from genrl_rewards.pictures import open_picture

    if not isinstance(images, torch.Tensor):
        read = [torch.from_numpy(np.array(open_picture(one))).movedim(-1, 0).float() / 255 for one in images]
        sizes = {tuple(picture.shape) for picture in read}
        if len(sizes) > 1:
            raise ValueError(
                f"images: pictures of one call have one size, found {sorted(sizes)}; score each size alone"
            )
        images = torch.stack(read)
    texts = [prompts] * len(images) if isinstance(prompts, str) else list(prompts)
    if len(texts) != len(images):
        raise ValueError(f"prompts: {len(texts)} of them for {len(images)} images; give one per image, or one for all")
    lent, results = Lent(), {}
    sections = reward_sections(rewards, lent)
    with lending(lent.objects):
        for name, keys in zip(labels_of([str(keys["name"]) for keys in sections]), sections, strict=True):
            reward, label = load_reward(keys["name"], keys.get("args", {}), device=default_device()), str(keys["name"])
            values = ask(reward, images=images, prompts=texts, columns=columns, name=label).values
            results[name] = [None if math.isnan(value) else value for value in values]
    return results


def export(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    full: bool = False,
    form: Form = "diffusers",
    push: str | None = None,
    private: bool = False,
) -> Path:
    """Write a run's model for plain diffusers, transformers or LeRobot into `out`, a new folder, which it returns.

    step: the checkpoint after so many iterations, None = the newest. full: of a LoRA, the whole model with it merged.
    form: of a pipeline's LoRA file. push: upload it to the hub's repository org/name as well, which is private if it
    is new and `private` says so. Raises ValueError for a folder that holds no run, for `out` in use, and for a
    repository that cannot be written; RuntimeError where the hub does not take the upload, with `out` complete.

    >>> sorted(path.name for path in genrl.export(folder, out).iterdir())
    ['README.md', 'pytorch_lora_weights.safetensors']
    """
    from genrl.diffusion.config.schema import Config
    from genrl.runtime.folder.hub import whole_folder
    from genrl.vla.config.schema import VLAConfig
    from genrl.vlm.config.schema import VLMConfig

    if not (Path(run) / "config.yaml").is_file():
        raise ValueError(f"{run} is not a run folder: it has no config.yaml")
    if Path(out).exists() and any(Path(out).iterdir()):
        raise ValueError(f"{out} is not empty: give a new folder")
    if push is not None:
        from genrl.runtime.folder import hub

        # Before the export, which may take an hour: that a name or a token is wrong shows at once.
        hub.check_repo(push)
    elif private:
        raise ValueError("private (--private): is of a repository; give push as well")
    config: RunConfig = load(Path(run) / "config.yaml")
    if not isinstance(config, Config) and form != "diffusers":
        raise ValueError("form (--format): is of a pipeline's LoRA; leave it out")
    if isinstance(config, VLAConfig) and full:
        raise ValueError("full (--full): a policy is always written whole; leave it out")
    # Whole or not at all: a folder with half of the weights loads without an error in some libraries.
    with whole_folder(Path(out)) as place:
        match config:
            case Config():
                from genrl.diffusion.files.export import export as write

                write(Path(run), place, step=step, full=full, form=form)
            case VLAConfig():
                from genrl.vla.setup import export as write_policy

                write_policy(Path(run), place, step)
            case VLMConfig():
                from genrl.vlm.policies.folder import load_trained, save_model

                save_model(load_trained(config, Path(run), step), config.vlm.path, place, full=full)
    if push is not None:
        hub.push(Path(run), Path(out), push, private=private)
    return Path(out)


def _name(model: Any, lent: Lent) -> str:
    return str(pipeline_section(model, lent)["path"])


def _call(
    num_inference_steps: int | None,
    guidance_scale: float | None,
    height: int | None,
    width: int | None,
    arguments: Mapping[str, Any] | None,
) -> dict[str, Any]:
    from genrl.diffusion.chosen import call_arguments

    return call_arguments(num_inference_steps, guidance_scale, height, width) | dict(arguments or {})


def _chosen(name: str, lora: str | Path | None, given: Mapping[str, Any], dtype: str | None) -> Chosen:
    from genrl.diffusion.chosen import Chosen, choose
    from genrl.diffusion.config.sections import Model

    adapter = None if lora is None else str(lora)
    return Chosen(Model(path=name), adapter, dict(given)) if is_given(name) else choose(name, adapter, dtype, given)
