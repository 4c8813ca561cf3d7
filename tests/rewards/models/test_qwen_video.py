"""Which frames of a video Qwen's models read."""

from __future__ import annotations

import pytest

from genrl_rewards.models.qwen_video import chosen


def test_frames_are_chosen_by_time() -> None:
    assert len(chosen(81, 16.0, 2.0, "r")) == 10 and chosen(81, 16.0, 2.0, "r")[::9] == [0, 80]
    assert chosen(16, 16.0, 2.0, "r") == [0, 5, 10, 15]  # one second: four all the same
    assert len(chosen(121, 16.0, 2.0, "r")) == 16 and len(chosen(121, 16.0, 2.0, "r", down=True)) == 14
    assert chosen(3, 16.0, 2.0, "r") == [0, 2]  # an even number of them
    with pytest.raises(ValueError, match="r reads videos of two frames or more; this is a picture"):
        chosen(1, 16.0, 2.0, "r")
