"""A gradient that stops being finite, once per method: `genrl replay` computes to the bit what the run had computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import brief_runs
from genrl.config import load
from genrl.config.method import KINDS, built_in
from tests.planted import replayed

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    ("diffusion", "dynamic_tree_rpo"): "diffusion/tree_rpo.yaml",
    ("diffusion", "flow_grpo"): "flow_grpo.yaml",
    ("vla", "ppo"): "vla/flow_sde.yaml",
    ("vlm", "answers"): "vlm/grpo.yaml",
    ("vlm", "episodes"): "vlm/vl_dac.yaml",
}
"""(kind, method) -> its file in configs/, where it is not `kind/method.yaml`."""
OTHERS = [
    *("diffusion/branch_grpo.yaml", "diffusion/mix_grpo_flash.yaml"),
    *("vla/dppo.yaml", "vla/flow_noise.yaml", "vla/reinflow.yaml", "vla/sft_diffusion.yaml"),
    *("vlm/ar_image_grpo.yaml", "vlm/bgpo.yaml", "vlm/grpo_care.yaml", "vlm/grid_grpo.yaml"),
]
"""Where the loss of one of these methods is made of something else."""
EVERY = [FILES.get((kind, name), f"{kind}/{name}.yaml") for kind in KINDS for name in built_in(kind)] + OTHERS


def test_every_embedded_file_is_there() -> None:
    assert [name for name in EVERY if not (ROOT / "configs" / name).is_file()] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # deprecations within diffusers
@pytest.mark.parametrize("name", EVERY)
def test_a_planted_nan_is_replayed_exactly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = ROOT / "configs" / name
    small = brief_runs.overrides(brief_runs.load(file), 2)
    if "evaluation.monitor.patience" not in small:  # which watches evaluations
        small["evaluation.every"] = 0
    config = load(file, [*(f"{key}={value}" for key, value in small.items()), f"output={tmp_path}", "trackers=[]"])
    replayed(config, monkeypatch)
