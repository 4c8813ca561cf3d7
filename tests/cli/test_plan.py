"""`genrl plan`: the tree of a configuration as text, its calls by hand, and no torch."""

from __future__ import annotations

from typing import Any

import pytest

from genrl.cli.plan import lines
from genrl.config import load
from genrl.diffusion.config.estimate import plan
from genrl.diffusion.config.schema import Config
from tests.cli.commands import ROOT, run, words

TREE_RPO = {"algorithm": "dynamic_tree_rpo", "tree": {"ways": 8}}
PIPELINES = [path for path in sorted(ROOT.glob("configs/**/*.yaml")) if isinstance(load(path), Config)]


def config(trainer: dict[str, Any], iterations: int = 10, **sampling: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "org/model"},
            "prompts": {"train": "a.txt"},
            "rewards": [{"name": "shapes"}],
            "sampling": {"num_inference_steps": 10, "prompts_per_iteration": 4, "guidance_scale": 1.0, **sampling},
            "trainer": {"algorithm": "flow_grpo", **trainer},
            "evaluation": {"every": 0},
            "iterations": iterations,
        }
    )


TREE_GRPO = """\
steps 0, 1, 2 trained, in 50.4% of the iterations (7 shapes)
per prompt: 1 root, 27 leaves, 229 nodes, 228 edges
  steps  states  ways      noise   edges  trained
      0       1     3        0.7       3        3
      1       3     3        0.7       9        9
      2       9     3        0.7      27       27
    3-9      27     1       none     189        0
model calls in sampling: 202, 7.48 per image; independent rollouts with as many leaves: 270, ratio 0.748
model calls in training: 13, 0.48 per image, for 39 edges
steps 6, 7, 8 trained, in 0.8% of the iterations (7 shapes)
per prompt: 1 root, 27 leaves, 73 nodes, 72 edges
  steps  states  ways      noise   edges  trained
    0-5       1     1       none       6        0
      6       1     3        0.7       3        3
      7       3     3        0.7       9        9
      8       9     3        0.7      27       27
      9      27     1       none      27        0
model calls in sampling: 46, 1.70 per image; independent rollouts with as many leaves: 270, ratio 0.170
model calls in training: 13, 0.48 per image, for 39 edges

an iteration, 4 prompts x 27 = 108 images, mean of 10:
model calls in sampling: 709.7, 6.57 per image; independent rollouts: 1,080, ratio 0.657
model calls in training: 52, 0.48 per image; 52 of them with gradient"""


def test_tree_grpo() -> None:
    """202, 176, ... 46 calls by place, 177 of 270 on average: TreeGRPO's accounting (arXiv 2512.08153)."""
    tree = {"window": {"size": 3, "schedule": "geometric"}, "tree": {"ways": 3, "at": "window"}}
    assert "\n".join(lines(config(tree, group_size=27))) == TREE_GRPO


def test_branch_grpo_of_the_paper() -> None:
    """FLUX, 20 steps, splits at 0, 3, 6, 9: 203 calls for 16 leaves, whatever is trained."""
    tree = {"tree": {"ways": 2, "at": [0, 3, 6, 9], "spread": 4.0}}
    text = "\n".join(lines(config(tree, group_size=16, num_inference_steps=20)))
    assert "1 root, 16 leaves, 219 nodes, 218 edges" in text and "correlation 0.0588" in text
    assert "model calls in sampling: 203, 12.69 per image" in text
    assert "model calls in sampling: 812, 12.69 per image; independent rollouts: 1,280, ratio 0.634" in text


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        ({"window": {"size": 2}}, "steps 0, 1 trained, in 12.5% of the iterations (8 shapes)"),
        ({"window": {"size": 2, "schedule": "progressive", "every": 3}}, "steps 3, 4 trained, in 10.0% of the iter"),
        ({"window": {"size": 4, "schedule": "backward", "shortest": 1}}, "steps 8 trained, in "),
        ({"window": {"size": 2}, "tail_ratio": 0.4}, "the last 4 steps in place of 8 of the schedule's"),
        ({**TREE_RPO, "window": {"size": 2}}, "layer_tuning evaluates the best path"),
        ({"window": {"size": 2}, "tree": {"ways": 8, "contrast": True}}, "training calls are at most these"),
        ({"tree": {"ways": 2, "at": [0], "prune": {"width": "best_sibling"}}}, "training calls are at most these"),
        (
            {"tree": {"ways": 2, "at": [0], "prune": {"depths": [4], "slide_every": 2}}},
            "steps 0, 1, 2, 4, 5, 6, 7, 8 tr",
        ),
        ({"kl_weight": 0.1}, "model calls in training: 576, 18.00 per image; 288 of them with gradient"),
    ],
)
def test_words(trainer: dict[str, Any], says: str) -> None:
    text = "\n".join(lines(config(trainer)))
    assert says in text, text


def test_totals_are_those_of_check() -> None:
    for path in PIPELINES:
        found = load(path)
        text, expected = "\n".join(lines(found)), plan(found)
        for what, calls in (("sampling", expected.sample_calls), ("training", expected.train_calls)):
            assert f"model calls in {what}: {round(calls, 1):,}".removesuffix(".0") in text, path


def test_guidance_counts_twice() -> None:
    once, twice = (list(lines(config({}, guidance_scale=scale))) for scale in (1.0, 4.5))
    assert "model calls in sampling: 320, 10.00 per image; independent rollouts: 320, ratio 1.000" in once
    assert "model calls in sampling: 640, 20.00 per image; independent rollouts: 640, ratio 1.000" in twice
    assert twice[-1] == "a step with guidance counts as two calls"


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert "per prompt: 1 root, 12 leaves" in run("plan", "configs/flow_grpo.yaml", "trainer.tree={ways: 12}")
    wrong = run("plan", "configs/flow_grpo.yaml", "trainer.tree={ways: 5}", code=2)
    assert "12 samples are not whole trees of 5 leaves; use 10 or 15" in wrong
    for kind, what in (("vla/flow_sde", "a policy"), ("vlm/grpo", "a vision-language model")):
        assert f"trains {what}" in words(run("plan", f"configs/{kind}.yaml", code=2))
