"""Policies of a file outside the package: trained, saved, loaded, evaluated and resumed as those that are built in."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from genrl.config.plugins import import_file
from genrl.runtime.loop.progress import Progress
from genrl.vla.config.schema import VLAConfig
from genrl.vla.policies.folder import load_policy, policy_class
from genrl.vla.setup import load_trained
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.tables import open_environment
from genrl.vla.train import judge_policy, train
from tests.vla import vla_runs

SOURCE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from genrl.vla.policies.embedded import EmbeddedConfig, EmbeddedPolicy


@dataclass(frozen=True)
class WideConfig(EmbeddedConfig):
    width: int = 8


class Wide(EmbeddedPolicy):
    """As in the documentation of `genrl.vla.policies.policy`, with a setting."""

    Config: ClassVar = WideConfig

    def __init__(self, config, stats):
        super().__init__(config, stats)
        numbers = config.horizon * config.action_dim
        self.body = nn.Sequential(
            nn.Linear(self.encoder.size + numbers + 1, config.width), nn.Mish(), nn.Linear(config.width, numbers)
        )
        if config.critic:
            self.value_head = nn.Linear(self.encoder.size, config.critic)

    def velocity(self, context, x, sigma):
        told = torch.cat([context["features"], x.flatten(1), sigma[:, None]], 1)
        return self.body(told).view(x.shape)


class Dreamer:
    def encode(self, observation): ...


number = 3
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


def imitated(place: Path, name: str, sampler: str = "flow_sde", **new: Any) -> VLAConfig:
    sft = {**vla_runs.SFT, "policy": {"path": None, "new": {"type": name, "image_size": 0, **new}}}
    return vla_runs.config(place, sampler=sampler, iterations=2, **sft)


def test_sft_then_ppo_then_grpo(file: Path, tmp_path: Path) -> None:
    """Every one from the run before it."""
    name = f"{file}:Wide"
    for folder in ("sft", "ppo", "grpo"):
        (tmp_path / folder).mkdir()
    run = train(imitated(tmp_path / "sft", name, args={"width": 12}))
    policy = load_policy(run / "policy")
    assert type(policy).__name__ == "Wide" and policy.name == name and not policy.critic and policy.config.width == 12
    config = vla_runs.config(tmp_path / "ppo", policy={"path": str(run)}, iterations=2)
    whole = train(config)
    assert load_policy(whole / "policy").critic == 1
    before, after = load_trained(whole, step=1), load_trained(whole)
    assert vla_runs.moved(after, vla_runs.weights(before)) >= {"body.0.weight", "value_head.weight"}
    with Progress(1, enabled=False) as progress:
        found = judge_policy(config, whole, progress)
    assert len(found.success) == config.evaluation.episodes
    last = train(vla_runs.config(tmp_path / "grpo", policy={"path": str(whole)}, iterations=1, **vla_runs.GRPO))
    assert not load_policy(last / "policy").critic


def test_what_it_cannot_do_is_told_before_anything_is_written(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sampler.kind: diffusion needs a policy that predicts noise"):
        train(imitated(tmp_path, f"{file}:Wide", "diffusion"))
    with pytest.raises(ValueError, match=r"policy.new.args: .*Wide has no \['wide'\]; it has \['width'\]"):
        train(imitated(tmp_path, f"{file}:Wide", args={"wide": 3}))
    with pytest.raises(ValueError, match="has no noise head; choose a sampler that learns no noise"):
        run = train(imitated(tmp_path, f"{file}:Wide"))
        train(vla_runs.config(tmp_path, sampler="reinflow", policy={"path": str(run)}, output=str(tmp_path / "b")))
    assert not (tmp_path / "b" / "policy").exists()


def test_an_installed_policy_and_an_installed_simulator(
    file: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their names in the entry point groups; the configuration knows them, too."""
    found = {
        "genrl.policies": EntryPoint("linear", "own_package:Wide", "genrl.policies"),
        "genrl.simulators": EntryPoint("corners", "own_package:make", "genrl.simulators"),
    }
    kind = policy_class(f"{file}:Wide")
    simulator = import_file(root / "docs" / "example_simulator.py")
    package = ModuleType("own_package")
    package.Wide, package.make = kind, simulator.make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_package", package)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [found[group]] if group in found else [])
    config = imitated(tmp_path, "linear")
    assert config.policy.new is not None and policy_class(config.policy.new.type) is kind
    env = open_environment(Simulation("corners", num_envs=2, chunk=2, tasks=("red",), max_steps=9))
    observation, _ = env.reset(seed=0)
    assert env.task_description == ["go to the red corner"] * 2 and observation["agent_pos"].shape == (2, 2)
    env.close()


def test_classes_that_are_no_policies(file: Path) -> None:
    with pytest.raises(ValueError, match="Dreamer has no tokenise, normalised, actions, with_heads, save, load"):
        policy_class(f"{file}:Dreamer")
    with pytest.raises(ValueError, match="number is no class"):
        policy_class(f"{file}:number")
    with pytest.raises(ValueError, match="did you mean Wide"):
        policy_class(f"{file}:Widde")
    with pytest.raises(ValueError, match="did you mean smolvla"):
        policy_class("smol_vla")
