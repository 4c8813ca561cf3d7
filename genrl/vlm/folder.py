"""A trained model as transformers and PEFT save it, and a model as a run left it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from genrl.config.vlm import VLMConfig
from genrl.runtime import checkpoint
from genrl.runtime.loop import put_back
from genrl.vlm.policy import ATTENTION, Lora, Policy

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def open_policy(config: VLMConfig, device: str | torch.device = "cpu", path: str | None = None) -> Policy:
    """The model that a run trains, as it is before training. Raises ValueError as `Policy`."""
    settings = config.vlm.lora
    lora = None if settings is None else Lora(settings.rank, settings.alpha, settings.targets or ATTENTION)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.vlm.dtype]
    return Policy(path or config.vlm.path, lora=lora, dtype=dtype, device=device, seed=config.seed)


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
    put_back(trained, checkpoint.load(found).tensors["weights"], found)
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
            if file.is_file() and not file.name.endswith(WEIGHTS) and not (out / file.name).exists():
                shutil.copy(file, out / file.name)
    else:
        policy.tokenizer.save_pretrained(out)
        policy.processor.image_processor.save_pretrained(out)
        (out / "chat_template.jinja").write_text(policy.processor.chat_template, encoding="utf-8")
    return out
