"""What policies see by: the small encoder of the embedded ones (picture, points, instruction and state as one vector of
features), and ResNet-18 and -34 (arXiv 1512.03385) up to their last feature map, by LeRobot's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from genrl.vla.policies import policy
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, POINTS, SEEN, STATE, TOKENS, Batch, Inputs, Statistics
from genrl.vla.policies.robot import Mode, normalise
from genrl_rewards.models.checkpoints import find, read_weights

MODES: dict[str, Mode] = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ENV": "MEAN_STD", "ACTION": "MIN_MAX"}
"""How the embedded policies normalise: actions to [-1, 1], where DPPO and ReinFlow clip."""

LANGUAGE, PICTURE, CLOUD, _KEYPOINTS = 64, 128, 64, 16
LOOKS = ("convolutions.", "film.", "keypoints.", "picture.")
"""What the parameters begin with that an encoder looks at pictures by."""


def check_statistics(inputs: Inputs, action_dim: int, stats: Statistics) -> None:
    """Raises ValueError where a feature has no statistics, or those of another width."""
    points = 3 if inputs.points else 0
    widths = {STATE: inputs.state, ENVIRONMENT: inputs.environment, POINTS: points, ACTION: action_dim}
    for name, width in widths.items():
        shapes = {key: tuple(v.shape) for key, v in stats.get(name, {}).items() if key != "count"}
        if width and (not shapes or set(shapes.values()) != {(width,)}):
            raise ValueError(f"{name} needs statistics of shape [{width}] (robot.statistics); found {shapes}")


class ResidualMLP(nn.Module):
    """Linear to `width`, then `blocks` times `x + W2 act(W1 norm(x))`, on [B, D]."""

    def __init__(self, inputs: int, width: int, blocks: int, activation: nn.Module) -> None:
        super().__init__()
        self.entry = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), activation, nn.Linear(width, width))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def value_head(inputs: int, width: int, blocks: int, activation: nn.Module, values: int = 1) -> nn.Sequential:
    """A critic on features [B, F]: [B, values], 0 before training."""
    last = nn.Linear(width, values)
    # A critic that begins at 0 predicts no return, which is nearer to sparse rewards than random values are.
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(ResidualMLP(inputs, width, blocks, activation), nn.LayerNorm(width), last)


def sinusoidal(time: Tensor, width: int, *, longest: float) -> Tensor:
    """Sines and cosines of time [B] at `width / 2` geometric periods, from 4e-3 of `longest` to it: [B, width]."""
    periods = longest * torch.logspace(math.log10(4e-3), 0.0, width // 2, device=time.device)
    angle = 2.0 * math.pi * time.float()[:, None] / periods
    return torch.cat([angle.sin(), angle.cos()], 1)


class PointEncoder(nn.Module):
    """Cloud [B, N, 3] -> [B, `CLOUD`], whatever the order of its points: 3D Diffusion Policy's (arXiv 2403.03954), an
    MLP on every point, the greatest of each of its numbers over the points, and a projection."""

    def __init__(self, widths: Sequence[int] = (3, 64, 128, 256)) -> None:
        super().__init__()
        layers = [(nn.Linear(low, high), nn.LayerNorm(high), nn.ReLU()) for low, high in pairwise(widths)]
        self.each = nn.Sequential(*(part for layer in layers for part in layer))
        self.project = nn.Sequential(nn.Linear(widths[-1], CLOUD), nn.LayerNorm(CLOUD))

    def forward(self, points: Tensor) -> Tensor:
        features: Tensor = self.project(self.each(points).amax(1))
        return features


class ObservationEncoder(nn.Module):
    """Observation -> features [B, `size`]: instruction 64, normalised state and environment, picture 128, points 64.

    Pictures and points may be replaced by what it saw in them before (`see`), as `SEEN`.

    Words: embedding, mean, MLP. Picture: three convolutions, each with group norm and a scale and shift from the
    instruction (FiLM, arXiv 1709.07871), then `_KEYPOINTS` mean positions (spatial softmax, arXiv 1504.00702).
    """

    def __init__(self, inputs: Inputs, stats: Statistics) -> None:
        super().__init__()
        self.inputs, self.stats = inputs, stats
        self.words = nn.Embedding(1 + len(inputs.vocabulary), 32, padding_idx=0)
        self.language = nn.Sequential(nn.Linear(32, LANGUAGE), nn.SiLU(), nn.Linear(LANGUAGE, LANGUAGE))
        self.sees = (PICTURE if inputs.image else 0) + (CLOUD if inputs.points else 0)
        self.size = LANGUAGE + inputs.state + inputs.environment + self.sees + inputs.seen
        if inputs.image:
            widths = (24, 32, 32) if inputs.image <= 32 else (32, 48, 64)
            strides = (2, 1, 1) if inputs.image <= 32 else (2, 2, 1)
            before = (3, *widths[:2])
            self.convolutions = nn.ModuleList(
                nn.Conv2d(low, high, 5 if stage == 0 else 3, stride, 2 if stage == 0 else 1)
                for stage, (low, high, stride) in enumerate(zip(before, widths, strides, strict=True))
            )
            self.norms = nn.ModuleList(nn.GroupNorm(8, width, affine=False) for width in widths)
            self.film = nn.ModuleList(nn.Linear(LANGUAGE, 2 * width) for width in widths)
            self.keypoints = nn.Conv2d(widths[-1], _KEYPOINTS, 1)
            self.picture = nn.Sequential(nn.Linear(2 * _KEYPOINTS, PICTURE), nn.SiLU(), nn.Linear(PICTURE, PICTURE))
        if inputs.points:
            self.cloud = PointEncoder()

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        return policy.tokenise(instructions, self.inputs.vocabulary)

    def forward(self, observation: Batch) -> Tensor:
        """Raises KeyError for an entry that is missing."""
        replaced = (IMAGE, POINTS) if SEEN in observation else ()
        missing = [name for name in self.inputs.keys if name not in observation and name not in replaced]
        if missing:
            raise KeyError(f"the policy needs {missing}; the observation has {sorted(observation)}")
        device, language = self.words.weight.device, self.hear(observation[TOKENS])
        parts = [language, normalise(observation[STATE].to(device), self.stats[STATE], MODES["STATE"])]
        if self.inputs.environment:
            environment = observation[ENVIRONMENT].to(device)
            parts.append(normalise(environment, self.stats[ENVIRONMENT], MODES["ENV"]))
        if self.inputs.looks:
            parts.append(observation[SEEN].to(device) if SEEN in observation else self.see(observation, language))
        if self.inputs.seen:
            parts.append(normalise(observation[SEEN].to(device), self.stats[SEEN], MODES["ENV"]))
        return torch.cat(parts, 1)

    def hear(self, tokens: Tensor) -> Tensor:
        """Features of instructions int64 [B, L]: [B, `LANGUAGE`]."""
        tokens = tokens.to(self.words.weight.device)
        is_word = (tokens > 0).float()[..., None]
        # A mean over the words that are there: padding must not make an instruction weaker.
        features: Tensor = self.language((self.words(tokens) * is_word).sum(1) / is_word.sum(1).clamp(min=1.0))
        return features

    def see(self, observation: Batch, language: Tensor) -> Tensor:
        """What there is to look at under what the instruction says, [B, `LANGUAGE`]: [B, `sees`]."""
        parts = [self.look(observation[IMAGE].to(language.device), language)] if self.inputs.image else []
        if self.inputs.points:
            points = observation[POINTS].to(language.device)
            if points.shape[1:] != (self.inputs.points, 3):
                raise ValueError(f"{POINTS} must be [B, {self.inputs.points}, 3], got {list(points.shape)}")
            parts.append(self.cloud(normalise(points, self.stats[POINTS], MODES["ENV"])))
        return torch.cat(parts, 1)

    def look(self, image: Tensor, language: Tensor) -> Tensor:
        """Features of pictures uint8 [B, S, S, 3] under what the instruction says, [B, `LANGUAGE`]: [B, `PICTURE`]."""
        side = self.inputs.image
        if image.dtype != torch.uint8 or image.shape[1:] != (side, side, 3):
            text = f"{IMAGE} must be uint8 [B, {side}, {side}, 3], got {image.dtype} {list(image.shape)}"
            raise ValueError(f"{text}: crop or pad pictures that are no squares in the environment")
        x = image.permute(0, 3, 1, 2).float() / 255.0 - 0.5
        for convolution, norm, film in zip(self.convolutions, self.norms, self.film, strict=True):
            scale, shift = film(language)[:, :, None, None].chunk(2, 1)
            x = functional.relu(norm(convolution(x)) * (1.0 + scale) + shift)
        maps = self.keypoints(x)
        # Where a map is high, as a mean position: the arm needs places, not what is there.
        weight = maps.flatten(2).softmax(-1).view(maps.shape)
        place = torch.linspace(-1.0, 1.0, maps.shape[-1], device=maps.device)
        features: Tensor = self.picture(
            torch.cat([(weight.sum(2) * place).sum(-1), (weight.sum(3) * place).sum(-1)], 1)
        )
        return features


DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
WIDTHS = (64, 128, 256, 512)

TORCHVISION = {"resnet18": "ResNet18_Weights.IMAGENET1K_V1", "resnet34": "ResNet34_Weights.IMAGENET1K_V1"}
"""What torchvision calls the weights of `pretrained`."""

Norm = Callable[[int], nn.Module]


def group_norm(channels: int) -> nn.GroupNorm:
    """Groups of 16 channels."""
    return nn.GroupNorm(channels // 16, channels)


class FrozenBatchNorm(nn.Module):
    """A batch norm whose statistics, scale and shift are never trained, [B, C, H, W]."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}.items():
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, [B, C, H, W]."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = norm(after)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        inner: Tensor = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(inner + shortcut)


def resnet(name: str, norm: Norm) -> nn.Sequential:
    """[B, 3, H, W] -> [B, 512, H / 32, W / 32]."""
    stages: list[nn.Module] = []
    before = 64
    for stage, (depth, width) in enumerate(zip(DEPTHS[name], WIDTHS, strict=True)):
        blocks = []
        for block in range(depth):
            blocks.append(BasicBlock(before, width, 2 if stage and not block else 1, norm))
            before = width
        stages.append(nn.Sequential(*blocks))
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    return nn.Sequential(stem, norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *stages)


def pretrained(name: str, key: str) -> dict[str, Tensor]:
    """torchvision's weights from ImageNet, but for its last layer: timm's copy on the hub, which is no pickle.

    key: of the configuration, for the ValueError where it cannot be downloaded.
    """
    held = read_weights(find(f"timm/{name}.tv_in1k", ("model.safetensors",), key))
    return {own: value for own, value in held.items() if not own.startswith("fc.") and "num_batches" not in own}
