"""A gradient that stops being finite, once per method: `genrl replay` computes to the bit what the run had computed."""

from pathlib import Path

import pytest

from benchmarks import brief_runs
from genrl.config import load
from genrl.config.method import KINDS, built_in
from genrl.vla.methods.v_ptr.settings import VPTR
from tests.planted import replayed
from tests.run_folders import tiered

ROOT = Path(__file__).resolve().parents[3]

FILES = {
    ("diffusion", "dynamic_tree_rpo"): "diffusion/tree_rpo.yaml",
    ("diffusion", "flow_grpo"): "flow_grpo.yaml",
    ("diffusion", "sft"): "diffusion/talk2move_sft.yaml",
    ("vla", "ppo"): "vla/flow_sde.yaml",
    ("vlm", "answers"): "vlm/grpo.yaml",
    ("vlm", "episodes"): "vlm/vl_dac.yaml",
    ("vlm", "music_preference"): "vlm/musicgen_reward.yaml",
}
"""(kind, method) -> its file in configs/, where it is not `kind/method.yaml`."""
OTHERS = [
    *("diffusion/branch_grpo.yaml", "diffusion/mix_grpo_flash.yaml"),
    *("vla/dppo.yaml", "vla/flow_noise.yaml", "vla/reinflow.yaml", "vla/sft_act.yaml", "vla/sft_diffusion.yaml"),
    *("vlm/ar_image_grpo.yaml", "vlm/bgpo.yaml", "vlm/grpo_care.yaml", "vlm/grid_grpo.yaml"),
]
"""Where the loss of one of these methods is made of something else."""
EVERY = [FILES.get((kind, name), f"{kind}/{name}.yaml") for kind in KINDS for name in built_in(kind)] + OTHERS
FAST = ("flow_grpo.yaml", "vla/flow_sde.yaml", "vlm/grpo.yaml")
"""One of each kind."""


def smaller(tree: brief_runs.Tree) -> brief_runs.Overrides:
    """On top of `brief_runs`, of pictures: half as many samples and steps. What a loss is made of, and in how many
    micro-batches, is as before; trees and early exits need their steps and leaves."""
    made, trained = tree.get("sampling") or {}, tree["trainer"]
    if "model" not in tree or {"tree", "exit_step"} & trained.keys():
        return {}
    group = made.get("group_size", 8)
    small: brief_runs.Overrides = {}
    if group < 4:
        small |= {"sampling.prompts_per_iteration": 6 // group, "sampling.batch_size": (6 // group + 1) // 2 * group}
    elif group > 6:
        whole = made["batch_size"] % group == 0
        small |= {"sampling.group_size": 6, "sampling.batch_size": 6 if whole else 8}
    if made["num_inference_steps"] > 5:
        small["sampling.num_inference_steps"] = 5
        small |= {"trainer.window.size": 2, "trainer.window.high": 4} if trained.get("window") else {}
    return small


@pytest.mark.parametrize("name", tiered(EVERY, FAST))
def test_a_planted_nan_is_replayed_exactly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(VPTR, "videos", 6)  # what its encoder learns before takes a minute, and is not replayed
    monkeypatch.setattr(VPTR, "pretraining_steps", 2)
    file = ROOT / "configs" / name
    tree = brief_runs.load(file)
    small = brief_runs.overrides(tree, 2) | smaller(tree)
    if not tree.get("evaluation", {}).get("monitor"):  # which watches evaluations
        small["evaluation.every"] = 0
    config = load(file, [*(f"{key}={value}" for key, value in small.items()), f"output={tmp_path}", "trackers=[]"])
    replayed(config, monkeypatch)
