"""GR00T N1.7 as LeRobot 0.6.1 saves it (`type: groot`).

The first 16 layers of a Qwen3-VL (Cosmos-Reason2-2B) read pictures and instruction once per observation; a transformer
on top of what the last of them says, before its norm, makes the context. The action head, a DiT, denoises a chunk: a
token of the state, then one per action, attend in turn to the words, to themselves, to the pictures, to themselves,
the time scaling and shifting every layer. What encodes states and actions has weights for each robot ("embodiment").

GR00T's time is 0 for noise and 1 for data, its velocity = action - noise; both are turned here: sigma = 1 - time and
velocity = noise - action. Chunks have the padded width (132) and all steps of the model (40).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_layers import GradientCheckpointingLayer

from genrl.mdp.levels import flow_times
from genrl.vla.policies import lerobot
from genrl.vla.policies.folder import HeadSizes, PublishedFlow, vocabulary_size
from genrl.vla.policies.groot_folder import (
    BACKBONE,
    Eye,
    GrootPrompts,
    GrootRobot,
    backbone_config,
    base_sizes,
    embodiment,
)
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import Batch, Errors
from genrl.vla.policies.robot import tokens_of
from genrl.vla.policies.transformer import attend, heads, masked_mean

_EMBEDDING = "backbone.language_model.embed_tokens.weight"


class Attention(nn.Module):
    """Attention of `heads` heads, with biases, to x itself or to another sequence."""

    def __init__(self, width: int, count: int, size: int, other: int | None = None) -> None:
        super().__init__()
        self.size = size
        self.to_q = nn.Linear(width, count * size)
        self.to_k, self.to_v = (nn.Linear(other or width, count * size) for _ in range(2))
        self.to_out = nn.Linear(count * size, width)

    def forward(self, x: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, T, W], other [B, S, V], mask bool [B, S] -> [B, T, W]."""
        query = heads(self.to_q, x, self.size)
        key, value = heads(self.to_k, other, self.size), heads(self.to_v, other, self.size)
        full_mask = key.new_ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask[:, None, None]
        attended: Tensor = self.to_out(attend(query, key, value, full_mask))
        return attended


class Block(GradientCheckpointingLayer):
    """Attention and feed-forward, norms first. timed: the first norm's scale and shift are a function of the time."""

    def __init__(self, width: int, count: int, size: int, *, other: int | None = None, timed: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=not timed)
        self.time = nn.Linear(width, 2 * width) if timed else None
        self.attn1 = Attention(width, count, size, other)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=not timed)
        self.ff = nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)})

    def forward(
        self, x: Tensor, other: Tensor | None = None, mask: Tensor | None = None, time: Tensor | None = None
    ) -> Tensor:
        """x [B, T, W]; other [B, S, V], mask bool [B, S]: what it attends to, x itself without; time [B, W]."""
        normed = self.norm1(x)
        if self.time is not None and time is not None:
            scale, shift = self.time(functional.silu(time))[:, None].chunk(2, -1)
            normed = normed * (1.0 + scale) + shift
        x = x + self.attn1(normed, normed if other is None else other, mask)
        hidden = functional.gelu(self.ff["up"](self.norm3(x)), approximate="tanh")
        output: Tensor = x + self.ff["down"](hidden)
        return output


class PerRobot(nn.Module):
    """A linear layer for each robot."""

    def __init__(self, robots: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W, self.b = nn.Parameter(torch.empty(robots, inputs, outputs)), nn.Parameter(torch.empty(robots, outputs))

    def forward(self, x: Tensor, robot: int) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return x.to(self.W.dtype) @ self.W[robot] + self.b[robot]


class Groot(PublishedFlow):
    """A folder of type groot as a flow policy.

    Context: "seen" [B, P, V] of the P tokens of pictures and prompt, "valid" and "image" bool [B, P]: which are there,
    and which are of pictures; "state" [B, 1, W], the state's token. The critic reads the mean of "seen" and "state",
    detached.

    In LeRobot an instruction's padding, to the longest of a batch, is seen by the transformer on top of the backbone,
    so that a row depends on those beside it; here it is masked, and a row is what it is alone.
    """

    def __init__(
        self, config: dict[str, Any], robot: GrootRobot, prompts: GrootPrompts, eye: Eye, vlm: Any, number: int
    ) -> None:
        """config: the base's sizes by its names. vlm: transformers' Qwen3VLConfig; number: the robot's."""
        super().__init__(robot, prompts, config["action_horizon"], config["max_action_dim"])
        self.config, self.eye, self.number, self.units = config, eye, number, robot
        self.taught = min(self.horizon, robot.steps)
        with torch.device("meta"):
            self.backbone = _backbone(vlm)
            self.action_head = nn.ModuleDict(_head(config))

    @property
    def encoder(self) -> nn.Module:
        """Qwen3-VL."""
        return self.backbone

    @property
    def head_sizes(self) -> HeadSizes:
        config = self.config
        reads = config["backbone_embedding_dim"] + config["input_embedding_dim"]
        return HeadSizes(reads, (1024, 512, 256), config["diffusion_model_cfg"]["output_dim"])

    def encode(self, observation: Batch) -> Batch:
        """Raises KeyError for an entry that is missing, ValueError for one of another shape."""
        head: Any = self.action_head
        device = head["model"]["proj_out_2"].weight.device
        embedded, valid, image = self._read_prompt(observation, device)
        embedded = head["vlln"](embedded.to(head["model"]["proj_out_2"].weight.dtype))
        for block in head["vl_self_attention"]["transformer_blocks"]:
            embedded = block(embedded, None, valid)
        numbers = self.robot.state(observation, device, self.config["max_state_dim"])
        hidden = functional.relu(head["state_encoder"]["layer1"](numbers[:, None], self.number))
        state = head["state_encoder"]["layer2"](hidden, self.number)
        return {"seen": embedded, "valid": valid, "image": image, "state": state}

    def read_by_critic(self, context: Batch) -> Tensor:
        return torch.cat([masked_mean(context["seen"], context["valid"]), context["state"][:, 0]], 1).float()

    def _read_prompt(self, observation: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """What the backbone's last layer says, before its norm, [B, P, V]; which tokens are there, and which are of
        pictures, bool [B, P]."""
        backbone: Any = self.backbone
        shown = [self.eye.patches(self.units.pixels(observation, name, device)) for name in self.robot.pictures]
        shown = shown * self.units.frames
        tokens, there = tokens_of(observation, device)
        place = backbone.config.image_token_id
        starts = (tokens[0] == place).nonzero()[:, 0].tolist() if len(tokens) else []
        if len(starts) != len(shown) or not bool((tokens[:, starts] == place).all()):
            raise ValueError(f"the prompt has {len(starts)} pictures, the policy shows {len(shown)}: use its tokenise")
        pieces, masks, before = [], [], 0
        for start, (patches, _) in zip(starts, shown, strict=True):
            count = patches.shape[1] // self.eye.merge**2
            # Qwen wants as many tokens of a picture as it has places; the prompt, which is stored with every decision,
            # has one.
            pieces += [tokens[:, before:start], tokens[:, start : start + 1].expand(-1, count)]
            masks += [there[:, before:start], there[:, start : start + 1].expand(-1, count)]
            before = start + 1
        ids, valid = torch.cat([*pieces, tokens[:, before:]], 1), torch.cat([*masks, there[:, before:]], 1)
        image = ids == place
        grid = torch.tensor([[1, *size] for _, size in shown], device=device).repeat(len(ids), 1)
        hidden = backbone(
            input_ids=ids,
            attention_mask=valid.long(),
            pixel_values=torch.cat([patches for patches, _ in shown], 1).flatten(0, 1),
            image_grid_thw=grid,
            mm_token_type_ids=image.int(),
            use_cache=False,
        )
        return hidden.last_hidden_state, valid, image

    def hidden(self, context: Batch, x: Tensor, sigma: Tensor) -> Tensor:
        """The DiT's output for the actions, float32 [B, H, W]."""
        head: Any = self.action_head
        model, encoder, robot = head["model"], head["action_encoder"], self.number
        dtype = model["proj_out_2"].weight.dtype
        buckets = self.config["num_timestep_buckets"]
        # A step's time is k / K; float32 may have it a little below, which must not lose a bucket.
        step = ((1.0 - sigma.double()) * buckets + 1e-3).floor()
        actions = encoder["W1"](x, robot)
        times = _waves(step, actions.shape[-1], actions.shape[-1] // 2, sine_first=True).to(dtype)
        both = torch.cat([actions, times[:, None].expand_as(actions)], -1)
        actions = encoder["W3"](functional.silu(encoder["W2"](both, robot)), robot)
        if self.config["add_pos_embed"]:
            actions = actions + head["position_embedding"].weight[: self.horizon]
        embedder = model["timestep_encoder"]["timestep_embedder"]
        time = embedder["linear_1"](_waves(step, 256, 127, sine_first=False).to(dtype))
        time = embedder["linear_2"](functional.silu(time))
        hidden = torch.cat([context["state"].to(dtype), actions], 1)
        embedded, valid, image = context["seen"].to(dtype), context["valid"], context["image"]
        # Counted by LeRobot among the blocks that look at the prompt, which are every second one.
        every = 2 * self.config["attend_text_every_n_blocks"]
        for number, block in enumerate(model["transformer_blocks"]):
            if number % 2:
                hidden = block(hidden, None, None, time)
            elif self.config["use_alternate_vl_dit"]:
                hidden = block(hidden, embedded, valid & (~image if number % every == 0 else image), time)
            else:
                hidden = block(hidden, embedded, valid, time)
        shift, scale = model["proj_out_1"](functional.silu(time))[:, None].chunk(2, -1)
        hidden = functional.layer_norm(hidden, hidden.shape[-1:], eps=1e-6) * (1.0 + scale) + shift
        output: Tensor = model["proj_out_2"](hidden)
        # The first place was the state's.
        return output[:, -self.horizon :].float()

    def _read(self, hidden: Tensor) -> Tensor:
        decoder: Any = self.action_head["action_decoder"]
        action_minus_noise = decoder["layer2"](functional.relu(decoder["layer1"](hidden, self.number)), self.number)
        velocity: Tensor = -action_minus_noise.float()
        return velocity

    def loss_noise(self, count: int, rng: torch.Generator) -> Batch:
        """Noise, and sigmas `.999 Beta(1.5, 1) + .001`, of flow matching."""
        noise = torch.randn(count, self.horizon, self.action_dim, generator=rng)
        return {"noise": noise, "level": flow_times(count, rng)}

    def errors(self, context: Batch, actions: Tensor, valid: Tensor, noise: Batch) -> Errors:
        """Flow matching by LeRobot's mask: of the robot's own numbers alone, as most of the 132 only pad an action, and
        of the `taught` steps, whose error is scaled so that its mean over all steps is theirs; others are 0."""
        gaussian, level = noise["noise"].to(actions.device), noise["level"].to(actions.device)
        counted = valid & (torch.arange(self.horizon, device=valid.device) < self.taught)
        actions, share = actions * counted[..., None], level[:, None, None]
        velocity_errors = self.velocity(context, share * gaussian + (1.0 - share) * actions, level) - (
            gaussian - actions
        )
        wrong = velocity_errors[..., : self.robot_action_dim].square().mean(-1) * counted
        return Errors(wrong * (self.horizon / self.taught), wrong.new_zeros(len(wrong)))

    @classmethod
    def load(cls, path: Path, device: torch.device | str, adapt: Adapt | None) -> Groot:
        """The policy of a LeRobot folder, in evaluation mode; what its configuration freezes has no gradient."""
        folder = lerobot.read_folder(path, adapt)
        config = folder.config
        if config.get("use_relative_actions"):
            raise ValueError(f"{path}/config.json: use_relative_actions must be false: they are not supported")
        sizes, robot = base_sizes(folder), GrootRobot(folder)
        vlm = backbone_config(folder, sizes)
        prompts = GrootPrompts(folder, BACKBONE, len(robot.pictures) * robot.frames)
        weights, metadata = lerobot.read_weights(path)
        vlm.text_config.vocab_size = vocabulary_size(weights, own_name, (_EMBEDDING,), path)
        policy = cls(sizes, robot, prompts, Eye(folder, vlm), vlm, embodiment(folder))
        policy.fill(folder, weights, metadata, own_name, [r"backbone\.language_model\.norm\.weight"])
        policy._place_waves(vlm)
        policy._freeze(config)
        return policy.ready(device)

    def _place_waves(self, vlm: Any) -> None:
        """The backbone's rotary frequencies, which no file has, on a device."""
        backbone: Any = self.backbone
        backbone.language_model.rotary_emb = type(backbone.language_model.rotary_emb)(config=vlm.text_config)
        backbone.visual.rotary_pos_emb = type(backbone.visual.rotary_pos_emb)(vlm.vision_config)

    def _freeze(self, config: dict[str, Any]) -> None:
        backbone: Any = self.backbone
        head: Any = self.action_head
        backbone.language_model.requires_grad_(config.get("tune_llm", False))
        backbone.visual.requires_grad_(config.get("tune_visual", False))
        top = config.get("tune_top_llm_layers", 0)
        for layer in backbone.language_model.layers[-top:] if top else ():
            layer.requires_grad_(True)
        for names, key in (
            (("state_encoder", "action_encoder", "action_decoder", "position_embedding"), "tune_projector"),
            (("model",), "tune_diffusion_model"),
            (("vlln", "vl_self_attention"), "tune_vlln"),
        ):
            for name in names:
                if name in head:
                    head[name].requires_grad_(config.get(key, True))


def own_name(key: str) -> str:
    """A published key as it is here. The language head is the embedding, under either name or both."""
    name = key.removeprefix("_groot_model.")
    if name == "backbone.model.lm_head.weight":
        return _EMBEDDING
    name = name.replace("backbone.model.model.", "backbone.", 1)
    if name.startswith("action_head."):
        for theirs, ours in (
            (".to_out.0.", ".to_out."),
            (".ff.net.0.proj.", ".ff.up."),
            (".ff.net.2.", ".ff.down."),
            (".norm1.linear.", ".time."),
        ):
            name = name.replace(theirs, ours)
    return name


def _waves(step: Tensor, width: int, falls: int, *, sine_first: bool) -> Tensor:
    """Sines and cosines of time steps [B] at width / 2 frequencies, 1 and on by 10,000^(-1 / falls): [B, width]."""
    angle = step.float()[:, None] * torch.exp(
        torch.arange(width // 2, device=step.device, dtype=torch.float32) * (-math.log(10_000.0) / falls)
    )
    return torch.cat([angle.sin(), angle.cos()] if sine_first else [angle.cos(), angle.sin()], 1)


def _backbone(vlm: Any) -> nn.Module:
    """Qwen3-VL without its last norm, before which it is read."""
    from transformers import Qwen3VLModel

    model: Any = Qwen3VLModel(vlm)
    model.language_model.norm = nn.Identity()
    backbone: nn.Module = model
    return backbone


def _head(config: dict[str, Any]) -> dict[str, nn.Module]:
    robots, width, hidden = config["max_num_embodiments"], config["input_embedding_dim"], config["hidden_size"]
    context_dim, actions, diffusion = (
        config["backbone_embedding_dim"],
        config["max_action_dim"],
        config["diffusion_model_cfg"],
    )
    count, size = diffusion["num_attention_heads"], diffusion["attention_head_dim"]
    linear: Callable[[int, int], PerRobot] = lambda inputs, outputs: PerRobot(robots, inputs, outputs)  # noqa: E731
    own = count * size
    blocks = [
        Block(own, count, size, other=None if number % 2 else context_dim, timed=True)
        for number in range(diffusion["num_layers"])
    ]
    embedder = {"linear_1": nn.Linear(256, own), "linear_2": nn.Linear(own, own)}
    model = {
        "timestep_encoder": nn.ModuleDict({"timestep_embedder": nn.ModuleDict(embedder)}),
        "transformer_blocks": nn.ModuleList(blocks),
        "proj_out_1": nn.Linear(own, 2 * own),
        "proj_out_2": nn.Linear(own, diffusion["output_dim"]),
    }
    top = config.get("vl_self_attention_cfg") or {"num_layers": 0}
    above = [
        Block(context_dim, top["num_attention_heads"], top["attention_head_dim"], timed=False)
        for _ in range(top["num_layers"])
    ]
    parts: dict[str, nn.Module] = {
        "model": nn.ModuleDict(model),
        "state_encoder": nn.ModuleDict(
            {"layer1": linear(config["max_state_dim"], hidden), "layer2": linear(hidden, width)}
        ),
        "action_encoder": nn.ModuleDict(
            {"W1": linear(actions, width), "W2": linear(2 * width, width), "W3": linear(width, width)}
        ),
        "action_decoder": nn.ModuleDict({"layer1": linear(hidden, hidden), "layer2": linear(hidden, actions)}),
        "vlln": nn.LayerNorm(context_dim) if config["use_vlln"] else nn.Identity(),
        "vl_self_attention": nn.ModuleDict({"transformer_blocks": nn.ModuleList(above)}),
    }
    if config["add_pos_embed"]:
        parts["position_embedding"] = nn.Embedding(config["max_seq_len"], width)
    return parts
