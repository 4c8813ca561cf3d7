"""docs/extending.md: what it shows is trained as it says, and so is what lies in a folder of somebody's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from benchmarks import brief_runs
from genrl.config import AnyConfig, load
from genrl.config.method import Kind
from genrl.runtime import frame
from genrl.runtime.run import Run
from tests.cli.commands import run as command
from tests.cli.commands import words
from tests.diffusion import runs
from tests.planted import replayed
from tests.run_folders import differences, rows
from tests.vla import vla_runs
from tests.vlm import vlm_runs

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

EXAMPLE = Path("docs/example_method.yaml")

SETTINGS = '''
from typing import ClassVar

from genrl.config.{kind}_method import {base}
from genrl.config.method import MetricDoc
from genrl.config.section import Positive


class Own({base}):
    """A method of somebody's own."""

    metrics: ClassVar = {{"own/strength": MetricDoc("the key", "As it was set.")}}
    {facts}

    strength: Positive = 1.0
    """Factor on the loss."""
'''
FACTS: dict[Kind, tuple[str, str]] = {
    "diffusion": ("DiffusionMethod", "deterministic: ClassVar[bool] = True"),
    "vla": ("VLAMethod", 'imitates: ClassVar[str] = "always"\n    whole_chain: ClassVar[bool] = True'),
    "vlm": ("VLMMethod", ""),
}
TRAIN: dict[Kind, str] = {
    "diffusion": """
from genrl.diffusion.methods.metering import Meter
from genrl.diffusion.methods.noising import noised, own_noise
from genrl.diffusion.methods.updating import update
from genrl.diffusion.rollout.forest import independent
from genrl.objectives.forward.forward_process import matching_error


def train(run, settings):
    for _ in run.iterations():
        rollouts = run.collect(lambda policy, batch, slots, beat: independent(policy.roll_out(batch), slots))

        def prepare(samples, epoch, k):
            given = noised(samples.final, own_noise(samples, epoch, k), samples.sigmas[1].to(samples.final))
            return samples.batch, given | {"reward": rollouts.total[samples.slots].to(samples.final)}

        update(run, settings, rollouts, 1, prepare, loss, meter := Meter())
        run.finish(meter.result() | {"own/strength": settings.strength})


def loss(settings, policy, recorded):
    velocity = policy.velocity(recorded.batch, recorded["noisy"], recorded["sigma"])
    error = matching_error(velocity, recorded["target"])
    return {"loss": settings.strength * recorded["reward"] * error, "model_output": velocity}
""",
    "vla": """
import torch
from genrl.mdp.noise import generator
from genrl.vla.methods.imitation import imitation_loss, recorded_frames
from genrl.vla.rollout.sampling import Acting


def train(run, settings):
    for iteration in run.loop.iterations():
        rng = generator(run.config.seed, "own", iteration)
        index = torch.randint(len(run.frames["action"]), (16,), generator=rng)
        recorded = recorded_frames(run.policy, run.frames, index, rng, torch.ones(1))
        results = loss(settings, Acting(run.policy, None), recorded)
        run.loop.backward(settings, results, recorded)
        norms = run.loop.step(["policy"])
        row = {"loss": float(results["loss"].detach()), "grad_norm/policy": norms["policy"], "lr": run.loop.lr}
        run.loop.finish(row | {"own/strength": settings.strength})


def loss(settings, acting, recorded):
    return {"loss": settings.strength * imitation_loss(acting.policy, recorded)}
""",
    "vlm": """
from genrl.runtime.recorded import Recorded
from genrl.vlm.rollout.recorded import Asked
from genrl.vlm.rollout.rollout import totals


def train(run, settings):
    for _ in run.loop.iterations():
        answers, row = run.draw()
        reward = totals(run.config, answers.scores).float()
        asked = Asked(answers.prompts, answers.group, run.config.generation.temperature)
        given = {"tokens": answers.tokens, "mask": answers.mask, "advantage": reward - reward.mean()}
        recorded = Recorded(asked, given)
        results = loss(settings, run.policy, recorded)
        run.loop.backward(settings, results, recorded)
        norms = run.loop.step(["policy"])
        row |= {"loss": float(results["loss"].detach()), "grad_norm": norms["policy"], "lr": run.loop.lr}
        run.loop.finish(row | {"own/strength": settings.strength})


def loss(settings, policy, recorded):
    asked = recorded.batch
    now = policy.log_probs(
        asked.prompts, recorded["tokens"], recorded["mask"], group=asked.group, temperature=asked.temperature
    )
    each = recorded["advantage"] * now.log_prob.sum(1)
    return {"loss": -settings.strength * each.mean(), "log_prob": now.log_prob}
""",
}


def example(*changes: str) -> AnyConfig:
    """The page's configuration in brief."""
    tree = brief_runs.load(EXAMPLE)
    small = brief_runs.overrides(tree, 2) | {"evaluation.every": 0, "evaluation.num_prompts": 2}
    return load(EXAMPLE, [*(f"{key}={number}" for key, number in small.items()), "trackers=[]", *changes])


def own(kind: Kind, place: Path, algorithm: str = "", **changes: Any) -> AnyConfig:
    """A tiny run of a kind in `place`, by the method `algorithm`."""
    place.mkdir(exist_ok=True)
    trainer = {"trainer": {"algorithm": algorithm}} if algorithm else {}
    if kind == "diffusion":
        runs.write_folder(place)
        return runs.config(place, vlm_runs.MODEL.parent / "tiny-t2i", **trainer, evaluation={"every": 0}, **changes)
    if kind == "vla":
        return vla_runs.config(place, **{**vla_runs.SFT, **trainer, **changes})
    (place / "tiny.yaml").write_text(yaml.safe_dump(vlm_runs.settings(place, **changes) | trainer), encoding="utf-8")
    return load(place / "tiny.yaml")


def trains_resumes_and_replays(config: Callable[..., AnyConfig], monkeypatch: pytest.MonkeyPatch) -> Path:
    """config(folder name, iterations). Returns the folder of a run of two iterations."""
    whole = frame.train(config("whole", 2))
    frame.train(config("parts", 1))
    parts = frame.train(config("parts", 2), resume=Path(config("parts", 2).output))
    assert differences(whole, parts) == []
    replayed(config("planted", 2), monkeypatch)
    return whole


def test_the_page_shows_the_files(root: Path) -> None:
    page = (root / "docs" / "extending.md").read_text(encoding="utf-8")
    shown = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.DOTALL)
    for name in ("example_method.py", "example_method.yaml"):
        assert (root / "docs" / name).read_text(encoding="utf-8") in shown
    assert len((root / "docs" / "example_method.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.slow
def test_the_example_is_trained_as_the_page_shows(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    whole = trains_resumes_and_replays(
        lambda name, iterations: example(f"output={tmp_path / name}", f"iterations={iterations}"), monkeypatch
    )
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["diffusion", "vla", "vlm"])
def test_a_folder_of_ones_own(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, facts = FACTS[kind]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "settings.py").write_text(SETTINGS.format(kind=kind, base=base, facts=facts))
    (tmp_path / "mine" / "train.py").write_text(TRAIN[kind])
    name = f"{tmp_path / 'mine' / 'settings.py'}:Own"
    whole = trains_resumes_and_replays(
        lambda place, iterations: own(kind, tmp_path / place, name, iterations=iterations), monkeypatch
    )
    assert [row["own/strength"] for row in rows(whole)] == [1.0, 1.0]
    file = tmp_path / "whole" / "tiny.yaml"
    assert "valid" in command("check", str(file))
    assert "trainer.strength: 1 Factor on the loss." in words(command("check", str(file), "--explain"))


KERNEL = '''
def ahead(x, velocity, sigma, sigma_next, *, noise_level):
    """The ODE's step, and noise in proportion to its length."""
    return x + (sigma_next - sigma) * velocity, noise_level * (sigma - sigma_next)
'''
TASK = '''
from PIL import Image
from genrl.vlm.tasks.rows import Question

COLOURS = {"red": (200, 30, 30), "blue": (30, 30, 200)}

def plain(rng, split):
    """Which colour a picture has."""
    colour = sorted(COLOURS)[rng.integers(2)]
    return Question((Image.new("RGB", (48, 48), COLOURS[colour]), "which colour have most shapes ?"), colour, 1, {})
'''
POLICY = """
import torch
from torch import nn
from genrl.vla.policies.embedded import EmbeddedPolicy

class Linear(EmbeddedPolicy):
    def __init__(self, config, stats):
        super().__init__(config, stats)
        numbers = config.horizon * config.action_dim
        self.body = nn.Linear(self.encoder.size + numbers + 1, numbers)

    def velocity(self, context, x, sigma):
        told = torch.cat([context["features"], x.flatten(1), sigma[:, None]], 1)
        return self.body(told).view(x.shape)
"""
OUTSIDE: dict[str, tuple[Kind, str, Callable[[str], dict[str, Any]]]] = {
    "ahead": (
        "diffusion",
        KERNEL,
        lambda name: {"trainer": {"algorithm": "flow_grpo", "kernel": name, "noise_level": 0.5}},
    ),
    "plain": ("vlm", TASK, lambda name: {"task": {"name": name}}),
    "Linear": ("vla", POLICY, lambda name: {"policy": {"path": None, "new": {"type": name, "image_size": 0}}}),
}
"""Name -> kind of run, source, and the sections that name it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_kernel_a_task_and_a_policy_of_ones_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, source, sections = OUTSIDE[name]
    (tmp_path / "mine.py").write_text(source)
    changes = sections(f"{tmp_path / 'mine.py'}:{name}")
    trains_resumes_and_replays(
        lambda place, iterations: own(kind, tmp_path / place, iterations=iterations, **changes), monkeypatch
    )
    assert "valid" in command("check", str(tmp_path / "whole" / "tiny.yaml"))
