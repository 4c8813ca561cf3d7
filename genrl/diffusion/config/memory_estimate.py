"""What one process of a run holds at its peak, part by part, from the headers of weight files. No torch.

Parts that are there all the time are summed; of those that take turns (a backward pass, decoding, prompts being
encoded) what the largest needs beyond the others.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from genrl.config.folders import is_gguf
from genrl.config.sections import BITS, LARGEST_COPY
from genrl.diffusion.config.estimate import Component, adapted_ranks, number, plan, sides, tokens, trained_parameters
from genrl.diffusion.config.model_rules import DENOISERS, is_text_encoder, quantized
from genrl.diffusion.config.schema import Config

HELD_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Kept(NamedTuple):
    """Bytes kept for the backward pass per token, layer and unit of width, without attention scores."""

    whole: float
    """All weights are trained, in float32."""
    lora: float
    """Adapters alone, in float32."""
    half: float
    """Adapters alone, in a half precision: norms still compute in float32."""

    def plus(self, other: Kept, times: float = 1.0) -> Kept:
        """The sum, the other one taken so many times."""
        return Kept(*(ours + times * more for ours, more in zip(self, other, strict=True)))


KEPT = {
    "SD3Transformer2DModel": Kept(84, 48, 27),
    "FluxTransformer2DModel": Kept(91, 51, 31),
    "QwenImageTransformer2DModel": Kept(103, 56, 40),
    "WanTransformer3DModel": Kept(140, 81, 53),
}
"""By the denoiser's class; measured on blocks of width 768 (docs/memory.md)."""
KEPT_ELSEWHERE = KEPT["QwenImageTransformer2DModel"]
NORMED = Kept(16, 8, 12)
"""Of SD3's blocks, where queries and keys are normed (SD3.5)."""
DUAL = Kept(41, 29, 25)
"""Of SD3's blocks, where pictures have a second attention: per token of the picture."""
BLOCK = re.compile(r"[^.]+\.\d+(?=\.)")
UNET_LEVELS = ("down_blocks.", "up_blocks.", "mid_block.")
UNET_PART = re.compile(
    r"(down_blocks\.\d+|up_blocks\.\d+|mid_block)\.(attentions\.\d+\.transformer_blocks|resnets)\.\d+"
)
EMBEDDINGS = ("shared", "embed", "wte", "position")
"""What in the names of matrices tells that they are tables, which stay as they are."""


def memory(config: Config, components: tuple[Component, ...]) -> list[tuple[str, int]]:
    """(what, bytes) of one process, largest parts first. Their sum is the peak on the device, beside the libraries.

    Activations are an estimate for transformer denoisers, by what blocks of their family keep. They are left out where
    the model's configuration does not tell its width (UNets).
    """
    offload = config.model.offload
    weights = {component.name: weight_bytes(config, component) for component in components}
    encoders = sum(size for name, size in weights.items() if is_text_encoder(name))
    away = [name for name in weights if is_text_encoder(name) and offload.text_encoders]
    parts = [(f"weights of {name}", size) for name, size in weights.items() if name not in away]
    trained = trained_parameters(config, components)
    if config.trains_shards and offload.denoiser:  # a share waits on the CPU with its gradients and optimiser state
        trained = sum(_at_a_time(c.shapes) for c in components if c.name in DENOISERS)
    else:
        parts += _trained(config, trained)
    training = [("gradients (float32)", 4 * trained), _activations(config, components)]
    training += [("unpacked weights, for the backward pass", _unpacked(config, components))]
    training += [("rounded weights of autocast, for the backward pass", _rounded(config, components))]
    parts += training
    taken = sum(size for _, size in training)
    decoding = _decoding(config, components)
    parts.append(("decoding, beyond what training needs", max(0, decoding - taken)))
    waits = encoders if offload.text_encoders == "between" else 0
    parts.append(("text encoders while they encode, beyond that", max(0, waits - max(taken, decoding))))
    alone = encoders if offload.text_encoders == "encode_then_free" else 0
    parts.append(("text encoders before training, beyond all", max(0, alone - sum(size for _, size in parts))))
    return sorted((part for part in parts if part[1]), key=lambda part: -part[1])


def weight_bytes(config: Config, component: Component) -> int:
    """Bytes of one network on the device: as `model.dtype` holds it, or quantised with its scales; float32 where all
    weights are trained; of a denoiser whose blocks wait on the CPU what is there at a time."""
    model = config.model
    held = 4 if component.name in DENOISERS and model.lora is None else HELD_BYTES[model.dtype]
    if component.name in DENOISERS and model.offload.denoiser:
        return held * _at_a_time(component.shapes)
    file = Path(model.path).expanduser()
    if component.name in DENOISERS and is_gguf(model.path) and file.is_file():
        return file.stat().st_size
    kind = quantized(model, [component.name]).get(component.name)
    if kind is None or kind not in BITS:
        return held * component.num_parameters
    total = 0.0
    for name, shape in component.shapes.items():
        count = math.prod(shape)
        if _is_linear(name, shape):
            # A scale for each row; nf4's are in its bits already.
            total += count * BITS[kind] / 8 + (0 if kind == "nf4" else held * shape[0])
        else:
            total += count * held
    return round(total)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether quantisation takes this tensor."""
    return len(shape) == 2 and name.endswith(".weight") and not any(word in name for word in EMBEDDINGS)


def _at_a_time(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers in no block, and in the two largest blocks: one computes while the next one comes."""
    blocks = _by_block(shapes)
    outside = blocks.pop("", 0)
    return outside + sum(count for _, count in blocks.most_common(2))


def _by_block(shapes: Mapping[str, tuple[int, ...]]) -> Counter[str]:
    """Numbers in each block, by its name; the empty name has those that are in none."""
    blocks: Counter[str] = Counter()
    for name, shape in shapes.items():
        match = UNET_PART.match(name) or (None if name.startswith(UNET_LEVELS) else BLOCK.match(name))
        blocks[match.group() if match else ""] += math.prod(shape)
    return blocks


def _unpacked(config: Config, components: tuple[Component, ...]) -> int:
    """torchao and diffusers' GGUF layers unpack a weight to multiply by it, and the graph keeps that copy, but for
    layers that scale and shift by the timestep (`norm1.linear`), through which no gradient of an adapter runs.
    bitsandbytes unpacks it once more in the backward pass."""
    model, total = config.model, 0
    for component in components:
        kind = quantized(model, [component.name]).get(component.name)
        if component.name in DENOISERS and (kind in ("int8", "fp8") or is_gguf(model.path)):
            linear = {name: shape for name, shape in component.shapes.items() if _is_linear(name, shape)}
            moved = {name: shape for name, shape in linear.items() if ".norm" not in name}
            total += _in_graph(config, moved) * (2 if _half(config) else 4)
    return total


def _in_graph(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers of these tensors that a graph holds copies of: of all blocks, or of the largest, which is computed
    again."""
    blocks = _by_block(shapes).values()
    return max(blocks, default=0) if config.model.gradient_checkpointing else sum(blocks)


def _rounded(config: Config, components: tuple[Component, ...]) -> int:
    """Autocast rounds float32 weights of linear layers to two bytes, and the graph keeps that copy."""
    model = config.model
    if model.autocast is None or not (model.dtype == "float32" or model.lora is None):
        return 0
    linear = [{n: s for n, s in c.shapes.items() if _is_linear(n, s)} for c in components if c.name in DENOISERS]
    return sum(2 * _in_graph(config, shapes) for shapes in linear)


def _half(config: Config) -> bool:
    """Whether activations take two bytes."""
    return config.model.autocast is not None or config.model.dtype != "float32"


def snapshots(config: Config) -> list[str]:
    """Copies of the trained parameters that a run comes to keep, by what they are for."""
    names = ["average (ema)"] if config.ema is not None else []
    names += config.trainer.snapshots(config)
    lora = config.model.lora
    is_base = lora is not None and (config.trainer.reference == "base" or not (lora.begin or lora.frozen))
    if config.trainer.reference is not None and not is_base:  # else it is the model without adapters
        names.append("reference")
    return names


def _trained(config: Config, trained: int) -> list[tuple[str, int]]:
    """What training so many numbers adds between its iterations."""
    lora = config.model.lora is not None
    state, copies = config.optimizer.state_bytes, snapshots(config)
    parts = [("adapters", trained * 4)] if lora else []
    parts.append((f"optimiser state ({config.optimizer.name})", round(trained * state)))
    parts += [(name, trained * 4) for name in copies]
    if lora or trained <= LARGEST_COPY:
        parts.append(("copy to undo an iteration", round(trained * (4 + state + 4 * len(copies)))))
    return parts


def _activations(config: Config, components: tuple[Component, ...]) -> tuple[str, int]:
    """Kept for the backward pass of a micro-batch, or of all whose graphs are kept."""
    saved = _kept_bytes(config, components)
    if graphs := config.trainer.calls(config, lambda scale: 1).kept:  # one process; several share it
        return "activations kept from sampling (rough)", round(saved * graphs)
    return "activations of one micro-batch (rough)", saved


def _kept_bytes(config: Config, components: tuple[Component, ...]) -> int:
    vae, denoiser = _first(components, "vae"), _first(components, *DENOISERS)
    if denoiser is None:
        return 0
    settings, model = denoiser.settings, config.model
    width = _width(settings)
    layers = sum(number(settings.get(name)) for name in ("num_layers", "num_single_layers", "n_layers"))
    if not width or not layers:
        return 0
    held = 2 if _half(config) else 4
    picture, text = tokens(config, settings, vae.settings if vae else {}), text_tokens(config, components)
    per_block = _kept_by_blocks(denoiser, layers, picture / (picture + text))
    if model.lora is None:
        # Of all weights, float32 alone was measured: half a precision is taken to save the share that it saves of
        # adapters.
        each = per_block.whole * (per_block.half / per_block.lora if _half(config) else 1) * width
    else:  # with what stands between the two matrices of an adapter
        each = (per_block.half if _half(config) else per_block.lora) * width + held * adapted_ranks(
            denoiser, model.lora
        ) / layers
    of_token = each + held * layers * width if model.gradient_checkpointing else each * layers
    batch = config.sampling.batch_size * plan(config, components).guidance
    return int(batch * (picture + text) * of_token / config.distributed.context)


def _kept_by_blocks(denoiser: Component, layers: int, picture: float) -> Kept:
    """Numbers that the mean block of a denoiser keeps; picture: the picture's share of the tokens."""
    per_layer = KEPT.get(denoiser.kind, KEPT_ELSEWHERE)
    if denoiser.kind != "SD3Transformer2DModel":
        return per_layer
    if denoiser.settings.get("qk_norm"):
        per_layer = per_layer.plus(NORMED)
    dual = denoiser.settings.get("dual_attention_layers")
    return per_layer.plus(DUAL, picture * len(dual) / layers) if isinstance(dual, list | tuple) else per_layer


def _width(settings: Mapping[str, Any]) -> int:
    """Numbers per token between the blocks of a transformer; 0 where its settings do not tell (UNets)."""
    heads = number(settings.get("num_attention_heads")) * number(settings.get("attention_head_dim"))
    return heads or number(settings.get("hidden_size")) or number(settings.get("dim"))  # Lumina2; Z-Image


def _first(components: tuple[Component, ...], *names: str) -> Component | None:
    """The first component of these names."""
    return next((component for component in components if component.name in names), None)


def text_tokens(config: Config, components: tuple[Component, ...]) -> int:
    """Tokens of the text that run through a denoiser's blocks beside those of the picture; 0 where it only looks at
    them. As `max_sequence_length` says, or as the pipelines of SD3 (256, after CLIP's), FLUX (512) and Lumina2 (at most
    256) have it."""
    encoder, denoiser = _first(components, "text_encoder"), _first(components, *DENOISERS)
    if denoiser is None or denoiser.settings.keys().isdisjoint(("joint_attention_dim", "cap_feat_dim")):
        return 0
    max_length = config.sampling.pipeline_args.get("max_sequence_length")
    clip = 0
    if denoiser.kind.startswith("SD3") and encoder is not None:
        clip = number(encoder.settings.get("max_position_embeddings")) or 77
    return clip + (max_length if isinstance(max_length, int) else 512 if denoiser.kind.startswith("Flux") else 256)


def _decoding(config: Config, components: tuple[Component, ...]) -> int:
    """Activations of the decoder: five times the input of its last blocks, which have full resolution (measured 4.8 on
    a CPU, whose convolutions copy)."""
    vae, denoiser = _first(components, "vae"), _first(components, *DENOISERS)
    channels = vae.settings.get("block_out_channels") if vae else None
    if not isinstance(channels, list) or denoiser is None:
        return 0
    height, width = sides(config, denoiser.settings, 2 ** (len(channels) - 1))
    frames = config.sampling.num_frames or 1
    batch = 1 if config.model.slice_vae else config.sampling.batch_size
    wide = int(channels[min(1, len(channels) - 1)])
    return 5 * wide * height * width * frames * batch * HELD_BYTES[config.model.dtype]


def changes(config: Config) -> Iterator[str]:
    """What saves memory, in the order in which to try it: first what costs time alone, then what rounds, then what
    changes training, at last what costs most time."""
    model, size = config.model, config.sampling.batch_size
    yield "model.offload.text_encoders=encode_then_free"
    if model.offload.text_encoders is None:
        yield "model.offload.text_encoders=between"
    yield "model.slice_vae=true"
    yield "model.gradient_checkpointing=true"
    if model.dtype == "float32":
        yield "model.dtype=bfloat16 model.autocast=null"
    yield "optimizer.name=adamw_8bit"
    if model.lora is None:  # of all weights nothing can be held in fewer bits
        yield "model.lora.rank=64 model.dtype=bfloat16 model.autocast=null distributed.fsdp=false"
    if model.quantize is None:
        yield "model.quantize=int8"
    while size > 1:
        size = -(-size // 2)
        yield f"sampling.batch_size={size}"
    yield "model.quantize=nf4"
    yield "model.quantize=null model.offload.denoiser=blocks"
