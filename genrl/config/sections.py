"""The sections that all kinds of run share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from genrl.config.errors import Finding
from genrl.config.section import Count, Flag, Fraction, NonNegative, Positive, Section, Text, Ways, Whole

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
    """When the held-out reward falls (docs/watch.md): say so, end the run, or go on from the best evaluation's weights
    with half the learning rate."""
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


class Economy(Section):
    """Which of a prompt's samples are trained on (docs/economy.md)."""

    keep: Ways | None = None
    """Train on so many samples of each group, those with the largest variance of the total reward (PODS, arXiv
    2504.13818); null = all."""

    def problems(self, section: str, group: int) -> Iterator[Finding]:
        """Why groups of so many samples cannot be thinned out so. section: the one that says how many."""
        if self.keep is not None and self.keep >= group:
            text = f"a group has {group} samples, so none is left out; write {max(2, group // 2)}, or leave it out"
            yield ("economy.keep", f"{section}.group_size"), text


class Known(NamedTuple):
    """One optimiser. source: "module:class"; state_bytes: per trained parameter; shards: whether its state is saved and
    put back where weights are sharded; install: its package."""

    source: str
    state_bytes: float
    shards: bool = False
    install: str = ""


OPTIMIZERS = {
    "adamw": Known("torch.optim:AdamW", 8, shards=True),
    "adamw_8bit": Known("torchao.optim:AdamW8bit", 2 + 8 / 256, install="torchao"),
    "adafactor": Known("torch.optim:Adafactor", 0),
    "lion": Known("lion_pytorch:Lion", 4, shards=True, install="lion-pytorch"),
    "muon": Known("genrl.runtime.weights.optimizers:Muon", 4),
    "prodigy": Known("prodigyopt:Prodigy", 16, install="prodigyopt"),
}
LEAST_PRODIGY = 0.01
LARGEST_COPY = 32_000_000
"""Most trained numbers of which a copy is kept at the beginning of every iteration, in full fine-tuning."""


class Optimizer(Section):
    """The optimiser and its schedule (docs/optimizers.md)."""

    name: Text = "adamw"
    """adamw, adamw_8bit (torchao), adafactor, lion, muon (AdamW for everything that is not a matrix), prodigy, or a
    class: package.module:Class, path/file.py:Class."""
    args: dict[str, Any] = {}
    """Further arguments of the optimiser, for example {betas: [0.9, 0.95], eps: 1e-6}."""
    lr: Positive = 3e-4
    """Learning rate (Flow-GRPO and DiffusionNFT with LoRA: 3e-4; full fine-tuning: about 1e-5)."""
    weight_decay: NonNegative = 1e-4
    """Decoupled weight decay (Flow-GRPO: 1e-4)."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm (all peers: 1)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or down to 0 at the end of the run."""
    schedule_iterations: Count | None = None
    """Iterations over which it falls, to a tenth that stays, whatever the run's number; null = those of the run."""
    warmup_steps: Whole = 0
    """Optimiser steps in which the learning rate rises from 0."""

    @property
    def lowest(self) -> float:
        """Share of lr that it does not fall below: a run that goes on after the fall is to learn something."""
        return 0.1 if self.schedule_iterations is not None else 0.0

    @property
    def state_bytes(self) -> float:
        """What it keeps per trained parameter; one of another package is taken to keep AdamW's two moments."""
        return OPTIMIZERS.get(self.name, OPTIMIZERS["adamw"]).state_bytes

    @property
    def is_known(self) -> bool:
        """Whether all that is written of it can be told right without its code, which imports torch: a name of the
        table, and no arguments but AdamW's two betas, which many recipes have."""
        if self.name not in OPTIMIZERS or not self.args:
            return self.name in OPTIMIZERS
        betas = self.args.get("betas") if self.name == "adamw" and len(self.args) == 1 else None
        return (
            isinstance(betas, list | tuple)
            and len(betas) == 2
            and all(isinstance(beta, float | int) and 0 <= beta < 1 for beta in betas)
        )

    def problems(self, sharded_by: str | None) -> Iterator[Finding]:
        """What can be told without importing the optimiser, which `check_optimizer` does. sharded_by: the key that
        shards what is trained, if any."""
        name, entry = self.name, OPTIMIZERS.get(self.name)
        if entry is None and ":" not in name:
            near = get_close_matches(name, OPTIMIZERS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            text = f"unknown optimiser {name!r}; {hint}they are: {', '.join(OPTIMIZERS)}; or name a class"
            yield ("optimizer.name",), f"{text}: package.module:Class"
        if sharded_by is not None and (entry is None or not entry.shards):
            can = " or ".join(other for other, row in OPTIMIZERS.items() if row.shards)
            yield ("optimizer.name", sharded_by), f"the state of {name} cannot be sharded; write {can}"
        if self.schedule == "constant" and self.schedule_iterations is not None:
            text = "a constant rate does not fall; write schedule: linear or cosine, or leave it out"
            yield ("optimizer.schedule_iterations", "optimizer.schedule"), text
        # Prodigy finds its own step size: at a usual rate it would run, and learn nothing, without a word.
        if name == "prodigy" and self.lr < LEAST_PRODIGY:
            text = f"prodigy finds its own step size, and lr is a factor on it: write 1, not {self.lr:g}"
            yield ("optimizer.lr", "optimizer.name"), text

    def missing_package(self) -> str | None:
        """Why it cannot be imported here, and what to install; None where its package is there."""
        entry = OPTIMIZERS.get(self.name)
        source = entry.source if entry is not None else self.name
        package = source.partition(":")[0].partition(".")[0]
        if source.rpartition(":")[0].endswith(".py"):
            file = Path(source.rpartition(":")[0])
            return None if file.is_file() else f"the file {file} does not exist (looked from {Path.cwd()})"
        if find_spec(package) is not None:
            return None
        if entry is None:
            return f"the package {package} is not installed: install it, or write one of {', '.join(OPTIMIZERS)}"
        return f"{self.name} needs the package {entry.install}: pip install {entry.install}, or write adamw"
