"""A gradient that stops being finite, once per method: `genrl replay` computes to the bit what the run had computed.
Of pictures one is here, the others in tests/diffusion/test_resume_all.py."""

from pathlib import Path

import pytest

from benchmarks import brief_runs
from genrl.config import load
from genrl.config.method import built_in
from genrl.vla.methods.v_ptr.settings import VPTR
from tests.planted import replayed
from tests.run_folders import tiered

ROOT = Path(__file__).resolve().parents[3]

FILES = {
    ("vla", "ppo"): "vla/flow_sde.yaml",
    ("vlm", "answers"): "vlm/grpo.yaml",
    ("vlm", "episodes"): "vlm/vl_dac.yaml",
    ("vlm", "music_preference"): "vlm/musicgen_reward.yaml",
}
"""(kind, method) -> its file in configs/, where it is not `kind/method.yaml`."""
OTHERS = [
    "flow_grpo.yaml",
    *("vla/dppo.yaml", "vla/flow_noise.yaml", "vla/reinflow.yaml", "vla/sft_act.yaml", "vla/sft_diffusion.yaml"),
    *("vlm/ar_image_grpo.yaml", "vlm/bgpo.yaml", "vlm/grpo_care.yaml", "vlm/grid_grpo.yaml"),
]
"""Where the loss of one of these methods is made of something else."""
EVERY = [FILES.get((kind, name), f"{kind}/{name}.yaml") for kind in ("vla", "vlm") for name in built_in(kind)] + OTHERS
FAST = ("flow_grpo.yaml", "vla/flow_sde.yaml", "vlm/grpo.yaml")
"""One of each kind."""


@pytest.mark.parametrize("name", tiered(EVERY, FAST))
def test_a_planted_nan_is_replayed_exactly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(VPTR, "videos", 6)  # what its encoder learns before takes a minute, and is not replayed
    monkeypatch.setattr(VPTR, "pretraining_steps", 2)
    file = ROOT / "configs" / name
    tree = brief_runs.load(file)
    small = brief_runs.overrides(tree, 2)
    if not tree.get("evaluation", {}).get("monitor"):  # which watches evaluations
        small["evaluation.every"] = 0
    config = load(file, [*(f"{key}={value}" for key, value in small.items()), f"output={tmp_path}", "trackers=[]"])
    replayed(config, monkeypatch)
