"""A checkpoint's model and processor, and the reasons why some cannot be trained (docs/vlm_models.md lists them)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from genrl.runtime.weights.quantization import computed_one_way, quantization_config
from genrl.vlm.policies.processor import load_processor
from genrl_rewards.models.checkpoints import pretrained

RESCALED = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier_scale")
"""Settings of models whose logits are not just the output layer of the last hidden state."""
WITH_KEYS = ("full_attention", "sliding_attention", "chunked_attention")
"""Layers whose past is keys and values, by the names that configurations give them."""
SEE = "docs/vlm_models.md has the models that are tested"


class Loaded(NamedTuple):
    """A model of transformers and its processor."""

    model: Any
    processor: Any


def loaded(path: str, dtype: torch.dtype, quantize: str | None = None) -> Loaded:
    """Those of a hub id or folder. quantize: int8, fp8 or nf4, for linear layers but the output's.

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
            f"a prompt's state can be neither padded nor shortened by a token; {SEE}"
        )
    rescaled = [name for name in RESCALED if getattr(text, name, None) not in (None, 1, 1.0)]
    if rescaled:
        raise ValueError(f"{path!r} ({kind}) rescales its logits ({rescaled[0]}), which the log-probabilities do not")
    return config
