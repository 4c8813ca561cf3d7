"""Every method in one tiny run: logged as documented, at the cost foretold, resumed to the bit. And its meter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from genrl.config.method import built_in, metrics_of
from genrl.diffusion.config.estimate import plan, read_components
from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy import decoding
from genrl.objectives.policy_losses import clipped_surrogate
from genrl.runtime.folder.metrics import by_heading, catalogue, document
from genrl.runtime.folder.run import Run, read_metrics
from genrl.runtime.loop.updating import Meter
from tests.diffusion import runs
from tests.diffusion.methods.watched import resumed
from tests.diffusion.policy.test_starting import editing
from tests.run_folders import tiered

KL = {"kl"}  # only with kl_weight above 0
EVALUATION = set(by_heading()["Evaluation"]) | {"timing/eval_s"}  # only where evaluation is due
USED = set(by_heading()["Rewards as used"])  # only of rewards that are not simply added
NOT_SCORED = set(by_heading()["Rewards"]) | {"timing/decode_s", "timing/score_s"}  # pictures that are given
GATED = {"schedule": [[0, 1.0]], "gate": {"reward": "brightness", "at_least": 0.0}}
COMMON = ("Rewards", "Rewards as used", "Evaluation", "Groups and advantages", "Update", "Time, memory and cost")
SHARED = {entry for title in COMMON for entry in by_heading()[title]}
SHARED -= {"rounding/applied"}  # what a pipeline trains is float32
GROUPS = set(by_heading()["Groups and advantages"])
ASSETS = Path(__file__).parents[3] / "assets"
JUDGE = {"name": "dino_adversary", "args": {"model": str(ASSETS / "tiny-dino"), "size": 16, "hidden": 4}}
FLOW: dict[str, Any] = {"kernel": "flow_sde", "noise_level": 0.7}
PLAIN = USED | KL | EVALUATION
CONFIGURATIONS: dict[str, tuple[dict[str, Any], set[str], dict[str, Any]]] = {
    # settings of the trainer, entries of all runs and of its method that such a run does not log, other sections
    "flow_grpo": ({"kl_weight": 0.01}, USED, {"evaluation": {"every": 2, "group_size": 2}}),
    "adv_grpo": (
        {"kl_weight": 0.01, "adversary": {"references": f"{ASSETS / 'references'}:train", "schedule": "together"}},
        {"used/<name>_weight", "used/<name>_gated"},
        {
            "prompts": {"train": str(ASSETS / "prompts/shapes_train.txt")},
            "evaluation": {"every": 1, "group_size": 2, "monitor": {"reward": "redness", "tolerance": 1.0}},
        },
    ),
    "dynamic_tree_rpo": (
        {"window": {"size": 1}, "tree": {"ways": 2, "at": "window"}, "layer_tuning": {"target": "best_image"}},
        PLAIN,
        {},
    ),
    "flow_dppo": ({"updates_per_iteration": 2}, PLAIN, {}),
    "gardo": (
        {"gate": {"rewards": ["brightness"]}, "diversity": "brightness", "reference_model": {"reset_every": 1}},
        EVALUATION,
        {},
    ),
    "opd": ({"teachers": {"teacher": {"guidance": 2.0}}}, PLAIN | {"zero_std_ratio", "group_std_mean"}, {}),
    "diffusion_nft": ({"kl_weight": 0.0}, KL | EVALUATION, {"ema": None}),
    "ddpo": (FLOW, PLAIN | {"zero_std_ratio", "group_std_mean"}, {"sampling": {"group_size": 1}}),
    "prompt_rl": (
        {"retained": 1, "kl_weight": 0.0, "rewriter": {"path": str(ASSETS / "tiny-lm"), "max_new_tokens": 4}},
        USED | KL,
        {"evaluation": {"every": 2, "group_size": 2}},
    ),
    "talk2move": ({}, PLAIN, {"sampling": {"num_inference_steps": 4}}),
    "prdp": (FLOW, PLAIN | {"advantage/abs_mean", "advantage/clipped"}, {}),
    "awm": ({"timesteps_per_sample": 1, "updates_per_iteration": 2}, PLAIN - KL, {}),
    "dgpo": ({"first_steps": 2, "timesteps_per_sample": 1}, PLAIN - KL, {}),
    "crd": ({"updates_per_iteration": 1}, PLAIN - KL, {}),
    "dpo": ({"reference_every": 1}, PLAIN | GROUPS, {}),
    "d3po": (FLOW, PLAIN | GROUPS, {}),
    "draft": ({}, PLAIN | GROUPS, {}),
    "diff_instruct": ({}, PLAIN | GROUPS | {"loss"}, {"sampling": {"num_inference_steps": 1}}),
    "spo": (FLOW | {"first": 0, "threshold": 0.0}, PLAIN | GROUPS, {}),
    "sft": ({}, PLAIN | GROUPS | NOT_SCORED, {"sampling": {"group_size": 1}}),
}


ONE_OF_EACH_ROOM = ("flow_grpo", "diffusion_nft", "d3po", "draft", "diff_instruct", "sft")

KEPT: dict[str, set[str]] = {
    "adv_grpo": {"kept-adversary", "kept-adversary_optimizer"},
    "diffusion_nft": {"snapshot-old"},
    "gardo": {"snapshot-following"},
    "prompt_rl": {"kept-rewriter"},
    "awm": {"snapshot-ema_reference", "snapshot-old"},
    "dgpo": {"snapshot-ema_reference"},
    "crd": {"snapshot-old", "snapshot-sampling"},
    "dpo": {"snapshot-refreshed_reference"},
    "diff_instruct": {"snapshot-assistant", "kept-assistant_optimizer"},
}
"""What a method has in its checkpoints beside weights, their average and their optimiser."""
CHEAPER = ("talk2move", "spo", "dynamic_tree_rpo", "diffusion_nft")
"""Than foretold in some iterations: an earlier exit step, fewer pairs, another window, an old policy that is new."""


def brief(name: str, folder: Path, model: Path, kontext: Path) -> Config:
    trainer, _, sections = CONFIGURATIONS[name]
    changes = {"evaluation": {"every": 0}, **sections, "trainer": {"algorithm": name, **trainer}}
    rewards = [runs.reward(folder, "redness")]
    if not USED & CONFIGURATIONS[name][1]:
        rewards = [runs.reward(folder, "redness", **GATED), runs.reward(folder, "brightness", weight=0)]
    if name == "adv_grpo":
        rewards = [runs.reward(folder, "redness", weight=0), JUDGE]
    if name in ("draft", "diff_instruct"):
        rewards = [runs.reward(folder, "warmth")]
    if name == "sft":
        Image.new("RGB", (32, 32), (200, 40, 40)).save(folder / "target.png")
        row = json.dumps({"prompt": "a red star", "target_image": "target.png"})
        (folder / "targets.jsonl").write_text(f"{row}\n", encoding="utf-8")
        changes = {**changes, "prompts": {"train": str(folder / "targets.jsonl"), "eval": None}}
    if name == "talk2move":
        return editing(folder, kontext, rewards=rewards, **changes)
    return runs.config(folder, model, rewards=rewards, **changes)


@pytest.fixture(autouse=True)
def _random_autoencoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MOST", 10.0)  # it need not give pictures back


@pytest.mark.parametrize("name", tiered(CONFIGURATIONS, ONE_OF_EACH_ROOM))
def test_a_run_is_logged_counted_and_gone_on_with(folder: Path, model: Path, kontext: Path, name: str) -> None:
    """That no other key is logged is the logger's to refuse (`document` raises)."""
    config = brief(name, folder, model, kontext)
    run = resumed(config, folder)
    entry = {id(doc): key for key, doc in catalogue().items()}
    rows = read_metrics(Run(run).metrics)
    logged = {entry[id(document(key))] for row in rows for key in row if key != "step"}
    assert logged == (SHARED | metrics_of(type(config.trainer)).keys()) - CONFIGURATIONS[name][1]
    expected = plan(config, read_components(Path(config.model.path)))
    if name not in CHEAPER:
        trained = [row for row in rows if "model_calls/train" in row]
        assert sum(row["model_calls/sample"] for row in trained) == pytest.approx(2 * expected.sample_calls)
        assert sum(row["model_calls/train"] for row in trained) == pytest.approx(2 * expected.train_calls)
    average = {"snapshot-average"} if config.ema else set()
    evaluated = {"kept-before"} if config.prompts.eval and config.evaluation.every else set()
    assert runs.last_state(run).tensors.keys() == {"weights", "optimizer"} | average | evaluated | KEPT.get(name, set())


def test_every_entry_is_logged_by_some_run() -> None:
    methods = built_in("diffusion")
    result = [(SHARED | metrics_of(methods[name]).keys()) - absent for name, (_, absent, _) in CONFIGURATIONS.items()]
    assert set().union(*result) == SHARED.union(*(metrics_of(method) for method in methods.values()))


def test_ratios_are_measured_over_all_their_values() -> None:
    """Deviations of 1e-7 about 1 keep their spread, whatever the micro-batches; equal ones have none."""
    ratios = 1.0 + 1e-7 * torch.tensor([1.0, -2.0, 4.0, 0.0, -3.0, 5.0], dtype=torch.float64)
    for values in (ratios, torch.ones_like(ratios)):
        meter = Meter()
        for part in values.split([1, 3, 2]):
            meter.add_surrogate(
                clipped_surrogate(part.log(), torch.zeros_like(part), torch.ones_like(part), 1, 1), part
            )
        result = meter.result()
        assert result["ratio/mean"] == pytest.approx(float(values.mean()), abs=1e-14)
        assert result["ratio/std"] == pytest.approx(float(values.std(correction=0)), rel=1e-6)
    assert result["ratio/std"] == result["ratio/max_abs_dev"] == 0.0
