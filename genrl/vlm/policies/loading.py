"""A checkpoint's model and processor with adapters or fused kernels, and the reasons why some cannot be trained
(docs/vlm_models.md lists them); its sizes, for the estimate of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from genrl.runtime.weights.low_rank import adapted, computed_one_way, quantization_config
from genrl.vlm.config.memory_estimate import Sizes
from genrl.vlm.config.sections import ATTENTION, VLMLoRA
from genrl.vlm.policies.processor import load_processor
from genrl_rewards.models.checkpoints import pretrained

if TYPE_CHECKING:
    from peft import PeftModel

RESCALED = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier_scale")
"""Settings of models whose logits are not just the output layer of the last hidden state."""
WITH_KEYS = ("full_attention", "sliding_attention", "chunked_attention")
"""Layers whose past is keys and values, by the names that configurations give them."""
BESIDE = ("generation_embeddings", "generation_aligner", "generation_head", "enc_to_dec_proj")
"""What a Janus and a MusicGen train beside their decoder."""
SEE = "docs/vlm_models.md has the models that are tested"


class Loaded(NamedTuple):
    """A model of transformers and its processor."""

    model: Any
    processor: Any


def loaded(path: str, dtype: torch.dtype, quantize: str | None = None) -> Loaded:
    """Model and processor of a hub id or folder. quantize: int8, fp8 or nf4, for linear layers but the output's.

    Raises ValueError where it is no checkpoint that `Policy` can train.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            text = "is a model whose code comes with its weights, and such code is not executed"
            hint = "take a version for transformers' own classes, such as OpenGVLab/InternVL3-8B-hf"
            raise ValueError(f"{path!r} {text}: {hint}; {SEE}") from error
        raise ValueError(f"{path!r} is no checkpoint of a transformers model: {error}") from error
    processor = load_processor(path, checked(config, path).model_type)
    try:
        architecture = transformers.AutoModelForImageTextToText
        held = None if quantize is None else quantization_config(quantize, transformers, dtype)
        model = pretrained(architecture, path, types=(), reward="policy", dtype=dtype, quantization=held)
        computed_one_way(model)
        return Loaded(model, processor)
    except ValueError as error:
        raise ValueError(f"{path!r} has no weights that can be read: {error}") from error


def checked(config: Any, path: str) -> Any:
    """The configuration of a checkpoint. Raises ValueError unless it is a model that `Policy` can train."""
    kind = config.model_type
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise ValueError(
            f"{path!r} is a {kind!r} model, which transformers' AutoModelForImageTextToText does not load: take a "
            f"vision-language model, such as a Qwen2.5-VL, Qwen3-VL, SmolVLM or LLaVA; {SEE}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{path!r} ({kind}) reads questions by an encoder, so answers share no prompt; {SEE}")
    text = config.get_text_config()
    stateful = sorted(set(getattr(text, "layer_types", None) or ()) - set(WITH_KEYS))
    if stateful:
        raise ValueError(
            f"{path!r} ({kind}) has layers of {stateful[0]}, which keep one state of all tokens, no keys and values: "
            f"a prompt's state cannot be padded; {SEE}"
        )
    rescaled = [name for name in RESCALED if getattr(text, name, None) not in (None, 1, 1.0)]
    if rescaled:
        raise ValueError(f"{path!r} ({kind}) rescales its logits ({rescaled[0]}), which the log-probabilities do not")
    return config


def use_liger(model: Any) -> None:
    """Let `model` compute with Liger's kernels from here on. The log-probabilities stay ours: Liger's loss is not used.

    Raises ValueError without a GPU or the package, and for a model type that Liger would leave as it is.
    """
    key = "vlm.kernels: liger"
    if not torch.cuda.is_available():
        raise ValueError(f"{key}: its kernels are Triton's and need a GPU, and there is none here; write null")
    try:
        from liger_kernel.transformers.monkey_patch import (
            MODEL_TYPE_TO_APPLY_LIGER_FN,
            _apply_liger_kernel_to_instance,
        )
    except ImportError as error:
        raise ValueError(f"{key}: liger-kernel cannot be imported ({error}): pip install liger-kernel") from error
    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"{key}: Liger has no kernels for {kind!r}; write null")
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)


def with_lora(model: Any, lora: VLMLoRA, seed: int) -> PeftModel:
    """Adapters inside `model`, on the layers of its language model alone, in float32."""
    from peft import LoraConfig  # here alone: it costs 1.4 s of a processor

    language, targets = model.get_decoder(), lora.targets or ATTENTION
    linear = {n for n, m in language.named_modules() if isinstance(m, torch.nn.Linear)}
    chosen = {name for name in linear if name.rsplit(".", 1)[-1] in targets}
    if not chosen:
        held = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise ValueError(f"no linear layer of the language model is named {list(targets)}. There are {held}")
    # Whole names: the layers of many vision towers end in `q_proj`, too, and are not to be adapted.
    prefix = next(name for name, module in model.named_modules() if module is language)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes any number
        target_modules=sorted(f"{prefix}.{name}" for name in chosen),
    )
    return adapted(model, config, seed)


class Adapted:
    """A policy whose model may hold adapters. model: it; peft: the PEFT model round it, None without LoRA."""

    model: Any
    peft: PeftModel | None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block the model is the one that training began from. ValueError without LoRA."""
        if self.peft is None:
            raise ValueError("a policy whose own weights are trained has no reference inside it: load a second Policy")
        with self.peft.disable_adapter():
            yield


def sizes(path: str, *, answers: bool = True) -> Sizes:
    """Sizes of the model whose config.json is in a folder, or a hub id's in the cache; it is built without weights.
    answers: with text, or else it makes something by tokens. Raises as `checked` where it is to answer."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    text = (checked(config, path) if answers else config).get_text_config(decoder=True)
    architecture: Any = transformers.AutoModelForCausalLM
    if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        architecture = transformers.AutoModelForImageTextToText
    elif config.is_encoder_decoder:
        architecture = transformers.AutoModelForTextToWaveform
    with torch.device("meta"):
        model = architecture.from_config(config)
    whole, head = model.get_decoder(), model.get_output_embeddings()
    decoder = whole.get_decoder()  # of MusicGen's, which has the heads in it, the layers alone
    parts = [whole, head, *(module for name, module in model.named_modules() if name.split(".")[-1] in BESIDE)]
    groups = [list(group) for group in decoder.children() if isinstance(group, nn.ModuleList)]
    layers = max(groups, key=lambda group: sum(p.numel() for layer in group for p in layer.parameters()))
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    features = Counter[str]()
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear):
            features[name.rsplit(".", 1)[-1]] += module.in_features + module.out_features
    numbers = sum(p.numel() for p in model.parameters())
    heads = text.num_attention_heads
    return Sizes(
        numbers=numbers,
        decoder=sum(p.numel() for p in {p for part in parts for p in part.parameters()}),
        linear=sum(m.weight.numel() for m in linear),
        rows=sum(m.out_features for m in linear),
        outside=numbers - sum(p.numel() for layer in layers for p in layer.parameters()),
        layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        layers=len(layers),
        width=text.hidden_size,
        inner=getattr(text, "intermediate_size", None) or text.ffn_dim // 2,
        keys=(getattr(text, "num_key_value_heads", None) or heads)
        * (getattr(text, "head_dim", None) or text.hidden_size // heads),
        features=dict(features),
    )
