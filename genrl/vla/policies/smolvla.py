"""SmolVLA (arXiv 2506.01844) as LeRobot publishes it.

The first 16 layers of SmolVLM2 read pictures, instruction and, in a token that only itself sees, the state, once per
observation; their keys and values, layer by layer, are the context. The action expert has three quarters of their
width. Every second of its layers attends to the context's keys and its own, causally; the others to the context's
alone, which they project again. Time runs as here: 1 is noise, velocity = noise - action. Chunks have the padded
width (32).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from genrl.vla.policies import lerobot
from genrl.vla.policies.folder import HeadSizes, PublishedFlow, vocabulary_size
from genrl.vla.policies.lerobot import Adapt, Folder
from genrl.vla.policies.policy import Batch
from genrl.vla.policies.robot import Prompts, Robot, letterbox, tokens_of, with_newline
from genrl.vla.policies.transformer import (
    Layer,
    final_norm,
    masked_mean,
    prefix,
    stacked,
    time_embedding,
    unstacked,
)

PUBLISHED = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
"""The backbone of the published policies, whose sizes are known here: no hub is asked."""

_EMBEDDING = "vlm_with_expert.vlm.model.text_model.embed_tokens.weight"
_HEAD = "vlm_with_expert.vlm.lm_head.weight"


@dataclass(frozen=True)
class SmolVLAConfig:
    """LeRobot's names."""

    chunk_size: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    resize_imgs_with_padding: tuple[int, int] | None = (512, 512)
    vlm_model_name: str = PUBLISHED
    num_vlm_layers: int = 16
    num_expert_layers: int = -1
    self_attn_every_n_layers: int = 2
    expert_width_multiplier: float = 0.75
    attention_mode: str = "cross_attn"
    add_image_special_tokens: bool = False
    adapt_to_pi_aloha: bool = False
    min_period: float = 4e-3
    max_period: float = 4.0
    freeze_vision_encoder: bool = True
    train_expert_only: bool = True
    train_state_proj: bool = True

    def __post_init__(self) -> None:
        if self.add_image_special_tokens or self.adapt_to_pi_aloha:
            raise ValueError("add_image_special_tokens and adapt_to_pi_aloha must be false: they are not supported")
        if self.num_expert_layers > 0 and self.num_expert_layers != self.num_vlm_layers:
            raise ValueError(
                f"num_expert_layers must be that of the backbone, {self.num_vlm_layers}, or not positive; "
                f"found {self.num_expert_layers}"
            )

    def crosses(self, layer: int) -> bool:
        """Whether a layer of the expert attends to the context alone."""
        every = self.self_attn_every_n_layers
        return "cross" in self.attention_mode and not (every > 0 and layer % every == 0)


class SmolVLA(PublishedFlow):
    """A folder of type smolvla as a flow policy.

    Context: "keys", "values" [B, layers, heads, P, D] of the prefix's P tokens, the state the last, "valid" bool
    [B, P]; with a critic "prefix" [B, W], the mean of the prefix's last hidden state, which the critic reads detached.
    """

    def __init__(self, config: SmolVLAConfig, robot: Robot, prompts: Prompts, vlm: Any) -> None:
        """vlm: transformers' SmolVLMConfig, its vocabulary that of the weights."""
        super().__init__(robot, prompts, config.chunk_size, config.max_action_dim)
        self.config = config
        wide = vlm.text_config.hidden_size
        width = int(wide * config.expert_width_multiplier)
        with torch.device("meta"):
            backbone, expert = _backbone(config, vlm), _expert(config, vlm, width)
            self.vlm_with_expert = nn.ModuleDict(
                {"vlm": nn.ModuleDict({"model": backbone}), "lm_expert": nn.ModuleDict(expert)}
            )
            self.state_proj = nn.Linear(config.max_state_dim, wide)
            self.action_in_proj = nn.Linear(config.max_action_dim, width)
            self.action_out_proj = nn.Linear(width, config.max_action_dim)
            self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)

    @property
    def encoder(self) -> nn.Module:
        """SmolVLM2."""
        networks: Any = self.vlm_with_expert
        encoder: nn.Module = networks["vlm"]
        return encoder

    @property
    def head_sizes(self) -> HeadSizes:
        return HeadSizes(self.state_proj.out_features, (1024, 512, 256), self.action_in_proj.out_features)

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        return self.prompts(with_newline(instructions))

    def encode(self, observation: Batch) -> Batch:
        """Raises KeyError for an entry that is missing, ValueError for one of another shape."""
        device, text = self.state_proj.weight.device, self._vlm["text_model"]
        x, valid = self._embed(observation, device)
        x, cache = prefix(text["layers"], x, valid)
        # Nothing else sees the state, so it goes last and alone: what it is projected by can be trained, and no
        # gradient passes through the rest.
        state = self._state(observation, device)[:, None].to(x.dtype)
        last: list[tuple[Tensor, Tensor]] = []
        place = valid.sum(1, keepdim=True)
        valid = torch.cat([valid, valid.new_ones(len(valid), 1)], 1)
        for layer, past in zip(text["layers"], cache, strict=True):
            state, pair = layer(state, place, valid[:, None, None], past)
            last.append(pair)
        pairs = zip(cache, last, strict=True)
        joined = [(torch.cat([a[0], b[0]], 2), torch.cat([a[1], b[1]], 2)) for a, b in pairs]
        context = stacked(joined) | {"valid": valid}
        if self.critic:
            context["prefix"] = masked_mean(final_norm(text["norm"], torch.cat([x, state], 1)), valid)
        return context

    def read_by_critic(self, context: Batch) -> Tensor:
        return context["prefix"]

    @property
    def _vlm(self) -> Any:
        encoder: Any = self.encoder
        return encoder["model"]

    def _state(self, observation: Batch, device: torch.device) -> Tensor:
        numbers = self.robot.state(observation, device, self.config.max_state_dim)
        state: Tensor = self.state_proj(numbers.to(self.state_proj.weight.dtype))
        return state

    def _embed(self, observation: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Pictures and instruction [B, P - 1, W] and which of it is there; all of it is scaled by sqrt W. An empty
        camera is masked by every query, so it is left out."""
        model, size = self._vlm, self.config.resize_imgs_with_padding
        pictures = [self.robot.picture(observation, name, device) for name in self.robot.pictures]
        boxed = [p if size is None else letterbox(p, size, "top_left") for p in pictures]
        weight = model["vision_model"].embeddings.patch_embedding.weight
        patches = model["vision_model"]((torch.cat(boxed) * 2.0 - 1.0).to(weight.dtype)).last_hidden_state
        features = model["connector"](patches.to(model["connector"].modality_projection.proj.weight.dtype))
        tokens, valid = tokens_of(observation, device)
        words = functional.embedding(tokens, model["text_model"]["embed_tokens"].weight)
        x = torch.cat([*features.chunk(len(boxed)), words], 1) * words.shape[-1] ** 0.5
        count = x.shape[1] - tokens.shape[1]
        x = x.to(model["text_model"]["layers"][0].self_attn.q_proj.weight.dtype)
        return x, torch.cat([valid.new_ones(len(tokens), count), valid], 1)

    def hidden(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        """The expert's last hidden state, float32 [B, H, W]."""
        model: Any = self.vlm_with_expert
        expert, weight, valid = model["lm_expert"], self.action_in_proj.weight, context["valid"]
        time = time_embedding(sigma, len(weight), self.config.min_period, self.config.max_period).to(weight.dtype)
        hidden = self.action_in_proj(x.to(weight.dtype))
        hidden = torch.cat([hidden, time[:, None].expand_as(hidden)], 2)
        hidden = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(hidden)))
        batch, length = len(x), self.horizon
        positions = torch.arange(length, device=x.device).expand(batch, -1)
        causal = valid.new_ones(length, length).tril().expand(batch, -1, -1)
        full_mask = torch.cat([valid[:, None].expand(-1, length, -1), causal], 2)[:, None]
        hidden = hidden.to(expert["layers"][0].self_attn.q_proj.weight.dtype)
        for layer, before in zip(expert["layers"], unstacked(context), strict=True):
            if layer.crosses:
                # Counted from 0, as LeRobot does; layers that see themselves, too, count on behind the prefix.
                hidden, _ = layer(hidden, positions, valid[:, None, None], before)
            else:
                hidden, _ = layer(hidden, valid.sum(1, keepdim=True) + positions, full_mask, before)
        return final_norm(expert["norm"], hidden)

    @classmethod
    def load(cls, path: Path, device: torch.device | str, adapt: Adapt | None) -> SmolVLA:
        """The policy of a LeRobot folder, in evaluation mode; what its configuration freezes has no gradient.

        A backbone other than `PUBLISHED` is described by config.json in the folder's own `vlm_model_name`, or on the
        hub.
        """
        folder = lerobot.read_folder(path, adapt)
        config = SmolVLAConfig(**folder.settings_of(SmolVLAConfig))
        vlm = _vlm_config(folder, config.vlm_model_name)
        weights, metadata = lerobot.read_weights(path)
        names = _names(weights)
        vlm.text_config.vocab_size = vocabulary_size(weights, names, (_EMBEDDING, _HEAD), path)
        policy = cls(config, Robot(folder), Prompts(folder, config.vlm_model_name), vlm)
        policy.fill(folder, weights, metadata, names, [r"vlm_with_expert\.vlm\.lm_head\.weight"])
        if config.freeze_vision_encoder:
            policy._vlm["vision_model"].requires_grad_(False)
        if config.train_expert_only:
            policy.encoder.requires_grad_(False)
        policy.state_proj.requires_grad_(config.train_state_proj)
        return policy.ready(device)


def expert_mlp(width: int) -> int:
    """Llama's hidden size of a layer of the expert: 4 / 1 of 2 / 3 of the width, up to a multiple of 256."""
    return 256 * -(-4 * int(2 * width / 3) // 256)


def _names(weights: dict[str, Tensor]) -> Callable[[str], str]:
    """Published keys have `model.` before them. A language head that is stored without the embedding is tied to it."""
    tied = not any(key.removeprefix("model.") == _EMBEDDING for key in weights)

    def own(key: str) -> str:
        name = key.removeprefix("model.")
        return _EMBEDDING if tied and name == _HEAD else name

    return own


def _vlm_config(folder: Folder, name: str) -> Any:
    from transformers import AutoConfig, SmolVLMConfig

    if name == PUBLISHED:
        text = {"model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32}
        text |= {"num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64, "rms_norm_eps": 1e-5}
        vision = {"model_type": "smolvlm_vision", "hidden_size": 768, "intermediate_size": 3072, "patch_size": 16}
        vision |= {"num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 512}
        return SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=4)
    file = folder.path / name / "config.json"
    # The name may hold `..`, and what is beside the weights is written back under it.
    if file.is_file() and file.resolve().is_relative_to(folder.path.resolve()):
        folder.beside[f"{name}/config.json"] = json.loads(file.read_text())
    try:
        return AutoConfig.from_pretrained(str(file.parent) if file.is_file() else name)
    except OSError as error:
        raise OSError(f"{folder.path}: put the config.json of the backbone {name!r} into {file.parent}") from error


def _backbone(config: SmolVLAConfig, vlm: Any) -> nn.ModuleDict:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector, SmolVLMVisionTransformer

    text = vlm.text_config
    depth = config.num_vlm_layers if config.num_vlm_layers > 0 else text.num_hidden_layers
    model = {
        "embed_tokens": nn.Embedding(text.vocab_size, text.hidden_size),
        "layers": nn.ModuleList(Layer(LlamaDecoderLayer(text, number)) for number in range(depth)),
        "norm": LlamaRMSNorm(text.hidden_size, eps=text.rms_norm_eps),
    }
    connector: Any = SmolVLMConnector
    return nn.ModuleDict(
        {
            "vision_model": SmolVLMVisionTransformer(vlm.vision_config),
            "connector": connector(vlm),
            "text_model": nn.ModuleDict(model),
        }
    )


def _expert(config: SmolVLAConfig, vlm: Any, width: int) -> dict[str, nn.Module]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

    text = vlm.text_config
    depth = config.num_vlm_layers if config.num_vlm_layers > 0 else text.num_hidden_layers
    own = LlamaConfig(
        hidden_size=width,
        intermediate_size=expert_mlp(width),
        num_hidden_layers=depth,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        hidden_act=text.hidden_act,
        rms_norm_eps=text.rms_norm_eps,
    )
    layers: list[Any] = [LlamaDecoderLayer(own, number) for number in range(depth)]
    keys = text.num_key_value_heads * text.head_dim
    for number, layer in enumerate(layers):
        if config.crosses(number):
            layer.self_attn.k_proj = nn.Linear(keys, keys, bias=False)
            layer.self_attn.v_proj = nn.Linear(keys, keys, bias=False)
    own_layers = (Layer(layer, crosses=config.crosses(number)) for number, layer in enumerate(layers))
    return {"layers": nn.ModuleList(own_layers), "norm": LlamaRMSNorm(width, eps=text.rms_norm_eps)}
