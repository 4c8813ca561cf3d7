"""Tiny whole runs of policies on the CPU: eight tables, a policy of a second's imitation that sometimes succeeds."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from genrl.config import load
from genrl.playground.minitable.demonstrations import expert_demonstrations
from genrl.playground.minitable.task import task_numbers
from genrl.vla.config.schema import VLAConfig
from genrl.vla.offline.imitation import imitate
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.run import VLARun
from genrl.vla.train import KIND, train
from tests import opened as opening
from tests.run_folders import differences, last_state, rows, start, start_ranks, wait
from tests.vla.tiny_policies import WORDS, diffusion, flow, minitable_frames

__all__ = ["WORDS", "differences", "last_state", "rows", "start", "start_ranks", "wait"]  # beside its own

SAMPLERS: dict[str, dict[str, Any]] = {
    "flow_sde": {"kind": "flow_sde", "steps": 3},
    "flow_cps": {"kind": "flow_cps", "steps": 3},
    "flow_noise": {"kind": "flow_noise", "steps": 3},
    "reinflow": {"kind": "reinflow", "steps": 3},
    "diffusion": {"kind": "diffusion", "steps": 5, "ft_denoising_steps": 3},
}
"""One of each kind."""


@cache
def _policies() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="genrl-policies-", dir=os.environ.get("GENRL_TESTS_BASE"))


@cache
def folder(kind: str) -> Path:
    """A policy that touches discs about every second time: "flow", or "diffusion"."""
    shown = expert_demonstrations(100, tasks=task_numbers(("touch",)), seed=0)
    frames = minitable_frames(shown, image_size=0)
    policy = flow(stir=False) if kind == "flow" else diffusion()
    steps = 80 if kind == "flow" else 200
    for _ in imitate(policy, frames, steps=steps, batch_size=64, learning_rate=2e-3, seed=0):
        pass
    save_policy(policy, Path(_policies().name) / kind)
    return Path(_policies().name) / kind


def policy_of(sampler: str) -> Path:
    return folder("diffusion" if sampler == "diffusion" else "flow")


def settings(place: Path, *, sampler: str | dict[str, Any] = "flow_sde", **changes: Any) -> dict[str, Any]:
    """The YAML of a tiny PPO run in `place`; `changes` are sections, merged key by key. sampler: of `SAMPLERS`, or a
    section."""
    kind = sampler if isinstance(sampler, str) else sampler["kind"]
    tree: dict[str, Any] = {
        "policy": changes["policy"] if "path" in changes.get("policy", {}) else {"path": str(policy_of(kind))},
        "environment": {"name": "minitable", "tasks": ["touch"], "num_envs": 8, "max_steps": 16},
        "sampler": SAMPLERS[sampler] if isinstance(sampler, str) else sampler,
        "trainer": {"algorithm": "ppo", "epochs": 2, "minibatch": 16, "critic_warmup": 0, "kl_stop": None},
        "optimizer": {"lr": 1e-3},
        "evaluation": {"every": 0, "episodes": 8, "videos": 0},
        "checkpoint": {"every": 1},
        "trackers": [],
        "iterations": 1,
        "output": str(place / "run"),
    }
    return {name: section for name, section in merged(tree, changes).items() if section is not None}


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Key by key; another algorithm's section replaces the one that was there."""
    result = dict(tree)
    for section, change in changes.items():
        old = tree.get(section)
        merges = isinstance(old, dict) and isinstance(change, Mapping) and "algorithm" not in change
        result[section] = {**old, **change} if merges else change  # type: ignore[dict-item]
    return result


GRPO: dict[str, Any] = {
    "trainer": {"algorithm": "grpo", "epochs": 2, "minibatch": 16, "kl_stop": None},
    "environment": {"group_size": 4},
}
SFT: dict[str, Any] = {
    "policy": {"new": {"image_size": 0}, "path": None},
    "demonstrations": {"expert": 8},
    "trainer": {"algorithm": "sft", "steps_per_iteration": 3, "batch_size": 16},
}
DAGGER: dict[str, Any] = {
    "demonstrations": {"expert": 8},
    "trainer": {"algorithm": "dagger", "steps_per_iteration": 3, "batch_size": 16},
}


def config(place: Path, *, sampler: str | dict[str, Any] = "flow_sde", **changes: Any) -> VLAConfig:
    """`settings` through a YAML file and the loader, as the command line would."""
    path = place / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings(place, sampler=sampler, **changes)), encoding="utf-8")
    result = load(path)
    assert isinstance(result, VLAConfig)
    return result


@contextmanager
def opened(settings: VLAConfig) -> Iterator[VLARun]:
    with opening.opened(settings, KIND) as run:
        yield run


def weights(policy: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in policy.state_dict().items()}


def moved(policy: torch.nn.Module, before: Mapping[str, Tensor]) -> set[str]:
    return {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}


def gradients(one: VLARun) -> dict[str, Tensor]:
    trained = {name: p for name, p in one.policy.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}


def assert_gradients(actual: Mapping[str, Tensor], one: VLARun, rtol: float) -> set[str]:
    """They are those that a backward pass has left since. Returns the parts of the policy in which one is not 0."""
    wanted = gradients(one)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    assert actual.keys() == wanted.keys() and largest > 1e-3
    for name, gradient in wanted.items():
        torch.testing.assert_close(actual[name], gradient, rtol=rtol, atol=0.1 * rtol * largest, msg=name)
    return {name.split(".")[0] for name, gradient in wanted.items() if gradient.abs().max() > 0}


def trained_weights(run: Path) -> dict[str, Tensor]:
    return weights(load_policy(run / "policy"))


def train_file(path: str, resume: str | None = None) -> None:
    """Child: train the YAML file, or go on in the folder `resume`."""
    result = load(Path(path))
    assert isinstance(result, VLAConfig)
    train(result, Path(resume) if resume else None)
