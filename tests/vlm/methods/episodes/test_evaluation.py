"""Episodes of an evaluation whose environments die."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from genrl.mdp.noise import derive_seed
from genrl.vlm.episodes.evaluate import SEEDS, Judged, figures_of, judge
from tests.vlm.methods.episodes import agent_runs

DIES = """
import os
import numpy as np
from PIL import Image
class Dies:
    layout, help, begun = 'steps', 'answer with one of them', ''
    def reset(self, seed, split):
        self.fate, self.steps = seed % 3, 0
        return self.seen()
    def seen(self):
        return (Image.new('RGB', (56, 56)), 'get to the goal')
    def step(self, text):
        self.steps += 1
        if self.fate == 0 and self.steps == 2: os._exit(7)
        return self.seen(), 1.0, self.steps == 3, False, {'success': True}
    def render(self):
        if self.fate == 1 and self.steps == 1: os._exit(8)
        return np.full((56, 56, 3), 60 * self.steps, np.uint8)
    def close(self): ...
"""


@pytest.mark.slow
def test_what_dies_in_a_step_or_over_its_picture_is_lost_and_the_others_are_filmed_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    place = {"name": f"{tmp_path / 'dies.py'}:Dies", "parallel": 3, "steps": 3, "processes": True}
    fates = [derive_seed("held out", number) % SEEDS % 3 for number in range(20)]
    numbers = [fates.index(fate) for fate in (0, 1, 2)]
    with agent_runs.opened(agent_runs.config(tmp_path, "vl_dac", environment=place)) as run:
        found = judge(run.policy, run.config, run.table, numbers)
        assert [one.lost for one in run.table.episodes.values()] == [True, True, False]
    row = figures_of(found)
    names = ("dropped", "too_long", "success_mean", "length_mean")
    assert [row[f"eval/{name}"] for name in names] == [2, 0, 1, 3]
    with pytest.raises(RuntimeError, match="all 2 episodes of the evaluation hung or died"):
        figures_of(Judged(found.episodes[:2], []))
    assert [one["steps"] for one in found.episodes] == [2, 1, 3]
    film = np.asarray(found.films[2][0])
    assert [film[0, left, 0] for left in range(0, film.shape[1], 98)] == [0, 60, 120, 180]
    assert [film.size[0] for film, _ in found.films] == [2 * 98 - 2, 96, 4 * 98 - 2]
