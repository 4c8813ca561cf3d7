"""OpenVLA-OFT (arXiv 2406.09246, 2502.19645), from its folder: a policy of action tokens, or with a continuous head.

One pass gives the whole chunk: [begin] [patches of all cameras] [state] [prompt] [H A empty places] [end], in which all
see all (OFT changes Llama so: no mask is causal; only padding is not seen). An action is read where a language model
would predict it, one place before its own: the first at the prompt's last token.

An action is one of 256 tokens, the last of the vocabulary: token = vocabulary - digit, digit 1 to 256 the bin of
[-1, 1], whose 256 edges have 255 centres, so that the bins 255 and 256 mean the same. Their likelihood is normalised
over these 256 tokens (SimpleVLA-RL, arXiv 2509.09674; RLinf); OFT's own cross-entropy is over the vocabulary.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from genrl.mdp import chains
from genrl.vla.policies import lerobot, openvla_folder
from genrl.vla.policies.folder import HeadSizes, PublishedPolicy
from genrl.vla.policies.layers import merged_state
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.openvla_folder import Robot, Source, own_name
from genrl.vla.policies.policy import STATE, TOKENS, Batch, Errors
from genrl.vla.policies.robot import tokens_of
from genrl.vla.policies.transformer import ROTARY_BASE, VITS, Featurizer, Layer, final_norm, positions_of

BINS = 256
PROMPT = "In: What action should the robot take to {}?\nOut:"
EMPTY = "\u2581"
"""The token (a space, 29871 of Llama-2) that follows the prompt in training."""


def edges() -> Tensor:
    """Edges of the bins, float64 [256]."""
    return torch.linspace(-1.0, 1.0, BINS, dtype=torch.float64)


def action_tokens(actions: Tensor) -> Tensor:
    """Actions in [-1, 1], clipped to it, as places among the last 256 tokens, int64: 256 - digit (numpy's digitize)."""
    # In float64, as numpy has its edges: an action on an edge would else fall to the one or the other side.
    inside = actions.detach().double().clamp(-1.0, 1.0)
    return BINS - torch.bucketize(inside, edges().to(actions.device), right=True)


def token_actions() -> Tensor:
    """What each of the last 256 tokens of the vocabulary means, float32 [256], falling: the centre of its bin."""
    centres = (edges()[1:] + edges()[:-1]) / 2.0
    # The first token is digit 256, behind the last edge: 1.0 itself falls there, and means what its neighbour does.
    return torch.cat([centres.flip(0)[:1], centres.flip(0)]).float()


class OpenVLA(PublishedPolicy):
    """A folder of type openvla as a policy of tokens.

    Context: "logits" float32 [B, H, A, 256] of the action tokens; with a critic "last" float32 [B, W], the hidden state
    of the prompt's last token, which it reads detached (RLinf's value head, 512-128 hidden).
    """

    robot: Robot

    def __init__(self, source: Source, robot: Robot) -> None:
        super().__init__(robot, source.oft.chunk, robot.action_dim)
        self.source, self.inputs = source, (*robot.inputs, TOKENS)
        self.prompts = Prompts(source)
        vision, text = _vision_sizes(source), _text_config(source)
        # The embedding ends with rows that are no words, only there to fill it up; action tokens are the last words.
        self.words = text.vocab_size - int(source.config.get("pad_to_multiple_of", 64))
        self.end, width = int(text.eos_token_id), text.hidden_size
        self.colours = openvla_folder.colours(source)
        with torch.device("meta"):
            towers = [Featurizer(size, side) for size, side in vision]
            self.vision_backbone = nn.ModuleDict({"featurizer": towers[0], "fused_featurizer": towers[1]})
            vision_width = sum(size.width for size, _ in vision)
            self.projector = nn.ModuleDict(
                {
                    "fc1": nn.Linear(vision_width, 4 * vision_width),
                    "fc2": nn.Linear(4 * vision_width, width),
                    "fc3": nn.Linear(width, width),
                }
            )
            self.language_model = nn.ModuleDict({"model": _llama(text)})
            if source.part("proprio_projector"):
                state = nn.Linear(len(robot.stats[STATE]["mask"]), width)
                self.proprio_projector = nn.ModuleDict({"fc1": state, "fc2": nn.Linear(width, width)})
            self.add_reading(text)
        self.reads = width

    def add_reading(self, text: Any) -> None:
        """What makes actions of hidden states."""
        self.language_model["lm_head"] = nn.Linear(text.hidden_size, text.vocab_size, bias=False)

    @property
    def encoder(self) -> nn.Module:
        """Both vision transformers."""
        return self.vision_backbone

    @property
    def centres(self) -> Tensor:
        """The normalised action of each token, float32 [256]."""
        return token_actions()

    @property
    def head_sizes(self) -> HeadSizes | None:
        return HeadSizes(self.reads, (512, 128))

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        return self.prompts(instructions)

    def encode(self, observation: Batch) -> Batch:
        """Raises KeyError for an entry that is missing, ValueError for one of another shape."""
        hidden = self._hidden(observation)
        context = self.read(hidden)
        if self.critic:
            context["last"] = hidden[:, 0]
        return context

    def read(self, hidden: Tensor) -> Batch:
        """The context of hidden states [B, H A, W]."""
        language: Any = self.language_model
        # Of 32,000 words only those that can be chosen are computed, and normalised over.
        rows = language["lm_head"].weight[self.words - BINS : self.words]
        logits = functional.linear(hidden, rows.float())
        return {"logits": logits.view(len(hidden), self.horizon, self.action_dim, BINS)}

    def logits(self, context: Batch) -> Tensor:
        """Logits of the action tokens, float32 [B, H, A, 256]."""
        return context["logits"]

    def demonstration_error(self, context: Batch, actions: Tensor) -> Tensor:
        """`-ln p` of the tokens of normalised actions [B, H, A], in that shape."""
        return -chains.chosen_log_prob(chains.token_log_probs(self.logits(context), 1.0), action_tokens(actions))

    def loss_noise(self, count: int, rng: torch.Generator) -> Batch:
        """Nothing in it is random."""
        return {}

    def errors(self, context: Batch, actions: Tensor, valid: Tensor, noise: Batch) -> Errors:
        """`demonstration_error`, mean over A; nothing beside it."""
        error = self.demonstration_error(context, actions).mean(2)
        return Errors(error, error.new_zeros(len(error)))

    def read_by_critic(self, context: Batch) -> Tensor:
        return context["last"]

    def save(self, folder: Path) -> None:
        """Write the folder's files, adapters merged into the weights, and the critic beside them."""
        weights = {name: value.detach().cpu().contiguous() for name, value in merged_state(self).items()}
        openvla_folder.save(folder, self.source, self.layout, weights)
        lerobot.write_heads(folder, weights)

    def _hidden(self, observation: Batch) -> Tensor:
        """The normed hidden states that actions are read from, float32 [B, H A, W]."""
        language: Any = self.language_model["model"]
        layers, table = language["layers"], language["embed_tokens"].weight
        tokens, there = tokens_of(observation, table.device)
        longest = int(there.sum(1).max())
        # Instructions are stored as wide as the rollout's longest; a batch need not pay for that.
        tokens, there = tokens[:, :longest], there[:, :longest]
        words = functional.embedding(tokens, table)
        parts = [self._seen(observation, table.device).to(table.dtype)]
        if "proprio_projector" in self._modules:
            part: Any = self.proprio_projector
            state = self.robot.state(observation, table.device).to(part["fc1"].weight.dtype)
            parts.append(part["fc2"](functional.gelu(part["fc1"](state)))[:, None].to(table.dtype))
        batch, count = len(tokens), self.horizon * self.action_dim
        places = words.new_zeros(batch, count, words.shape[-1])
        x = torch.cat([words[:, :1], *parts, words[:, 1:], places, table[self.end].expand(batch, 1, -1)], 1)
        num_patches = sum(part.shape[1] for part in parts)
        ones = there.new_ones
        valid = torch.cat([ones(batch, 1 + num_patches), there[:, 1:], ones(batch, count + 1)], 1)
        positions, mask = positions_of(valid), valid[:, None, None]
        x = x.to(layers[0].self_attn.q_proj.weight.dtype)
        for layer in layers:
            x, _ = layer(x, positions, mask)
        last = num_patches + there.sum(1) - 1  # the prompt's last token, before what pads it
        first = num_patches + longest  # the first empty place
        read = torch.cat([x[torch.arange(batch, device=x.device), last][:, None], x[:, first : first + count - 1]], 1)
        return final_norm(language["norm"], read)

    def _seen(self, observation: Batch, device: torch.device) -> Tensor:
        """Patches of all cameras in the language model's width [B, P, W], one camera after another."""
        pictures = self.robot.pictures(observation, device)
        towers = (self.vision_backbone["featurizer"], self.vision_backbone["fused_featurizer"])
        features = [
            tower((pictures - mean.to(device)) / std.to(device))
            for tower, (mean, std) in zip(towers, self.colours, strict=True)
        ]
        part: Any = self.projector
        x = part["fc1"](torch.cat(features, 2).to(part["fc1"].weight.dtype))
        projected: Tensor = part["fc3"](functional.gelu(part["fc2"](functional.gelu(x))))
        return torch.cat(projected.chunk(len(self.robot.cameras)), 1)

    @classmethod
    def load(cls, path: Path, device: torch.device | str, adapt: Adapt | None) -> OpenVLA:
        """The policy of a folder, in evaluation mode: of tokens, or with OFT's head where the folder has one."""
        source = openvla_folder.read(path, adapt)
        kind = OpenVLARegression if source.part("action_head") else OpenVLA
        policy = kind(source, Robot(source))
        unused = [r".*rotary_emb\.inv_freq", *policy.not_computed]
        policy.layout = lerobot.place(policy, source.weights, source.metadata, own_name, unused, path)
        source.weights = {}  # they are the policy's, or the layout's
        policy._add_heads(path)
        return policy.ready(device)

    @property
    def not_computed(self) -> list[str]:
        """Patterns of tensors of the file that no action depends on."""
        towers: Any = self.vision_backbone
        return [rf"vision_backbone\.{name}\.{unused}" for name in towers for unused in towers[name].unused]


class OpenVLARegression(OpenVLA):
    """A folder with OFT's continuous head: an action is a function of the observation, so there is no likelihood, and
    it imitates and acts only. Context: "actions" float32 [B, H, A]."""

    def add_reading(self, text: Any) -> None:
        self.action_head = nn.ModuleDict({"model": ResidualReading(text.hidden_size, self.action_dim)})

    @property
    def not_computed(self) -> list[str]:
        return [*super().not_computed, r"language_model\.lm_head\.weight"]

    @property
    def head_sizes(self) -> None:
        """None; a folder without action_head--*.pt has action tokens."""
        return None

    def read(self, hidden: Tensor) -> Batch:
        head: Any = self.action_head["model"]
        states = hidden.view(len(hidden), self.horizon, -1)
        return {"actions": head(states.to(head.fc1.weight.dtype)).float()}

    def regressed(self, context: Batch) -> Tensor:
        """The chunk, normalised, float32 [B, H, A]."""
        return context["actions"]

    def demonstration_error(self, context: Batch, actions: Tensor) -> Tensor:
        """`|a - demonstrated|` of normalised actions [B, H, A] (OFT's L1), in that shape."""
        return (self.regressed(context) - actions).abs()


class ResidualReading(nn.Module):
    """OFT's head: the hidden states of an action's numbers [..., A W] -> the action [..., A]."""

    def __init__(self, width: int, numbers: int) -> None:
        super().__init__()
        self.layer_norm1, self.fc1 = nn.LayerNorm(numbers * width), nn.Linear(numbers * width, width)
        self.mlp_resnet_blocks = nn.ModuleList(
            nn.ModuleDict({"ffn": nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())})
            for _ in range(2)
        )
        self.layer_norm2, self.fc2 = nn.LayerNorm(width), nn.Linear(width, numbers)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            ffn: Any = block
            x = x + ffn["ffn"](x)
        actions: Tensor = self.fc2(self.layer_norm2(x))
        return actions


class Prompts:
    """Instructions as Llama's token numbers, int64 [B, L], padded with 0 to the longest."""

    def __init__(self, source: Source) -> None:
        """Raises FileNotFoundError for a folder without tokenizer.json, ValueError for one without the empty token."""
        from tokenizers import Tokenizer

        self.tokenizer: Any = Tokenizer.from_file(str(lerobot.existing(source.path, "tokenizer.json")))
        self.begin, self.empty = int(_text_config(source).bos_token_id), self.tokenizer.token_to_id(EMPTY)
        if self.empty is None:
            raise ValueError(f"{source.path}/tokenizer.json has no token {EMPTY!r}: it is not Llama-2's")

    def __call__(self, instructions: Sequence[str]) -> Tensor:
        """Raises ValueError for an instruction that is empty, or has the token 0."""
        lines = []
        for row, text in enumerate(instructions):
            if not text.strip():
                raise ValueError(f"row {row} has no instruction: the environment must give a task_description")
            ids = self.tokenizer.encode(PROMPT.format(text.lower()), add_special_tokens=False).ids
            if 0 in ids:
                raise ValueError(f"{text!r} has token 0, which stands for padding (row {row})")
            lines.append([self.begin, *ids, *([] if ids[-1] == self.empty else [self.empty])])
        tokens = torch.zeros(len(lines), max(map(len, lines), default=0), dtype=torch.int64)
        for row, line in enumerate(lines):
            tokens[row, : len(line)] = torch.tensor(line)
        return tokens


def _vision_sizes(source: Source) -> list[tuple[Any, int]]:
    """(sizes, side of the picture) of the two vision transformers."""
    config, where = source.config, f"{source.path}/config.json"
    names, sides = config.get("timm_model_ids") or [], config.get("image_sizes") or []
    for name in names:
        if name not in VITS:
            near = difflib.get_close_matches(name, VITS, n=1, cutoff=0.0)[0]
            raise ValueError(f"{where}: timm_model_ids: {name!r} is not known here; the nearest one is {near!r}")
    if len(names) != 2 or len(set(sides)) != 1 or len(sides) != 2:
        text = "two vision transformers and one size of pictures"
        raise ValueError(f"{where}: timm_model_ids and image_sizes must name {text}, found {names} and {sides}")
    return [(VITS[name], int(side)) for name, side in zip(names, sides, strict=True)]


def _text_config(source: Source) -> Any:
    """transformers' LlamaConfig. Published files say little of it: what is left out is that class's default."""
    from transformers import LlamaConfig

    settings, where = dict(source.config["text_config"]), f"{source.path}/config.json"
    if (kind := settings.pop("model_type", "llama")) != "llama":
        raise ValueError(f"{where}: text_config must be a llama's, found {kind!r}")
    text = LlamaConfig(**settings)
    if text.rope_parameters != {"rope_type": "default", "rope_theta": ROTARY_BASE}:
        wanted = f"a rope_theta of {ROTARY_BASE:g} and no rope_scaling"
        raise ValueError(f"{where}: text_config must have {wanted}, found {text.rope_parameters}")
    if (bins := source.config.get("n_action_bins", BINS)) != BINS:
        raise ValueError(f"{where}: n_action_bins must be {BINS}, found {bins}")
    return text


def _llama(text: Any) -> nn.ModuleDict:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

    layers: list[Any] = [LlamaDecoderLayer(text, number) for number in range(text.num_hidden_layers)]
    return nn.ModuleDict(
        {
            "embed_tokens": nn.Embedding(text.vocab_size, text.hidden_size),
            "layers": nn.ModuleList(Layer(layer) for layer in layers),
            "norm": LlamaRMSNorm(text.hidden_size, eps=text.rms_norm_eps),
        }
    )
