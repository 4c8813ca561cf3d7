"""What one process of a run holds at its peak, part by part, from the sizes of its model. No torch.

All is arithmetic but for what a layer of the decoder keeps for the backward pass, which was measured (`KEPT`). Not in
it: activations of the vision tower and of what decodes pictures and sounds, and what the libraries and the allocator
take.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genrl.config.sections import BITS, LARGEST_COPY
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.config.sections import ATTENTION, LOGITS, VLMLoRA

PUBLISHED = Path(__file__).parent / "published"
"""The config.json of models that recipes name, by hub id, and their sizes."""
QUESTION = 1024
"""Tokens that a question is taken to have, its picture included."""
CAPTION = 128
"""Tokens that one is taken to have of which something else than text is made, by tokens."""
KEPT, KEPT_WITH_LORA = (10.1, 4.0, 2.0), (7.3, 3.0, 2.3)
"""Numbers kept per token and layer, in units of its width, the width inside its MLP, and that of its keys. Measured on
Qwen2's layers in bfloat16 with flash attention, four combinations of widths, rank 16 on the attention."""
RECOMPUTED = 1.0  # of its width, where layers are computed again

Parts = list[tuple[str, int]]


@dataclass(frozen=True)
class Sizes:
    """Of a model. decoder: weights without which it reads no pictures and decodes nothing, all that is trained where it
    makes something else than text; linear: weights that can be held in fewer bits, rows: their output features;
    outside: what is in no layer of the decoder; layer: the largest of its layers; inner: width inside its MLP, half of
    it without a gate; keys: width of a layer's keys; features: of the linear layers of the decoder, by the last part of
    their names: inputs and outputs of all together."""

    numbers: int
    decoder: int
    linear: int
    rows: int
    outside: int
    layer: int
    layers: int
    width: int
    inner: int
    keys: int
    features: Mapping[str, int]

    def adapted(self, lora: VLMLoRA) -> int:
        """Input and output features of the layers that get adapters, which a rank multiplies."""
        return sum(count for name, count in self.features.items() if name in (lora.targets or ATTENTION))


def published(source: str) -> Sizes | None:
    """Sizes of a model that a recipe names, by its hub id; None of others. benchmarks/published_shapes.py writes them,
    from the config.json beside them."""
    file = PUBLISHED / source / "sizes.json"
    return Sizes(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def memory(config: VLMConfig, size: Sizes, processes: int = 1) -> Parts:
    """(what, bytes) of one of so many processes, largest parts first; their sum is the peak on the device."""
    held, shares = _bytes(config), processes if config.distributed.fsdp else 1
    weights, trained = _weights(config, size), size.decoder if config.vlm.makes else size.numbers
    models, resting = _models(config), Parts()
    if config.vlm.lora is not None:
        trained = models * config.vlm.lora.rank * size.adapted(config.vlm.lora)
        resting += [("frozen weights", weights // shares), ("adapters", 4 * trained)]
    elif config.distributed.fsdp:
        resting.append(("float32 shares of the weights", 4 * trained // shares))
    else:
        resting += [("weights", weights), ("copies of what is trained", (models - 1) * held * trained)]
        trained *= models
        resting += [
            ("float32 copies of the weights", 4 * trained if config.rounds_weights else 0),
        ]
    optimised = trained if config.vlm.lora is not None else trained // shares
    state = config.optimizer.state_bytes
    resting.append((f"optimiser state ({config.optimizer.name})", round(optimised * state)))
    if config.vlm.lora is not None or (shares == 1 and trained <= LARGEST_COPY):
        resting.append(("copy to undo an iteration", round(optimised * (4 + state))))
    if config.vlm.lora is None and "ref" in config.trainer.reads:
        resting.append(("reference", weights // shares))
    updating = [
        ("gradients", optimised * (held if config.rounds_weights and shares == 1 else 4)),
        *_update(config, size, processes),
    ]
    if shares > 1:
        updating.append(("weights gathered in updates", _gathered(config, size)))
    answering = _answers(config, size, processes) + (weights if shares > 1 else 0)
    # Answering and updating take turns: only the larger of the two counts.
    more = max(0, answering - sum(part for _, part in updating))
    parts = [*resting, *updating, ("answering, beyond what updates need", more)]
    return sorted((part for part in parts if part[1]), key=lambda part: -part[1])


def ways(config: VLMConfig) -> Iterator[tuple[str, VLMConfig, int]]:
    """(name, the run in this way, processes): all weights, in shards, adapters, adapters on fewer bits; in bfloat16."""
    adapted: dict[str, Any] = {"lora": config.vlm.lora or VLMLoRA()}
    remedies: list[tuple[str, dict[str, Any], int]] = [
        ("all weights", {}, 1),
        *((f"all weights, {count} processes with fsdp", {}, count) for count in (2, 4, 8)),
        ("LoRA", adapted, 1),
        ("LoRA, 8 processes with fsdp", adapted, 8),
        ("LoRA, int8", {**adapted, "quantize": "int8"}, 1),
        ("LoRA, nf4 (QLoRA)", {**adapted, "quantize": "nf4"}, 1),
    ]
    for name, changes, processes in remedies:
        if config.vlm.makes and (processes > 1 or "quantize" in changes):
            continue  # only models that answer with text have these
        vlm = config.vlm.model_copy(update={"lora": None, "quantize": None, "dtype": "bfloat16", **changes})
        shards = config.distributed.model_copy(update={"fsdp": processes > 1})
        yield name, config.model_copy(update={"vlm": vlm, "distributed": shards}), processes


def _bytes(config: VLMConfig) -> int:
    return 4 if config.vlm.dtype == "float32" else 2


def _weights(config: VLMConfig, size: Sizes) -> int:
    """Bytes of the model as a pass reads it."""
    held, kind = _bytes(config), config.vlm.quantize
    if kind is None:
        return held * size.numbers
    scales = 0 if kind == "nf4" else held * size.rows
    return round(size.linear * BITS[kind] / 8) + scales + held * (size.numbers - size.linear)


def _gathered(config: VLMConfig, size: Sizes) -> int:
    """Bytes of a model in shards in an update: what is in no layer, and two layers; of all weights their gradients too,
    which are summed in float32."""
    held = _bytes(config)
    if config.vlm.lora is not None:
        return held * (size.outside + 2 * size.layer)
    return (2 * held + 4) * size.outside + 2 * held * 2 * size.layer


def question(config: VLMConfig) -> int:
    """Tokens that a prompt is taken to have."""
    return CAPTION if config.vlm.makes else QUESTION


def _models(config: VLMConfig) -> int:
    """Models that are trained: what a method trains beside the model is taken for one more, as MusicRL's value is."""
    return 1 + ("heads" in config.trainer.reads)


def _guided(config: VLMConfig) -> int:
    """Rows of an answer in a pass: with guidance, for which null is taken, one without words, too."""
    return 2 if config.vlm.makes in ("image", "music") and config.generation.guidance_scale != 1 else 1


def _update(config: VLMConfig, size: Sizes, processes: int) -> Parts:
    """Kept for the backward pass of a micro-batch; logits of a part of its tokens, their softmax and gradient."""
    generation, vlm = config.generation, config.vlm
    recomputes = vlm.gradient_checkpointing
    answers = config.trainer.rows_per_pass or _rows(config, processes)
    apart = recomputes or config.distributed.fsdp or vlm.makes
    prompts = answers if apart else math.ceil(answers / generation.group_size)
    tokens = prompts * question(config) + answers * generation.max_new_tokens
    tokens *= _guided(config) + _models(config) - 1
    of_width, of_inner, of_keys = KEPT if vlm.lora is None else KEPT_WITH_LORA
    layer = of_width * size.width + of_inner * size.inner + of_keys * size.keys
    numbers = size.layers * RECOMPUTED * size.width + layer if recomputes else size.layers * layer
    parts = [("activations of one micro-batch (rough)", round(tokens * numbers * _bytes(config)))]
    if vlm.quantize in ("int8", "fp8"):  # torchao unpacks a weight, and the graph keeps that copy
        layers = 1 if recomputes else size.layers
        parts.append(("unpacked weights, for the backward pass", layers * size.layer * _bytes(config)))
    return [*parts, ("logits", 3 * 4 * LOGITS)]


def _rows(config: VLMConfig, processes: int) -> int:
    """Answers of one process in an iteration."""
    return math.ceil(config.generation.prompts_per_iteration / processes) * config.generation.group_size


def _answers(config: VLMConfig, size: Sizes, processes: int) -> int:
    """Keys and values while a process answers."""
    generation, every = config.generation, _rows(config, processes)
    rows = min(every, generation.batch_size or every) * _guided(config)
    return 2 * size.layers * size.keys * rows * (question(config) + generation.max_new_tokens) * _bytes(config)
