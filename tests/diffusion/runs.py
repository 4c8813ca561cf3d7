"""Tiny whole runs on the CPU: a random SD3 pipeline, a few prompts, a reward; an iteration takes under a second."""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from genrl.config import load
from genrl.diffusion.config.schema import Config
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.train import KIND, train
from genrl.runtime.folder.run import Run
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.weights.weights import Weights
from tests import opened as opening
from tests.run_folders import differences, last_state, rows, start, start_ranks, wait

__all__ = ["differences", "last_state", "rows", "start", "start_ranks", "wait"]  # beside its own

PROMPTS = ["a red star", "two blue dogs", "one green square", "a cat"]
HELD_OUT = ["three stars", "a yellow dog"]
CALL: dict[str, Any] = {"guidance_scale": 1.0, "height": 16, "width": 16, "max_sequence_length": 4}
"""Of the pipeline of `settings`, but for the number of steps."""
QUIET: dict[str, Any] = {"evaluation": {"every": 0}, "checkpoint": {"every": 100}}

REWARDS = '''\
import random

import numpy as np
import torch


def brightness(images):
    """Mean of all pixels, 0 to 1."""
    return images.mean(dim=(1, 2, 3)).tolist()


def redness(images, prompts):
    """Red minus blue, with both as parts."""
    red, blue = images[:, 0].mean(dim=(1, 2)), images[:, 2].mean(dim=(1, 2))
    return (red - blue).tolist(), {"red": red.tolist(), "blue": blue.tolist()}


def warmth(images):
    """Red less blue and a little curvature, with gradients."""
    return (images[:, 0] - images[:, 2] + 0.3 * images[:, 1] ** 2).mean(dim=(1, 2))


warmth.differentiable = True


def nothing(images):
    """The same score for every picture."""
    return [0.5] * len(images)


def noisy(images):
    """Brightness, and a little noise from the global generators."""
    noise = random.random() + np.random.rand() + torch.rand(()).item()
    return (images.mean(dim=(1, 2, 3)) + 0.01 * noise * torch.rand(len(images))).tolist()
'''


def write_folder(folder: Path) -> None:
    (folder / "train.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    (folder / "eval.txt").write_text("\n".join(HELD_OUT), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")


LORA: dict[str, Any] = {"rank": 4, "alpha": 8}


def settings(folder: Path, model: Path, /, *, lora: dict[str, Any] | None = LORA, **changes: Any) -> dict[str, Any]:
    """The YAML of a tiny Flow-GRPO run in `folder`; `changes` are sections, merged key by key but for the trainer."""
    tree: dict[str, Any] = {
        "model": {"path": str(model), "lora": lora},
        "prompts": {"train": str(folder / "train.txt"), "eval": str(folder / "eval.txt")},
        "rewards": [{"name": f"{folder / 'rewards.py'}:brightness"}],
        "sampling": {
            **{"num_inference_steps": 3, "guidance_scale": 1.0, "height": 16, "width": 16},
            **{"prompts_per_iteration": 2, "group_size": 2, "batch_size": 2},
            "pipeline_args": {"max_sequence_length": 4},
        },
        "trainer": {"algorithm": "flow_grpo"},
        "optimizer": {"lr": 1e-2},
        "evaluation": {"every": 2, "num_prompts": 2},
        "checkpoint": {"every": 1},
        "trackers": [],
        "iterations": 2,
        "output": str(folder / "run"),
    }
    for section, change in changes.items():
        old = tree.get(section)
        replaces = not isinstance(old, dict) or not isinstance(change, Mapping) or "algorithm" in change
        tree[section] = change if replaces else {**old, **change}
    return tree


def config(folder: Path, model: Path, /, **changes: Any) -> Config:
    """`settings` through a YAML file and the loader, as the command line would."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings(folder, model, **changes)), encoding="utf-8")
    return load(path)


NFT = {"algorithm": "diffusion_nft"}


def unloaded(**sections: Any) -> Config:
    """Settings of a model and files that are not there; sections are merged key by key but for the trainer."""
    tree: dict[str, Any] = {
        **{"model": {"path": "org/model"}, "prompts": {"train": "a.txt"}, "rewards": [{"name": "shapes"}]},
        **{"trainer": {"algorithm": "flow_grpo"}, "evaluation": {"every": 0}},
    }
    for name, section in sections.items():
        merged = isinstance(section, dict) and name != "trainer"
        tree[name] = {**tree.get(name, {}), **section} if merged else section
    return Config.model_validate(tree)


def picture(pipe: Any, seed: int = 3, prompt: str = PROMPTS[0], **call: Any) -> np.ndarray:
    """By a plain call of the pipeline, as a script without genrl would: [height, width, 3], 0 to 1."""
    pipe.set_progress_bar_config(disable=True)
    arguments = {"num_inference_steps": 3, **CALL, **call}
    sampled = pipe(prompt=prompt, generator=torch.Generator().manual_seed(seed), output_type="np", **arguments)
    return np.asarray(sampled.images[0])


@torch.no_grad()
def move(weights: Weights, seed: int = 0, size: float = 0.1) -> None:
    """Far from the start, where the second half of an adapter is 0."""
    source = torch.Generator().manual_seed(seed)
    for p in weights.parameters:
        p.add_(size * torch.randn(p.shape, generator=source))


def reward(folder: Path, name: str, **extra: Any) -> dict[str, Any]:
    return {"name": f"{folder / 'rewards.py'}:{name}", **extra}


@contextmanager
def opened(config: Config) -> Iterator[DiffusionRun]:
    """A new run, as `train` opens it: for tests that look at a method from inside."""
    with opening.opened(config, KIND) as run:
        yield run


def spoil(run: DiffusionRun, when: Callable[[int], bool], factor: float = math.nan) -> list[Tensor]:
    """From here on, losses of the micro-batches (from 1) that `when` names are multiplied; returned as they were."""
    losses: list[Tensor] = []
    backward = run.loop.optimization.backward

    def spoilt(settings: Any, results: Mapping[str, Tensor], recorded: Recorded, *, divisor: float) -> None:
        losses.append(results["loss"].detach().clone())
        loss = results["loss"] * (factor if when(len(losses)) else 1.0)
        backward(settings, {**results, "loss": loss}, recorded, divisor=divisor)

    run.loop.optimization.backward = spoilt  # type: ignore[method-assign]
    return losses


def resumed(run: Path, folder: Path, done: int) -> Path:
    """A copy of a finished run in `folder`, gone on with from its checkpoint after `done` iterations."""
    again = folder / f"{run.name}-again-{done}"
    shutil.copytree(run, again)
    for path in (again / "checkpoints").iterdir():
        if path.name > f"step-{done:06d}":
            shutil.rmtree(path)
    train(load(Run(again).config).model_copy(update={"output": str(again)}), again)
    return again


# -- runs in processes of their own ------------------------------------------------------------------------------

Target = Callable[..., None]


def written(folder: Path, model: Path, name: str, /, **changes: Any) -> Path:
    """The YAML file of a run in `folder/name/run`."""
    (folder / name).mkdir(exist_ok=True)
    config(folder, model, output=str(folder / name / "run"), **changes)
    return (folder / "tiny.yaml").rename(folder / f"{name}.yaml")


def launch(file: Path, count: int, target: Target, *arguments: Any, machines: int = 1) -> list[BaseProcess]:
    """`target(file, *arguments)` in so many processes; what they print goes beside the file."""
    log = file.with_suffix(".log")
    if count == 1:
        return [start(target, str(file), *arguments, log=log)]
    return start_ranks(count, target, str(file), *arguments, log=log, machines=machines)


def printed(file: Path) -> str:
    """The ends of what the processes of `launch` printed."""
    return "\n".join(path.read_text()[-3000:] for path in sorted(file.parent.glob(f"{file.stem}*.log")))


def finish(file: Path, count: int, target: Target, *arguments: Any, machines: int = 1) -> None:
    """`launch`, until all have ended well."""
    assert wait(launch(file, count, target, *arguments, machines=machines), 500) == [0] * count, printed(file)


def train_file(path: str, resume: str | None = None) -> None:
    """Child: train the YAML file, or go on in the folder `resume`."""
    train(load(Path(path)), Path(resume) if resume else None)
