"""ResNet-18 and -34 (arXiv 1512.03385) up to their last feature map, by the names that LeRobot stores them under."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from genrl_rewards.models.checkpoints import find, read_weights

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
