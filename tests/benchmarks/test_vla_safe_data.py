"""The data that our own PPO makes in DSRL's format: what it writes is read again."""

from pathlib import Path

import numpy as np
import pytest
import torch

from genrl.vla.data.recordings import read_steps
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.tables import open_environment

pytest.importorskip("h5py", reason="needs h5py: pip install 'genrl-diffusion[h5py]'")
from benchmarks import vla_safe_data as made  # noqa: E402

LINE = f"{Path(__file__).parents[1] / 'vla' / 'frail.py'}:Line"
STEPS = 6


def test_a_policy_learns_from_its_episodes_which_are_kept(tmp_path: Path) -> None:
    told = {"reward": "environment", "success_key": None, "cost_key": "cost", "max_steps": STEPS}
    env = open_environment(Simulation(LINE, num_envs=40, chunk=1, **told))
    torch.manual_seed(0)
    policy = made.Gaussian(2, 1)
    data = made.collect(env, policy, STEPS, 0)
    env.close()
    before = [p.detach().clone() for p in policy.parameters()]
    made.improve(policy, torch.optim.Adam(policy.parameters(), lr=made.LR), data, 20.0, 0)
    assert not all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    path = made.save(data, torch.tensor([3, 0, 7]), tmp_path, "Line")
    steps = read_steps(path, success_key=None, cost_key=None)
    kept = made.totals(data)
    assert path.name == f"Line-{kept[1][[0, 3, 7]].max():.0f}-3.hdf5"
    np.testing.assert_allclose(steps.totals(), [each[[0, 3, 7]].numpy() for each in kept], rtol=1e-5)
    ends = np.flatnonzero(steps.done)
    within = np.setdiff1d(np.arange(len(steps.done)), ends)
    assert len(ends) == 3 and np.array_equal(steps.next_observation[within], steps.observation[within + 1])
    assert np.array_equal(steps.terminated[ends], steps.next_observation[ends, 0] >= 3)
