"""The choice of prompts: posteriors, Thompson sampling, prompts that are asked again; and what is refused."""

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import ConfigError, load
from genrl.config.sections import Replay, Selection
from genrl.diffusion.config.schema import Config
from genrl.diffusion.train import train
from genrl.runtime.loop import economy
from genrl.runtime.loop.economy import choose, looked_at, noted
from genrl.vla.config.schema import VLAConfig
from genrl.vlm.config.schema import VLMConfig
from tests.diffusion import runs
from tests.diffusion.conftest import model as model
from tests.runtime.loop.loops import backward, loop

NAN = float("nan")


def after(settings: Selection, *visits: list[float], number: int = 0) -> economy.Known:
    known: economy.Known = {}
    for iteration, values in enumerate(visits):
        known, _ = noted(settings, known, [number], torch.tensor([values]), iteration=iteration)
    return known


class TestPosteriors:
    def test_success_is_the_discounted_beta_update_of_the_paper(self) -> None:
        alpha, beta, kept = 1.0, 1.0, economy.DISCOUNT
        visits = [[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]]
        for right in (3, 1, 2):
            alpha = kept * alpha + (1 - kept) * 1.0 + right
            beta = kept * beta + (1 - kept) * 1.0 + 4 - right
        a, b, times, last = after(Selection(by="success"), *visits)["0"]
        assert (1 + a, 1 + b, times, last) == pytest.approx((alpha, beta, 3, 2))

    def test_spread_is_the_conjugate_update(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without discount, the evidence of two visits is that of the pooled variance within both."""
        monkeypatch.setattr(economy, "DISCOUNT", 1.0)
        first, second = [0.1, 0.4, 0.9], [5.0, 5.2]
        a, b, *_ = after(Selection(by="spread"), first, second)["0"]
        assert a == pytest.approx((2 + 1) / 2)
        pooled = float((torch.tensor(first).var() * 2 + torch.tensor(second).var() * 1) / 3)
        assert b / a == pytest.approx(pooled, rel=1e-6)

    def test_samples_without_a_score_are_no_evidence(self) -> None:
        """And rounding is no spread: three times .1 has a mean of .1 plus an ulp."""
        assert after(Selection(by="success"), [1.0, NAN, 0.0])["0"][:2] == [1.0, 1.0]
        assert after(Selection(by="spread"), [1.0, NAN])["0"][:2] == [0.0, 0.0]
        assert after(Selection(by="spread"), [0.1, 0.1, 0.1])["0"][:2] == [1.0, 0.0]

    def test_draws_have_the_moments_of_the_posterior(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(economy, "TARGET", 0.0)
        a, b, prior = 3.0, 1.5, 0.2
        drawn = [economy._distance(Selection(by="success"), (a, b), prior, random.Random(k)) for k in range(20000)]
        assert sum(drawn) / 20000 == pytest.approx((1 + a) / (2 + a + b), abs=0.005)
        drawn = [-economy._distance(Selection(by="spread"), (a, b), prior, random.Random(k)) for k in range(20000)]
        assert sum(drawn) / 20000 == pytest.approx((prior + b) / (1 + a), rel=0.03)

    def test_success_is_to_reach_a_first_reward_and_metrics_say_what_was_foreseen(self) -> None:
        first, total = torch.tensor([1.0, 0.9, NAN, 1.2]), torch.tensor([0.1, 0.2, NAN, 0.4])
        success = Selection(by="success")
        assert economy.values_of(success, first, total).nan_to_num(-1).tolist() == [1, 0, -1, 1]
        assert economy.values_of(success, first, total, right_at=0.9).nan_to_num(-1).tolist() == [1, 1, -1, 1]
        assert economy.values_of(Selection(by="spread"), first, total) is total
        known = after(Selection(by="success"), [1.0] * 8)
        _, row = noted(Selection(by="success"), known, [0, 7], torch.tensor([[1.0, 1.0], [0.0, 1.0]]), iteration=1)
        assert row == {"selection/known": 0.5, "selection/error": pytest.approx(1 - 9 / 10)}
        _, row = noted(Selection(by="success"), {}, [0], torch.tensor([[1.0, 1.0]]), iteration=0)
        assert row["selection/known"] == 0.0 and math.isnan(row["selection/error"])


class TestChoice:
    def test_without_a_selection_it_is_the_order_of_the_data_with_one_what_is_not_known_is_tried(self) -> None:
        """With one, fewer candidates than places are asked again."""
        assert choose(None, [4, 4, 1], 3, {}, iteration=0, seed=0) == [4, 4, 1] and looked_at(None, 3) == 3
        assert Counter(choose(Selection(by="success"), [5, 6, 5], 4, {}, iteration=0, seed=0)) == {5: 2, 6: 2}
        known = after(Selection(by="success"), [1.0] * 8, number=0)
        by = Selection(by="success")
        chosen = Counter(n for i in range(400) for n in choose(by, [0, 1], 1, known, iteration=i, seed=0))
        assert chosen[1] > 300 and chosen[0] > 0

    @pytest.mark.parametrize("by", ["success", "spread"])
    def test_prompts_that_teach_are_preferred(self, by: str) -> None:
        """0 to 3 are always wrong, 4 to 7 half right, 8 to 11 always right."""
        settings, known = Selection(by=by), {}  # type: ignore[arg-type, var-annotated]
        for iteration in range(4):
            values = torch.tensor([[0.0] * 8] * 4 + [[0.0, 1.0] * 4] * 4 + [[1.0] * 8] * 4)
            known, _ = noted(settings, known, range(12), values, iteration=iteration)
        chosen = Counter(n for i in range(200) for n in choose(settings, range(12), 4, known, iteration=i, seed=1))
        assert sum(chosen[n] for n in range(4, 8)) > 0.97 * 800

    def test_it_depends_on_keys_alone_and_not_on_the_order_of_a_file(self) -> None:
        settings = Selection(by="success", replay=Replay())
        known: economy.Known = {}
        for iteration, numbers in enumerate(([8, 30, 2], [11, 5, 4])):
            known, _ = noted(settings, known, numbers, torch.tensor([[0.0, 1.0]] * 3), iteration=iteration)
        again = json.loads(json.dumps(known, sort_keys=True))
        for iteration in range(3, 9):
            one = choose(settings, range(40, 72), 4, known, iteration=iteration, seed=3)
            assert one == choose(settings, range(40, 72), 4, again, iteration=iteration, seed=3)
        assert one != choose(settings, range(40, 72), 4, known, iteration=9, seed=3)


class TestReplay:
    settings = Selection(by="success", candidates=1, replay=Replay(share=0.5))

    def test_useful_prompts_come_again_after_the_cooldown_and_not_too_often(self) -> None:
        values = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
        known, _ = noted(self.settings, {}, [0, 1, 2, 3], values, iteration=0)
        assert set(choose(self.settings, [4, 5, 6, 7], 4, known, iteration=2, seed=0)) == {4, 5, 6, 7}
        chosen = choose(self.settings, [4, 5, 6, 7], 4, known, iteration=3, seed=0)
        assert set(chosen[:2]) == {0, 1} and set(chosen[2:]) < {4, 5, 6, 7}
        for iteration in range(3):
            known, _ = noted(self.settings, known, [0, 1], values[:2], iteration=iteration)
        assert set(choose(self.settings, [8, 9, 10, 11], 4, known, iteration=9, seed=0)) == {8, 9, 10, 11}
        known, _ = noted(self.settings, {}, [0, 1], torch.tensor([[0.0, 1.0]] * 2), iteration=0)
        for seed in range(20):
            chosen = choose(self.settings, [0, 1, 2, 3], 4, known, iteration=5, seed=seed)
            assert sorted(chosen) == [0, 1, 2, 3]


PICTURES = {
    "model": {"path": "org/name"},
    "prompts": {"train": "a.txt", "eval": "b.txt"},
    "rewards": [{"name": "shapes"}],
    "trainer": {"algorithm": "flow_grpo"},
}
LANGUAGE = {"vlm": {"path": "some/model"}, "task": {"name": "shapes"}, "rewards": [{"name": "exact"}]}
SPREAD = {"selection": {"by": "spread"}}
GRAPH = {"algorithm": "flow_grpo", "keep_graph": True}


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    for base, changes, words in (
        (PICTURES, {"economy": {"keep": 8}}, "so none is left out; write 4"),
        (PICTURES, {"economy": {"keep": 1}}, "a whole number of 2 or more or null"),
        (PICTURES, {"economy": {"keep": 4}, "sampling": {"batch_size": 12}}, "whole groups of 8; use 16"),
        (PICTURES, {"economy": {"keep": 4}, "trainer": {"algorithm": "dgpo"}}, "dgpo reads whole groups"),
        (PICTURES, {"economy": {"keep": 4}, "trainer": GRAPH}, "keep_graph: false"),
        (PICTURES, {"economy": {"keep": 4}, "kernels": {"compile": True}}, "by another graph; write false"),
        (PICTURES, {"economy": SPREAD, "rewards": [{"name": "shapes", "normalize": "group"}]}, "the same spread"),
        (PICTURES, {"economy": SPREAD, "sampling": {"buckets": [[64, 64], [64, 96]]}}, "micro-batches are of one size"),
        (LANGUAGE, {"economy": SPREAD, "task": {"name": "shapes", "curriculum": {}}}, "which questions come first"),
        (LANGUAGE, {"economy": {"selektion": {}}}, "selection"),
    ):
        (tmp_path / "a.yaml").write_text(json.dumps({**base, **changes}))
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / "a.yaml")
        assert len(caught.value.problems) == 1 and words in str(caught.value), str(caught.value)


# -- A run that trains nothing says so at once, and ends with the reason after some iterations
REWARDS = """
def never(images):
    return [float("nan")] * len(images)

def rounding(images):
    return [0.5 + 1e-17 * k for k in range(len(images))]

def huge(images):
    return [1e308 - k for k in range(len(images))]"""


@pytest.mark.parametrize("name", ["never", "rounding", "huge"])
def test_a_reward_that_tells_nothing_ends_the_run(name: str, model: Path, tmp_path: Path, caplog: Any) -> None:
    runs.write_folder(tmp_path)
    (tmp_path / "flat.py").write_text(REWARDS)
    rewards = [{"name": f"{tmp_path / 'flat.py'}:{name}"}]
    changes = {"evaluation": {"every": 0}, "iterations": 9, "idle_iterations": 2}
    config = runs.config(tmp_path, model, rewards=rewards, **changes)
    with pytest.raises(RuntimeError, match="the last 2 iterations changed no weight.*idle_iterations=null") as error:
        train(config)
    scored = name == "rounding"
    assert ("all samples have the same reward" if scored else f"no sample had a score; {name} gave none") in str(error)
    why = "in every group all samples have the same reward" if scored else "no sample had a score"
    assert f"iteration 1 taught nothing: {why}" in caplog.text
    rows = runs.rows(tmp_path / "run")
    assert len(rows) == 2 and not (tmp_path / "run" / "lora").exists()
    failed = rows[0][f"reward/{name}_failed"]
    assert (rows[0]["zero_std_ratio"] == 1.0 and failed == 0) if scored else failed > 0


def test_what_changes_nothing_is_said_and_only_iterations_in_a_row_count(tmp_path: Path, caplog: Any) -> None:
    one = loop(tmp_path)
    one.finish({})
    for gradient in (0.0, 1.0):
        one.optimization.updates = 1
        one.finish({"grad_norm": gradient})
    told = [record.getMessage() for record in caplog.records if "taught nothing" in record.getMessage()]
    assert told == [
        "iteration 1 taught nothing: its method made no optimiser step",
        "iteration 2 taught nothing: the gradient was 0",
    ]
    one = loop(tmp_path / "rows")
    one.config.iterations = 40
    for _ in range(2):
        for _ in range(4):
            one.finish({})
        backward(one, policy=1.0)
        one.optimization.step(["policy"])
        one.finish({})
        for _ in range(4):
            one.finish({})
        one.optimization.other_updates = 1
        one.finish({})
    one.config.idle_iterations = None
    for _ in range(10):
        one.finish({"reward/total_mean": math.nan})
    one.config.idle_iterations = 11
    with pytest.raises(RuntimeError, match="the last 11 iterations"):
        one.finish({})
    assert all(kind.model_fields["idle_iterations"].default == 5 for kind in (Config, VLAConfig, VLMConfig))
