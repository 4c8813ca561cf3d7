"""pi0 (arXiv 2410.24164) and pi0.5 (arXiv 2504.16054) as LeRobot and openpi publish them.

PaliGemma reads pictures and instruction once per observation; its keys and values, layer by layer, are the context. The
action expert, a narrower Gemma of as many layers, denoises a chunk: in every layer its queries attend to the context's
keys and its own. pi0's expert begins with a token of the state, and is told the time beside every action; pi0.5 has the
state as numbers in its instruction, and the time scales, shifts and gates every layer (adaRMS).

Time runs as here: 1 is noise, velocity = noise - action. Chunks have the padded width (32): all of it is denoised, the
robot's part is `chunk[..., :robot_action_dim]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from genrl.vla.policies import lerobot
from genrl.vla.policies.folder import HeadSizes, PublishedFlow, vocabulary_size
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import STATE, TOKENS, Batch
from genrl.vla.policies.robot import Prompts, Robot, letterbox, tokens_of, with_newline
from genrl.vla.policies.transformer import (
    AdaptiveNorm,
    Layer,
    final_norm,
    masked_mean,
    prefix,
    stacked,
    time_embedding,
    unstacked,
)

TOKENIZER = "google/paligemma-3b-pt-224"


class Gemma(NamedTuple):
    """Sizes of a Gemma."""

    width: int
    depth: int
    mlp: int
    heads: int
    key_heads: int
    head_size: int


class Siglip(NamedTuple):
    """Sizes of a vision transformer."""

    width: int
    depth: int
    mlp: int
    heads: int
    patch: int


GEMMA = {
    "gemma_2b": Gemma(2048, 18, 16384, 8, 1, 256),
    "gemma_300m": Gemma(1024, 18, 4096, 8, 1, 256),
    "dummy": Gemma(64, 4, 128, 8, 1, 16),
}
"""By openpi's names; "dummy" is its size for tests."""

SIGLIP = {"gemma_2b": Siglip(1152, 27, 4304, 16, 14), "dummy": Siglip(32, 2, 64, 4, 14)}
"""By the language model that it sees for."""

_PALIGEMMA = "paligemma_with_expert.paligemma."
_EMBEDDING, _TIED = _PALIGEMMA + "model.language_model.embed_tokens.weight", _PALIGEMMA + "lm_head.weight"


@dataclass(frozen=True)
class PI0Config:
    """LeRobot's names. adaptive: pi0.5. padded_state: its prompt has `max_state_dim` numbers of the state, those after
    the robot's own being 0 (bin 128); openpi writes the robot's own alone (it pads after it has made the tokens)."""

    adaptive: bool
    padded_state: bool = False
    paligemma_variant: str = "gemma_2b"
    action_expert_variant: str = "gemma_300m"
    chunk_size: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    image_resolution: tuple[int, int] = (224, 224)
    min_period: float = 4e-3
    max_period: float = 4.0
    freeze_vision_encoder: bool = False
    train_expert_only: bool = False


class PI0(PublishedFlow):
    """A folder of type pi0 or pi05 as a flow policy.

    Context: "keys", "values" [B, layers, 1, P, D] of the prefix's P tokens, "valid" bool [B, P]; pi0: "state" [B, 32];
    pi0.5 with a critic: "prefix" [B, W], the mean of the prefix's last hidden state.

    critic: pi0's reads the expert's hidden state, detached, its mean over the chunk. pi_RL averages its value over the
    denoising steps in rollouts and takes one step's in training; here the expert is asked once, at the mean of the
    initial noise and sigma = 1, so that both are the same function of the observation. pi0.5's reads "prefix".
    """

    def __init__(self, config: PI0Config, robot: Robot, prompts: Prompts, vocabulary: int) -> None:
        super().__init__(robot, prompts, config.chunk_size, config.max_action_dim)
        self.config = config
        language, expert = GEMMA[config.paligemma_variant], GEMMA[config.action_expert_variant]
        width = expert.width
        with torch.device("meta"):
            self.paligemma_with_expert = nn.ModuleDict(
                {
                    "paligemma": nn.ModuleDict({"model": _paligemma(config, language, vocabulary)}),
                    "gemma_expert": nn.ModuleDict({"model": _stack(expert, adaptive=config.adaptive)}),
                }
            )
            self.action_in_proj = nn.Linear(config.max_action_dim, width)
            self.action_out_proj = nn.Linear(width, config.max_action_dim)
            if config.adaptive:
                self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
            else:
                self.state_proj = nn.Linear(config.max_state_dim, width)
                self.action_time_mlp_in = nn.Linear(2 * width, width)
                self.action_time_mlp_out = nn.Linear(width, width)

    @property
    def encoder(self) -> nn.Module:
        """PaliGemma."""
        networks: Any = self.paligemma_with_expert
        encoder: nn.Module = networks["paligemma"]
        return encoder

    @property
    def head_sizes(self) -> HeadSizes:
        expert, language = GEMMA[self.config.action_expert_variant], GEMMA[self.config.paligemma_variant]
        if self.config.adaptive:
            return HeadSizes(language.width, (1024, 512, 256), expert.width)
        return HeadSizes(expert.width, (512, 256, 128), expert.width)

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        """pi0.5: bytes in UTF-8, for the state belongs into the prompt, and `encode` writes it."""
        if not self.config.adaptive:
            return self.prompts(with_newline(instructions))
        lines = [instruction.encode() for instruction in instructions]
        empty = [row for row, line in enumerate(lines) if not line.strip()]
        if empty:
            raise ValueError(f"row {empty[0]} has no instruction: the environment must give a task_description")
        tokens = torch.zeros(len(lines), max(map(len, lines), default=0), dtype=torch.int64)
        for row, line in enumerate(lines):
            tokens[row, : len(line)] = torch.tensor(list(line))
        return tokens

    def encode(self, observation: Batch) -> Batch:
        """Raises KeyError for an entry that is missing, ValueError for one of another shape."""
        device = self.action_in_proj.weight.device
        numbers = self.robot.state(observation, device, self.config.max_state_dim)
        if self.config.adaptive:
            state = numbers if self.config.padded_state else numbers[:, : self.robot.widths[STATE]]
            tokens = self.prompts(_prompts(observation[TOKENS], state)).to(device)
            there = tokens > 0
        else:
            tokens, there = tokens_of(observation, device)
        x, valid = self._embed(observation, tokens, there)
        language = self._paligemma["language_model"]
        x, cache = prefix(language["layers"], x, valid)
        context = stacked(cache) | {"valid": valid}
        if not self.config.adaptive:
            context["state"] = numbers
        elif self.critic:
            context["prefix"] = masked_mean(final_norm(language["norm"], x), valid)
        return context

    def read_by_critic(self, context: Batch) -> Tensor:
        if self.config.adaptive:
            return context["prefix"]
        state = context["state"]
        x = state.new_zeros(len(state), self.horizon, self.action_dim)
        # A constant to the critic (`value` detaches it), so no graph of the expert is kept.
        with torch.no_grad():
            return self.hidden(context, x, state.new_ones(len(state))).mean(1)

    @property
    def _paligemma(self) -> Any:
        encoder: Any = self.encoder
        return encoder["model"]

    def _embed(self, observation: Batch, tokens: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """The prefix [B, P, W] and which of it is there: pictures, then the prompt. An empty camera is masked by every
        query, so it is left out."""
        model, size = self._paligemma, self.config.image_resolution
        pictures = [self.robot.picture(observation, name, tokens.device) for name in self.robot.pictures]
        pixels = torch.cat([letterbox(picture, size, "centre") for picture in pictures]) * 2.0 - 1.0
        patches = model["vision_tower"](pixels.to(model["vision_tower"].embeddings.patch_embedding.weight.dtype))
        linear = model["multi_modal_projector"]["linear"]
        features = linear(patches.last_hidden_state.to(linear.weight.dtype)).chunk(len(pictures))
        table = model["language_model"]["embed_tokens"].weight
        # Gemma scales its words by the root of the width; pictures come from the projector at that size already.
        words = functional.embedding(tokens, table) * table.shape[1] ** 0.5
        dtype = model["language_model"]["layers"][0].self_attn.q_proj.weight.dtype
        x = torch.cat([*(f.to(dtype) for f in features), words.to(dtype)], 1)
        count = x.shape[1] - tokens.shape[1]
        return x, torch.cat([there.new_ones(len(tokens), count), there], 1)

    def hidden(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        """The expert's last hidden state of the actions, float32 [B, H, W]."""
        expert: Any = self.paligemma_with_expert["gemma_expert"]
        layers, norm = expert["model"]["layers"], expert["model"]["norm"]
        weight = self.action_in_proj.weight
        time = time_embedding(sigma, len(weight), self.config.min_period, self.config.max_period).to(weight.dtype)
        suffix, condition = self.action_in_proj(x.to(weight.dtype)), None
        batch, valid = len(x), context["valid"]
        if self.config.adaptive:
            condition = functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(time))))
        else:
            suffix = torch.cat([suffix, time[:, None].expand_as(suffix)], 2)
            suffix = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(suffix)))
            state = self.state_proj(context["state"].to(self.state_proj.weight.dtype))
            suffix = torch.cat([state[:, None], suffix], 1)
        length = suffix.shape[1]
        # Not causal: the actions of a chunk see the later ones, too.
        within = valid.new_ones(length, length)
        if not self.config.adaptive:
            within[0, 1:] = False  # the state does not see the actions
        mask = torch.cat([valid[:, None].expand(-1, length, -1), within.expand(batch, -1, -1)], 2)[:, None]
        # Behind what is there of the prefix, not behind its padding.
        positions = valid.sum(1, keepdim=True) + torch.arange(length, device=valid.device)
        hidden = suffix.to(layers[0].self_attn.q_proj.weight.dtype)
        for layer, before in zip(layers, unstacked(context), strict=True):
            hidden, _ = layer(hidden, positions, mask, before, condition)
        return final_norm(norm, hidden, condition)[:, -self.horizon :]

    @classmethod
    def load(cls, path: Path, device: torch.device | str, adapt: Adapt | None) -> PI0:
        """The policy of a LeRobot folder, in evaluation mode; what its configuration freezes has no gradient."""
        folder = lerobot.read_folder(path, adapt)
        settings = folder.config
        known = folder.settings_of(PI0Config) | folder.beside.get(lerobot.PROMPT, {})
        config = PI0Config(adaptive=settings["type"] == "pi05", **known)
        for name, variant, sizes in (
            ("paligemma_variant", config.paligemma_variant, sorted(SIGLIP)),
            ("action_expert_variant", config.action_expert_variant, sorted(GEMMA)),
        ):
            if variant not in sizes:
                raise ValueError(f"{path}/config.json: {name} must be one of {sizes}, found {variant!r}")
        weights, metadata = lerobot.read_weights(path)
        words = vocabulary_size(weights, own_name, (_EMBEDDING, _TIED), path)
        policy = cls(config, Robot(folder), Prompts(folder, TOKENIZER), words)
        policy.fill(folder, weights, metadata, own_name, [r"paligemma_with_expert\.gemma_expert\.lm_head\.weight"])
        vision = policy._paligemma["vision_tower"].embeddings
        # A buffer that no file has, so it is still on the meta device.
        vision.position_ids = torch.arange(vision.num_positions)[None]
        if config.freeze_vision_encoder:
            policy._paligemma["vision_tower"].requires_grad_(False)
        if config.train_expert_only:
            policy.encoder.requires_grad_(False)
        return policy.ready(device)


def discretised(state: Tensor) -> Tensor:
    """Numbers of 256 equal bins over [-1, 1], -1 below them and 255 from the last one's edge on (pi0.5), int64."""
    # As openpi's np.digitize, in float64: a state on an edge would else fall into the bin beside it.
    edges = torch.linspace(-1.0, 1.0, 257, dtype=torch.float64)[:-1]
    return torch.bucketize(state.detach().cpu().double(), edges, right=True) - 1


def _prompts(tokens: Tensor, state: Tensor) -> list[str]:
    """pi0.5's prompts: the instruction, whose bytes are `tokens`, and the numbers of the state, normalised."""
    texts = []
    for line, numbers in zip(tokens.tolist(), discretised(state).tolist(), strict=True):
        task = bytes(byte for byte in line if byte).decode().strip().replace("_", " ").replace("\n", " ")
        texts.append(f"Task: {task}, State: {' '.join(map(str, numbers))};\nAction: ")
    return texts


def own_name(key: str) -> str:
    """A published key as it is here: with or without `model.` before it and `vision_model.` after the vision tower; the
    embedding stored under its own name, under the head's that it is tied to, or under both."""
    name = key.removeprefix("model.").replace(".vision_tower.vision_model.", ".vision_tower.")
    return _EMBEDDING if name == _TIED else name


def _stack(size: Gemma, *, adaptive: bool) -> nn.ModuleDict:
    from transformers import GemmaConfig
    from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer, GemmaRMSNorm

    config = GemmaConfig(
        hidden_size=size.width,
        intermediate_size=size.mlp,
        num_hidden_layers=size.depth,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        head_dim=size.head_size,
        hidden_act="gelu_pytorch_tanh",
    )
    layers: list[Any] = [GemmaDecoderLayer(config, number) for number in range(size.depth)]
    if adaptive:
        for layer in layers:
            layer.input_layernorm = AdaptiveNorm(size.width)
            layer.post_attention_layernorm = AdaptiveNorm(size.width)
    norm = AdaptiveNorm(size.width) if adaptive else GemmaRMSNorm(size.width)
    return nn.ModuleDict({"layers": nn.ModuleList(Layer(layer) for layer in layers), "norm": norm})


def _paligemma(config: PI0Config, size: Gemma, vocabulary: int) -> nn.ModuleDict:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    eye = SIGLIP[config.paligemma_variant]
    vision = SiglipVisionConfig(
        hidden_size=eye.width,
        intermediate_size=eye.mlp,
        num_hidden_layers=eye.depth,
        num_attention_heads=eye.heads,
        image_size=config.image_resolution[0],
        patch_size=eye.patch,
        vision_use_head=False,
    )
    eyes = SiglipVisionModel(vision)
    language = _stack(size, adaptive=False)
    language["embed_tokens"] = nn.Embedding(vocabulary, size.width)
    return nn.ModuleDict(
        {
            "vision_tower": getattr(eyes, "vision_model", eyes),  # wrapped in the first releases of transformers 5
            "multi_modal_projector": nn.ModuleDict({"linear": nn.Linear(eye.width, size.width)}),
            "language_model": language,
        }
    )
