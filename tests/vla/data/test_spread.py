"""Demonstrations beside the statistics that a policy normalises by: least spreads, other units, other widths."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.frames import check_spread
from genrl.vla.data.lerobot_dataset import Episode, open_dataset, write_dataset
from genrl.vla.policies.folder import load_policy
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import ACTION, IMAGE, STATE
from genrl.vla.policies.robot import normalise, statistics, with_least_spread
from genrl.vla.setup import adapted
from tests.vla.published import pi_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("policy")
    pi_folder(place)
    return place


def frames(scale: float = 1.0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {STATE: torch.randn(50, 5, generator=rng), ACTION: scale * torch.randn(50, 6, 3, generator=rng)}


def test_a_dimension_that_hardly_moves_is_not_blown_up() -> None:
    """A gripper that closes in one frame of a thousand: 45,902 by the plain quantiles."""
    values = torch.zeros(1000, 1) + 1e-5 * torch.rand(1000, 1, generator=torch.Generator().manual_seed(0))
    values[500] = 0.5
    plain = statistics(values)
    assert normalise(values, plain, "QUANTILES").max() > 40_000
    floored = with_least_spread(plain)
    assert normalise(values, floored, "QUANTILES").abs().max() < 25
    moving = statistics(torch.rand(1000, 2))
    assert all(torch.equal(value, moving[name]) for name, value in with_least_spread(moving).items())


def test_one_number_is_not_broadcast_against_two() -> None:
    with pytest.raises(ValueError, match="1 numbers cannot be normalised by statistics of 2"):
        normalise(torch.zeros(4, 1), statistics(torch.rand(9, 2)), "MEAN_STD")


def test_data_in_other_units_are_refused_and_outliers_said(folder, caplog) -> None:
    stats = {name: statistics(value.flatten(0, -2)) for name, value in frames().items()}
    policy = load_policy(folder, adapt=Adapt(stats=stats))
    shown = frames()
    with caplog.at_level(logging.WARNING):
        check_spread(policy, shown)
    assert not caplog.messages
    shown[STATE][3, 1] = 30.0
    with caplog.at_level(logging.WARNING):
        check_spread(policy, shown)
    (line,) = caplog.messages
    assert line.startswith("2.00% of the numbers of observation.state[1] lie beyond 5 once normalised, up to")
    with pytest.raises(ValueError, match=r"of action\[0\] lie beyond 5 .*write policy.statistics: data"):
        check_spread(policy, frames(57.3))  # degrees for radians


def test_statistics_of_the_data_take_the_place_of_those_of_the_checkpoint(folder, tmp_path) -> None:
    rng = np.random.default_rng(0)
    columns = {STATE: rng.normal(size=(40, 5)), ACTION: 57.3 * rng.normal(size=(40, 3))}
    columns = {name: value.astype(np.float32) for name, value in columns.items()}
    camera = {"observation.images.cam": rng.integers(0, 256, size=(40, 16, 16, 3), dtype=np.uint8)}
    write_dataset(tmp_path / "data", [Episode(["do it"] * 40, columns | camera)], fps=10)
    config = VLAConfig.model_validate(
        {
            "policy": {"path": str(folder), "statistics": "data"},
            "environment": {"name": "minitable"},
            "demonstrations": {"dataset": str(tmp_path / "data"), "camera": "observation.images.cam"},
            "trainer": {"algorithm": "sft"},
        }
    )
    adapt = adapted(config)
    assert adapt is not None and adapt.stats is not None
    assert adapt.stats.keys() == {STATE, ACTION, IMAGE}
    written = open_dataset(tmp_path / "data").stats[ACTION]
    torch.testing.assert_close(adapt.stats[ACTION]["std"], written["std"])
    policy = load_policy(folder, adapt=adapt)
    shown = {STATE: torch.from_numpy(columns[STATE]), ACTION: torch.from_numpy(columns[ACTION])[:, None]}
    check_spread(policy, shown)
    with pytest.raises(ValueError, match="name it in demonstrations.dataset"):
        adapted(config.model_copy(update={"demonstrations": None}))
    shutil.rmtree(tmp_path / "data")  # openpi's names, and no statistics
    write_dataset(tmp_path / "data", [Episode(["do it"] * 40, {"actions": columns[ACTION]} | camera)], fps=10)
    (tmp_path / "data" / "meta" / "stats.json").unlink()
    again = adapted(config)
    assert again is not None and again.stats is not None and again.stats.keys() == {ACTION}
    assert torch.equal(again.stats[ACTION]["std"], adapt.stats[ACTION]["std"])
