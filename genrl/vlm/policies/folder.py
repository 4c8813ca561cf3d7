"""A trained model as transformers and PEFT save it, and a model as a run left it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from genrl.config.vlm import VLMConfig
from genrl.runtime import checkpoint
from genrl.runtime.weights import put_back
from genrl.vlm.policies.codes import CODEC, CodePolicy
from genrl.vlm.policies.image_tokens import ImagePolicy
from genrl.vlm.policies.masked_text import MaskedPolicy
from genrl.vlm.policies.policy import ATTENTION, Lora, Policy

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def open_policy(config: VLMConfig, device: str | torch.device = "cpu", path: str | None = None) -> Policy:
    """The model that a run trains, as it is before training. Raises ValueError as `Policy`."""
    settings = config.vlm.lora
    lora = None if settings is None else Lora(settings.rank, settings.alpha, settings.targets or ATTENTION)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.vlm.dtype]
    if config.vlm.output == "image":
        guidance = config.generation.guidance_scale
        common: dict[str, Any] = {"lora": lora, "dtype": dtype, "device": device, "seed": config.seed}
        drawing: Any = ImagePolicy(path or config.vlm.path, guidance=guidance, **common)
        return drawing  # type: ignore[no-any-return]  # used as a Policy where both can the same
    if config.vlm.output in ("voxels", "audio"):
        coded: Any = CodePolicy(path or config.vlm.path, lora=lora, dtype=dtype, device=device, seed=config.seed)
        if coded.codec.kind != config.vlm.output:
            raise ValueError(f"vlm.output: {config.vlm.output}, but {config.vlm.path} makes {coded.codec.kind}")
        return coded  # type: ignore[no-any-return]
    if config.vlm.output == "masked_text":
        masked: Any = MaskedPolicy(
            path or config.vlm.path,
            length=config.generation.max_new_tokens,
            samples=config.generation.elbo_samples if config.trainer.bounds else None,
            steps=config.generation.denoising_steps,
            dtype=dtype,
            device=device,
        )
        return masked  # type: ignore[no-any-return]
    policy = Policy(path or config.vlm.path, lora=lora, dtype=dtype, device=device, seed=config.seed)
    policy.prefix_attention = config.vlm.prefix_attention
    return policy


def load_trained(config: VLMConfig, run: Path, step: int | None = None, device: str = "cpu") -> Policy:
    """The model of a run's checkpoint, the newest one or that after `step` iterations.

    Raises ValueError where there is none.
    """
    folder = run / "checkpoints"
    found = checkpoint.latest(folder) if step is None else folder / f"step-{step:06d}"
    if found is None or not found.is_dir():
        have = ", ".join(path.name for path in sorted(folder.glob("step-*"))) or "none"
        raise ValueError(
            f"{run} has no checkpoint {'' if step is None else f'after {step} iterations'}; there are {have}"
        )
    policy = open_policy(config, device)
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    weights = checkpoint.load(found).tensors["weights"]
    if any(name.startswith("baseline.") for name in weights):  # MusicRL trains two models
        weights = {name.removeprefix("policy."): v for name, v in weights.items() if name.startswith("policy.")}
    put_back(trained, weights, found)
    return policy


def save_model(policy: Policy, source: str, out: Path, *, full: bool = False) -> Path:
    """Write `out`: the whole model with its processor, or the adapter of a LoRA (full: merged into the model).

    source: what the model was loaded from; its tokenizer and processor files are copied as they are.
    """
    out.mkdir(parents=True, exist_ok=True)
    if policy.peft is not None and not full:
        policy.peft.peft_config["default"].base_model_name_or_path = source
        policy.peft.save_pretrained(str(out))
        return out
    model = policy.model if policy.peft is None else policy.peft.merge_and_unload()
    model.save_pretrained(out)
    if Path(source).is_dir():
        for file in Path(source).iterdir():
            kept = file.name == CODEC or not file.name.endswith(WEIGHTS)
            if file.is_file() and kept and not (out / file.name).exists():
                shutil.copy(file, out / file.name)
    elif isinstance(policy, MaskedPolicy | CodePolicy):
        policy.tokenizer.save_pretrained(out)
    else:
        policy.tokenizer.save_pretrained(out)
        policy.processor.image_processor.save_pretrained(out)
        (out / "chat_template.jinja").write_text(policy.processor.chat_template, encoding="utf-8")
    return out
