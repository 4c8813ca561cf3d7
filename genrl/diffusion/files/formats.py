"""A trained LoRA in the forms that other programs read, and what is written compared with what was trained.

kohya (A1111, Forge, ComfyUI): layers of a U-Net as `lora_unet_down_blocks_0_...lora_down.weight`, by diffusers' own
`convert_state_dict_to_kohya`. ComfyUI: the same of a U-Net; of a transformer whose diffusers names it knows
(`model_lora_keys_unet` in its comfy/lora.py) those names. In both the scale is multiplied into the second matrix and no
alpha is written, which all of them read as a scale of 1: they ignore diffusers' metadata, the converter writes the rank
as alpha, and of layers with several ranks diffusers reads the alphas wrongly.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from genrl.config import LoRA
from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import Model
from genrl.diffusion.policy.adapters import ADAPTER, activate_all, add_frozen, load_lora
from genrl.diffusion.policy.interfaces import Pipeline
from genrl.diffusion.policy.loading import load_pipeline
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch
from genrl.runtime.weights.devices import default_device

Form = Literal["diffusers", "kohya", "comfyui"]
KNOWN_TO_COMFYUI = (
    "AuraFlowTransformer2DModel",
    "FluxTransformer2DModel",
    "PixArtTransformer2DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
)
MERGED = {torch.float32: 1e-3}
"""How far a merged pipeline's first step may be off, relative to its largest number; in half precision 0.05."""


class ExportError(RuntimeError):
    """What was written does not give back the model it was made from."""


def unquantised(model: Model) -> Model:
    """The model as it was published: adapters belong to those weights."""
    return model.model_copy(update={"quantize": None})


def adapt(pipe: Pipeline, lora: LoRA, folder: Path) -> None:
    """Put the trained adapter in `folder`, and the frozen ones, into a plain pipeline."""
    load_lora(pipe, str(folder), ADAPTER)
    add_frozen(pipe, lora.frozen)
    activate_all(pipe)


def write_form(config: Config, lora: Path, out: Path, form: Form, probe: Batch) -> None:
    """Write the adapter in the folder `lora` as `out/lora_<form>.safetensors`, load it again by diffusers, and compare
    a step of `probe`. Raises ValueError where the form has no names for this model or adapter, ExportError where the
    file acts differently."""
    assert config.model.lora is not None
    if config.model.lora.text_encoders:
        raise ValueError(f"--format {form}: text encoders are adapted, too, which is written in diffusers' form alone")
    model = unquantised(config.model)
    pipe = load_pipeline(model)
    load_lora(pipe, str(lora), ADAPTER)
    denoisers: dict[str, Any] = {n: p for n, p in pipe.components.items() if getattr(p, "peft_config", None)}
    if problem := form_problem(form, {name: type(part).__name__ for name, part in denoisers.items()}, _kind(denoisers)):
        raise ValueError(f"--format {form}: {problem}")
    ((name, denoiser),) = denoisers.items()
    layers: dict[str, Tensor] = get_peft_model_state_dict(denoiser, adapter_name=ADAPTER)
    scales = {layer: module.scaling[ADAPTER] for layer, module in denoiser.named_modules() if _is_adapted(module)}
    named = {f"{name}.{key}": value for key, value in _folded(layers, scales).items()}
    if name == "unet":
        converted: dict[str, Tensor] = convert_state_dict_to_kohya(named)
        named = {key: value for key, value in converted.items() if not key.endswith(".alpha")}
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"lora_{form}.safetensors"
    save_file({key: value.contiguous().cpu() for key, value in named.items()}, file, metadata={"format": "pt"})

    def again() -> Pipeline:
        plain = load_pipeline(model)
        load_lora(plain, str(out))
        return plain

    require_alike(config, probe, lambda: pipe, again, file)


def form_problem(form: Form, denoisers: dict[str, str], kind: str) -> str | None:
    """Why an adapter of this type, of these components (-> class), has no such form."""
    if kind not in ("lora", "rslora"):
        return f"diffusers' converter writes LoRAs alone, and this is a {kind}; write diffusers"
    if set(denoisers) == {"unet"}:
        return None
    classes = ", ".join(denoisers.values())
    if form == "kohya":
        return f"it has names for U-Nets, and this is a {classes}; write comfyui, or diffusers"
    if len(denoisers) > 1 or classes not in KNOWN_TO_COMFYUI:
        names = ", ".join(KNOWN_TO_COMFYUI)
        return f"ComfyUI does not know diffusers' names of a {classes}, only of U-Nets, {names}; write diffusers"
    return None


def require_alike(
    config: Config, probe: Batch, one: Callable[[], Pipeline], other: Callable[[], Pipeline], what: Path
) -> None:
    """Delete what was written and raise ExportError unless two pipelines, one after the other, make the same first step
    of `probe`; of two experts all steps. what: that folder, or a file alone in its folder."""
    expected, actual = (_step(config, make(), probe) for make in (one, other))
    tolerance = MERGED.get(getattr(torch, config.model.dtype), 0.05) * float(expected.abs().max())
    difference = float((expected - actual).abs().max())
    # Written so that NaN is refused, too.
    if not difference <= tolerance:
        shutil.rmtree(what if what.is_dir() else what.parent)
        raise ExportError(f"{what} acts differently from the model that was trained (by up to {difference:g}): deleted")


def merged_is_alike(config: Config, lora: Path, out: Path, probe: Batch) -> None:
    """Compare a pipeline into which adapters were merged with the base model that has them beside it."""
    assert config.model.lora is not None
    model, settings = unquantised(config.model), config.model.lora

    def unmerged() -> Pipeline:
        pipe = load_pipeline(model)
        adapt(pipe, settings, lora)
        return pipe

    plain = {"revision": None, "variant": None, "config": None, "without": ()}
    merged = model.model_copy(update={"path": str(out)} | plain)
    require_alike(config, probe, unmerged, lambda: load_pipeline(merged), out)


@torch.no_grad()
def _step(config: Config, pipe: Pipeline, probe: Batch) -> Tensor:
    autocast = getattr(torch, config.model.autocast) if config.model.autocast else None
    policy = Policy(pipe.to(default_device()), autocast=autocast)
    return policy.roll_out(probe, stop=None if len(policy.denoisers) > 1 else 1).final.cpu()


def _kind(denoisers: dict[str, Any]) -> str:
    config = next(iter(denoisers.values())).peft_config[ADAPTER]
    if config.peft_type.value != "LORA":
        return str(config.peft_type.value).lower()
    return "dora" if config.use_dora else "lora"


def _is_adapted(module: nn.Module) -> bool:
    return ADAPTER in getattr(module, "scaling", {})


def _folded(layers: dict[str, Tensor], scales: dict[str, float]) -> dict[str, Tensor]:
    """The layers with the scale within the second matrix."""
    named = {}
    for key, value in layers.items():
        layer, second, _ = key.partition(".lora_B.")
        named[key] = value * scales[layer] if second else value
    return named
