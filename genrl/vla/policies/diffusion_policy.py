"""Diffusion Policy (arXiv 2303.04137) as LeRobot publishes it: ResNet, spatial softmax, a one-dimensional U-Net.

It reads the last `n_obs_steps` observations, and its chunk begins with the first of them: `n_obs_steps - 1` actions lie
in the past. Chunks here have those last: row 0 is the action of now, as it is for every policy, so that what is
executed and scored are the first rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from genrl.mdp.ddpm import cosine_alpha_bars
from genrl.vla.policies import lerobot
from genrl.vla.policies.encoder import DEPTHS, group_norm, resnet
from genrl.vla.policies.folder import HeadSizes, PublishedPolicy
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import STATE, Batch
from genrl.vla.policies.robot import Robot


@dataclass(frozen=True)
class DiffusionPolicyConfig:
    """LeRobot's names."""

    n_obs_steps: int = 2
    horizon: int = 16
    vision_backbone: str = "resnet18"
    resize_shape: tuple[int, int] | None = None
    crop_shape: tuple[int, int] | None = (84, 84)
    use_group_norm: bool = True
    spatial_softmax_num_keypoints: int = 32
    use_separate_rgb_encoder_per_camera: bool = False
    down_dims: tuple[int, ...] = (512, 1024, 2048)
    kernel_size: int = 5
    n_groups: int = 8
    diffusion_step_embed_dim: int = 128
    use_film_scale_modulation: bool = True
    num_train_timesteps: int = 100
    beta_schedule: str = "squaredcos_cap_v2"
    prediction_type: Literal["epsilon", "sample"] = "epsilon"
    clip_sample: bool = True
    clip_sample_range: float = 1.0

    def __post_init__(self) -> None:
        if self.vision_backbone not in DEPTHS:
            raise ValueError(f"vision_backbone must be one of {sorted(DEPTHS)}, found {self.vision_backbone!r}")
        if self.beta_schedule != "squaredcos_cap_v2" or not self.clip_sample or self.clip_sample_range != 1.0:
            raise ValueError(
                "beta_schedule must be 'squaredcos_cap_v2', clip_sample true and clip_sample_range 1, which is DPPO's "
                f"chain; found {self.beta_schedule!r}, {self.clip_sample} and {self.clip_sample_range}"
            )
        if self.prediction_type not in ("epsilon", "sample"):
            raise ValueError(f"prediction_type must be 'epsilon' or 'sample', found {self.prediction_type!r}")
        if self.horizon % 2 ** (len(self.down_dims) - 1):
            raise ValueError(f"horizon {self.horizon} must be a multiple of {2 ** (len(self.down_dims) - 1)}")


class DiffusionPolicy(PublishedPolicy):
    """A folder of type diffusion as a policy that predicts noise.

    Entries of an observation are [B, n_obs_steps, ...], the latest last; without that axis they are taken for all of
    them, as LeRobot does at the start of an episode. There is no instruction: `tokenise` has nothing to say. Context:
    "features" [B, F], all that the encoder computes; the critic reads them detached. Pictures are cropped in the
    middle, in training too, so that a replay sees what was acted on.
    """

    robot: Robot

    def __init__(self, config: DiffusionPolicyConfig, robot: Robot, picture: tuple[int, int]) -> None:
        """picture: height and width of a camera's picture, before resizing and cropping."""
        super().__init__(robot, config.horizon, robot.action_dim)
        self.config = config
        cameras, whole = len(robot.pictures), config.resize_shape or picture
        size = config.crop_shape or whole
        if cameras and any(part > side for part, side in zip(size, whole, strict=True)):
            raise ValueError(f"crop_shape {list(size)} is larger than the pictures, {list(whole)} (height x width)")
        with torch.device("meta"):
            self.diffusion = nn.ModuleDict()
            if cameras:
                self.diffusion["rgb_encoder"] = (
                    nn.ModuleList(_RgbEncoder(config, size) for _ in range(cameras))
                    if config.use_separate_rgb_encoder_per_camera
                    else _RgbEncoder(config, size)
                )
            num_features = 2 * config.spatial_softmax_num_keypoints * cameras + sum(robot.widths.values())
            self.diffusion["unet"] = _Unet(config, robot.action_dim, config.n_obs_steps * num_features)
        self._features = config.n_obs_steps * num_features
        self._alpha_bars = cosine_alpha_bars(config.num_train_timesteps)

    @property
    def encoder(self) -> nn.Module:
        return self.diffusion["rgb_encoder"] if self.robot.pictures else nn.ModuleDict()

    @property
    def train_steps(self) -> int:
        """Noise levels."""
        return self.config.num_train_timesteps

    @property
    def head_sizes(self) -> HeadSizes:
        return HeadSizes(self._features, (512, 256, 128))

    def encode(self, observation: Batch) -> Batch:
        """Raises KeyError for an entry that is missing, ValueError for one of another shape."""
        device, steps = next(self.parameters()).device, self.config.n_obs_steps
        order = sorted(self.robot.vectors.items(), key=lambda pair: pair[1] != STATE)
        vectors = [self._history(self.robot.vector(observation, name, device), 1, name) for name, _ in order]
        read = self.robot.picture if self.config.resize_shape is not None else self.robot.picture_of_own_size
        pictures = [self._history(read(observation, name, device), 3, name) for name in self.robot.pictures]
        if pictures:
            encoder: Any = self.diffusion["rgb_encoder"]
            encoders = encoder if isinstance(encoder, nn.ModuleList) else [encoder] * len(pictures)
            seen = [e(self._framed(p.flatten(0, 1))) for e, p in zip(encoders, pictures, strict=True)]
            # Behind the state and before the environment: the order in which the U-Net's weights were trained.
            vectors[1:1] = [features.view(-1, steps, features.shape[-1]) for features in seen]
        return self.context(torch.cat(vectors, 2).flatten(1))

    def context(self, features: Tensor) -> Batch:
        """The context of features [B, F] that the encoder has computed."""
        return {"features": features}

    def noise(self, context: Batch, x: Tensor, timestep: Tensor) -> Tensor:
        past, timestep = self.config.n_obs_steps - 1, timestep.to(x.device)
        unet: Any = self.diffusion["unet"]
        # The network was trained on chunks that begin in the past: turned to its order, and back.
        predicted: Tensor = unet(x.float().roll(past, 1), timestep, context["features"]).roll(-past, 1)
        if self.config.prediction_type == "epsilon":
            return predicted
        bar = self._alpha_bars.to(x.device)[timestep].float()[:, None, None]
        # One that predicts the sample, solved for the noise in x = sqrt(bar) sample + sqrt(1 - bar) noise: chains ask
        # for noise.
        return (x - bar.sqrt() * predicted) / (1.0 - bar).sqrt()

    def read_by_critic(self, context: Batch) -> Tensor:
        return context["features"]

    def train(self, mode: bool = True) -> DiffusionPolicy:
        """Batch norms keep the statistics they were published with: a replay must see what was acted on."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def _history(self, value: Tensor, axes: int, name: str) -> Tensor:
        """[B, n_obs_steps, ...]; axes: those of one observation."""
        steps = self.config.n_obs_steps
        if value.ndim == axes + 1:
            return value[:, None].expand(-1, steps, *value.shape[1:])
        if value.ndim != axes + 2 or value.shape[1] != steps:
            raise ValueError(f"{name}: the policy reads {steps} observations, got shape {list(value.shape)}")
        return value

    def _framed(self, pixels: Tensor) -> Tensor:
        """Resized, then cropped in the middle."""
        if self.config.resize_shape is not None:
            size = tuple(self.config.resize_shape)
            pixels = functional.interpolate(pixels, size, mode="bilinear", align_corners=False, antialias=True)
        if self.config.crop_shape is None:
            return pixels
        height, width = self.config.crop_shape
        top, left = (round((pixels.shape[axis] - size) / 2.0) for axis, size in ((2, height), (3, width)))
        return pixels[:, :, top : top + height, left : left + width]

    @classmethod
    def load(cls, path: Path, device: torch.device | str, adapt: Adapt | None) -> DiffusionPolicy:
        """The policy of a LeRobot folder, in evaluation mode."""
        folder = lerobot.read_folder(path, adapt)
        settings, robot = folder.config, Robot(folder)
        shapes = {tuple(settings["input_features"][name]["shape"][-2:]) for name in robot.pictures.values()}
        if len(shapes) > 1:
            raise ValueError(f"{path}/config.json: all pictures must have one shape, found {sorted(shapes)}")
        policy = cls(
            DiffusionPolicyConfig(**folder.settings_of(DiffusionPolicyConfig)), robot, next(iter(shapes), (0, 0))
        )
        policy.fill(folder, *lerobot.read_weights(path))
        return policy.ready(device)


class _RgbEncoder(nn.Module):
    """Picture [B, 3, H, W] -> [B, 2 K]: K mean positions (spatial softmax, arXiv 1504.00702) through a layer."""

    def __init__(self, config: DiffusionPolicyConfig, size: Sequence[int]) -> None:
        super().__init__()
        points = config.spatial_softmax_num_keypoints
        self.backbone = resnet(config.vision_backbone, group_norm if config.use_group_norm else nn.BatchNorm2d)
        self.pool = nn.Module()
        self.pool.nets = nn.Conv2d(512, points, 1)
        # A ResNet halves a picture five times, rounding up.
        height, width = (-(-side // 32) for side in size)
        # Zeros only for their shape: the file has the positions.
        self.pool.register_buffer("pos_grid", torch.zeros(height * width, 2))
        self.out = nn.Linear(2 * points, 2 * points)

    def forward(self, x: Tensor) -> Tensor:
        pool: Any = self.pool
        maps = pool.nets(self.backbone(x)).flatten(2)
        features: Tensor = self.out((maps.softmax(-1) @ pool.pos_grid).flatten(1))
        return functional.relu(features)


class _Block(nn.Module):
    """Convolution, group norm, Mish over actions, [B, C, H]."""

    def __init__(self, before: int, after: int, config: DiffusionPolicyConfig) -> None:
        super().__init__()
        kernel = config.kernel_size
        self.block = nn.Sequential(
            nn.Conv1d(before, after, kernel, padding=kernel // 2), nn.GroupNorm(config.n_groups, after), nn.Mish()
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x)
        return output


class _Residual(nn.Module):
    """Two blocks beside a shortcut, the condition [B, F] between them: a scale and a shift, or a shift (FiLM)."""

    def __init__(self, before: int, after: int, condition: int, config: DiffusionPolicyConfig) -> None:
        super().__init__()
        self.scales = config.use_film_scale_modulation
        self.conv1, self.conv2 = _Block(before, after, config), _Block(after, after, config)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition, (1 + self.scales) * after))
        self.residual_conv = nn.Identity() if before == after else nn.Conv1d(before, after, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale_and_shift = self.cond_encoder(condition)[..., None]
        inner = self.conv1(x)
        if self.scales:
            scale, shift = scale_and_shift.chunk(2, 1)
            inner = scale * inner + shift
        else:
            inner = inner + scale_and_shift
        output: Tensor = self.conv2(inner) + self.residual_conv(x)
        return output


class _Unet(nn.Module):
    """(chunk [B, H, A], timestep [B], features [B, F]) -> [B, H, A]; halves the actions between its stages."""

    def __init__(self, config: DiffusionPolicyConfig, action_dim: int, features: int) -> None:
        super().__init__()
        wide, dims = config.diffusion_step_embed_dim, config.down_dims
        self.wide = wide
        self.diffusion_step_encoder = nn.Sequential(
            # In the place of LeRobot's module of sines, which has no weights, so that the numbers in the names fit.
            nn.Identity(),
            nn.Linear(wide, 4 * wide),
            nn.Mish(),
            nn.Linear(4 * wide, wide),
        )
        residual = partial(_Residual, condition=wide + features, config=config)
        last = len(dims) - 1
        self.down_modules = nn.ModuleList(
            nn.ModuleList(
                [
                    residual(before, after),
                    residual(after, after),
                    nn.Conv1d(after, after, 3, 2, 1) if stage < last else nn.Identity(),
                ]
            )
            for stage, (before, after) in enumerate(zip((action_dim, *dims[:-1]), dims, strict=True))
        )
        self.mid_modules = nn.ModuleList([residual(dims[-1], dims[-1]), residual(dims[-1], dims[-1])])
        pairs = list(zip(dims[:-1], dims[1:], strict=True))
        self.up_modules = nn.ModuleList(
            nn.ModuleList(
                [residual(2 * deep, shallow), residual(shallow, shallow), nn.ConvTranspose1d(shallow, shallow, 4, 2, 1)]
            )
            for shallow, deep in reversed(pairs)
        )
        self.final_conv = nn.Sequential(_Block(dims[0], dims[0], config), nn.Conv1d(dims[0], action_dim, 1))

    def forward(self, x: Tensor, timestep: Tensor, features: Tensor) -> Tensor:
        half = self.wide // 2
        # Over half - 1, as LeRobot: the slowest rate is 1 / 10,000 itself.
        rate = torch.exp(torch.arange(half, device=x.device) * (-math.log(10_000.0) / (half - 1)))
        angle = timestep.float()[:, None] * rate
        time = self.diffusion_step_encoder(torch.cat([angle.sin(), angle.cos()], 1))
        condition = torch.cat([time, features], 1)
        x = x.transpose(1, 2)
        skips = []
        stage: Any
        for stage in self.down_modules:
            first, second, down = stage
            x = second(first(x, condition), condition)
            skips.append(x)
            x = down(x)
        for block in self.mid_modules:
            x = block(x, condition)
        for stage in self.up_modules:
            first, second, up = stage
            x = up(second(first(torch.cat([x, skips.pop()], 1), condition), condition))
        predicted: Tensor = self.final_conv(x).transpose(1, 2)
        return predicted
