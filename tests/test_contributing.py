"""CONTRIBUTING.md, "Adding something": the files that it names are there, and one of each can be added from outside."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
import yaml

import genrl_rewards
from benchmarks import brief_runs
from genrl.config import RunConfig, load
from genrl.config.method import built_in_names, find_method
from genrl.config.plugins import find
from genrl.diffusion.config.kernels import find_kernel
from genrl.runtime.folder.run import Run
from genrl.runtime.loop import frame
from genrl.vla.config.names import POLICIES
from genrl.vla.policies.embedded import EmbeddedConfig
from genrl.vla.policies.policy import ACTION, STATE, Inputs
from genrl.vla.policies.robot import statistics
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.tables import open_environment
from genrl.vlm.config.names import TASKS
from tests.cli.commands import run as command
from tests.cli.commands import words
from tests.planted import replayed
from tests.run_folders import assert_resumes, differences, rows
from tests.vla import vla_runs

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


def test_the_files_to_touch_are_there_and_the_page_shows_its_examples(root: Path) -> None:
    section = Path("CONTRIBUTING.md").read_text().partition("## Adding something")[2].partition("\n## ")[0]
    named = [name for name in re.findall(r"`([\w./]+/[\w./]*)`", section) if not {"NAME", "KIND"} & {*name.split("/")}]
    assert len(named) > 12 and [name for name in named if not Path(name).exists()] == []
    for kind in ("diffusion", "vla", "vlm"):  # of NAME and KIND
        assert Path(f"configs/{kind}").is_dir()
        for name in built_in_names(kind):  # type: ignore[arg-type]
            folder = Path(f"genrl/{kind}/methods/{name}")
            assert (folder / "settings.py").is_file() and (folder / "train.py").is_file()
    page = (root / "docs" / "extending.md").read_text(encoding="utf-8")
    shown = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.DOTALL)
    for name in ("example_method.py", "example_method.yaml"):
        assert (root / "docs" / name).read_text(encoding="utf-8") in shown
    assert len((root / "docs" / "example_method.py").read_text(encoding="utf-8").splitlines()) <= 60


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


# -- docs/extending.md: what it shows is trained as it says
EXAMPLE = Path("docs/example_method.yaml")


def example(*changes: str) -> RunConfig:
    """The page's configuration in brief."""
    tree = brief_runs.load(EXAMPLE)
    small = brief_runs.overrides(tree, 2) | {"evaluation.every": 0, "evaluation.num_prompts": 2}
    small |= {"sampling.group_size": 4, "sampling.batch_size": 4, "sampling.num_inference_steps": 4}
    return load(EXAMPLE, [*(f"{key}={number}" for key, number in small.items()), "trackers=[]", *changes])


@pytest.mark.slow
def test_the_example_is_trained_as_the_page_shows(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed, too, and replayed."""
    monkeypatch.chdir(root)

    def config(name: str, iterations: int) -> RunConfig:
        return example(f"output={tmp_path / name}", f"iterations={iterations}")

    whole = frame.train(config("whole", 2))
    frame.train(config("parts", 1))
    assert differences(whole, frame.train(config("parts", 2), resume=tmp_path / "parts")) == []
    replayed(config("planted", 2), monkeypatch)
    assert all(row["rwr/weight_max"] > 1.0 and row["updates"] == 2.0 for row in rows(whole))
    assert load(Run(whole).config).trainer.algorithm == "docs/example_method.py:RewardWeighted"


def test_commands_know_the_example(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert "valid" in command("check", str(EXAMPLE))
    explained = words(command("check", str(EXAMPLE), "--explain"))
    assert "trainer.temperature: 1 T in w = exp(A / T)" in explained
    assert "RewardWeighted trains on finished samples at noise levels" in command("plan", str(EXAMPLE))
    schema = jsonschema.Draft202012Validator(json.loads(command("config", "schema", str(EXAMPLE))))
    tree = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    base = yaml.safe_load((root / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
    said = {**base, **tree, "optimizer": {}}
    schema.validate(said)
    said["trainer"] = {**tree["trainer"], "temperatur": 1}
    assert not schema.is_valid(said)


def test_a_policy_of_ones_own_is_trained_and_resumed(tmp_path: Path) -> None:
    """What is for pictures and answers: tests/diffusion/methods/test_outside_kernels.py, tests/vlm/test_outside.py."""
    (tmp_path / "own.py").write_text(OWN)
    policy = {"path": None, "new": {"type": f"{tmp_path / 'own.py'}:Policy", "image_size": 0}}
    config = vla_runs.config(tmp_path, **vla_runs.SFT | {"policy": policy}, iterations=2)
    assert_resumes(frame.train, config, tmp_path)
    assert "valid" in command("check", str(tmp_path / "tiny.yaml"))
