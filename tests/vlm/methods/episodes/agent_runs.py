"""Tiny whole runs of an agent on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.episodes.run import EpisodesRun
from genrl.vlm.train import KIND
from tests import opened as opening
from tests.vlm import vlm_runs

ASSETS = Path(__file__).resolve().parents[4] / "assets"
MODEL, CROP = ASSETS / "tiny-vlm-agent", ASSETS / "tiny-vlm-crop"
PAYS = '''
"""Pays for the length of every answer, and ends after two to four steps: what an update needs is there at once."""
import numpy as np
from PIL import Image
class Pays:
    layout, help, begun = "steps", "answer with one of them", ""
    def reset(self, seed, split):
        self.rng, self.left = np.random.default_rng(seed), 2 + seed % 3
        return self.seen()
    def seen(self):
        self.picture = self.rng.integers(256, size=(56, 56, 3), dtype=np.uint8)
        return (Image.fromarray(self.picture), "get to the goal")
    def step(self, text):
        self.left -= 1
        paid = len(text) % 7 / 10
        return self.seen(), paid, self.left == 0, False, {"valid": True, "success": paid > 0.3}
    def render(self):
        return self.picture
    def close(self): ...
'''
TWO_BY_TWO = {"prompts_per_iteration": 2, "group_size": 2, "max_new_tokens": 20}


def config(place: Path, preset: str, **changes: Any) -> VLMConfig:
    """Four slots of three steps where every answer is paid, or two groups of two episodes with the crop tool."""
    (place / "pays.py").write_text(PAYS)
    critic = preset in ("vl_dac", "poad", "token_ppo", "ma_rlhf")
    sections: dict[str, Any] = {
        "vlm": {"path": str(MODEL if critic else CROP)},
        "task": None,
        "rewards": None,
        "environment": {"name": f"{place / 'pays.py'}:Pays", "parallel": 4, "steps": 3} if critic else {"name": "crop"},
        "generation": {"max_new_tokens": 6} if critic else TWO_BY_TWO,
        "trainer": {"preset": preset},
        "evaluation": {"every": 0, "questions": 4},
    }
    if critic:
        sections["trainer"]["critic"] = {"hidden": [8], "warmup": 0}
    for name, change in changes.items():
        both = isinstance(change, dict) and isinstance(sections.get(name), dict) and "algorithm" not in change
        sections[name] = {**sections[name], **change} if both else change
    return vlm_runs.config(place, **sections)


@contextmanager
def opened(config: VLMConfig) -> Iterator[EpisodesRun]:
    """A new run, as `train` opens it."""
    with opening.opened(config, KIND) as run:
        yield run
