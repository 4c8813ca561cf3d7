"""ManiSkill: the batch over a double, and its own PickCube where it and a Vulkan driver are installed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from genrl.vla.simulators.contract import Reading, Run, Simulation
from genrl.vla.simulators.maniskill import BatchHost, sentence
from genrl.vla.simulators.simulator import seed_of
from genrl.vla.simulators.tables import open_environment


class Double:
    """What ManiSkill's batched environment does: n walks from a start by the seed; success at 1, failure below -1."""

    device, single_action_space = torch.device("cpu"), spaces.Box(-1.0, 1.0, (2,), np.float32)
    spec = SimpleNamespace(id="PushCube-v1")

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.place = num_envs, torch.zeros(num_envs)
        self.agent = SimpleNamespace(robot=SimpleNamespace(get_qpos=lambda: self.place[:, None] * torch.ones(2)))

    def reset(self, *, seed: list[int], options: dict[str, Any]) -> None:
        assert len(seed) == self.num_envs
        with torch.random.fork_rng():
            torch.manual_seed(seed[0])
            self.place[options["env_idx"]] = 0.2 * torch.rand(len(options["env_idx"]))

    def step(self, actions: torch.Tensor):
        self.place = self.place + 0.3 * actions[:, 0]
        success = self.place >= 1.0
        return self.get_obs(), self.place.clone(), success | (self.place < -1.0), None, {"success": success}

    def get_obs(self) -> torch.Tensor:
        return torch.stack([self.place, 2 * self.place], 1)

    def get_sensor_images(self) -> dict[str, Any]:
        rgb = (self.place.clamp(0, 1) * 255).to(torch.uint8)[:, None, None, None].expand(-1, 4, 4, 3)
        return {"base_camera": {"rgb": rgb}}


def test_a_batch() -> None:
    """Slots that end inside a chunk show where they ended, not where they were stepped along to."""
    how = Reading(chunk=3, image_size=4, max_steps=4, instruction="push")
    host = BatchHost(Double(4), 4, how)
    (first,) = host.run(Run({0: 7, 1: 7, 2: 8, 3: 9}, {}))
    start = first.observation["agent_pos"][:, 0]
    assert start[0] == start[1] and len(set(start.tolist())) == 3 and first.n_executed.tolist() == [0] * 4
    assert first.instruction == ["push"] * 4 and first.action_dim == 2
    chunks = np.zeros((4, 3, 2), dtype=np.float32)
    chunks[0, :, 0] = 5.0  # clipped to 1: there in three steps, or fewer
    chunks[1, :, 0] = -9.0
    (second,) = host.run(Run({}, dict(enumerate(chunks))))
    steps = int(np.ceil((1.0 - start[0]) / 0.3))
    place = second.observation["agent_pos"][:, 0]
    assert second.terminated.tolist() == [True, False, False, False] and second.success[0]
    assert second.n_executed.tolist() == [steps, 3, 3, 3] and second.rewards[0].sum() == 1
    np.testing.assert_allclose(place, start + np.array([0.3 * steps, -0.9, 0, 0], dtype=np.float32), atol=1e-6)
    (third,) = host.run(Run({0: 11}, {slot: chunks[slot] for slot in (1, 2, 3)}))
    place = third.observation["agent_pos"][:, 0]
    assert third.slots.tolist() == [0, 1, 2, 3] and third.n_executed.tolist() == [0, 1, 1, 1]
    assert third.terminated.tolist() == [False, True, False, False] and not third.success.any()
    assert third.truncated.tolist() == [False, False, True, True], "the fourth action"
    np.testing.assert_allclose(place[1], start[1] - 1.2, atol=1e-6)
    (alone,) = BatchHost(Double(1), 1, how).run(Run({0: 11}, {}))
    assert alone.observation["agent_pos"][0, 0] == place[0], "a start is a function of its number alone"
    pixels = third.observation["pixels"]
    assert pixels.shape == (4, 4, 4, 3) and pixels[2, 0, 0, 0] == int(np.clip(place[2], 0, 1) * 255)
    assert host.render([2], 8).shape == (1, 8, 8, 3)
    assert sentence(Double(2), Reading(chunk=1)) == ["push cube"] * 2
    assert sentence(Double(1), Reading(chunk=1, instruction="go")) == ["go"]
    assert seed_of(3, Reading(chunk=1, goals=2)) == seed_of(5, Reading(chunk=1, goals=2)) < 2**31


def test_pick_cube() -> None:
    """The same in this process as on workers, with a time limit that falls into the second chunk."""
    pytest.importorskip("mani_skill", reason="needs ManiSkill: pip install mani-skill")
    sapien = pytest.importorskip("sapien")
    try:
        sapien.render.RenderSystem()
    except RuntimeError as error:
        pytest.skip(f"ManiSkill needs a Vulkan driver: {error}")
    how: dict[str, Any] = {
        "chunk": 3,
        "image_size": 64,
        "max_steps": 5,
        "settings": {"control_mode": "pd_ee_delta_pose"},
    }
    result = []
    for workers in (0, 2):
        env = open_environment(Simulation("maniskill", num_envs=2, workers=workers, **how))
        rng = np.random.default_rng(0)
        shown = [*env.reset(seed=1)[0].values()]
        assert env.task_description == ["pick cube"] * 2 and [value.shape[1:] for value in shown[:2]] == [(9,), (42,)]
        for _ in range(2):
            observation, *rest = env.step(rng.uniform(-1, 1, (2, 3, 7)).astype(np.float32))
            shown += [*observation.values(), *rest[:3], rest[3]["n_executed"]]
        env.close()
        assert shown[-1].tolist() == [2, 2]
        result.append(shown)
    assert all(np.array_equal(here, there) for here, there in zip(*result, strict=True))
