"""MiniTable: episodes by number, dynamics, success, the expert, auto-reset, pictures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrl.playground.minitable import INSTRUCTIONS, PUT, TOUCH, MiniTable, State, demonstrate, expert_chunk, task
from genrl.playground.minitable.demonstrations import expert_demonstrations, minitable_rest, write_minitable
from genrl.playground.minitable.env import THINGS, cloud, render
from genrl.vla.data.frames import ACTION_IS_PAD, chunks, dataset_frames, frame_statistics
from genrl.vla.data.lerobot_dataset import open_dataset
from genrl.vla.offline.imitation import imitate
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, STATE, TOKENS, tokenise
from tests.vla.tiny_policies import FACTS, WORDS, flow, minitable_frames


def keys(count: int, seed: int = 0) -> np.ndarray:
    return task.episode_keys(seed, np.arange(count), np.zeros(count))


def table(gripper=(0.0, 0.0), red=(0.4, 0.0), green=(0.0, 0.4), blue=(-0.4, 0.0), held=-1, number=0) -> State:
    places = np.array([gripper], np.float32), np.array([[red, green, blue]], np.float32)
    return State(*places, np.array([held]), np.array([number]))


def act(state: State, *action: float) -> State:
    return task.step(state, np.array([action], dtype=np.float32))


@settings(max_examples=25)
@given(st.integers(0, 2**62), st.integers(1, 40))
def test_episodes_begin_as_they_must_and_alone_as_in_a_batch(seed: int, count: int) -> None:
    numbers = keys(count, seed)
    state = task.initial_state(numbers, PUT + TOUCH)
    assert (np.abs(state.gripper - [0.0, -0.6]) <= 0.3 + 1e-6).all() and (np.abs(state.discs) <= 0.45 + 1e-6).all()
    apart = np.linalg.norm(state.discs[:, (0, 0, 1)] - state.discs[:, (1, 2, 2)], axis=-1)
    assert (apart >= 0.36 - 1e-5).all()
    assert (np.linalg.norm(state.discs - state.gripper[:, None], axis=-1) >= 0.25 - 1e-5).all()
    assert not task.is_success(state).any() and (state.held == -1).all()
    row = count // 2
    alone = task.initial_state(numbers[row : row + 1], PUT + TOUCH)
    for ours, theirs in zip(alone, state.rows(slice(row, row + 1)), strict=True):
        assert np.array_equal(ours, theirs)


def test_moving_grasping_carrying_and_letting_go() -> None:
    state = act(table(), 1.0, -0.5, -1.0)
    assert state.gripper[0].tolist() == pytest.approx([0.12, -0.06])
    assert act(table(gripper=(0.95, 0.0)), 5.0, 0.0, -1.0).gripper[0, 0] == 1.0  # actions are clipped, so is the table
    assert act(table(), 0.0, 0.0, 1.0).held[0] == -1  # nothing within reach of the hand
    state = act(table(gripper=(0.3, 0.0)), 0.0, 0.0, 1.0)
    assert state.held[0] == 0
    state = act(state, 1.0, 0.0, 1.0)
    assert state.discs[0, :2].tolist() == [pytest.approx([0.52, 0.0]), pytest.approx([0, 0.4])]
    state = act(state, 1.0, 0.0, -1.0)  # let go after the move
    assert state.held[0] == -1 and state.discs[0, 0, 0] == pytest.approx(0.64)
    assert act(state, 1.0, 0.0, -1.0).discs[0, 0, 0] == pytest.approx(0.64)
    taken = act(table(red=(0.1, 0.0), green=(0.05, 0.0)), 0.0, 0.0, 1.0)
    assert taken.held[0] == act(taken, 0.0, 0.0, 1.0).held[0] == 1  # the nearest is taken and kept


def test_success_needs_the_right_disc_let_go_in_the_right_zone() -> None:
    inside = (-0.8 + 0.24, 0.0)
    assert task.is_success(table(red=inside)).all()
    assert not task.is_success(table(red=inside, held=0)).any()
    assert task.is_success(table(red=inside, held=1)).all()
    assert not task.is_success(table(red=(-0.8 + 0.26, 0.0))).any()
    assert not task.is_success(table(green=inside)).any() and task.is_success(table(green=inside, number=3)).all()
    assert not task.is_success(table(red=inside, number=1)).any()
    near = table(gripper=(0.3, 0.0), number=9)
    assert task.is_success(near).all() and not task.is_success(table(number=9)).any()


def test_the_expert_always_succeeds() -> None:
    """In 11.4 steps on average to put, 5.2 to touch (2000 episodes)."""
    assert INSTRUCTIONS[PUT[5]] == "put the green block in the far zone" and len(set(INSTRUCTIONS)) == 12
    put, touch = demonstrate(keys(2000), PUT), demonstrate(keys(2000), TOUCH)
    assert 11.0 < put.length.mean() < 11.8 and put.length.max() <= 24
    assert 4.9 < touch.length.mean() < 5.5
    assert np.abs(put.actions).max() <= 1.0
    with pytest.raises(RuntimeError, match="the expert failed"):
        demonstrate(keys(50), PUT, max_steps=5)
    state = table(gripper=(0.0, 0.4), held=1)  # asked for red, holds green
    for _ in range(40):
        state = task.step(state, expert_chunk(state, 1)[:, 0])
    assert task.is_success(state).all()


def rollout(env: MiniTable, decisions: int, seed: int = 7) -> list[tuple]:
    """Expert chunks, spoilt by noise so that episodes end in both ways at different times."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(decisions):
        spoilt = rng.uniform(-1, 1, (env.num_envs, 1, 1)) > 0.5
        noise = rng.uniform(-1, 1, (env.num_envs, env.chunk, 3))
        action = np.where(spoilt, noise, expert_chunk(env.state, env.chunk)).astype(np.float32)
        rows.append(env.step(action))
    return rows


@pytest.mark.parametrize("chunk", [1, 4])
def test_next_step_auto_reset(chunk: int) -> None:
    """The observation of the end is the final one; the next decision only resets; rows after it are a new episode."""
    env = MiniTable(32, image_size=0, chunk=chunk, max_steps=14)
    env.reset(seed=2)
    ended, elapsed, kinds = np.zeros(32, dtype=bool), np.zeros(32, dtype=int), set()
    for observation, reward, terminated, truncated, info in rollout(env, 12 * (5 - chunk)):
        count, done = info["n_executed"], terminated | truncated
        assert (count[ended] == 0).all() and (count[~ended] >= 1).all() and (count[~done & ~ended] == chunk).all()
        assert not reward[ended].any() and not done[ended].any() and not (terminated & truncated).any()
        # a new episode begins at the front edge with an empty hand
        assert (observation["agent_pos"][ended, 2] == 0).all() and (observation["agent_pos"][ended, 1] < -0.29).all()
        elapsed = np.where(ended, 0, elapsed + count)
        assert (elapsed[truncated] == 14).all() and (elapsed <= 14).all()
        assert np.array_equal(terminated, reward == 1) and np.array_equal(info["is_success"], terminated)
        assert np.array_equal(info["rewards"].sum(1), reward)
        paid = info["rewards"][terminated]
        assert (paid.argmax(1) + 1 == count[terminated]).all()  # nothing is executed after success
        final = {name: value[terminated] for name, value in observation.items()}
        discs, nothing = final["environment_state"].reshape(-1, 3, 2), np.full(terminated.sum(), -1)
        assert task.is_success(State(final["agent_pos"][:, :2], discs, nothing, final["task_index"])).all()
        kinds |= ({"success"} if terminated.any() else set()) | ({"limit"} if truncated.any() else set())
        ended = done
    assert kinds == {"success", "limit"}


def test_a_chunk_is_its_actions_one_by_one() -> None:
    wide, narrow = MiniTable(16, tasks=PUT + TOUCH, image_size=32, chunk=4), MiniTable(16, tasks=PUT + TOUCH, chunk=1)
    for env in (wide, narrow):
        env.reset(seed=3)
    rng = np.random.default_rng(0)
    for _ in range(4):
        action = rng.uniform(-1, 1, (16, 4, 3)).astype(np.float32)
        together = wide.step(action)[0]
        for k in range(4):
            single, _, terminated, truncated, _ = narrow.step(action[:, k : k + 1])
            assert not (terminated | truncated).any()  # noise does not succeed this soon
    for name, value in together.items():
        assert np.array_equal(value, single[name])
    numbers = {"agent_pos": (np.float32, (16, 3)), "environment_state": (np.float32, (16, 6))}
    shown = numbers | {"task_index": (np.int64, (16,)), "pixels": (np.uint8, (16, 32, 32, 3))}
    assert {name: (value.dtype, value.shape) for name, value in together.items()} == shown
    assert wide.task_description == [INSTRUCTIONS[k] for k in together["task_index"]] and wide.action_dim == 3
    assert "pixels" not in MiniTable(1, image_size=0).reset(seed=0)[0]


def test_chosen_episodes_and_the_next() -> None:
    env = MiniTable(3, image_size=0)
    env.reset(seed=0)
    chosen = np.array([11, 12, 11], dtype=np.uint64)
    observation, info = env.reset(options={"episodes": chosen})
    expected = task.initial_state(chosen, PUT)
    assert np.array_equal(observation["environment_state"], expected.discs.reshape(3, 6))
    assert (info["n_executed"] == 0).all()
    env.step(np.full((3, 4, 3), 0.3, dtype=np.float32))
    film = env.render([2, 0])
    assert film.shape == (2, 128, 128, 3) and np.array_equal(film[1], render(env.state, 128)[0])
    another, _ = env.reset()
    assert not np.isin(another["environment_state"], observation["environment_state"]).any()


def test_pictures_show_where_things_are_and_the_grip_and_stay_in_the_frame() -> None:
    """The centre of mass of each colour is the disc's place, to a tenth of a pixel at 64 pixels."""
    state = task.initial_state(keys(40), PUT)
    clear = state._replace(gripper=np.full((40, 2), -1.0, dtype=np.float32))
    for size in (32, 64):
        picture = render(clear, size).astype(float)
        place = (np.arange(size) + 0.5) * 2.2 / size - 1.1
        for disc in range(3):
            others = picture[..., [c for c in range(3) if c != disc]].max(-1)
            weight = np.clip(picture[..., disc] - others - 25, 0, None)
            x = (weight.sum(1) * place).sum(1) / weight.sum((1, 2))
            y = (weight.sum(2) * -place).sum(1) / weight.sum((1, 2))
            error = np.hypot(x - clear.discs[:, disc, 0], y - clear.discs[:, disc, 1])
            assert error.max() < 0.35 * 2.2 / size, (size, disc)
    open_hand, closed = (render(table(gripper=(1.0, 1.0), held=held), 32)[0] for held in (-1, 0))
    assert closed[1:4, 28:31].min() < 10 < 80 < open_hand[1:4, 28:31].min()
    beyond = table(red=(1.12, -1.12))  # a disc carried over the edge
    assert render(beyond, 32).shape == (1, 32, 32, 3)


def test_a_cloud_shows_where_things_are_and_which() -> None:
    """Every thing has its height: its points are spread round its place, within its radius."""
    state = task.initial_state(keys(6), PUT)
    points = cloud(state, 56)
    assert points.shape == (6, 56, 3) and points.dtype == np.float32
    places = [state.discs[:, k] for k in range(3)] + [state.gripper]
    for height, place, radius in zip((0.1, 0.2, 0.3, 0.5), places, (0.11, 0.11, 0.11, 0.075), strict=True):
        own = points[np.isclose(points[..., 2], height)].reshape(6, 8, 3)[..., :2]
        assert np.abs(own.mean(1) - place).max() < 0.2 * radius
        away = np.linalg.norm(own - place[:, None], axis=-1)
        assert 0.9 * radius < away.max() < radius
    assert (points[..., 2] == 0).sum(1).tolist() == [24] * 6  # the zones
    assert np.array_equal(cloud(state.rows(slice(3, 4)), 56)[0], points[3])
    env = MiniTable(6, image_size=0, points=20)
    assert np.array_equal(env.reset(seed=0)[0]["environment_points"], cloud(env.state, 20))
    fewest = cloud(state, THINGS)  # one point of each
    assert len({tuple(point) for point in fewest[0].tolist()}) == THINGS == 3 + 1 + len(task.ZONE_CENTRES)
    with pytest.raises(ValueError, match="6 points cannot show the 7 things"):
        cloud(state, THINGS - 1)


# -- The expert's episodes as a data set, and data sets as frames: the same numbers as without the detour
BOTH = (STATE, TOKENS, ENVIRONMENT, IMAGE)


def words(instructions):
    return tokenise(instructions, WORDS)


@pytest.mark.parametrize(("image_size", "horizon"), [(32, 4), (0, 50)])
def test_a_data_set_of_the_expert_gives_its_frames_bit_for_bit(tmp_path: Path, image_size: int, horizon: int) -> None:
    shown = expert_demonstrations(6, tasks=(*PUT, *TOUCH), seed=3)
    direct = minitable_frames(shown, horizon=horizon, image_size=image_size)
    write_minitable(tmp_path / "set", shown, image_size=image_size)
    inputs = BOTH if image_size else BOTH[:3]
    result = dataset_frames(open_dataset(tmp_path / "set"), words, inputs=inputs, horizon=horizon, rest=minitable_rest)
    assert result.keys() == direct.keys()
    for name, values in direct.items():
        assert result[name].dtype == values.dtype and torch.equal(result[name], values), name
    for name, stats in frame_statistics(result).items():
        assert all(torch.equal(value, frame_statistics(direct)[name][key]) for key, value in stats.items())
    there = np.arange(shown.actions.shape[1]) < shown.length[:, None]  # what the expert would do from every frame
    state = State(shown.gripper[there], shown.discs[there], shown.held[there], shown.task[there.nonzero()[0]])
    assert np.array_equal(result[ACTION].numpy(), expert_chunk(state, horizon))
    for number, episode in enumerate(open_dataset(tmp_path / "set").read()):
        length = shown.length[number]
        assert set(episode.instructions) == {INSTRUCTIONS[shown.task[number]]} and len(episode.instructions) == length
        for name in ("next.reward", "next.done", "next.success"):
            assert episode.columns[name][:, 0].tolist() == [0] * (length - 1) + [1]


def test_chunks_beyond_the_end_repeat_the_last_action_and_say_so() -> None:
    actions = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
    result, beyond = chunks(actions, 2)
    assert result.tolist() == [[[1, 2], [3, 4]], [[3, 4], [5, 6]], [[5, 6], [5, 6]]]
    assert beyond.tolist() == [[False, False], [False, False], [False, True]]
    rested, beyond = chunks(actions, 5, (0.0, 9.0))
    assert rested[1].tolist() == [[3, 4], [5, 6], [0, 9], [0, 9], [0, 9]] and beyond[1].sum() == 3
    assert actions[2].tolist() == [5, 6]  # what was given stays as it was
    with pytest.raises(ValueError, match="rest has 3 numbers, the actions of the data set 2"):
        chunks(actions, 2, (0.0, 0.0, 0.0))


def test_without_a_rest_frames_have_the_mask_and_training_does_not_look_behind_it(tmp_path: Path) -> None:
    result = write_minitable(tmp_path / "set", expert_demonstrations(4, tasks=PUT, seed=0), image_size=0)
    frames = dataset_frames(result, words, inputs=FACTS.keys, horizon=4)
    assert frames[ACTION_IS_PAD].sum() == 4 * (1 + 2 + 3) and frames[ACTION_IS_PAD].shape == frames[ACTION].shape[:2]
    spoilt = frames | {ACTION: torch.where(frames[ACTION_IS_PAD][..., None], 100.0, frames[ACTION])}
    how = {"steps": 3, "batch_size": 32, "learning_rate": 1e-3, "seed": 0}
    assert list(imitate(flow(), spoilt, **how)) != list(imitate(flow(), frames, **how))  # the noisy chunk is looked at
    only = {name: value for name, value in spoilt.items() if name != ACTION_IS_PAD}
    assert next(imitate(flow(), spoilt, **how)) < 0.01 * next(imitate(flow(), only, **how))
    (second,) = (dataset_frames(result, words, inputs=[STATE], horizon=4, episodes=[1]),)
    length = result.index[0]["length"]
    assert second.keys() == {STATE, ACTION, ACTION_IS_PAD}
    assert torch.equal(second[STATE], frames[STATE][length : length + result.index[1]["length"]])
    with pytest.raises(KeyError, match=f"no column '{IMAGE}'"):
        dataset_frames(result, words, inputs=[IMAGE], horizon=4)
