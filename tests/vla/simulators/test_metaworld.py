"""Meta-World: its tasks, their independence of the past, pictures, experts; and on workers."""

import importlib.util

import numpy as np
import pytest

from genrl.vla.evaluate import evaluation_episodes
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.metaworld import INSTRUCTIONS, MAX_STEPS, checked
from genrl.vla.simulators.simulator import headless
from genrl.vla.simulators.tables import open_environment

THREE = ("reach-v3", "push-v3", "pick-place-v3")

headless()
if importlib.util.find_spec("metaworld") is None:
    pytest.skip("needs Meta-World: pip install 'genrl-diffusion[metaworld]'", allow_module_level=True)


def test_every_task_has_a_sentence_of_its_own() -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP

    assert set(INSTRUCTIONS) == set(ALL_V3_ENVIRONMENTS) == set(ENV_POLICY_MAP) and len(INSTRUCTIONS) == 50
    assert len(set(INSTRUCTIONS.values())) == 50 and all(line == line.lower() for line in INSTRUCTIONS.values())
    assert checked(()) == tuple(INSTRUCTIONS) and checked(THREE) == THREE
    with pytest.raises(ValueError, match="no task 'pick-place'; the nearest is 'pick-place-v3'"):
        checked(["pick-place"])


@pytest.mark.parametrize("task", ["reach-v3", "drawer-open-v3"])
def test_an_episode_is_that_of_meta_world_whatever_was_run_before(task: str) -> None:
    """Two environments take turns in one model; a third one is Meta-World's own, with its double reset."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    from genrl.vla.simulators.metaworld import MetaWorldEnv

    actions = np.random.default_rng(0).uniform(-1, 1, (12, 4)).astype(np.float32)
    one, other = MetaWorldEnv(task), MetaWorldEnv(task)
    begun = [one.reset(seed=5)[0], other.reset(seed=6)[0]]
    assert not np.array_equal(*(seen["environment_state"] for seen in begun))
    expected = [(begun[0]["environment_state"], 0.0, 0.0)]
    for action in actions:
        seen, reward, _, _, info = one.step(action)
        expected.append((seen["environment_state"], reward, info["success"]))
        other.step(-action)
    again = [(other.reset(seed=5)[0]["environment_state"], 0.0, 0.0)]
    for action in actions:
        seen, reward, _, _, info = other.step(action)
        again.append((seen["environment_state"], reward, info["success"]))
    for (a, r, s), (b, q, u) in zip(expected, again, strict=True):
        assert np.array_equal(a, b) and (r, s) == (q, u)
    own = ALL_V3_ENVIRONMENTS[task]()
    own._partially_observable, own._set_task_called = False, True
    del own.sawyer_observation_space
    own._freeze_rand_vec, own._last_rand_vec = True, one.inner._last_rand_vec
    np.testing.assert_allclose(own.reset()[0], expected[0][0], atol=1e-9)
    for action, (seen, reward, success) in zip(actions, expected[1:], strict=True):
        observation, paid, _, _, info = own.step(action)
        np.testing.assert_allclose(observation, seen, atol=1e-9)
        assert paid == pytest.approx(reward, abs=1e-9) and info["success"] == success


def test_the_contract() -> None:
    env = open_environment(Simulation("metaworld", num_envs=6, chunk=2, tasks=THREE, group_size=2))
    observation, _ = env.reset(seed=0)
    assert observation["environment_state"].shape == (6, 39) and observation["agent_pos"].shape == (6, 4)
    state = observation["environment_state"]
    assert state.dtype == np.float32 and set(observation) == {"agent_pos", "environment_state"}
    assert np.array_equal(state[:, :4], observation["agent_pos"]) and np.array_equal(state[::2], state[1::2])
    assert set(env.task_description) == {INSTRUCTIONS[name] for name in THREE} and env.max_steps == MAX_STEPS
    assert (np.abs(state[:, 36:39]) > 0).any(1).all(), "the goal is there"
    env.reset(options={"episodes": evaluation_episodes(1, 6)})
    assert all(env.task_description.count(INSTRUCTIONS[name]) == 2 for name in THREE)
    env.close()
    few = open_environment(Simulation("metaworld", num_envs=6, chunk=2, tasks=("reach-v3",), goals=3))
    goals = few.reset(options={"episodes": evaluation_episodes(1, 6)})[0]["environment_state"][:, 36:39]
    assert len(np.unique(goals, axis=0)) == 3 and np.array_equal(goals[:3], goals[3:])
    few.close()
