"""CONTRIBUTING.md, "Adding something": the files that it names are there, and one of each can be added from outside."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch

import genrl_rewards
from genrl.config.method import built_in_names, find_method
from genrl.config.plugins import find
from genrl.diffusion.config.kernels import find_kernel
from genrl.vla.config.names import POLICIES
from genrl.vla.policies.embedded import EmbeddedConfig
from genrl.vla.policies.normalise import statistics
from genrl.vla.policies.policy import ACTION, STATE, Inputs
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.tables import open_environment
from genrl.vlm.config.names import TASKS

OWN = '''
import gymnasium
import numpy as np
from torch import nn

from genrl.diffusion.config.schema import Updating
from genrl.vla.policies.embedded import EmbeddedPolicy


class Method(Updating):
    """A method."""

    takes = frozenset({"older_samples"})


def train(run, settings): ...


def loss(settings, policy, recorded): ...


def kernel(x, velocity, sigma, sigma_next, *, noise_level):
    return x + (sigma_next - sigma) * velocity, noise_level


def darkness(images):
    return 1.0 - images.mean((1, 2, 3))


class Policy(EmbeddedPolicy):
    def __init__(self, config, stats):
        super().__init__(config, stats)
        self.out = nn.Linear(self.encoder.size, config.horizon * config.action_dim)

    def velocity(self, context, x, sigma):
        return self.out(context["features"]).view(x.shape) - x


class Walk(gymnasium.Env):
    task_description = "walk away"
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.uniform(size=1)
        return self.at, {}

    def step(self, action):
        self.at = self.at + action
        return self.at, 0.0, False, False, {"is_success": bool(self.at[0] > 2.5)}


def walk():
    return Walk()


def task(rng, split):
    raise NotImplementedError
'''


def test_the_files_to_touch_are_there() -> None:
    section = Path("CONTRIBUTING.md").read_text().partition("## Adding something")[2].partition("\n## ")[0]
    named = [name for name in re.findall(r"`([\w./]+/[\w./]*)`", section) if not {"NAME", "KIND"} & {*name.split("/")}]
    assert len(named) > 12 and [name for name in named if not Path(name).exists()] == []
    for kind in ("diffusion", "vla", "vlm"):  # of NAME and KIND
        assert Path(f"configs/{kind}").is_dir()
        for name in built_in_names(kind):  # type: ignore[arg-type]
            folder = Path(f"genrl/{kind}/methods/{name}")
            assert (folder / "settings.py").is_file() and (folder / "train.py").is_file()


def test_one_of_each_is_added_from_outside(tmp_path: Path) -> None:
    (file := tmp_path / "own.py").write_text(OWN)
    assert find_method(f"{file}:Method", "diffusion")(algorithm="own").takes == {"older_samples"}
    mean, std = find_kernel(f"{file}:kernel")(torch.ones(2), torch.ones(2), 1.0, 0.5, noise_level=0.3)
    assert mean.tolist() == [0.5, 0.5] and std == 0.3
    scores = genrl_rewards.score(genrl_rewards.load(f"{file}:darkness"), images=torch.zeros(1, 3, 4, 4), prompts=["a"])
    assert list(scores.values) == [1.0]
    stats = {STATE: statistics(torch.randn(9, 1)), ACTION: statistics(torch.randn(9, 1))}
    policy = find(f"{file}:Policy", POLICIES)(EmbeddedConfig(Inputs(1, ("go",)), 1, 2), stats)
    seen = {STATE: torch.zeros(3, 1), "observation.language.tokens": policy.tokenise(["go"] * 3)}
    assert policy.velocity(policy.encode(seen), torch.zeros(3, 2, 1), torch.ones(3)).shape == (3, 2, 1)
    env = open_environment(Simulation(f"{file}:walk", chunk=2, num_envs=2, max_steps=6))
    env.reset(seed=0)
    assert not env.step(np.ones((2, 2, 1), np.float32))[4]["is_success"].all()
    assert env.step(np.ones((2, 2, 1), np.float32))[4]["is_success"].all() and env.task_description[0] == "walk away"
    env.close()
    assert callable(find(f"{file}:task", TASKS))
