"""Rewards that are trained alongside the model that they judge (Adv-GRPO, arXiv 2511.20256).

A *trainable* reward has the attributes and methods of `Trainable` in addition to its `__call__`. The trainer `adv_grpo`
shows it reference pictures and samples of the same prompts, computes a loss from its logits and takes the optimiser's
step; the reward owns neither. Nothing is inherited: docs/rewards.md says how to write such a class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor, nn

from genrl_rewards.contract import Reward, check_choice, name_of, needs
from genrl_rewards.models.checkpoints import fill
from genrl_rewards.models.clip_model import ClipScorer
from genrl_rewards.models.pixels import eight_bit, frames, mean_over_frames, wants_gradients
from genrl_rewards.scorers.pictures.dino import MODEL as DINO_MODEL
from genrl_rewards.scorers.pictures.dino import DinoFeatures
from genrl_rewards.scorers.preference.pickscore import MODEL as PICKSCORE_MODEL
from genrl_rewards.scorers.preference.pickscore import PROCESSOR, SCALES, pickscore

Loss: TypeAlias = Literal["hinge", "bce", "preference"]
Logits: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""[B] of whole pictures, or these and [B, P] of their patches. High means: a reference."""

METHODS = ("logits", "parameters", "state_dict", "load_state_dict")


class Trainable(Protocol):
    """What a trainable reward has."""

    loss: Loss
    """hinge, bce: tell references from samples; preference: rank a reference above the sample of the same prompt."""
    patch_weight: float
    """Weight of the patches' loss, where `logits` gives patches."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Scores, as those of any reward."""

    def logits(self, images: Tensor, prompts: Sequence[str]) -> Logits:
        """Logits of pictures float [B, 3, H, W] in [0, 1], with the graph to `parameters()`."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """What is trained; the same objects in every call."""

    def state_dict(self) -> dict[str, Any]:
        """All that training changes: numbers, text, tensors, and lists and dictionaries of them."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Restore what `state_dict` returned."""


def check_trainable(reward: Reward, name: str = "") -> Trainable:
    """The reward. Raises ValueError if one with `logits` lacks the rest of `Trainable`, or is not pointwise."""
    name = name or name_of(reward)
    lacking = [method for method in METHODS if not callable(getattr(reward, method, None))]
    if lacking:
        raise ValueError(f"reward {name!r} has logits, so it is to be trained, but no {', no '.join(lacking)}")
    trainable: Any = reward
    loss = getattr(reward, "loss", None)
    if loss not in get_args(Loss):
        losses = ", ".join(get_args(Loss))
        raise ValueError(f"reward {name!r}: its attribute `loss` is {loss!r}; it must be one of {losses}")
    if not any(True for _ in trainable.parameters()):
        raise ValueError(f"reward {name!r} has no parameters to train")
    if needs(reward).kind != "pointwise":
        raise ValueError(f"reward {name!r} is to be trained, so its scores must not depend on other samples")
    checked: Trainable = trainable
    return checked


def checked_logits(reward: Trainable, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, ...]:
    """Logits [B] of whole pictures [B, 3, H, W], and [B, P] of their patches, if it has any.

    Raises ValueError for logits of other shapes.
    """
    output, count = reward.logits(images, prompts), len(images)
    of_images, *patches = sides = output if isinstance(output, tuple) else (output,)
    if of_images.shape != (count,) or any(x.ndim != 2 or len(x) != count for x in patches):
        shapes = [tuple(x.shape) for x in sides]
        raise ValueError(
            f"reward {name_of(reward)!r}: logits of {count} pictures have the shapes {shapes}; they "
            f"must be [{count}], or a tuple of [{count}] and [{count}, patches]"
        )
    return sides


def unit_scale(features: Tensor) -> Tensor:
    """Features [..., D] scaled to length sqrt(D), so that each number is of order 1.

    Only the direction counts, as in the released reward; this length is one that a new linear layer can learn from.
    """
    scale: float = features.shape[-1] ** 0.5
    return scale * nn.functional.normalize(features, dim=-1, eps=1e-6)


def head_of(width: int, hidden: int) -> nn.Sequential:
    """The paper's head: linear, GELU, linear to one logit."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 1))


def top_patches(logits: Tensor, share: float = 0.2) -> Tensor:
    """Mean of the highest floor(share P) of a picture's patch logits [B, P], at least one of them: [B]."""
    count = max(1, int(share * logits.shape[1]))
    return logits.topk(count, dim=1).values.mean(dim=1)


class DinoAdversary:
    """Does it look like the references? A head on a frozen DINO, trained alongside the model (adv_grpo); unbounded.

    `model`        hub id or folder of a DINOv2 (with registers or without) or DINOv3
    `size`         side of the square that it sees, in pixels; null: the multiple of its patch nearest the paper's 518
    `hidden`       width of the head (`head_of`), the same for class token and patches
    `patch_weight` w in the score `(1 - w) h(class token) + w mean h(patches)`, and of the patches in the loss
    `loss`         `hinge` (default) or `bce`
    `seed`         of the head's initial weights
    `dtype`        of the frozen model: `float32` (default), `bfloat16`, `float16`

    Pictures are rounded to 8 bits first, as reference files are. Training and scoring use the same features
    (`unit_scale`) and all patches; the released code trains on raw features, scores unit ones, and samples 64 patches.
    The prompt is ignored. A video gets the mean over its frames.
    """

    differentiable = True

    def __init__(
        self,
        model: str = DINO_MODEL,
        size: int | None = None,
        hidden: int = 512,
        patch_weight: float = 0.3,
        loss: Literal["hinge", "bce"] = "hinge",
        seed: int = 0,
        dtype: str = "float32",
        device: str = "cpu",
    ):
        check_choice("dino_adversary: unknown loss", loss, ("hinge", "bce"))
        self.dino = DinoFeatures(model, size, device, "dino_adversary", dtype)
        self.loss: Loss = loss
        self.patch_weight = patch_weight
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.head = head_of(self.dino.width, hidden).to(device)

    def to(self, device: str) -> None:
        """Move the frozen model and the head."""
        self.dino.to(device)
        self.head.to(device)

    def __call__(self, images: Tensor) -> Tensor:
        of_images, patches = self.logits(frames(images), ())
        scores = (1 - self.patch_weight) * of_images + self.patch_weight * patches.mean(1)
        return mean_over_frames(scores, images).to(images.device)

    def logits(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        with_grad = wants_gradients(images)
        with torch.set_grad_enabled(with_grad):
            # Or the head would tell samples from references by their digits: files have 256 levels, decoded samples any
            # number.
            features = self.dino.features(images if with_grad else eight_bit(images))
        return self.head(unit_scale(features.class_token))[..., 0], self.head(unit_scale(features.patches))[..., 0]

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.head.parameters()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.head.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        fill(self.head, state, "the saved head of dino_adversary")


class DinoLayersAdversary:
    """As `dino_adversary`, with a head for each of several layers and the best fifth of the patches; in (0, 1).

    `layers`      blocks of the DINO, from 0, whose patches are judged (released default: 2, 5, 8, 11 of 12)
    `temperature` of the score (released default 0.2; its configuration: 2 with layer 11 alone)
    `model`, `size`, `hidden`, `loss`, `seed`, `dtype` as for `dino_adversary`

    With l_k the mean of the highest fifth of layer k's patch logits, `<l_k>` is trained as the picture's logit, and the
    score is `sigmoid(<l_k> / temperature)`. The released code weighs the layers by a learned gate instead, which is 1
    for a single layer. The prompt is ignored. A video gets the mean over its frames.
    """

    differentiable = True
    patch_weight = 0.0

    def __init__(
        self,
        model: str = DINO_MODEL,
        layers: Sequence[int] = (2, 5, 8, 11),
        size: int | None = None,
        hidden: int = 512,
        temperature: float = 0.2,
        loss: Literal["hinge", "bce"] = "hinge",
        seed: int = 0,
        dtype: str = "float32",
        device: str = "cpu",
    ):
        check_choice("dino_layers_adversary: unknown loss", loss, ("hinge", "bce"))
        self.dino = DinoFeatures(model, size, device, "dino_layers_adversary", dtype)
        last = self.dino.model.config.num_hidden_layers - 1
        if not layers or not all(0 <= layer <= last for layer in layers):
            raise ValueError(f"dino_layers_adversary: layers {[*layers]}; use one or more of 0 to {last}")
        if temperature <= 0:
            raise ValueError(f"dino_layers_adversary: temperature {temperature}; use more than 0")
        self.loss: Loss = loss
        self.layers, self.temperature = tuple(layers), temperature
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.heads = nn.ModuleList(head_of(self.dino.width, hidden) for _ in layers).to(device)

    def to(self, device: str) -> None:
        """Move the frozen model and the heads."""
        self.dino.to(device)
        self.heads.to(device)

    def __call__(self, images: Tensor) -> Tensor:
        scores = torch.sigmoid(self.logits(frames(images), ()) / self.temperature)
        return mean_over_frames(scores, images).to(images.device)

    def logits(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        with_grad = wants_gradients(images)
        with torch.set_grad_enabled(with_grad):
            patches = self.dino.patches_after(self.layers, images if with_grad else eight_bit(images))
        each = [top_patches(head(unit_scale(x))[..., 0]) for head, x in zip(self.heads, patches, strict=True)]
        return torch.stack(each).mean(dim=0)

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.heads.parameters()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.heads.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        fill(self.heads, state, "the saved heads of dino_layers_adversary")


class PickScoreAdversary:
    """PickScore, or another CLIP, whose last vision layers learn to prefer references to samples (adv_grpo).

    `model`     hub id or folder of a CLIPModel
    `processor` hub id or folder of its tokenizer and image processor; null: PickScore's for PickScore, else `model`
    `layers`    how many of the last vision layers are trained (the paper: 2; its released configuration: 1)
    `scale`     of the score, as of `pickscore`

    The text tower, the projections and the logit scale are not trained. The log-odds of "the reference is preferred"
    are differences of `logit scale x cosine`. The model runs in float32.
    """

    differentiable = True
    loss: Loss = "preference"
    patch_weight = 0.0

    def __init__(
        self,
        model: str = PICKSCORE_MODEL,
        processor: str | None = None,
        layers: int = 1,
        scale: str = "over_26",
        device: str = "cpu",
    ):
        check_choice("pickscore_adversary: unknown scale", scale, SCALES)
        if processor is None:
            processor = PROCESSOR if model == PICKSCORE_MODEL else model
        self.scale = scale
        self.scorer = ClipScorer(model, processor, device, "pickscore_adversary")
        self.to = self.scorer.to
        every = self.scorer.model.vision_model.encoder.layers
        if not 1 <= layers <= len(every):
            raise ValueError(f"pickscore_adversary: {layers} of {len(every)} vision layers; use 1 to {len(every)}")
        self.trained: nn.ModuleList = every[len(every) - layers :]
        self.trained.requires_grad_(True)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return pickscore(self.scorer.cosines(images, prompts), self.scorer.logit_scale, self.scale)

    def logits(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.scorer.logit_scale * self.scorer.cosines(images, prompts)

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.trained.parameters()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.trained.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        fill(self.trained, state, "the saved layers of pickscore_adversary")
