"""LIBERO here and in LeRobot: are its simulator, and what a policy reads and sees, the same over 40 actions?

    python3.12 -m venv lerobot && lerobot/bin/pip install 'lerobot[dataset]==0.6.1' '.[libero]'
    lerobot/bin/pip install --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1
    PYTHONPATH=.:rewards lerobot/bin/python benchmarks/libero_lerobot.py libero_object/0 libero_spatial/2

LeRobot asks for an older torch and Python 3.12, so in an environment of its own, in which both run. Both begin at the
same listed start with the same seed; LeRobot loads the scene anew for it. Figures: docs/vla_simulators.md.
"""

import gc
import sys
from typing import Any

import numpy as np
from lerobot.envs import make_env, make_env_pre_post_processors, preprocess_observation
from lerobot.envs.configs import LiberoEnv as LeRobots

from genrl.vla.policies.policy import STATE
from genrl.vla.simulators.libero.env import CAMERAS, LiberoEnv
from genrl.vla.simulators.libero.package import opened

SIZE, START, SEED, ACTIONS = 128, 3, 7, 40


def theirs(name: str) -> tuple[Any, Any]:
    """LeRobot's environment of a task, and what it makes of its observations."""
    suite, _, number = name.partition("/")
    opened()
    config = LeRobots(task=suite, task_ids=[int(number)], observation_height=SIZE, observation_width=SIZE)
    return make_env(config)[suite][int(number)], make_env_pre_post_processors(config, None)[0]


def states(names: list[str]) -> None:
    """Print the greatest differences over an episode's start and `ACTIONS` random actions."""
    for name in names:
        actions = np.random.default_rng(SEED).uniform(-1, 1, (ACTIONS, 7)).astype(np.float32)
        vector, before = theirs(name)
        inner, rows = vector.envs[0].unwrapped, []
        inner.init_state_id = START
        raw = vector.reset(seed=[SEED])[0]
        for action in [*actions, None]:
            seen = before(preprocess_observation(raw))
            pictures = [
                raw["pixels"][camera][0, ::-1, ::-1].astype(int) for camera in CAMERAS
            ]  # theirs are turned later
            rows.append((inner._env.get_sim_state(), seen[STATE][0].numpy(), *pictures))
            raw = raw if action is None else vector.step(action[None])[0]
        vector.close()
        del vector, inner
        gc.collect()  # what is freed later would end the context of the next pictures
        env, greatest = LiberoEnv(name), np.zeros(2 + len(CAMERAS))
        ours = env.reset(seed=SEED, options={"start": START})[0]
        for action, row in zip([*actions, None], rows, strict=True):
            shown = (env.env.get_sim_state(), ours["agent_pos"], *(env.picture(SIZE, camera) for camera in CAMERAS))
            differences = [np.abs(a - b).max() for a, b in zip(shown, row, strict=True)]
            greatest = np.maximum(greatest, differences)
            ours = ours if action is None else env.step(action)[0]
        env.close()
        print(name, dict(zip(("simulator", "agent_pos", *CAMERAS), greatest.tolist(), strict=True)))


if __name__ == "__main__":
    states(sys.argv[1:])
