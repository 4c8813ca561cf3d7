"""ACT, the Action Chunking Transformer (arXiv 2304.13705), as LeRobot publishes it: it says a chunk outright.

A transformer reads a latent, the robot's state, that of the environment and every cell of the pictures' feature maps;
its decoder has a query for each action. In training a second one, the encoder of a VAE, reads the demonstrated chunk
and gives the latent's distribution; when it acts the latent is 0. Nothing is denoised, so there is no likelihood.
"""

from __future__ import annotations

import difflib
import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from genrl.vla.policies import lerobot
from genrl.vla.policies.encoder import DEPTHS, TORCHVISION, WIDTHS, FrozenBatchNorm, pretrained, resnet
from genrl.vla.policies.folder import PublishedPolicy
from genrl.vla.policies.lerobot import Adapt, Folder
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, STATE, Batch, Errors, Statistics
from genrl.vla.policies.robot import Robot

if TYPE_CHECKING:
    from genrl.vla.config.sections import NewPolicy
    from genrl.vla.policies.policy import Inputs

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""By which LeRobot normalises pictures, unless it is told not to."""
_MODES = {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ENV": "MEAN_STD", "ACTION": "MEAN_STD"}


@dataclass(frozen=True)
class ACTConfig:
    """LeRobot's names and defaults, but that a new one downloads no weights unless it is told to."""

    chunk_size: int = 100
    vision_backbone: str = "resnet18"
    pretrained_backbone_weights: str | None = None
    replace_final_stride_with_dilation: bool = False
    pre_norm: bool = False
    dim_model: int = 512
    n_heads: int = 8
    dim_feedforward: int = 3200
    feedforward_activation: str = "relu"
    n_encoder_layers: int = 4
    n_decoder_layers: int = 1
    use_vae: bool = True
    latent_dim: int = 32
    n_vae_encoder_layers: int = 4
    temporal_ensemble_coeff: float | None = None
    dropout: float = 0.1
    kl_weight: float = 10.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            kind = type(ACTConfig.__dataclass_fields__[name].default)
            # By type, not isinstance: true would pass for 1.
            if kind is int and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number from 1 on, found {value!r}")
            if kind is bool and value not in (False, True):
                raise ValueError(f"{name} must be true or false, found {value!r}")
            if kind is float and (type(value) not in (int, float) or not 0 <= value < math.inf):
                raise ValueError(f"{name} must be a number from 0 on, found {value!r}")
        if self.vision_backbone not in DEPTHS:
            raise ValueError(f"vision_backbone must be one of {sorted(DEPTHS)}, found {self.vision_backbone!r}")
        if self.replace_final_stride_with_dilation:
            raise ValueError(
                f"replace_final_stride_with_dilation must be false: there is none in {self.vision_backbone}"
            )
        if self.feedforward_activation not in ("relu", "gelu"):
            raise ValueError(f"feedforward_activation must be relu or gelu, found {self.feedforward_activation!r}")
        if self.dim_model % self.n_heads or self.dim_model % 4:
            raise ValueError(f"dim_model {self.dim_model} must be a multiple of n_heads {self.n_heads} and of 4")
        if self.dropout >= 1:
            raise ValueError(f"dropout must be below 1, found {self.dropout}")
        if self.temporal_ensemble_coeff is not None:
            raise ValueError(
                f"temporal_ensemble_coeff must be null, found {self.temporal_ensemble_coeff}: it averages over earlier "
                "decisions, and a policy here decides from one observation; environment.chunk says how often"
            )


class ACT(PublishedPolicy):
    """A folder of type act, or a new one. There is no instruction: `tokenise` has nothing to say.

    Context: "tokens" and "positions" [B, n, D] of all that it sees, the normalised "state" [B, S].
    """

    robot: Robot

    def __init__(self, config: ACTConfig, robot: Robot) -> None:
        """Raises ValueError for a robot without state, with nothing beside it to look at, or with other vectors."""
        super().__init__(robot, config.chunk_size, robot.action_dim)
        others = sorted(robot.widths.keys() - {STATE, ENVIRONMENT})
        if STATE not in robot.widths or others or not (robot.pictures or ENVIRONMENT in robot.widths):
            text = f"ACT reads {STATE!r} with pictures or {ENVIRONMENT!r} or both, has {list(robot.inputs)}"
            raise ValueError(f"{robot.path}: {text}")
        self.config = config
        self.model = _Network(config, robot.widths, robot.action_dim, looks=bool(robot.pictures))

    @property
    def encoder(self) -> nn.Module:
        """What sees."""
        return self.model.backbone if self.robot.pictures else nn.ModuleDict()

    def encode(self, observation: Batch) -> Batch:
        """Raises KeyError for an entry that is missing, ValueError for one of another shape."""
        model, device = self.model, self.model.action_head.weight.device
        vectors = {
            width: self.robot.vector(observation, name, device) for name, width in sorted(self.robot.vectors.items())
        }
        tokens = [model.encoder_robot_state_input_proj(vectors[STATE])[:, None]]
        if ENVIRONMENT in vectors:
            tokens.append(model.encoder_env_state_input_proj(vectors[ENVIRONMENT])[:, None])
        # Row 0 of the table is the latent's place, which `_act` puts in front.
        places = [model.encoder_1d_feature_pos_embed.weight[1:]]
        for name in self.robot.pictures:
            pixels = self.robot.picture_of_own_size(observation, name, device)
            maps = model.encoder_img_feat_input_proj(model.backbone(pixels))
            tokens.append(maps.flatten(2).mT)
            places.append(_cells(maps.shape[2], maps.shape[3], self.config.dim_model).to(device))
        tokens_seen = torch.cat(tokens, 1)
        return {"tokens": tokens_seen, "positions": torch.cat(places).expand_as(tokens_seen), "state": vectors[STATE]}

    def regressed(self, context: Batch) -> Tensor:
        """The normalised actions [B, H, A] of each context."""
        return self._act(context, context["tokens"].new_zeros(len(context["tokens"]), self.config.latent_dim))

    def loss_noise(self, count: int, rng: torch.Generator) -> Batch:
        """The latent's noise [count, L], and seeds of dropout [count]."""
        latent = torch.randn(count, self.config.latent_dim, generator=rng)
        return {"latent": latent, "dropout": torch.randint(2**31, (count,), generator=rng)}

    def errors(self, context: Batch, actions: Tensor, valid: Tensor, noise: Batch) -> Errors:
        """|a - a'|, mean over A; and kl_weight times the divergence of the latent from N(0, 1) (arXiv
        1312.6114, appendix B).

        A batch has the dropout of its first row's seed.
        """
        with self._dropping(int(noise["dropout"][0])):
            if self.config.use_vae:
                mean, log_variance = self._latent(context["state"], actions, valid)
                latent = mean + (0.5 * log_variance).exp() * noise["latent"].to(actions)
                divergence = 0.5 * (mean**2 + log_variance.exp() - 1.0 - log_variance).sum(1)
            else:
                latent = actions.new_zeros(len(actions), self.config.latent_dim)
                divergence = actions.new_zeros(len(actions))
            # L1 instead of squares: the paper found it to model the sequence of actions more precisely.
            error = (self._act(context, latent) - actions).abs().mean(2)
        return Errors(error, self.config.kl_weight * divergence)

    def _act(self, context: Batch, latent: Tensor) -> Tensor:
        model, rows = self.model, len(latent)
        tokens = torch.cat([model.encoder_latent_input_proj(latent)[:, None], context["tokens"]], 1)
        first = model.encoder_1d_feature_pos_embed.weight[:1].expand(rows, 1, -1)
        places = torch.cat([first, context["positions"]], 1)
        queries = model.decoder_pos_embed.weight.expand(rows, -1, -1)
        actions: Tensor = model.action_head(model.decoder(queries, model.encoder(tokens, places), places))
        return actions

    def _latent(self, state: Tensor, actions: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance [B, L] of the latent that makes these actions."""
        model, rows = self.model, len(actions)
        tokens = torch.cat(
            [
                model.vae_encoder_cls_embed.weight.expand(rows, 1, -1),
                model.vae_encoder_robot_state_input_proj(state)[:, None],
                model.vae_encoder_action_input_proj(actions),
            ],
            1,
        )
        # The first two tokens, class and state, are always there.
        absent = functional.pad(~valid, (2, 0))
        encoded: Tensor = model.vae_encoder(tokens, model.vae_encoder_pos_enc.expand(rows, -1, -1), absent)[:, 0]
        mean, log_variance = model.vae_encoder_latent_output_proj(encoded).chunk(2, 1)
        return mean, log_variance

    @contextmanager
    def _dropping(self, seed: int) -> Iterator[None]:
        """Dropout by a seed of its own: the loss is a function of what is recorded, and can be replayed."""
        device = self.model.action_head.weight.device
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            torch.manual_seed(seed)
            # Its batch norms are frozen ones, so that the mode is of dropout alone.
            self.train()
            try:
                yield
            finally:
                self.eval()

    @classmethod
    def new(cls, inputs: Inputs, action_dim: int, stats: Statistics, settings: NewPolicy) -> ACT:
        """A policy with fresh weights, its picture network's those that `settings`, the section `policy.new`, name."""
        arguments = sorted(ACTConfig.__dataclass_fields__.keys() - {"chunk_size"})
        for name in settings.args.keys() - set(arguments):
            near = difflib.get_close_matches(name, arguments, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"policy.new.args: act has no {name!r}; {hint}it has {', '.join(arguments)}")
        try:
            config = ACTConfig(chunk_size=settings.horizon, **settings.args)
        except ValueError as error:
            raise ValueError(f"policy.new.args: {error}") from None
        if inputs.points:
            raise ValueError("policy.new.points: act has no encoder of points; write 0")
        folder = _new_folder(config, inputs, action_dim, stats)
        policy = cls(config, Robot(folder))
        if (begun := config.pretrained_backbone_weights) is not None:
            key, weights = "policy.new.args.pretrained_backbone_weights", TORCHVISION[config.vision_backbone]
            if begun != weights or not inputs.image:
                raise ValueError(f"{key} must be null or, with pictures, {weights}; found {begun!r}")
            policy.model.backbone.load_state_dict(pretrained(config.vision_backbone, key))
        policy.folder, policy.layout = folder, lerobot.new_layout(policy)
        return policy.eval()

    @classmethod
    def load(cls, path: Path, device: torch.device | str, adapt: Adapt | None) -> ACT:
        """The policy of a LeRobot folder, in evaluation mode."""
        folder = lerobot.read_folder(path, adapt)
        try:
            config = ACTConfig(**folder.settings_of(ACTConfig))
        except ValueError as error:
            raise ValueError(f"{path}/config.json: {error}") from None
        robot = Robot(folder)
        with torch.device("meta"):
            policy = cls(config, robot)
        policy.fill(folder, *lerobot.read_weights(path))
        return policy.ready(device)


def _new_folder(config: ACTConfig, inputs: Inputs, action_dim: int, stats: Statistics) -> Folder:
    """What LeRobot's configuration says of a new policy."""
    shapes: dict[str, dict[str, Any]] = {STATE: {"type": "STATE", "shape": [inputs.state]}}
    used = {name: stats[name] for name in (STATE, ACTION)}
    if inputs.environment:
        shapes[ENVIRONMENT] = {"type": "ENV", "shape": [inputs.environment]}
        used[ENVIRONMENT] = stats[ENVIRONMENT]
    if inputs.image:
        shapes[IMAGE] = {"type": "VISUAL", "shape": [3, inputs.image, inputs.image]}
        used[IMAGE] = {name: torch.tensor(numbers)[:, None, None] for name, numbers in IMAGENET.items()}
    settings = {
        "type": "act",
        "n_obs_steps": 1,
        "input_features": shapes,
        "output_features": {ACTION: {"type": "ACTION", "shape": [action_dim]}},
        "normalization_mapping": _MODES,
        "n_action_steps": config.chunk_size,
    }
    return lerobot.new_folder(settings | asdict(config), used)


class _Network(nn.Module):
    """All weights, by LeRobot's names, as it initialises them."""

    vae_encoder_pos_enc: Tensor

    def __init__(self, config: ACTConfig, widths: dict[str, int], action_dim: int, *, looks: bool) -> None:
        super().__init__()
        size = config.dim_model
        if config.use_vae:
            self.vae_encoder = _Encoder(config, config.n_vae_encoder_layers)
            self.vae_encoder_cls_embed = nn.Embedding(1, size)
            self.vae_encoder_robot_state_input_proj = nn.Linear(widths[STATE], size)
            self.vae_encoder_action_input_proj = nn.Linear(action_dim, size)
            self.vae_encoder_latent_output_proj = nn.Linear(size, 2 * config.latent_dim)
            self.register_buffer("vae_encoder_pos_enc", _places(2 + config.chunk_size, size)[None])
        if looks:
            stages = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
            layers = resnet(config.vision_backbone, FrozenBatchNorm)
            self.backbone = nn.Sequential(OrderedDict(zip(stages, layers, strict=True)))
            for module in self.backbone.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.encoder, self.decoder = _Encoder(config, config.n_encoder_layers), _Decoder(config)
        self.encoder_robot_state_input_proj = nn.Linear(widths[STATE], size)
        if ENVIRONMENT in widths:
            self.encoder_env_state_input_proj = nn.Linear(widths[ENVIRONMENT], size)
        self.encoder_latent_input_proj = nn.Linear(config.latent_dim, size)
        if looks:
            self.encoder_img_feat_input_proj = nn.Conv2d(WIDTHS[-1], size, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + len(widths), size)
        self.decoder_pos_embed = nn.Embedding(config.chunk_size, size)
        self.action_head = nn.Linear(size, action_dim)
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)


class _Layer(nn.Module):
    """What a layer of either stack is made of: attention to itself (and to what was read), two linear layers."""

    def __init__(self, config: ACTConfig, *, reads: bool) -> None:
        super().__init__()
        size, wide = config.dim_model, config.dim_feedforward
        self.self_attn = nn.MultiheadAttention(size, config.n_heads, config.dropout, batch_first=True)
        if reads:
            self.multihead_attn = nn.MultiheadAttention(size, config.n_heads, config.dropout, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(size, wide), nn.Linear(wide, size)
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        if reads:
            self.norm3 = nn.LayerNorm(size)
        self.dropout = nn.Dropout(config.dropout)
        self.reads, self.pre_norm = reads, config.pre_norm
        self.activation = functional.relu if config.feedforward_activation == "relu" else functional.gelu

    def forward(
        self,
        x: Tensor,
        places: Tensor,
        absent: Tensor | None = None,
        seen: Tensor | None = None,
        seen_places: Tensor | None = None,
    ) -> Tensor:
        """x, places [B, n, D]; absent bool [B, n]; seen, seen_places [B, m, D]."""

        def itself(x: Tensor) -> Tensor:
            # Places go into queries and keys, not into values (as in DETR, arXiv 2005.12872): what is read stays free
            # of them.
            query = x + places
            attended: Tensor = self.self_attn(query, query, x, key_padding_mask=absent, need_weights=False)[0]
            return attended

        def across(x: Tensor) -> Tensor:
            assert seen is not None and seen_places is not None
            attended: Tensor = self.multihead_attn(x + places, seen + seen_places, seen, need_weights=False)[0]
            return attended

        def inner(x: Tensor) -> Tensor:
            attended: Tensor = self.linear2(self.dropout(self.activation(self.linear1(x))))
            return attended

        parts = (itself, across, inner) if self.reads else (itself, inner)
        norms = (self.norm1, self.norm2, self.norm3) if self.reads else (self.norm1, self.norm2)
        for part, norm in zip(parts, norms, strict=True):
            x = x + self.dropout(part(norm(x))) if self.pre_norm else norm(x + self.dropout(part(x)))
        return x


class _Encoder(nn.Module):
    """[B, n, D] -> [B, n, D]."""

    def __init__(self, config: ACTConfig, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config, reads=False) for _ in range(layers))
        self.norm = nn.LayerNorm(config.dim_model) if config.pre_norm else nn.Identity()

    def forward(self, x: Tensor, places: Tensor, absent: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, places, absent)
        output: Tensor = self.norm(x)
        return output


class _Decoder(nn.Module):
    """Queries [B, H, D], what was read [B, n, D] and where it stood [B, n, D] -> [B, H, D]; it begins with zeros."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config, reads=True) for _ in range(config.n_decoder_layers))
        self.norm = nn.LayerNorm(config.dim_model)

    def forward(self, queries: Tensor, seen: Tensor, places: Tensor) -> Tensor:
        x = torch.zeros_like(queries)
        for layer in self.layers:
            x = layer(x, queries, None, seen, places)
        output: Tensor = self.norm(x)
        return output


def _places(count: int, size: int) -> Tensor:
    """Sines and cosines of the places 0, 1, .. (arXiv 1706.03762, section 3.5), float32 [count, size]."""
    # In float64 and rounded once, as LeRobot makes its table in NumPy.
    rate = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(count, dtype=torch.float64)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1).float()


def _cells(height: int, width: int, size: int) -> Tensor:
    """Places of a map's cells, row by row: sines and cosines of down and across, both up to 2 pi: [H W, size]."""

    def along(count: int) -> Tensor:
        # Counted from 1 and with DETR's epsilon, as LeRobot does: published weights were trained with these places.
        place = torch.arange(1, count + 1, dtype=torch.float32) / (count + 1e-6) * (2.0 * math.pi)
        angle = place[:, None] / 10_000.0 ** (torch.arange(0, size // 2, 2) / (size // 2))
        return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)

    down, across = along(height)[:, None].expand(-1, width, -1), along(width).expand(height, -1, -1)
    return torch.cat([down, across], 2).flatten(0, 1)
