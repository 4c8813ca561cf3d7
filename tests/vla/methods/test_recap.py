"""RECAP: its numbers against arrays of a released trainer, what a policy is told, data sets, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrl.playground.minitable.world import TableWorld
from genrl.vla.data.lerobot_dataset import Episode, write_dataset
from genrl.vla.methods.recap import train as recap
from genrl.vla.methods.recap.settings import RECAP
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, STATE, TOKENS
from genrl.vla.setup import load_trained
from genrl.vla.train import train
from tests.run_folders import rows
from tests.vla.methods.test_vla_offline_trainers import small
from tests.vla.published_runs import config


def test_the_numbers_of_the_released_trainer(golden: Callable[[str], Any]) -> None:
    """Returns, advantages and their bound; the critic; who is told what."""
    released = golden("recap")
    names = sorted(name for name in released if name.startswith("episode") and name.count("_") == 0)
    lengths, success = (torch.tensor([int(released[name][k]) for name in names]) for k in (0, 1))
    left = recap.returns(lengths, success.bool(), -float(released["failure_reward"]))
    assert torch.equal(left, torch.from_numpy(np.concatenate([released[f"{name}_return"] for name in names])))
    values = torch.from_numpy(np.concatenate([released[f"{name}_value"] for name in names]))
    actual = recap.advantages(left.double(), values, lengths, int(released["lookahead"]))
    want = np.concatenate([released[f"{name}_advantage_as_released"] for name in names])
    np.testing.assert_allclose(actual.numpy(), want, rtol=1e-5, atol=1e-7)
    bound = recap.threshold(actual, 0.3)
    assert float(bound) == pytest.approx(float(released["threshold_top30"]), abs=1e-7)
    assert torch.equal(actual >= bound, torch.from_numpy(released["positive"]))

    logits = torch.tensor(released["value_logits"], requires_grad=True)
    actual = recap.value_loss(logits, torch.from_numpy(released["value_target"]))
    np.testing.assert_allclose(actual.detach().numpy(), released["value_loss"], rtol=1e-5)
    actual.mean().backward()
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), released["value_grad"], atol=1e-6)
    np.testing.assert_allclose(recap.expected(logits).detach().numpy(), released["value_mean"], atol=1e-6)
    positive, uniform = (torch.from_numpy(released[key]) for key in ("positive", "route_uniform"))
    which = recap.clause_numbers(positive, uniform, float(released["route_drop"])).numpy()
    for place, part in enumerate(("positive_conditional", "negative_conditional")):
        assert np.array_equal(which == place, released[f"route_both_{part}_mask"])
    assert np.array_equal(which != 2, released["route_both_conditional_mask"])


def test_the_best_steps_have_the_bare_instruction(root: Path, tmp_path: Path) -> None:
    settings = small(root, "recap", tmp_path)
    assert isinstance(settings.trainer, RECAP)
    policy: Any = recap.new_policy(settings)
    data, _ = recap.mixed(settings, settings.trainer, policy)
    count = len(data.frames[ACTION])
    assert int(data.lengths.sum()) == count and 0 < int(data.success.sum()) < len(data.success)
    bare = data.shown(torch.zeros(count, dtype=torch.int64))[TOKENS]
    for place, clause in enumerate(recap.CLAUSES):
        said = data.shown(torch.full((count,), place))[TOKENS]
        words = policy.tokenise([clause])[0].tolist() if clause else []
        assert [int(n) for n in said[0] if n] == [int(n) for n in bare[0] if n] + words
    lines = {tuple(policy.tokenise([line])[0].tolist()) for line in TableWorld().lines}
    assert {tuple(int(n) for n in row if n) for row in bare.tolist()} <= lines


def recorded(folder: Path, *, wins: tuple[bool, ...] = (True, False, True), pictures: bool = False) -> Path:
    episodes = []
    for number, won in enumerate(wins):
        rng, length = np.random.default_rng(number), 5 + number
        columns = {
            STATE: rng.normal(size=(length, 3)).astype(np.float32),
            ENVIRONMENT: rng.normal(size=(length, 6)).astype(np.float32),
            ACTION: rng.uniform(-1, 1, size=(length, 3)).astype(np.float32),
            "next.success": ((np.arange(length) == length - 1) & won)[:, None],
        }
        if pictures:
            columns[IMAGE] = rng.integers(0, 256, size=(length, 32, 32, 3), dtype=np.uint8)
        episodes.append(Episode(["touch the red block"] * length, columns))
    write_dataset(folder, episodes, fps=10)
    return folder


TINY = ("trainer.critic_steps=3", "trainer.steps_per_iteration=2", "trainer.batch_size=8", "iterations=1")


def test_it_learns_from_a_data_set_and_moves_the_critic_before_the_policy_alone(root: Path, tmp_path: Path) -> None:
    folder = recorded(tmp_path / "data")
    change = f"demonstrations={{dataset: {folder}}}"
    run = train(small(root, "recap", tmp_path / "run", change, *TINY, "iterations=2", "optimizer.weight_decay=0.1"))
    last = rows(run)[-1]
    assert last["data/success_mean"] == pytest.approx(2 / 3) and 0 < last["data/positive"] < 1
    both = [load_trained(run, step=n).state_dict() for n in (1, 2)]
    heads = [{name: value for name, value in one.items() if name.startswith("value_")} for one in both]
    assert heads[0] and all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


def test_data_that_compare_nothing_are_refused(root: Path, tmp_path: Path) -> None:
    change = f"demonstrations={{dataset: {recorded(tmp_path / 'data', wins=(True, True))}}}"
    with pytest.raises(ValueError, match="all 2 episodes are successes by next.success.*take sft"):
        train(small(root, "recap", tmp_path / "run", change))
    with pytest.raises(ValueError, match="has no column 'next.reward'"):
        train(small(root, "recap", tmp_path / "run", change, "trainer.outcome=next.reward"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pi0", "pi05", "smolvla"])
def test_published_policies_learn_so_from_pictures(tmp_path: Path, kind: str) -> None:
    data = recorded(tmp_path / "data", pictures=True)
    trainer = {"algorithm": "recap", "critic_steps": 2, "steps_per_iteration": 2, "batch_size": 4}
    changes: dict[str, Any] = {"demonstrations": {"dataset": str(data)}, "evaluation": {"every": 1, "episodes": 4}}
    run = train(config(tmp_path, kind, trainer=trainer, iterations=1, **changes))
    assert 0 < rows(run)[-1]["data/positive"] < 1
