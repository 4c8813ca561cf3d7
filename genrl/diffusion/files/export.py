"""Weights that plain diffusers loads: LoRA adapters, verified by reloading, and whole pipelines with their card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from peft import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from genrl import __version__
from genrl.config import LoRA
from genrl.config import load as load_config
from genrl.config.folders import hub_file, is_gguf
from genrl.data import prompts as prompt_files
from genrl.data.sizes import NAMES
from genrl.diffusion.config.schema import Config
from genrl.diffusion.evaluate import evaluation_arguments
from genrl.diffusion.files.formats import ExportError, Form, adapt, merged_is_alike, unquantised, write_form
from genrl.diffusion.policy.adapters import (
    ADAPTER,
    SECOND,
    activate,
    denoiser_that_loads,
    denoisers_of,
    encoders_of,
    is_lokr,
    keys_of,
    loads_lora,
)
from genrl.diffusion.policy.interfaces import Adapted, AdaptedDenoiser, Pipeline
from genrl.diffusion.policy.loading import load_pipeline, loading_code
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import batch_arguments, batch_inputs, call_arguments
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.hub import THIS_FOLDER, as_code
from genrl.runtime.folder.hub import table as table_of
from genrl.runtime.folder.run import Run, read_metrics, write_atomic
from genrl.runtime.weights.weights import result
from genrl_rewards.models.accounts import collected

_RELOADED = "genrl_reloaded"


def save_lora(policy: Policy, folder: Path, probe: Batch) -> None:
    """Write the present adapter so that `pipe.load_lora_weights(folder)` restores it, and prove it.

    The second expert of a pipeline that has two (Wan 2.2) gets the folder `transformer_2` within, to be loaded with
    `load_into_transformer_2=True`. A pipeline without a LoRA loader has `pipe.transformer.load_lora_adapter(folder,
    prefix=None, use_safetensors=True)` restore it. Everything is loaded back by diffusers under another adapter name,
    and the denoising of `probe` must come out equal. Raises ExportError where it does not.
    """
    pipe, encoders = policy.pipe, _adapted_encoders(policy)
    for name, denoiser in _adapted(policy).items():
        part = name.removesuffix(SECOND)
        if not loads_lora(pipe, policy.denoisers) or is_lokr(denoiser):
            _save_adapter(denoiser, folder if part == name else folder / name)
            continue
        arguments = {}
        for key, adapted in {part: denoiser, **(encoders if part == name else {})}.items():
            arguments[f"{key}_lora_layers"] = get_peft_model_state_dict(adapted, adapter_name=ADAPTER)
            # Without the metadata lora_alpha is lost: the adapter would load at another strength, without a word.
            arguments[f"{key}_lora_adapter_metadata"] = _settings(adapted)
        type(pipe).save_lora_weights(folder if part == name else folder / name, **arguments)
    with torch.compiler.set_stance("force_eager"):  # a compiled denoiser: not for two calls
        verify_lora(policy, folder, probe)


def _settings(adapted: Any) -> dict[str, Any]:
    """peft's settings of an adapter; sets in order, so that equal runs write equal bytes."""
    settings: dict[str, Any] = adapted.peft_config[ADAPTER].to_dict()
    return {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}


def _save_adapter(denoiser: AdaptedDenoiser, folder: Path) -> None:
    """Save an adapter as `denoiser.save_lora_adapter` does, which casts the model first; a quantised one cannot be
    cast."""
    metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(_settings(denoiser), indent=2, sort_keys=True)}
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        key: tensor.contiguous() for key, tensor in get_peft_model_state_dict(denoiser, adapter_name=ADAPTER).items()
    }
    save_file(state, folder / LORA_WEIGHT_NAME_SAFE, metadata)


@torch.no_grad()
def verify_lora(policy: Policy, folder: Path, probe: Batch) -> None:
    """Raise ExportError unless the adapter in `folder`, as diffusers loads it, acts like the one in memory."""
    denoisers = _adapted(policy)
    networks: list[Any] = [*denoisers.values(), *_adapted_encoders(policy).values()]
    expected = _denoised(policy, probe)
    try:
        with collected([]):  # of a second adapter beside the first, which is what we want here
            _load_again(policy, folder)
        for network in networks:
            _require_equal_adapters(network, folder)
            # The trained one is switched off meanwhile, or both would act.
            activate(network, _RELOADED)
        actual = _denoised(policy, probe)
    finally:
        for network in networks:
            activate(network)
            delete = network.delete_adapters if hasattr(network, "delete_adapters") else network.delete_adapter
            delete(_RELOADED)
    # Equal bits in float32 on a CPU; a pipeline in lower precision holds the reloaded adapter rounded to it.
    tolerance = max(1e-5, 4 * torch.finfo(next(iter(denoisers.values())).dtype).eps) * float(expected.abs().max())
    difference = float((expected - actual).abs().max())
    if not difference <= tolerance:
        raise ExportError(f"the adapter in {folder} acts differently after reloading (by up to {difference:g})")


@torch.no_grad()
def accompany(policy: Policy, probe: Batch) -> None:
    """The model calls of `save_lora`, in a process that makes them together with the one that saves."""
    # One for the adapter in memory, one for the reloaded: collective calls have to be as many in every process.
    for _ in range(2):
        _denoised(policy, probe)


def _denoised(policy: Policy, probe: Batch) -> Tensor:
    stop = None if len(policy.denoisers) > 1 else 1  # each expert has its steps
    return policy.roll_out(probe, stop=stop).final


def _load_again(policy: Policy, folder: Path) -> None:
    """Load the folder beside the adapter in training. Raises ExportError where diffusers cannot read it."""
    try:
        _read_plainly(policy.pipe, folder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ExportError(f"the adapter in {folder} cannot be loaded again: {error}") from error
    device = policy.device
    # peft puts it beside the weights it adapts, which may wait on the CPU.
    for network in (*_adapted(policy).values(), *_adapted_encoders(policy).values()):
        for key, parameter in network.named_parameters():
            if _RELOADED in key:
                parameter.data = parameter.data.to(device)


def _read_plainly(pipe: Pipeline, folder: Path) -> None:
    """Load it as a user of diffusers alone does, since that is what is to be proven: not by the reader of all forms."""
    for name in denoisers_of(pipe):
        part: Any = pipe.components[name]
        place = folder / name if name.endswith(SECOND) else folder
        if not place.is_dir():
            continue
        is_lokr = any(".lokr_" in key for file in place.glob("*.safetensors") for key in keys_of(file))
        if is_lokr or not loads_lora(pipe, denoisers_of(pipe)):
            part.load_lora_adapter(str(place), prefix=None, adapter_name=_RELOADED, use_safetensors=True)
        else:
            second = {"load_into_transformer_2": True} if name.endswith(SECOND) else {}
            pipe.load_lora_weights(str(place), adapter_name=_RELOADED, **second)


def _adapted(policy: Policy) -> dict[str, AdaptedDenoiser]:
    adapted: dict[str, AdaptedDenoiser] = {}
    for name, denoiser in policy.denoisers.items():
        assert isinstance(denoiser, AdaptedDenoiser), f"the {name} has no adapter"
        adapted[name] = denoiser
    return adapted


def _adapted_encoders(policy: Policy) -> dict[str, Any]:
    """The text encoders that are trained."""
    return encoders_of(policy.pipe) if policy.memo.trained else {}


def _require_equal_adapters(denoiser: AdaptedDenoiser, folder: Path) -> None:
    """The reloaded adapter is the trained one: scale, rank, names, and values up to the dtype it is held in."""
    if _RELOADED not in denoiser.peft_config:
        raise ExportError(f"the adapter in {folder} holds nothing for the {type(denoiser).__name__}")
    trained, reloaded = (denoiser.peft_config[name] for name in (ADAPTER, _RELOADED))
    values, again = (get_peft_model_state_dict(denoiser, adapter_name=name) for name in (ADAPTER, _RELOADED))
    alphas = [getattr(config, "alpha" if is_lokr(denoiser) else "lora_alpha") for config in (trained, reloaded)]
    same = trained.r == reloaded.r and alphas[0] == alphas[1] and values.keys() == again.keys()
    if not same or any(not torch.equal(values[key].to(again[key].dtype), again[key]) for key in values):
        raise ExportError(f"the adapter in {folder} has other weights, rank or alpha after reloading")


def export(run: Path, out: Path, step: int | None = None, *, full: bool = False, form: Form = "diffusers") -> Path:
    """Write a run's model for plain diffusers into the new folder `out`, with its card; returns `out`.

    step: iterations of the checkpoint to take (None = the newest). full: the whole pipeline, a LoRA merged into it;
    a fully fine-tuned model is always written whole. form: of a LoRA's file. Averaged weights are taken where the run
    keeps an average. What was merged or converted is loaded again, and one denoising compared. Raises ValueError where
    there is no such checkpoint, `out` is not empty, or this LoRA has no such form; ExportError where they differ.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose another --out")
    folders = Run(run).checkpoints
    source = checkpoint.latest(folders) if step is None else folders / f"step-{step:06d}"
    if source is None or not source.is_dir():
        have = ", ".join(str(int(path.name.removeprefix("step-"))) for path in checkpoint.steps(folders)) or "none"
        missing = "no checkpoint" if step is None else f"no checkpoint {step}"
        raise ValueError(f"{run} has {missing}; checkpoints there: {have}")
    loaded = checkpoint.load(source)
    config = load_config(run / "config.yaml")
    if not isinstance(config, Config):
        raise ValueError(f"{run} is no run of a diffusion pipeline")
    if form != "diffusers" and (full or config.model.lora is None):
        raise ValueError(f"--format {form}: is a form of LoRAs, and the whole pipeline is written; leave it out")
    if full and is_gguf(config.model.path):
        text = "a LoRA is not merged into quantised weights; export it alone, without --full"
        raise ValueError(f"{config.model.path}: {text}, and merge it into the published ones")
    prompts = prompt_files.load(config.prompts.eval or config.prompts.train, config.prompts.column)[:5]
    probe = probe_of(config, prompts[0])
    if config.model.lora is not None and not full:
        if form == "diffusers":
            # As it was saved, which `save_lora` verified then: nothing is written anew that could differ.
            shutil.copytree(source / "lora", out, dirs_exist_ok=True)
        else:
            write_form(config, source / "lora", out, form, probe)
    else:
        # Adapters are merged into the weights as they were published, not into their rounded form.
        pipe = load_pipeline(unquantised(config.model))
        if config.model.lora is not None:
            adapt(pipe, config.model.lora, source / "lora")
            adapted = [name for name, part in pipe.components.items() if isinstance(part, Adapted)]
            if loads_lora(pipe, adapted):
                pipe.fuse_lora(components=adapted)  # by default not the second expert
                pipe.unload_lora_weights()
            else:
                for name in adapted:
                    pipe.components[name].fuse_lora()
                    pipe.components[name].unload_lora()
        else:
            _fill(pipe, result(loaded.tensors))
        # Once merged there is no adapter to reload: the whole is compared with the base that has the adapter.
        pipe.save_pretrained(out)
        if config.model.lora is not None:
            # The comparison loads two pipelines by itself.
            del pipe
            merged_is_alike(config, source / "lora", out, probe)
    rows = [row for row in read_metrics(Run(run).metrics) if row["step"] <= loaded.step and "eval/total_mean" in row]
    write_card(out, config, rows, [prompt.text for prompt in prompts], whole=full, form=form)
    return out


FOR_OTHERS = {
    "kohya": "The file has kohya's names: put it where A1111 or Forge look for LoRAs; diffusers reads it, too.\n",
    "comfyui": "The file has ComfyUI's names: put it into its models/loras; diffusers reads it, too.\n",
}
"""What a card says of a LoRA in another form than diffusers'."""


def probe_of(config: Config, prompt: prompt_files.Prompt) -> Batch:
    """One sample, to compare models by."""
    sampling = config.sampling
    inputs = batch_inputs(sampling.inputs, [prompt])
    return Batch([prompt.text], [("probe", config.seed)], batch_arguments(sampling, [prompt]), inputs=inputs)


@torch.no_grad()
def _fill(pipe: Pipeline, tensors: Mapping[str, Tensor]) -> None:
    """Put `component.parameter` tensors of a checkpoint into a pipeline."""
    for name, tensor in tensors.items():
        component, _, key = name.partition(".")
        pipe.components[component].get_parameter(key).copy_(tensor)


def write_card(
    folder: Path,
    config: Config,
    rows: Sequence[Mapping[str, float | None]],
    prompts: list[str],
    *,
    whole: bool = False,
    form: Form = "diffusers",
) -> None:
    """README.md of an exported model: base model, method, held-out rewards, how to load and call it.

    rows: of metrics.jsonl, the evaluations by step. The last is this model's; that of step 0, where there is one, is of
    the base model.
    """
    is_lora = config.model.lora is not None and not whole
    code = "\n".join(_card_code(config, folder, prompts[0] if prompts else "a prompt", is_lora=is_lora))
    table = table_of(rows)
    examples = "\n".join(f"- {as_code(json.dumps(prompt, ensure_ascii=False))}" for prompt in prompts)
    rewards = ", ".join(f"{as_code(reward.name)} (weight {reward.weight:g})" for reward in config.rewards)
    name, others = config.model.config or config.model.path, FOR_OTHERS.get(form, "")
    text = f"""---
base_model: {json.dumps(name, ensure_ascii=False)}
library_name: diffusers
tags: [{"lora, " if is_lora else ""}reinforcement-learning, genrl, {json.dumps(config.trainer.algorithm)}]
---

# {as_code(name)} fine-tuned by {as_code(config.trainer.algorithm)}

{"LoRA adapter" if is_lora else "Pipeline"} trained by reinforcement learning with genrl {__version__}.
{others}Rewards: {rewards}. {config.iterations} iterations of {config.sampling.images_per_iteration} samples.
The licence of the base model applies.

```python
{code}
```

{table}

Prompts it was evaluated on, among others:

{examples}
"""
    write_atomic(folder / "README.md", text)


def _card_code(config: Config, folder: Path, prompt: str, *, is_lora: bool) -> Iterator[str]:
    """Lines of Python that load the model in `folder` and call it as it was evaluated."""
    model, sampling = config.model, config.sampling
    if is_lora and model.config is not None:
        yield from ("import diffusers", "import torch", "import transformers", "", loading_code(model))
    else:
        base = json.dumps(model.path if is_lora else THIS_FOLDER)
        plain = model.dtype == "float32"
        yield from () if plain else ("import torch",)
        file, _, kind = (model.pipeline or "").rpartition(":")
        imported = f"from {Path(file).stem} import {kind}" if kind else "from diffusers import DiffusionPipeline"
        yield from (imported, "")
        loaded = "".join(f", {name}=None" for name in model.without) if is_lora else ""
        loaded += "" if plain else f", dtype=torch.{model.dtype}"
        yield f"pipe = {kind or 'DiffusionPipeline'}.from_pretrained({base}{loaded})"
    if is_lora and model.scheduler:
        settings = "".join(f", {name}={value!r}" for name, value in model.scheduler.items())
        yield f"pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config{settings})"
    if is_lora and model.lora is not None:
        yield _loading(model.lora, folder)
    arguments = call_arguments(sampling) | evaluation_arguments(config)
    if sampling.buckets and sampling.buckets != "rows":
        arguments |= dict(zip(NAMES, sampling.buckets[0], strict=False))
    result = "images" if sampling.num_frames is None else "frames"
    yield f"{result} = pipe("
    yield f"    prompt={json.dumps(prompt)},"
    yield from (f"    {name}={value!r}," for name, value in arguments.items())
    for name, column in sampling.inputs.items():
        yield f"    {name}=...,  # the picture of the row's column {column!r}"
    yield f").{result}"


def _loading(lora: LoRA, folder: Path) -> str:
    """The lines that load the adapter in `folder`, with those that were frozen beside it."""
    if denoiser := denoiser_that_loads(folder):
        return f'pipe.{denoiser}.load_lora_adapter("{THIS_FOLDER}", prefix=None, use_safetensors=True)'
    if not lora.frozen:
        return f'pipe.load_lora_weights("{THIS_FOLDER}")'
    named = {"trained": THIS_FOLDER} | {f"frozen_{number}": source for number, source in enumerate(lora.frozen)}
    lines = []
    for name, source in named.items():
        place, file = (source, None) if Path(source).exists() else hub_file(source)
        chosen = "" if file is None else f", weight_name={json.dumps(file)}"
        lines.append(f"pipe.load_lora_weights({json.dumps(place)}{chosen}, adapter_name={name!r})")
    return "\n".join([*lines, f"pipe.set_adapters({list(named)!r})"])
