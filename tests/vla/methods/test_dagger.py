"""DAgger: what is labelled, by whom, who acts, and what is imitated in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrl.config import ConfigError
from genrl.playground.minitable import INSTRUCTIONS, State, expert_chunk
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import frames_of
from genrl.vla.data.frames import ACTION_IS_PAD
from genrl.vla.methods.dagger import train as dagger
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, STATE, TOKENS, Batch
from tests.vla import vla_runs


def config(folder: Path, **changes: Any) -> VLAConfig:
    trainer = {**vla_runs.DAGGER["trainer"], **changes.pop("trainer", {})}
    return vla_runs.config(folder, **{**vla_runs.DAGGER, **changes, "trainer": trainer})


def table(frames: Batch, instructions: dict[tuple[int, ...], int]) -> State:
    """The tables that the frames were seen on: a gripper that holds a disc is nearest to that one."""
    gripper, discs = frames[STATE][:, :2].numpy(), frames[ENVIRONMENT].reshape(-1, 3, 2).numpy()
    nearest = np.linalg.norm(discs - gripper[:, None], axis=-1).argmin(1)
    told = np.array([instructions[tuple(row)] for row in frames[TOKENS].tolist()])
    return State(gripper, discs, np.where(frames[STATE][:, 2].numpy() > 0, nearest, -1), told)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_every_state_that_is_visited_gets_the_experts_chunk_from_there(tmp_path: Path, beta: float) -> None:
    with vla_runs.opened(config(tmp_path, environment={"tasks": ["put"]})) as run:
        numbers = {tuple(run.policy.tokenise([text])[0].tolist()): n for n, text in enumerate(INSTRUCTIONS)}
        found = dagger.visit(run, beta, 0)
        wanted = expert_chunk(table(found.frames, numbers), 4)
        np.testing.assert_array_equal(found.frames[ACTION].numpy(), wanted)
        assert len(found.error) == len(wanted) > 16 and found.error.min() > 0
        assert 4 * (len(wanted) - len(found.success)) <= found.steps <= 4 * len(wanted) and found.dropped == 0
        again = dagger.visit(run, beta, 0)
        assert all(torch.equal(value, again.frames[name]) for name, value in found.frames.items())
        other = dagger.visit(run, beta, 1)
        assert not torch.equal(found.frames[STATE][:8], other.frames[STATE][:8])


def test_who_acts(tmp_path: Path) -> None:
    """The expert alone touches every disc; the policy alone does what it does without being asked."""
    with vla_runs.opened(config(tmp_path, environment={"num_envs": 32})) as run:
        assert all(dagger.visit(run, 1.0, 0).success)
        alone = dagger.visit(run, 0.0, 0).success
        assert any(alone) and not all(alone)
        mixed = [dagger.visit(run, beta, 0).error for beta in (0.0, 0.5, 1.0)]
        assert len(mixed[1]) != len(mixed[0]) or not torch.equal(mixed[1], mixed[0])


def test_two_processes_collect_what_one_does(tmp_path: Path) -> None:
    """Each half of the slots, in the order of all of them; up to the rounding of other batches."""
    parts = []
    for name, slots, first in (("whole", 8, 0), ("left", 4, 0), ("right", 4, 4)):
        settings = config(tmp_path, environment={"num_envs": slots}, output=str(tmp_path / name))
        with vla_runs.opened(settings) as run:
            run.first_slot = first
            parts.append(dagger.visit(run, 0.5, 0))
    whole, joined = dagger.in_order(parts[:1]), dagger.in_order(parts[1:])
    assert torch.equal(whole[TOKENS], joined[TOKENS]) and len(whole[TOKENS]) > 12
    for name in (STATE, ENVIRONMENT, ACTION):
        torch.testing.assert_close(whole[name], joined[name], atol=1e-4, rtol=0.0)


def test_the_union_of_demonstrations_and_all_labels_is_imitated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the expert tells is never padding, which a data set's ends may have."""
    unions: list[Batch] = []
    updates = dagger.imitation_updates

    def watched(run: Any, settings: Any, frames: Batch, loss: Any) -> dict[str, float]:
        unions.append(frames)
        return updates(run, settings, frames, loss)

    monkeypatch.setattr(dagger, "imitation_updates", watched)
    settings = config(tmp_path, iterations=2, trainer={"beta": 0.5})
    with vla_runs.opened(settings) as run:
        shown = frames_of(settings, run.policy)[0]
        shown = run.frames = shown | {ACTION_IS_PAD: torch.zeros(shown[ACTION].shape[:2], dtype=torch.bool)}
        shown[ACTION_IS_PAD][:, 3:] = True
        dagger.train(run, settings.trainer)  # type: ignore[arg-type]
        logged = vla_runs.rows(run.process.run.folder)
    first, second = unions
    count = len(shown[ACTION])
    for name in first:
        assert torch.equal(first[name][:count], shown[name]), name
        assert torch.equal(second[name][: len(first[name])], first[name]), name
    labels = [len(union[ACTION]) - count for union in unions]
    assert not second[ACTION_IS_PAD][count:].any()
    assert 8 <= labels[0] < labels[1] and [row["dagger/labels"] for row in logged] == labels
    assert [row["dagger/beta"] for row in logged] == [0.5, 0.25]
    assert logged[1]["rollout/env_steps"] > logged[0]["rollout/env_steps"] and logged[0]["loss"] > 0


def test_simulators_without_an_expert_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="maniskill has none; minitable, .*, fetch, reacher have one"):
        config(tmp_path, environment={"name": "maniskill", "tasks": None})
    with pytest.raises(ConfigError, match=r"dagger imitates: write `expert: N`, or `dataset: FOLDER`"):
        config(tmp_path, demonstrations={"expert": None})


def test_one_of_your_own_is_asked_before_anything_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path, evaluation={"every": 1})
    with vla_runs.opened(settings) as run:
        run.frames = frames_of(settings, run.policy)[0]
        monkeypatch.delattr("genrl.playground.minitable.env.TableHost.advise")
        monkeypatch.setattr(run, "judged", lambda iteration: pytest.fail("it was evaluated"))
        with pytest.raises(ValueError, match="TableHost has no expert; minitable, metaworld, .* have one"):
            dagger.train(run, settings.trainer)  # type: ignore[arg-type]
