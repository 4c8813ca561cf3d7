"""Whole tiny runs of the policies that make pictures, masked texts, bodies and tunes; their losses by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from genrl.cli.app import app
from genrl.config import load
from genrl.objectives.preferences import pair_loss
from genrl.vlm.methods.policy_loss import estimate, policy_loss
from genrl.vlm.policies.folder import load_trained
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.rollout.rollout import draw
from genrl.vlm.rollout.token_batch import TokenBatch
from genrl.vlm.train import train
from tests.run_folders import rows
from tests.vlm import vlm_runs
from tests.vlm.tiers import fast_first

ASSETS = Path(__file__).resolve().parents[2] / "assets"
GROUPS = {"prompts_per_iteration": 2, "group_size": 3}
KINDS: dict[str, dict[str, Any]] = {
    "image": {
        "vlm": {"path": str(ASSETS / "tiny-janus"), "output": "image"},
        "task": {"name": "captions"},
        "generation": {**GROUPS, "max_new_tokens": 16},
        "rewards": [{"name": "shapes"}],
    },
    "masked_text": {
        "vlm": {"path": str(ASSETS / "tiny-dllm"), "output": "masked_text"},
        "task": {"name": "sums"},
        "generation": {**GROUPS, "max_new_tokens": 9, "elbo_samples": 3, "denoising_steps": 3},
        "rewards": [{"name": "exact"}],
    },
    "voxels": {
        "vlm": {"path": str(ASSETS / "tiny-bodies"), "output": "voxels"},
        "task": {"name": "bodies"},
        "generation": {**GROUPS, "max_new_tokens": 24},
        "rewards": [{"name": "shapes", "views": "max"}, {"name": "shapes", "views": "sum", "weight": 0.1}],
    },
    "audio": {
        "vlm": {"path": str(ASSETS / "tiny-tunes"), "output": "audio"},
        "task": {"name": "tunes"},
        "generation": {**GROUPS, "max_new_tokens": 11, "temperature": 0.99},
        "rewards": [
            {"name": "rewards/genrl_rewards/scorers/texts/tunes.py:text_fit"},
            {"name": "rewards/genrl_rewards/scorers/texts/tunes.py:sound_quality"},
        ],
    },
}


def config(place: Path, kind: str, preset: str, **changes: Any) -> Any:
    place.mkdir(parents=True, exist_ok=True)
    return vlm_runs.config(place, **{**KINDS[kind], "trainer": {"preset": preset}, "iterations": 2, **changes})


@pytest.mark.parametrize("recipe", fast_first(("janus_pro_7b_grpo", "janus_pro_7b_dpo"), ("janus_pro_7b_grpo",)))
def test_recipes_for_a_published_model_train_a_tiny_one(recipe: str, tmp_path: Path) -> None:
    changes = [
        f"vlm.path={ASSETS / 'tiny-janus'}",
        "vlm.dtype=float32",
        "task={name: captions}",
        "generation={prompts_per_iteration: 2, group_size: 4, max_new_tokens: 16, guidance_scale: 5.0, batch_size: 8}",
        "rewards=[{name: shapes}]",
        "trainer.micro_batch=8",
        "evaluation.every=0",
        "trackers=[]",
        "iterations=1",
        f"output={tmp_path / 'run'}",
    ]
    train(load(ASSETS.parent / "configs" / "vlm" / f"{recipe}.yaml", changes))
    (row,) = rows(tmp_path / "run")
    assert row["updates"] == 1 and row["grad_norm"] > 0


def test_pictures_are_kept_judged_and_exported(tmp_path: Path) -> None:
    evaluation = {"every": 1, "questions": 4, "blind": True}
    settings = config(tmp_path, "image", "grpo", iterations=1, evaluation=evaluation)
    run = train(settings)
    assert Image.open(run / "samples" / "step-000000" / "00.png").size == (32, 32)
    judged = [row for row in rows(run) if "eval/shapes_mean" in row]
    assert len(judged) == 2 and "eval/accuracy_blind" not in judged[0]
    out = tmp_path / "out"
    told = CliRunner().invoke(app, ["export", str(run), "--out", str(out)])
    assert told.exit_code == 0, told.output
    scores = tmp_path / "scores.json"
    for model in ([str(run)], [str(out), "--config", str(tmp_path / "tiny.yaml")]):
        told = CliRunner().invoke(app, ["eval", *model, "--num-prompts", "4", "--out", str(scores)])
        assert told.exit_code == 0, told.output
        found = json.loads(scores.read_text())["scores"]["eval/shapes_mean"]
        assert found == pytest.approx(judged[1]["eval/shapes_mean"])


def test_tunes_are_kept_and_the_policy_alone_is_loaded(tmp_path: Path) -> None:
    run = train(config(tmp_path, "audio", "music_rl", iterations=1, evaluation={"every": 1, "questions": 2}))
    assert (run / "samples" / "step-000001-00.wav").read_bytes()[:4] == b"RIFF"
    policy = load_trained(config(tmp_path / "again", "audio", "music_rl"), run)
    weights = {name: p for name, p in policy.model.named_parameters()}
    assert not any("baseline" in name for name in weights)


def test_a_shape_has_one_score_of_its_views_for_each_step(tmp_path: Path) -> None:
    settings = config(tmp_path, "voxels", "hi_grpo")
    with vlm_runs.opened(settings) as run:
        answers, _ = run.draw()
        ready = run.estimate(answers)
    assert set(answers.scores) == {"shapes", "shapes/coarse", "shapes-2", "shapes-2/coarse"}
    best, total = answers.scores["shapes"], answers.scores["shapes-2"]
    assert bool((total <= 6 * best + 1e-9).all()) and bool((total >= best - 1e-9).all())
    assert ready is not None
    advantage, step = ready.batch.advantage, ready.batch.extra["step"]
    assert advantage is not None and advantage.shape == step.shape
    for row in range(len(step)):
        for number in (0, 1):
            assert len(advantage[row][step[row] == number].unique()) == 1


class TestLosses:
    def test_dpo_is_of_the_best_and_the_worst_of_each_group(self) -> None:
        generator = torch.Generator().manual_seed(0)
        new, ref = (torch.randn(9, 5, generator=generator, dtype=torch.float64) for _ in range(2))
        new.requires_grad_()
        mask = torch.arange(5) < torch.tensor([5, 4, 3] * 3)[:, None]
        rewards = torch.tensor([0.2, 0.9, 0.5, 1.0, 1.0, 1.0, 0.1, 0.1, 0.7])
        group = torch.arange(3).repeat_interleave(3)
        batch = TokenBatch(mask, group, rewards, old_log_prob=new.detach(), ref_log_prob=ref)
        found = policy_loss(PRESETS["dpo"], estimate(PRESETS["dpo"], batch).batch.with_log_prob(new)).loss
        own, old = ((values * mask).sum(1) for values in (new, ref))
        pairs = ((1, 0), (8, 6))  # the second group has no spread
        gain = own - old
        wanted = sum(pair_loss("sigmoid", gain[[a]], gain[[b]], beta=0.1).loss.sum() for a, b in pairs)
        assert torch.allclose(found, wanted / 3)

    def test_hi_grpo_is_the_sum_of_the_token_means_of_its_two_steps(self) -> None:
        generator = torch.Generator().manual_seed(1)
        new: Tensor = torch.randn(4, 6, generator=generator, dtype=torch.float64).requires_grad_()
        step = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]] * 2)
        mask = torch.ones(4, 6, dtype=torch.bool)
        mask[0, 5] = False
        high, low = (torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(2))
        extra = {"step": step, "high": high, "low": low}
        same = new.detach()
        batch = TokenBatch(mask, torch.tensor([0, 0, 1, 1]), low, old_log_prob=same, ref_log_prob=same, extra=extra)
        found = policy_loss(PRESETS["hi_grpo"], estimate(PRESETS["hi_grpo"], batch).batch.with_log_prob(new)).loss
        loss = torch.zeros((), dtype=torch.float64)
        for number, reward in ((0, high + 0.5 * low), (1, low)):
            pairs = reward.view(2, 2)
            advantage = ((pairs - pairs.mean(1, keepdim=True)) / pairs.std(1, keepdim=True)).flatten()
            kept = mask & (step == number)
            loss = loss - ((new - same).exp() * advantage[:, None])[kept].sum() / kept.sum()
        wanted, given = (torch.autograd.grad(value, new, retain_graph=True)[0] for value in (loss, found))
        assert torch.allclose(found, loss, atol=1e-6) and torch.allclose(given, wanted, atol=1e-6)

    def test_one_mask_at_a_time_has_the_gradient_of_all(self, tmp_path: Path) -> None:
        """BGPO on a real model: the estimates' gradient, column by column, is that of the exact loss on policy."""
        settings = config(tmp_path, "masked_text", "bgpo")
        with vlm_runs.opened(settings) as run:
            policy: Any = run.policy
            answers = draw(policy, settings, run.opened, [run.questions[0]], (0, "x"))
            advantage = torch.tensor([1.0, -1.0, 0.5])
            arguments = (answers.prompts, answers.tokens, answers.mask)
            elbo = policy.log_probs(*arguments, group=answers.group).log_prob
            (-advantage[:, None] * elbo).mean().backward()  # on policy: the gradient of -A exp(mean d)
            wanted = [p.grad.clone() for p in policy.parameters]
            policy.model.zero_grad()
            again = policy.log_probs(*arguments, group=answers.group).log_prob
            batch = TokenBatch(
                torch.ones(3, 3).bool(), answers.group, old_log_prob=elbo.detach(), advantage=advantage, rows=3
            )
            policy_loss(PRESETS["bgpo"], batch.with_log_prob(again)).loss.backward()
            assert all(torch.allclose(p.grad, w, atol=1e-6) for p, w in zip(policy.parameters, wanted, strict=True))
