"""What one process of a run holds that trains a published policy, part by part, from its config.json and the names and
shapes of its weights. No torch.

The encoder reads pictures and instruction once per decision; its keys and values are the context, to which the action
expert attends (OpenVLA has no expert: its language model makes the actions, over a context of nothing).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from genrl.config.folders import DTYPE_BYTES, Shape, read_header, read_json, unpacked, weight_files
from genrl.config.sections import LARGEST_COPY
from genrl.vla.config.schema import VLAConfig

KEPT, KEPT_WITH_LORA = (10.1, 4.0, 2.0), (7.3, 3.0, 2.3)
"""Numbers kept for the backward pass per token and layer, in units of its width, the width inside its MLP, and that of
its keys: those of language models, whose layers these are (docs/memory.md)."""
PASSING = (4.0, 3.0)
"""Numbers per token of a layer that keeps nothing, in units of its width and the width inside its MLP."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "to_q", "to_k", "to_v", "to_out")
TUNED = ("tune_llm", "tune_visual", "tune_top_llm_layers")
"""What config.json of a GR00T says of its backbone, which is frozen by default."""
HORIZON, ROBOT = 50, 7
"""Actions of a chunk where config.json does not say; numbers of an action of OpenVLA's robots."""


class Kind(NamedTuple):
    """Parts of the names of a type's weights, and its tokens: of a picture as the eye has them and as the language
    model does, and at most of the instruction where config.json does not say."""

    eye: str
    language: str
    expert: str | None
    encoder: str
    unused: tuple[str, ...]
    patches: int
    seen: int
    words: int
    repeats: bool = True
    """Whether keys and values are copied for the heads that ask: there are several of them."""
    state: bool = False
    """Whether the state is a token of the language model, through which what projects it learns."""
    above: str | None = None
    """A transformer on top of the language model, trained like the expert: the context is what it says, instead of keys
    and values."""
    horizon: int | None = None
    """Actions that the expert makes, of which a robot may be taught fewer; None = as many as a chunk has."""

    def of_encoder(self, name: str) -> bool:
        """Whether a weight is one of the encoder's."""
        return self.encoder in f".{name}"


PI = ("vision_tower.", "language_model.", "gemma_expert.", ".paligemma.", ("gemma_expert.lm_head.",))
GROOT = ("visual.", "language_model.", "head.model.", ".backbone.", ("model.norm.",))
KINDS = {
    "pi0": Kind(*PI, 256, 256, 48, False),
    "pi05": Kind(*PI, 256, 256, 200, False),
    "smolvla": Kind("vision_model.", "text_model.", "lm_expert.", ".vlm.", ("vlm.lm_head.",), 1024, 64, 48, True, True),
    "groot": Kind(*GROOT, 256, 64, 70, above="vl_self_attention.", horizon=40),
    "openvla": Kind("vision_backbone.", "language_model.", None, "vision_backbone.", ("attn_pool.",), 256, 256, 40),
}


@dataclass(frozen=True)
class Known:
    """A policy by its config.json and its weights' shapes. stored: bytes of a number in its file."""

    settings: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    stored: float

    @property
    def kind(self) -> Kind:
        """What its type's weights are called."""
        return KINDS[type_of(self.settings)]


class Stack(NamedTuple):
    """Layers of a transformer, all alike."""

    layers: int
    width: int
    inner: int
    queries: int
    keys: int


def type_of(settings: Mapping[str, Any]) -> str:
    """The type of a policy by its config.json."""
    return str(settings.get("type", settings.get("model_type")))


def published(source: str) -> Known | None:
    """The policy of a hub id, as its file is shaped; None where the table does not know it."""
    table = _table()
    settings = table["policies"].get(source)
    if settings is None:
        return None
    return Known(settings, dict(unpacked(table["shapes"][type_of(settings)])), settings["stored"])


@cache
def _table() -> Mapping[str, Any]:
    """`shapes` by type, `policies` by hub id. benchmarks/published_shapes.py makes it."""
    file = Path(__file__).with_name("published.json")
    table: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return table


def in_folder(folder: Path) -> Known | None:
    """The policy of a folder, from its JSON file and the headers of its weights; None for one of another type."""
    settings = read_json(folder / "config.json")
    if type_of(settings) not in KINDS:
        return None
    files = [file for file in weight_files(folder, None) if file.name.startswith("model")]  # else statistics, heads
    entries = [entry for file in files for entry in read_header(file)]
    shapes = {name: shape for name, shape, _ in entries}
    held = sum(math.prod(shape) * DTYPE_BYTES.get(dtype, 4) for _, shape, dtype in entries)
    return Known(settings, shapes, held / max(1, sum(map(math.prod, shapes.values()))))


def memory(config: VLAConfig, policy: Known, processes: int = 1) -> list[tuple[str, int]]:
    """(what, bytes) of one of so many processes, largest parts first; their sum is the peak on the device. Left out are
    the new heads, a hundredth of a policy."""
    trained, rest = _numbers(config, policy)
    adapters, state = config.policy.lora is not None, config.optimizer.state_bytes
    own = trained // processes if config.trains_shards else trained
    average = 4 if config.ema else 0
    parts = [
        ("weights that are not trained", round(_held(config, policy) * rest)),
        ("adapters" if adapters else "weights that are trained (float32)", 4 * trained),
        ("shares of them, beside the whole that acts", 4 * own if own < trained else 0),
        (f"optimiser state ({config.optimizer.name})", round(own * state)),
        ("average (ema)", own * average),
    ]
    if adapters or trained <= LARGEST_COPY:
        parts.append(("copy to undo an iteration", round(own * (4 + state + average))))
    rows = config.trainer.rows_per_pass or 1
    updating = [("gradients", 4 * own), ("one pass of an update (rough)", rows * _pass(config, policy))]
    abreast = -(-max(config.environment.num_envs, config.evaluation.num_envs or 0) // processes)
    acting = abreast * (_context(config, policy) + _reading(config, policy))
    more = max(0, acting - sum(size for _, size in updating))
    parts += [*updating, (f"acting in {abreast} simulators, beyond what updates need", more)]
    return sorted((part for part in parts if part[1]), key=lambda part: -part[1])


def changes(config: VLAConfig) -> Iterator[str]:
    """What saves memory, in the order in which to try it: first what rounds what is not trained, then what costs time,
    at last what changes training."""
    if config.policy.dtype is None:
        yield "policy.dtype=bfloat16"
    yield "policy.gradient_checkpointing=true"
    most, envs = config.trainer.rows_per_pass or 1, config.environment
    halves = [-(-most // 2**n) for n in range(1, most.bit_length() + 1)]
    yield from (f"trainer.microbatch={rows}" for rows in halves)
    fewer = (count for count in (64, 32, 16, 8) if count < envs.num_envs and count % envs.group_size == 0)
    yield from (f"environment.num_envs={count}" for count in fewer)
    yield from (f"trainer.microbatch={rows}" for rows in halves)  # where acting took more, they saved nothing before
    yield "optimizer.name=adamw_8bit"
    if config.policy.lora is None:
        yield "policy.lora.rank=32"


def _numbers(config: VLAConfig, policy: Known) -> tuple[int, int]:
    """Numbers that are trained, and that are not."""
    kind, lora = policy.kind, config.policy.lora
    used = {name: shape for name, shape in policy.shapes.items() if not any(part in name for part in kind.unused)}
    free = {name: shape for name, shape in used.items() if not (_reads_only(config, policy) and kind.of_encoder(name))}
    every, trained = (sum(map(math.prod, shapes.values())) for shapes in (used, free))
    if lora is None:
        return trained, every - trained
    names = "|".join(map(re.escape, lora.targets or ATTENTION))
    target = re.compile(rf"\.(?:layers|transformer_blocks)\..*\.({names})(?:\.0)?\.weight$")
    return lora.rank * sum(sum(s) for n, s in free.items() if kind.eye not in n and target.search(n)), every


def _reads_only(config: VLAConfig, policy: Known) -> bool:
    """Whether the encoder is not trained."""
    if type_of(policy.settings) == "groot" and not any(policy.settings.get(key) for key in TUNED):
        return True
    return config.policy.frozen or policy.settings.get("train_expert_only") is True


def _held(config: VLAConfig, policy: Known) -> float:
    """Bytes of a number that is not trained: as the run asks; else float32, but for what the folder itself freezes."""
    if config.policy.dtype is not None:
        return 2 if config.policy.dtype == "bfloat16" else 4
    return policy.stored if policy.settings.get("train_expert_only") is True else 4


def _stack(policy: Known, part: str) -> Stack:
    """The layers whose weights' names have this part."""
    named = {name.partition(part)[2]: shape for name, shape in policy.shapes.items() if part in name}
    layers = {
        int(m[2]) + 1
        for name in named
        if (m := re.search(r"(^|\.)(?:layers|blocks|transformer_blocks)\.(\d+)\.", name))
    }

    def rows(*ends: str) -> int:
        return next((shape[0] for end in ends for name, shape in named.items() if name.endswith(f"0.{end}.weight")), 0)

    reads = ("0.self_attn.q_proj.weight", "0.attn.qkv.weight", "0.attn1.to_q.weight")
    width = next(s[1] for n, s in named.items() if n.endswith(reads))
    queries, keys = rows("self_attn.q_proj", "attn1.to_q") or width, rows("self_attn.k_proj", "attn1.to_k") or width
    inner = rows("mlp.up_proj", "mlp.fc1", "mlp.linear_fc1", "ff.net.0.proj")
    return Stack(max(layers), width, inner, queries, keys)


def _tokens(config: VLAConfig, policy: Known) -> tuple[int, int]:
    """Tokens of the pictures as the eye has them; and of pictures, instruction and state as the language model does."""
    kind, features = policy.kind, policy.settings.get("input_features") or {}
    cameras = sum(f.get("type") == "VISUAL" and "empty_camera" not in name for name, f in features.items())
    if config.policy.oft is not None:
        cameras = len(config.policy.oft.cameras)
    cameras, words = max(1, cameras), policy.settings.get("tokenizer_max_length") or kind.words
    return cameras * kind.patches, cameras * kind.seen + words + 1


def _context(config: VLAConfig, policy: Known) -> int:
    """Bytes of what an expert attends to in a decision: keys and values of every layer, or what the last one says."""
    if policy.kind.expert is None:
        return 0
    if policy.kind.above is not None:
        return 4 * _tokens(config, policy)[1] * _stack(policy, policy.kind.above).width
    language, (_, tokens) = _stack(policy, policy.kind.language), _tokens(config, policy)
    return round(2 * language.layers * language.keys * tokens * _held(config, policy))


def _reading(config: VLAConfig, policy: Known) -> int:
    """Bytes of the largest layer of eye and language model while a decision is read without gradients."""
    patches, tokens = _tokens(config, policy)
    eye, language = _stack(policy, policy.kind.eye), _stack(policy, policy.kind.language)
    if policy.kind.expert is None:
        tokens += _places(config, policy)
    of = (PASSING[0] * s.width + PASSING[1] * s.inner for s in (eye, language))
    return round(_held(config, policy) * max(n * each for n, each in zip((patches, tokens), of, strict=True)))


def _places(config: VLAConfig, policy: Known) -> int:
    """Tokens in which the actions of a chunk are made."""
    oft = config.policy.oft
    return ROBOT * (oft.chunk if oft else 8) + 1 if policy.kind.expert is None else _horizon(policy) + 1


def _horizon(policy: Known) -> int:
    return policy.kind.horizon or int(policy.settings.get("chunk_size") or HORIZON)


def _pass(config: VLAConfig, policy: Known) -> int:
    """Bytes of a decision in a pass of an update: its context, and what is kept for the backward pass, or while it is
    read anew if that is more."""
    kind, sampler, (patches, tokens) = policy.kind, config.sampler, _tokens(config, policy)
    language, reads_only = _stack(policy, kind.language), _reads_only(config, policy)
    if kind.expert is None:
        kept = _kept(config, policy, language, tokens + _places(config, policy), 0)
    else:
        scored = sampler.noise_head != "none" or getattr(sampler, "selection", "") == "all"
        steps = sampler.steps if scored and config.trainer.imitates != "always" else 1
        kept = steps * _kept(config, policy, _stack(policy, kind.expert), _places(config, policy), tokens)
        if kind.above is not None:
            kept += _kept(config, policy, _stack(policy, kind.above), tokens, 0)
        if not reads_only:
            kept += _kept(config, policy, language, tokens, 0)
            kept += _kept(config, policy, _stack(policy, kind.eye), patches, 0)
        elif kind.state and config.policy.lora is None:
            kept += _kept(config, policy, language, 1, tokens)
    return _context(config, policy) + max(kept, _reading(config, policy))


def _kept(config: VLAConfig, policy: Known, stack: Stack, tokens: int, past: int) -> int:
    """Bytes kept of a stack's layers for so many tokens, which attend to so many past ones besides."""
    adapters = config.policy.lora is not None
    of_width, of_inner, of_keys = KEPT_WITH_LORA if adapters else KEPT
    layer = tokens * (of_width * stack.width + of_inner * stack.inner + of_keys * stack.keys)
    layer += 2 * (stack.queries if policy.kind.repeats else stack.keys) * (past + tokens)
    again = config.policy.gradient_checkpointing
    numbers = stack.layers * tokens * stack.width + layer if again else stack.layers * layer
    return round(numbers * (_held(config, policy) if adapters else 4))
