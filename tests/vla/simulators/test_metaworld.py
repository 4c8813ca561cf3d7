"""Meta-World: its tasks, and their independence of the past."""

import importlib.util

import numpy as np
import pytest

from genrl.vla.simulators.metaworld import INSTRUCTIONS, checked
from genrl.vla.simulators.simulator import headless

headless()
if importlib.util.find_spec("metaworld") is None:
    pytest.skip("needs Meta-World: pip install 'genrl-diffusion[metaworld]'", allow_module_level=True)


def test_every_task_has_a_sentence_of_its_own() -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP

    assert set(INSTRUCTIONS) == set(ALL_V3_ENVIRONMENTS) == set(ENV_POLICY_MAP) and len(INSTRUCTIONS) == 50
    assert len(set(INSTRUCTIONS.values())) == 50 and all(line == line.lower() for line in INSTRUCTIONS.values())
    assert checked(()) == tuple(INSTRUCTIONS) and checked(("reach-v3",)) == ("reach-v3",)
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
