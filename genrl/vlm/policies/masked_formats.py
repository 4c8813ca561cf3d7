"""Checkpoints of masked diffusion language models, read without their own code: LLaDA, Dream, and masked language
models of transformers.

LLaDA (arXiv 2502.09992) is LLaMA with attention in both directions, and names of its own for weights and settings.
Dream (arXiv 2508.15487) is Qwen2 with attention in both directions; it was an autoregressive model first, so what it
predicts for a place stands one place before it. Names and keys are those of the checkpoints GSAI-ML/LLaDA-8B and
Dream-org/Dream-v0-7B.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from transformers.configuration_utils import PreTrainedConfig

from genrl_rewards.models.accounts import accounted
from genrl_rewards.models.checkpoints import pretrained, tokenizer_of, transformers

BLOCK = r"^model\.transformer\.blocks\.(\d+)\."
LLADA_WEIGHTS = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    BLOCK + r"attn_norm\.": r"model.layers.\1.input_layernorm.",
    BLOCK + r"ff_norm\.": r"model.layers.\1.post_attention_layernorm.",
    **{BLOCK + rf"{one}_proj\.": rf"model.layers.\1.self_attn.{one}_proj." for one in "qkv"},
    BLOCK + r"attn_out\.": r"model.layers.\1.self_attn.o_proj.",
    BLOCK + r"ff_proj\.": r"model.layers.\1.mlp.gate_proj.",
    BLOCK + r"up_proj\.": r"model.layers.\1.mlp.up_proj.",
    BLOCK + r"ff_out\.": r"model.layers.\1.mlp.down_proj.",
}
"""LLaDA's names of weights (regular expressions) as transformers' LLaMA has them."""
LLADA_FIXED = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
    "alibi": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
}
"""The settings of LLaDA's code that LLaMA's modules can do; all published checkpoints have them."""

DREAM_SAME = [
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
]
"""Settings of Dream that Qwen2 has by the same name."""


class _BothWays:
    """Attention in both directions, and a folder that the model's own code reads."""

    own: Mapping[str, Any]
    """The checkpoint's config.json."""

    def look_both_ways(self, own: Mapping[str, Any]) -> None:
        """Turn causal masks off in all layers."""
        self.own = own
        self.config.is_causal = False  # type: ignore[attr-defined]  # of the model that this is mixed into
        for layer in self.model.layers:  # type: ignore[attr-defined]
            layer.self_attn.is_causal = False

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights by their names in the checkpoint, and its config.json."""
        super().save_pretrained(folder)  # type: ignore[misc]
        (Path(folder) / "config.json").write_text(json.dumps(self.own, indent=2), encoding="utf-8")


class LLaDA(_BothWays, transformers.LlamaForCausalLM):  # type: ignore[misc]
    """LLaMA's modules with LLaDA's weights."""

    weights: ClassVar[Mapping[str, str]] = LLADA_WEIGHTS

    @staticmethod
    def read(own: Mapping[str, Any]) -> PreTrainedConfig:
        """LLaMA's configuration from LLaDA's. Raises ValueError for what LLaMA's modules cannot do."""
        for key, value in LLADA_FIXED.items():
            if own.get(key, value) != value:
                raise ValueError(f"config.json: {key} is {own[key]!r}; only {value!r} is supported")
        heads, width = own["n_heads"], own["d_model"]
        return transformers.LlamaConfig(
            vocab_size=own.get("embedding_size") or own["vocab_size"],
            hidden_size=width,
            intermediate_size=own.get("mlp_hidden_size") or own["mlp_ratio"] * width,
            num_hidden_layers=own["n_layers"],
            num_attention_heads=heads,
            num_key_value_heads=own.get("n_kv_heads") or (1 if own.get("multi_query_attention") else heads),
            max_position_embeddings=own["max_sequence_length"],
            rms_norm_eps=own["rms_norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": own["rope_theta"]},
            tie_word_embeddings=own.get("weight_tying", True),
            pad_token_id=own.get("pad_token_id"),
            eos_token_id=own.get("eos_token_id"),
            # What a place has seen changes with what is filled in behind it.
            use_cache=False,
        )


class Dream(_BothWays, transformers.Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2's modules with Dream's weights, whose names are the same."""

    weights: ClassVar[Mapping[str, str]] = {}

    @staticmethod
    def read(own: Mapping[str, Any]) -> PreTrainedConfig:
        """Qwen2's configuration from Dream's. Raises ValueError for what is not supported."""
        for key in ("use_sliding_window", "use_mrope", "rope_scaling"):
            if own.get(key):
                raise ValueError(f"config.json: {key} is {own[key]!r}; only false or null is supported")
        return transformers.Qwen2Config(
            **{key: own[key] for key in DREAM_SAME},
            rope_parameters={"rope_type": "default", "rope_theta": own["rope_theta"]},
            pad_token_id=own.get("pad_token_id"),
            eos_token_id=own.get("eos_token_id"),
            use_cache=False,
        )


class Opened(NamedTuple):
    """A model and its tokenizer. ahead: places between a place and where it is predicted, 0 or 1."""

    model: Any
    tokenizer: Any
    ahead: int


def open_masked(path: str, dtype: torch.dtype) -> Opened:
    """The masked language model in `path`, by the `model_type` of its config.json: `llada`, `Dream`, or one that
    transformers' `AutoModelForMaskedLM` knows.

    The tokenizer's mask token is that of `mask_token_id`, where it names none itself. Raises OSError, ValueError and
    KeyError where there is no such model, and ValueError where weights are missing or left over.
    """
    config, _ = PreTrainedConfig.get_config_dict(path)
    kind = config.get("model_type")
    if kind not in ("llada", "Dream"):
        model = pretrained(transformers.AutoModelForMaskedLM, path, types=(), reward="policy", dtype=dtype)
        return Opened(model, tokenizer_of(path, "policy"), 0)
    # their tokenizer classes are code in the checkpoints; the files are those of a fast tokenizer, and of Qwen2's
    reader = transformers.PreTrainedTokenizerFast if kind == "llada" else transformers.Qwen2Tokenizer
    with accounted(path):
        tokenizer = reader.from_pretrained(path)
    if tokenizer.mask_token is None and config.get("mask_token_id") is not None:
        tokenizer.mask_token = tokenizer.convert_ids_to_tokens(config["mask_token_id"])
    return Opened(_filled(LLaDA if kind == "llada" else Dream, path, config, dtype), tokenizer, int(kind == "Dream"))


def _filled(made: Any, path: str, own: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The model of a class, LLaDA or Dream, with the weights in `path`."""
    with accounted(path):
        model, report = made.from_pretrained(
            path,
            config=made.read(own),
            key_mapping=dict(made.weights) or None,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
        if left := sorted(map(str, report["unexpected_keys"])):  # names are mapped here, so each has its place
            raise ValueError(f"{len(left)} weights are left over ({', '.join(left[:3])}...)")
    model.look_both_ways(own)
    return model
