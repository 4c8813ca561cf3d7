"""The expert's episodes as a data set, and data sets as frames: the same numbers as without the detour."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from genrl.playground.minitable import INSTRUCTIONS, PUT, TOUCH, State, expert_chunk
from genrl.playground.minitable.demonstrations import (
    expert_demonstrations,
    minitable_episodes,
    minitable_rest,
    write_minitable,
)
from genrl.vla.data.frames import ACTION_IS_PAD, chunks, dataset_frames, frame_statistics
from genrl.vla.data.lerobot_dataset import open_dataset
from genrl.vla.offline.imitation import imitate
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, STATE, TOKENS, tokenise
from tests.vla.tiny_policies import TOLD, WORDS, flow, minitable_frames

BOTH = (STATE, TOKENS, ENVIRONMENT, IMAGE)


def words(instructions):
    return tokenise(instructions, WORDS)


@pytest.mark.parametrize(("image_size", "horizon"), [(32, 4), (0, 50)])
def test_a_data_set_of_the_expert_gives_its_frames_bit_for_bit(tmp_path: Path, image_size: int, horizon: int) -> None:
    shown = expert_demonstrations(6, tasks=(*PUT, *TOUCH), seed=3)
    direct = minitable_frames(shown, horizon=horizon, image_size=image_size)
    write_minitable(tmp_path / "set", shown, image_size=image_size)
    inputs = BOTH if image_size else BOTH[:3]
    found = dataset_frames(open_dataset(tmp_path / "set"), words, inputs=inputs, horizon=horizon, rest=minitable_rest)
    assert found.keys() == direct.keys()
    for name, values in direct.items():
        assert found[name].dtype == values.dtype and torch.equal(found[name], values), name
    for name, stats in frame_statistics(found).items():
        assert all(torch.equal(value, frame_statistics(direct)[name][key]) for key, value in stats.items())
    there = np.arange(shown.actions.shape[1]) < shown.length[:, None]  # what the expert would do from every frame
    state = State(shown.gripper[there], shown.discs[there], shown.held[there], shown.task[there.nonzero()[0]])
    assert np.array_equal(found[ACTION].numpy(), expert_chunk(state, horizon))


def test_the_expert_is_a_function_of_the_seed() -> None:
    one, again, other = (expert_demonstrations(5, tasks=PUT, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not np.array_equal(one.gripper[:, 0], other.gripper[:, 0])
    more = expert_demonstrations(8, tasks=PUT, seed=1)
    assert np.array_equal(more.length[:5], one.length) and np.array_equal(more.task[:5], one.task)


def test_episodes_end_in_their_success() -> None:
    shown = expert_demonstrations(5, tasks=(0, 10), seed=1)
    for number, episode in enumerate(minitable_episodes(shown, image_size=16)):
        length = shown.length[number]
        assert set(episode.instructions) == {INSTRUCTIONS[shown.task[number]]}
        assert {len(values) for values in episode.columns.values()} == {length} == {len(episode.instructions)}
        for name in ("next.reward", "next.done", "next.success"):
            assert episode.columns[name][:, 0].tolist() == [0] * (length - 1) + [1]


def test_chunks_beyond_the_end_repeat_the_last_action_and_say_so() -> None:
    actions = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
    found, beyond = chunks(actions, 2)
    assert found.tolist() == [[[1, 2], [3, 4]], [[3, 4], [5, 6]], [[5, 6], [5, 6]]]
    assert beyond.tolist() == [[False, False], [False, False], [False, True]]
    rested, beyond = chunks(actions, 5, (0.0, 9.0))
    assert rested[1].tolist() == [[3, 4], [5, 6], [0, 9], [0, 9], [0, 9]] and beyond[1].sum() == 3
    assert actions[2].tolist() == [5, 6]  # what was given stays as it was
    with pytest.raises(ValueError, match="rest has 3 numbers, the actions of the data set 2"):
        chunks(actions, 2, (0.0, 0.0, 0.0))


def test_without_a_rest_frames_have_the_mask_and_training_does_not_look_behind_it(tmp_path: Path) -> None:
    found = write_minitable(tmp_path / "set", expert_demonstrations(4, tasks=PUT, seed=0), image_size=0)
    frames = dataset_frames(found, words, inputs=TOLD.keys, horizon=4)
    assert frames[ACTION_IS_PAD].sum() == 4 * (1 + 2 + 3) and frames[ACTION_IS_PAD].shape == frames[ACTION].shape[:2]
    spoilt = frames | {ACTION: torch.where(frames[ACTION_IS_PAD][..., None], 100.0, frames[ACTION])}
    how = {"steps": 3, "batch_size": 32, "learning_rate": 1e-3, "seed": 0}
    assert list(imitate(flow(), spoilt, **how)) != list(imitate(flow(), frames, **how))  # the noisy chunk is looked at
    only = {name: value for name, value in spoilt.items() if name != ACTION_IS_PAD}
    assert next(imitate(flow(), spoilt, **how)) < 0.01 * next(imitate(flow(), only, **how))
    (second,) = (dataset_frames(found, words, inputs=[STATE], horizon=4, episodes=[1]),)
    length = found.index[0]["length"]
    assert second.keys() == {STATE, ACTION, ACTION_IS_PAD}
    assert torch.equal(second[STATE], frames[STATE][length : length + found.index[1]["length"]])
    with pytest.raises(KeyError, match=f"no column '{IMAGE}'"):
        dataset_frames(found, words, inputs=[IMAGE], horizon=4)


def test_videos_of_the_expert_are_near_its_pictures(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    shown = expert_demonstrations(3, tasks=PUT, seed=0)
    found = write_minitable(tmp_path / "set", shown, image_size=64, videos=True)
    frames = dataset_frames(found, words, inputs=[IMAGE], horizon=4)
    direct = minitable_frames(shown, image_size=64)
    error = (frames[IMAGE].float() - direct[IMAGE].float()).abs()
    assert error.mean() < 4.0
    mixed_up = (frames[IMAGE].float() - direct[IMAGE].roll(1, 0).float()).abs()
    # nearer to its own frame than to the one before, wherever something moved
    moved = (direct[IMAGE].roll(1, 0) != direct[IMAGE]).flatten(1).any(1)
    assert bool((error.flatten(1).mean(1) < mixed_up.flatten(1).mean(1))[moved].all())
