"""A trained model as transformers and PEFT save it, and a model as a run left it."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel

from genrl.config.plugins import find
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.whole import own_files
from genrl.runtime.weights.weights import put_back, result
from genrl.vlm.config.names import OUTPUTS
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.codes import CODEC
from genrl.vlm.policies.contract import SequencePolicy, members
from genrl.vlm.policies.loading import loaded
from genrl.vlm.policies.policy import Policy
from genrl_rewards.given import is_given

SEE = "see genrl/vlm/policies/contract.py"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def open_policy(config: VLMConfig, device: str | torch.device = "cpu", path: str | None = None) -> Policy:
    """The model that a run trains, as it is before training.

    Raises ValueError as the policy's `open` does, and for a class that is no policy, naming what it lacks.
    """
    kind: Any = find(config.vlm.output, OUTPUTS)
    opened = getattr(kind, "open", None)
    if not isinstance(kind, type) or opened is None:
        raise ValueError(
            f"vlm.output: {config.vlm.output} is no policy: a class with open(config, device, path), {SEE}"
        )
    policy: Any = opened(config, device, path or config.vlm.path)
    has_interface = isinstance(policy, Policy | SequencePolicy)
    if not has_interface:
        lacks = ", ".join(name for name in members() if not hasattr(policy, name))
        raise ValueError(f"vlm.output: {config.vlm.output} has no {lacks}, {SEE}")
    return policy  # type: ignore[no-any-return]  # used as a Policy where both can the same


def load_trained(config: VLMConfig, run: Path, step: int | None = None, device: str = "cpu") -> Policy:
    """The model of a run's checkpoint, the newest one or that after `step` iterations; its average, where there is one.

    Raises ValueError where there is none.
    """
    folder = run / "checkpoints"
    saved = checkpoint.latest(folder) if step is None else folder / f"step-{step:06d}"
    if saved is None or not saved.is_dir():
        have = ", ".join(path.name for path in sorted(folder.glob("step-*"))) or "none"
        raise ValueError(
            f"{run} has no checkpoint {'' if step is None else f'after {step} iterations'}; there are {have}"
        )
    policy = open_policy(config, device)
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    weights = result(checkpoint.load(saved).tensors)
    if any(name.startswith("baseline.") for name in weights):  # MusicRL trains two models
        weights = {name.removeprefix("policy."): v for name, v in weights.items() if name.startswith("policy.")}
    put_back(trained, weights, saved)
    return policy


def _merged(policy: Policy, adapted: PeftModel, source: str) -> Any:
    """The model with its adapter merged in; on quantised weights, which would round it, into those of the source."""
    if getattr(policy, "quantized", False):  # other policies than `Policy` never are
        with TemporaryDirectory() as place:
            adapted.save_pretrained(place)
            adapted = PeftModel.from_pretrained(loaded(source, policy.dtype).model, place)
    return adapted.merge_and_unload()


def save_model(policy: Policy, source: str, out: Path, *, full: bool = False) -> Path:
    """Write `out`: the whole model with its processor, or the adapter of a LoRA (full: merged into the model).

    source: what the model was loaded from; its tokenizer and processor files are copied as they are.
    """
    out.mkdir(parents=True, exist_ok=True)
    if is_given(source):
        source = policy.model.config.name_or_path or source
    if policy.peft is not None and not full:
        # PEFT notes where the model came from, which of a script's is nowhere; who loads the adapter looks there.
        policy.peft.peft_config["default"].base_model_name_or_path = source
        policy.peft.save_pretrained(str(out))
        return out
    model = policy.model if policy.peft is None else _merged(policy, policy.peft, source)
    model.save_pretrained(out)
    if Path(source).is_dir():
        for file in own_files(Path(source)):  # a link may lead to what is nobody else's business
            is_copied = file.name == CODEC or not file.name.endswith(WEIGHTS)
            if is_copied and not (out / file.name).exists():
                shutil.copy(file, out / file.name)
        return out
    policy.tokenizer.save_pretrained(out)
    if policy.processor is not None:
        parts = ("image_processor", "feature_extractor")  # the second is MusicGen's
        next(getattr(policy.processor, part) for part in parts if hasattr(policy.processor, part)).save_pretrained(out)
        if policy.processor.chat_template:
            (out / "chat_template.jinja").write_text(policy.processor.chat_template, encoding="utf-8")
    return out
