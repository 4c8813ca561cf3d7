"""Demonstrations under the names that people's data sets have, and what they cannot be."""

from pathlib import Path

import numpy as np
import pytest
import torch

from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import frames_of
from genrl.vla.data.frames import episode_frames
from genrl.vla.data.lerobot_dataset import Episode, write_dataset
from genrl.vla.policies.policy import ACTION, IMAGE, STATE
from genrl.vla.setup import new_policy

CAMERA = "observation.images.top"


def config(folder: Path, names: tuple[str, ...], size: tuple[int, int] = (8, 8)) -> VLAConfig:
    columns = {name: np.full((4, 3), k, dtype=np.float32) for k, name in enumerate(names)}
    pictures = {CAMERA: np.zeros((4, *size, 3), dtype=np.uint8)}
    write_dataset(folder / "data", [Episode(["do it"] * 4, columns | pictures)], fps=10)
    return VLAConfig.model_validate(
        {
            "policy": {"new": {"image_size": 8}},
            "environment": {"name": "gymnasium/Some-v0"},
            "demonstrations": {"dataset": str(folder / "data"), "camera": CAMERA},
            "trainer": {"algorithm": "sft"},
        }
    )


@pytest.mark.parametrize("names", [(STATE, ACTION), ("state", "actions"), (STATE, "actions")])
def test_columns_of_openpi_are_those_of_lerobot(names: tuple[str, ...], tmp_path: Path) -> None:
    """Statistics are not needed for the width of actions."""
    result = config(tmp_path, names)
    (tmp_path / "data" / "meta" / "stats.json").unlink()
    frames, _ = frames_of(result, None)
    assert frames[STATE].unique().tolist() == [0.0] and frames[ACTION].unique().tolist() == [1.0]
    assert frames[IMAGE].shape == (4, 8, 8, 3)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"demonstrations.dataset: .* has no column 'action'; it has .*moves"):
        frames_of(config(tmp_path, (STATE, "moves")), None)


def test_episodes_of_different_pictures_are_refused_by_name() -> None:
    sizes = ((8, 8), (8, 12))
    columns = [{IMAGE: np.zeros((2, *size, 3), dtype=np.uint8), ACTION: np.zeros((2, 3))} for size in sizes]
    episodes = [Episode(["do it"] * 2, each) for each in columns]
    with pytest.raises(ValueError, match=r"image is \[8, 8, 3\] in one episode and \[8, 12, 3\] in another"):
        episode_frames(episodes, lambda texts: torch.zeros(0), inputs=[IMAGE], horizon=2)


def test_a_new_policy_sees_square_pictures(tmp_path: Path) -> None:
    result = config(tmp_path, (STATE, ACTION), (8, 12))
    with pytest.raises(ValueError, match=r"the pictures are 8 x 12 \(height x width\), and a new policy sees square"):
        new_policy(result, *frames_of(result, None))
