"""Whole tiny runs of the policies that make pictures, masked texts, bodies and tunes; their losses by hand."""

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from genrl.cli.app import app
from genrl.config import dump, load
from genrl.objectives.preferences import pair_loss
from genrl.runtime.show.compare.page import Page, key_path
from genrl.vlm.evaluate import compare
from genrl.vlm.methods.policy_loss import estimate, policy_loss
from genrl.vlm.policies.folder import load_trained
from genrl.vlm.recipe.presets import PRESETS
from genrl.vlm.rollout.token_batch import TokenBatch
from genrl.vlm.train import train
from genrl_rewards.scorers.texts.tunes import sound_quality
from tests.cli import commands
from tests.run_folders import rows, tiered
from tests.runtime.show.compare import pages
from tests.vlm import vlm_runs

ASSETS = Path(__file__).resolve().parents[2] / "assets"
GROUPS = {"prompts_per_iteration": 2, "group_size": 3}
TUNES = "rewards/genrl_rewards/scorers/texts/tunes.py"
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
        "generation": {**GROUPS, "max_new_tokens": 9, "denoising_steps": 3},
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
        "rewards": [{"name": f"{TUNES}:text_fit"}, {"name": f"{TUNES}:sound_quality"}],
    },
}


def config(place: Path, kind: str, preset: str, **changes: Any) -> Any:
    place.mkdir(parents=True, exist_ok=True)
    return vlm_runs.config(place, **{**KINDS[kind], "trainer": {"preset": preset}, "iterations": 2, **changes})


@pytest.mark.parametrize("recipe", tiered(("janus_pro_7b_grpo", "janus_pro_7b_dpo"), ("janus_pro_7b_grpo",)))
def test_recipes_for_a_published_model_train_a_tiny_one(recipe: str, tmp_path: Path) -> None:
    changes = [f"vlm.path={ASSETS / 'tiny-janus'}", "vlm.dtype=float32", "task={name: captions}", "trackers=[]"]
    made = "prompts_per_iteration: 2, group_size: 4, max_new_tokens: 16, guidance_scale: 5.0, batch_size: 8"
    changes += [f"generation={{{made}}}", "rewards=[{name: shapes}]", "trainer.micro_batch=8", "evaluation.every=0"]
    changes += ["iterations=1", f"output={tmp_path / 'run'}"]
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
    printed = CliRunner().invoke(app, ["export", str(run), "--out", str(out)])
    assert printed.exit_code == 0, printed.output
    scores = tmp_path / "scores.json"
    for model in ([str(run)], [str(out), "--config", str(tmp_path / "tiny.yaml")]):
        printed = CliRunner().invoke(app, ["eval", *model, "--num-prompts", "4", "--out", str(scores)])
        assert printed.exit_code == 0, printed.output
        result = json.loads(scores.read_text())["scores"]["eval/shapes_mean"]
        assert result == pytest.approx(judged[1]["eval/shapes_mean"])


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
        actual = policy_loss(PRESETS["dpo"], estimate(PRESETS["dpo"], batch).batch.with_log_prob(new)).loss
        own, old = ((values * mask).sum(1) for values in (new, ref))
        pairs = ((1, 0), (8, 6))  # the second group has no spread
        gain = own - old
        wanted = sum(pair_loss("sigmoid", gain[[a]], gain[[b]], beta=0.1).loss.sum() for a, b in pairs)
        assert torch.allclose(actual, wanted / 3)

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
        actual = policy_loss(PRESETS["hi_grpo"], estimate(PRESETS["hi_grpo"], batch).batch.with_log_prob(new)).loss
        loss = torch.zeros((), dtype=torch.float64)
        for number, reward in ((0, high + 0.5 * low), (1, low)):
            pairs = reward.view(2, 2)
            advantage = ((pairs - pairs.mean(1, keepdim=True)) / pairs.std(1, keepdim=True)).flatten()
            kept = mask & (step == number)
            loss = loss - ((new - same).exp() * advantage[:, None])[kept].sum() / kept.sum()
        wanted, given = (torch.autograd.grad(value, new, retain_graph=True)[0] for value in (loss, actual))
        assert torch.allclose(actual, loss, atol=1e-6) and torch.allclose(given, wanted, atol=1e-6)


# -- Tunes of two models on one page, from the same noise, scored by the rewards of the run
BASE = str(ASSETS / "tiny-tunes")


@pytest.mark.slow
def test_tunes_of_a_run_and_of_the_model_that_it_began_with(tmp_path: Path) -> None:
    changes = {"optimizer": {"lr": 0.05}, "evaluation": {"every": 0, "questions": 6}, "iterations": 1}
    run = train(config(tmp_path, "audio", "music_rl", **changes))
    out = tmp_path / "compare.html"
    said = commands.run("compare", BASE, str(run), "--out", str(out), "--category", "answer")
    key = json.loads(key_path(out).read_text())
    assert f"{len(key['pairs'])} pairs" in said and len(key["pairs"]) + key["identical"] == 6
    shown = pages.data(out)["pairs"]
    for pair in shown:
        of_pair = key["pairs"][pair["token"]]
        assert pair["prompt"] == of_pair["prompt"] and of_pair["category"] in pair["prompt"]
        for side in ("left", "right"):
            with wave.open(io.BytesIO(pages.content(pair[side]["url"], tmp_path))) as file:
                sound = np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32767
                rate = file.getframerate()
            score = sound_quality([torch.from_numpy(sound.copy()).float()], [rate])[0]
            index = "ab".index(of_pair["left"]) if side == "left" else "ba".index(of_pair["left"])
            assert of_pair["rewards"]["sound_quality"][index] == pytest.approx(float(score), abs=0.01)


def test_answers_that_are_text(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    settings = vlm_runs.config(tmp_path)
    (tmp_path / "run" / "config.yaml").write_text(dump(settings))
    page = Page(tmp_path / "compare.html", question="")
    with pytest.raises(ValueError, match="its answers are text or actions; a page shows pictures and sounds"):
        compare(BASE, str(tmp_path / "run"), page)
