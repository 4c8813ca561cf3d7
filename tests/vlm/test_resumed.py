"""Runs of every kind of method and policy that answers in tokens: trained for two iterations, and stopped between them
and resumed to the bit, with all that they remember."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.recipe.shaping import ConsistencyBonus
from genrl.vlm.train import train
from tests.run_folders import assert_resumes, rows
from tests.vlm import test_economy, test_music, test_sequence_training, tiny_musicgen, vlm_runs
from tests.vlm.methods import test_rlfr, test_sft
from tests.vlm.methods.episodes import agent_runs, test_archer, test_paid_turns, test_sub_agents
from tests.vlm.policies import test_masked_formats
from tests.vlm.tiers import fast_first

STAGES = [
    {"iterations": 1, "trainer": test_sft.SFT, "optimizer": {"lr": 1e-3}},
    {"iterations": 1, "optimizer": {"lr": 1e-4}},
]
SPREAD = [{"name": f"{test_masked_formats.__file__}:shortness"}]
FEW = {"prompts_per_iteration": 2, "group_size": 4}


def answers(place: Path, preset: str, **changes: Any) -> VLMConfig:
    return vlm_runs.config(place, trainer={"preset": preset}, task={"rows": 6}, **changes)


def optimised(place: Path, name: str, lr: float = 1e-4) -> VLMConfig:
    return vlm_runs.config(place, optimizer={"name": name, "lr": lr}, generation=FEW)


def sequences(kind: str, preset: str, **changes: Any) -> Callable[[Path], VLMConfig]:
    return lambda place: test_sequence_training.config(place, kind, preset, **changes)


def music(place: Path, preset: str, vlm: dict[str, Any] | None = None) -> VLMConfig:
    return test_music.config(place, str(tiny_musicgen.save(place / "model")), preset, vlm)


def music_preference(place: Path) -> VLMConfig:
    pairs = test_music.pairs(place / "data", str(tiny_musicgen.save(place / "model")))
    return vlm_runs.config(place, **pairs)


def asking(place: Path) -> VLMConfig:
    """What sub-agents said is said again, not drawn again."""
    (place / "asks.py").write_text(test_sub_agents.ASKS)
    return agent_runs.config(place, "vl_dac", environment={"name": f"{place / 'asks.py'}:Asks"})


RUNS: dict[str, Callable[[Path], VLMConfig]] = {
    "grpo": lambda place: answers(place, "grpo", ema={"decay": 0.5}),
    "packed rows": lambda place: answers(place, "grpo", vlm={"packing": True}),
    "statistics of questions": lambda place: answers(place, "dcpo"),
    "an average as the judge": lambda place: answers(place, "grpo_care"),
    "adafactor": lambda place: optimised(place, "adafactor"),
    "adamw_8bit": lambda place: optimised(place, "adamw_8bit"),
    "prodigy": lambda place: optimised(place, "prodigy", 1.0),
    "chosen questions and answers": lambda place: test_economy.config(place),
    "chosen questions of rlfr": lambda place: test_economy.config(place, trainer={"preset": "rlfr"}),
    "rlfr": lambda place: test_rlfr.config(place),
    "sft, then grpo": lambda place: vlm_runs.config(place, stages=STAGES, iterations=2),
    "sft at a rate of its own, then grpo": lambda place: vlm_runs.config(
        place, stages=[STAGES[0], {"iterations": 1}], iterations=2
    ),
    "episodes that go on": lambda place: agent_runs.config(place, "vl_dac"),
    "groups of episodes": lambda place: agent_runs.config(place, "para_grpo"),
    "sub-agents": asking,
    "archer": lambda place: test_archer.config(place),
    "trloo": lambda place: test_paid_turns.config(place, {"preset": "trloo"}),
    "ui_s1": lambda place: test_paid_turns.config(place, {"preset": "ui_s1"}),
    "pictures": sequences("image", "grpo"),
    "pictures by dpo": sequences("image", "dpo"),
    "masked text": sequences("masked_text", "just_grpo", rewards=SPREAD),
    "masked text by bgpo": sequences("masked_text", "bgpo", rewards=SPREAD),
    "bodies": sequences("voxels", "hi_grpo"),
    "tunes": sequences("audio", "music_rl"),
    "musicgen": lambda place: music(place, "music_rl"),
    "an adapter of musicgen": lambda place: music(place, "music_rl", test_music.LORA),
    "preferences of music": music_preference,
}
SLOW = (
    *("adafactor", "adamw_8bit", "prodigy", "chosen questions of rlfr", "sub-agents", "trloo", "ui_s1"),
    *("pictures by dpo", "an adapter of musicgen"),
)


@pytest.mark.parametrize("name", fast_first(RUNS, [name for name in RUNS if name not in SLOW]))
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConsistencyBonus, "average", (0.995, 1))
    config = RUNS[name](tmp_path)
    evaluated = config.evaluation.model_copy(update={"every": 0})
    assert_resumes(train, config.model_copy(update={"iterations": 2, "evaluation": evaluated}), tmp_path)
    first, second = rows(Path(config.output))
    assert first.get("ratio/max", 1.0) == first.get("ratio/mean", 1.0) == 1.0, "on policy to the bit"
    assert all(row["grad_norm"] > 0 for row in (first, second))
