"""The optimisers that a configuration can name, and what cannot work in its section `optimizer`. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from genrl.config.method import Finding
from genrl.config.sections import Optimizer

if TYPE_CHECKING:
    from genrl.config import AnyConfig


class Known(NamedTuple):
    """One optimiser. source: "module:class"; args: what `optimizer.args` may hold; state_bytes: per trained parameter;
    shards: whether its state is saved and put back where weights are sharded; install: its package."""

    source: str
    args: tuple[str, ...]
    state_bytes: float
    betas: bool = True
    shards: bool = False
    install: str = ""


OPTIMIZERS = {
    "adamw": Known("torch.optim:AdamW", ("eps", "amsgrad", "foreach", "fused"), 8, shards=True),
    "adamw_8bit": Known("torchao.optim:AdamW8bit", ("eps", "amsgrad", "block_size"), 2 + 8 / 256, install="torchao"),
    "adafactor": Known("torch.optim:Adafactor", ("beta2_decay", "eps", "d", "foreach"), 0, betas=False),
    "lion": Known(
        "lion_pytorch:Lion", ("use_triton", "decoupled_weight_decay"), 4, shards=True, install="lion-pytorch"
    ),
    "muon": Known(
        "genrl.runtime.weights.muon:Muon",
        ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
        4,
    ),
    "prodigy": Known(
        "prodigyopt:Prodigy",
        ("beta3", "eps", "decouple", "use_bias_correction", "safeguard_warmup", "d0", "d_coef", "growth_rate")
        + ("slice_p",),
        16,
        install="prodigyopt",
    ),
}
OWN_KEYS = ("lr", "betas", "weight_decay")
LEAST_PRODIGY = 0.01


def state_bytes(settings: Optimizer) -> float:
    """What an optimiser keeps per trained parameter; one of another package is taken to keep AdamW's two moments."""
    known = OPTIMIZERS.get(settings.name)
    return OPTIMIZERS["adamw"].state_bytes if known is None else known.state_bytes


def optimizer_problems(config: AnyConfig) -> Iterator[Finding]:
    """What can be told without importing the optimiser."""
    settings = config.optimizer
    name, known = settings.name, OPTIMIZERS.get(settings.name)
    for key in settings.args:
        if key in OWN_KEYS:
            yield (f"optimizer.args.{key}", f"optimizer.{key}"), f"has its own key; write optimizer.{key}"
    if known is None and ":" not in name:
        near = get_close_matches(name, OPTIMIZERS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        text = f"unknown optimiser {name!r}; {hint}they are: {', '.join(OPTIMIZERS)}; or name a class"
        yield ("optimizer.name",), f"{text}: package.module:Class"
    if config.trains_shards and (known is None or not known.shards):
        can = " or ".join(other for other, found in OPTIMIZERS.items() if found.shards)
        key = "distributed.fsdp" if config.distributed.fsdp else "model.offload.denoiser"
        yield ("optimizer.name", key), f"the state of {name} cannot be sharded; write {can}"
    if known is None:
        return
    for key in settings.args:
        if key not in known.args and key not in OWN_KEYS:
            yield (f"optimizer.args.{key}",), unknown_argument(name, key, known.args)
    if settings.betas is not None and not known.betas:
        yield ("optimizer.betas", "optimizer.name"), f"{name} has no betas; leave them out"
    if name == "prodigy" and settings.lr < LEAST_PRODIGY:
        text = f"prodigy finds its own step size, and lr is a factor on it: write 1, not {settings.lr:g}"
        yield ("optimizer.lr", "optimizer.name"), text


def unknown_argument(name: str, key: str, known: tuple[str, ...]) -> str:
    """The message for an entry of `optimizer.args` that the optimiser does not take."""
    near = get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{name} has no argument {key!r}; {hint}it takes: {', '.join(known) or 'none'}"


def missing_package(settings: Optimizer) -> str | None:
    """Why the optimiser cannot be imported here, and what to install; None where its package is there."""
    known = OPTIMIZERS.get(settings.name)
    source = known.source if known is not None else settings.name
    package = source.partition(":")[0].partition(".")[0]
    if source.rpartition(":")[0].endswith(".py"):
        file = Path(source.rpartition(":")[0])
        return None if file.is_file() else f"the file {file} does not exist (looked from {Path.cwd()})"
    if find_spec(package) is not None:
        return None
    if known is None:
        return f"the package {package} is not installed: install it, or write one of {', '.join(OPTIMIZERS)}"
    return f"{settings.name} needs the package {known.install}: pip install {known.install}, or write adamw"
