"""The sections that all kinds of run share."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from genrl.config.section import Count, Flag, Fraction, NonNegative, Positive, Section, Text, Whole

Precision = Literal["float32", "bfloat16", "float16"]
Tracker = Literal["tensorboard", "wandb", "swanlab", "trackio", "mlflow", "comet_ml", "aim", "clearml", "dvclive"]

Quantized = Literal["int8", "int4", "fp8", "nf4"]
BITS = {"int8": 8.0, "fp8": 8.0, "nf4": 4.127}
"""Per weight of a linear layer, nf4's scales of 64 weights included."""
QUANTIZERS = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
"""Kind of quantisation -> the package that computes with it."""
NO_INT4 = (
    "torchao has no backward pass through its packed four-bit weights, and the layout that has one holds a weight in a "
    "byte, as int8 does; write nf4 (bitsandbytes, needs a GPU) or int8"
)


def missing_quantizer(kind: str) -> str:
    """What to install for weights of this kind; "" where it is there."""
    package = QUANTIZERS[kind]
    if find_spec(package) is not None:
        return ""
    return f"{kind} is computed by {package}, which is not installed: pip install {package}"


class LowRank(Section):
    """Low-rank adapters; only they are trained."""

    rank: Count = 32
    """Rank of the adapters (Flow-GRPO and DiffusionNFT: 32)."""
    alpha: Positive = 64.0
    """Scale of the adapters; the update is multiplied by alpha / rank (Flow-GRPO: 64)."""
    targets: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Name endings of the layers to adapt; null = the attention projections of the denoiser."""


OF_THE_FILE = ("type", "rank", "alpha", "targets", "ranks")
"""Settings that a LoRA to go on with has itself."""


class LoRA(LowRank):
    """Low-rank adapters of the denoiser (docs/adapters.md); only they are trained."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["lora", "dora", "rslora", "lokr"] = "lora"
    """lora; dora: with the length of each row learnt separately; rslora: multiplied by alpha / sqrt(rank); lokr:
    Kronecker products. No loha: diffusers cannot read it."""
    ranks: dict[str, Count] = {}
    """Other ranks, for a whole component (transformer_2) or for layers whose name ends in a match of the regular
    expression; alpha follows, so that alpha / rank stays the same (not rslora's)."""
    begin: Text | None = Field(default=None, alias="from")
    """Folder or hub id (org/name, or org/name:file.safetensors) of a LoRA to continue training; its type, rank, alpha
    and targets are used. null = a new one."""
    frozen: tuple[Text, ...] = ()
    """The same, of LoRAs that are active throughout and not trained."""
    text_encoders: Flag = False
    """Also adapt the attention of those text encoders whose adapters diffusers loads (CLIP's of Stable Diffusion and
    FLUX.1); prompts are then encoded in every model call."""

    @model_serializer(mode="wrap")
    def _as_written(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what the file of `from` says itself: written down as a default it would look as if it were
        wanted."""
        values: dict[str, Any] = plain(self)
        return values if self.begin is None else {k: v for k, v in values.items() if k not in OF_THE_FILE}


class EMA(Section):
    """Moving average of the trained weights; evaluation and export use it."""

    decay: Fraction = 0.9
    """Share of the average kept when it is renewed (Flow-GRPO and DiffusionNFT: 0.9)."""
    every: Count = 1
    """Optimiser steps from one renewal to the next (DiffusionNFT: 1; Flow-GRPO: 8)."""


class Monitor(Section):
    """A second held-out figure that says when training has gone too far (reward hacking); `on_collapse` then acts."""

    reward: Text
    """The name of the log's `eval/<name>_mean`. Pictures: a reward of weight 0, never trained on; answers: a reward, or
    accuracy; robots and episodes: success."""
    tolerance: NonNegative
    """How far it may fall below its best evaluation, in its own units."""


class EvaluationBase(Section):
    """When a run is judged on what is held out."""

    every: Whole = 20
    """Evaluate every so many iterations, and at the start and the end; 0 = never."""
    on_collapse: Literal["warn", "stop", "back"] = "warn"
    """When the held-out reward falls, or loss, gradient norm or KL leave their own history (docs/watch.md): say so, end
    the run, or go on from the best evaluation's weights with half the learning rate."""
    monitor: Monitor | None = None
    """Also watch a second figure, by which the best evaluation is then chosen; null = the run's own alone."""


class Waiting(Section):
    """How long is waited for a reward in another process or on a server."""

    timeout_s: Positive = 60.0
    """Seconds for one attempt, from connecting to the end of the reply."""
    deadline_s: Positive = 180.0
    """Seconds for one call with all its attempts."""


class Outage(Waiting):
    """What happens when a reward in another process or on a server does not answer."""

    policy: Literal["stop", "drop"] = "stop"
    """At the deadline: stop the run, or leave out these samples."""


class Checkpoint(Section):
    """When the state is saved, and how many saves stay on disk."""

    every: Count = 20
    """Save every so many iterations, and at the end."""
    keep: Count = 3
    """Newest checkpoints that stay on disk."""


class Distributed(Section):
    """Several processes."""

    fsdp: Flag | Literal["node"] = False
    """Shard the model (FSDP2): with adapters its frozen weights, otherwise weights, gradients and optimiser state; true
    = over all processes, node = over those of each machine, which holds the model once."""
    timeout_s: Positive = 600.0
    """Seconds without progress after which a stuck run is stopped."""


def labels_of(names: Iterable[str]) -> tuple[str, ...]:
    """A short, unique name for each reward of these names, in their order: `shapes`, `Brightness`, `ocr-2`."""
    labels: list[str] = []
    for name in names:
        base = name.rsplit(":", 1)[-1]
        same = sum(label == base or label.startswith(f"{base}-") for label in labels)
        labels.append(f"{base}-{same + 1}" if same else base)
    return tuple(labels)
