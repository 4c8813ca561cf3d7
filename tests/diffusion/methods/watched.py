"""A method trained in this process with all that it did on record, and the bare networks to compute it again."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from genrl.config.method import code_of
from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.adapters import trainable
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import train
from genrl.runtime.weights.sharding import whole
from tests.diffusion import runs

QUIET = runs.QUIET
EIGHT = {"prompts_per_iteration": 2, "group_size": 4, "batch_size": 4}
TRIPLES = {"group_size": 3, "batch_size": 2}
"""Groups that micro-batches cut."""
DIFFUSION = {"num_inference_steps": 4, "pipeline_args": {}}
"""Sampling of the tiny Stable Diffusion 1.5."""
Given = dict[str, Tensor]


def copied(tensors: dict[str, Any]) -> Given:
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


@dataclass
class Piece:
    batch: Batch
    given: Given


@dataclass
class Update:
    """One optimiser step as it was about to be taken."""

    weights: Given
    snapshots: dict[str, Given]
    gradient: Given
    pieces: list[Piece]


@dataclass
class Watched:
    rollouts: list[Rollouts] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)
    snapshots: list[dict[str, Given]] = field(default_factory=list)
    """At the end of each iteration."""
    weights: Given = field(default_factory=dict)
    """In the end."""


def gradients(run: DiffusionRun) -> Given:
    return {key: whole(p.grad).clone() for key, p in run.weights.named.items() if p.grad is not None}


def watch(run: DiffusionRun) -> Watched:
    seen, pieces = Watched(), []
    collect, finish, optimization = run.collect, run.finish, run.loop.optimization
    backward, step = optimization.backward, optimization.step

    def watched_collect(draw: Any, **shape: Any) -> Rollouts:
        seen.rollouts.append(collect(draw, **shape))
        return seen.rollouts[-1]

    def watched_backward(settings: Any, results: Any, recorded: Any, **counts: float) -> None:
        pieces.append(Piece(recorded.batch, copied(recorded.tensors)))
        backward(settings, results, recorded, **counts)

    def watched_step(groups: Any = None) -> dict[str, float]:
        snapshots = {name: copied(tensors) for name, tensors in run.weights.snapshots.items()}
        seen.updates.append(Update(copied(run.weights.named), snapshots, gradients(run), list(pieces)))
        pieces.clear()
        return step(groups)

    def watched_finish(metrics: Any) -> None:
        seen.rows.append(dict(metrics))
        seen.snapshots.append({name: copied(tensors) for name, tensors in run.weights.snapshots.items()})
        finish(metrics)

    run.collect, optimization.backward = watched_collect, watched_backward  # type: ignore[method-assign]
    optimization.step, run.finish = watched_step, watched_finish  # type: ignore[method-assign]
    return seen


def after_collect(run: DiffusionRun, change: Callable[[Rollouts], object]) -> None:
    """From here on, `change` sees each iteration's samples as soon as they are drawn."""
    collect = run.collect

    def collected(draw: Any, **shape: Any) -> Rollouts:
        result = collect(draw, **shape)
        change(result)
        return result

    run.collect = collected  # type: ignore[method-assign]


def run(config: Config, prepare: Callable[[DiffusionRun], object] = lambda run: None) -> Watched:
    with runs.opened(config) as run:
        seen = watch(run)
        prepare(run)
        code_of(config.trainer).train(run, config.trainer)
        seen.weights = copied(run.weights.named)
    return seen


class Bare:
    """The networks alone, loaded afresh, with any weights of a run."""

    def __init__(self, config: Config, values: Given | None = None) -> None:
        self.pipe: Any = DiffusionPipeline.from_pretrained(config.model.path)
        part = "unet" if hasattr(self.pipe, "unet") else "transformer"
        self.network = getattr(self.pipe, part)
        for module in (self.network, self.pipe.vae):
            module.eval().requires_grad_(False)
        self.named = trainable({part: self.network}, config.model.lora).named
        if values is not None:
            self.fill(values)

    @torch.no_grad()
    def fill(self, values: Given) -> None:
        for key, p in self.named.items():
            p.copy_(values[key])

    def frozen(self) -> Self:
        for p in self.named.values():
            p.requires_grad_(False)
        return self

    @contextmanager
    def untrained(self) -> Iterator[None]:
        """Without its adapters and without gradients."""
        self.network.disable_adapters()
        with torch.no_grad():
            yield
        self.network.enable_adapters()

    def velocity(self, prompts: list[str], x: Tensor, sigma: Tensor) -> Tensor:
        """Of SD3, without guidance."""
        rows = [
            self.pipe.encode_prompt(prompt=[p], prompt_2=None, prompt_3=None, max_sequence_length=4) for p in prompts
        ]
        output: Tensor = self.network(
            hidden_states=x,
            timestep=1000 * sigma.expand(len(x)),
            encoder_hidden_states=torch.cat([row[0] for row in rows]),
            pooled_projections=torch.cat([row[2] for row in rows]),
            return_dict=False,
        )[0]
        return output

    def under(self, values: Given | None, prompts: list[str], x: Tensor, sigma: Tensor) -> Tensor:
        """The velocity with these weights; None: without adapters and gradients."""
        if values is None:
            with self.untrained():
                return self.velocity(prompts, x, sigma)
        self.fill(values)
        return self.velocity(prompts, x, sigma)

    def noise(self, prompts: list[str], x: Tensor, t: Tensor) -> Tensor:
        """Of Stable Diffusion 1.5."""
        text = self.pipe.encode_prompt(prompts, "cpu", 1, False)[0]
        output: Tensor = self.network(x, t, encoder_hidden_states=text).sample
        return output

    def decoded(self, latents: Tensor) -> Tensor:
        scaled = latents / self.pipe.vae.config.scaling_factor + (self.pipe.vae.config.shift_factor or 0.0)
        images: Tensor = self.pipe.vae.decode(scaled, return_dict=False)[0]
        return (images / 2 + 0.5).clamp(0, 1)

    def gradient(self, loss: Tensor) -> Given:
        """Of the loss in every trained weight; 0 where it is in none."""
        result = torch.autograd.grad(loss, list(self.named.values()), allow_unused=True)
        return {
            key: torch.zeros_like(p) if g is None else g for (key, p), g in zip(self.named.items(), result, strict=True)
        }


def relative(one: Given, other: Given) -> float:
    """Norm of the difference over the norm, over all parameters; one that is missing has gradient 0."""
    zero = torch.zeros(())
    keys = one.keys() | other.keys()
    difference = math.fsum(float((one.get(k, zero) - other.get(k, zero)).double().square().sum()) for k in keys)
    return math.sqrt(difference / math.fsum(float(g.double().square().sum()) for g in other.values()))


def equal(one: Given, other: Given) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def resumed(config: Config, folder: Path, done: int = 1) -> Path:
    """The uninterrupted run, after one gone on with from the checkpoint of iteration `done` ended at the same bits."""
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": 1, "keep": 9})})
    straight = train(config)
    assert runs.differences(straight, runs.resumed(straight, folder, done)) == []
    assert any(row.get("updates", 0) > 0 for row in runs.rows(straight))
    return straight


def trained_by(count: int, folder: Path) -> Path:
    """The run of `tiny.yaml` in this many processes; its folder is `run` in `folder`, moved to `world-count`."""
    runs.finish(folder / "tiny.yaml", count, runs.train_file)
    return (folder / "run").rename(folder / f"world-{count}")
