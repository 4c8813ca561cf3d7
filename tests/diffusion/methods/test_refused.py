"""What each method refuses before any work begins, by its key: settings that contradict each other or do nothing."""

from pathlib import Path
from typing import Any

import pytest

from genrl.config import ConfigError, check_files
from tests.diffusion import runs
from tests.diffusion.methods.watched import DIFFUSION, EIGHT
from tests.diffusion.policy.test_rewriter import TINY
from tests.diffusion.policy.test_starting import editing

Tree = dict[str, Any]
GROUPS = {"group_size": 4, "prompts_per_iteration": 2, "batch_size": 4}
ADAPTED: Tree = {"rank": 4, "alpha": 8, "text_encoders": True}
KEPT: Tree = {"keep_graph": True}
DDIM: Tree = {"kernel": "ddim", "noise_level": 1.0}
D3PO: Tree = {"kernel": "flow_sde", "noise_level": 0.7}
BASES: dict[str, tuple[Tree, Tree]] = {  # keys of the method, other sections
    "adv_grpo": ({}, {}),
    "dgpo": ({"first_steps": 3, "timesteps_per_sample": 2}, {"sampling": EIGHT}),
    "crd": ({}, {"sampling": EIGHT}),
    "awm": ({"timesteps_per_sample": 2}, {}),
    "d3po": (D3PO, {}),
    "diff_instruct": ({}, {"sampling": {"num_inference_steps": 1, "group_size": 2, "batch_size": 4}}),
    "prompt_rl": ({"retained": 1}, {"sampling": GROUPS}),
    "prdp": ({"beta": 1e-3, "clip_range": 1e-3}, {"sampling": DIFFUSION}),
    "spo": ({"candidates": 3, "first": 1}, {"sampling": DIFFUSION | {"group_size": 2, "batch_size": 3}}),
    "talk2move": ({}, {"sampling": {"num_inference_steps": 5}}),
}
OF_STABLE_DIFFUSION = ("prdp", "spo")
ROWS: list[tuple[str, Tree, Tree, str]] = [
    ("adv_grpo", {"adversary": {"schedule": "lag", "every": 5}}, {}, "is of schedule: alternate"),
    ("adv_grpo", {"adversary": {"every": 3}}, {}, "none of 2 iterations trains the model"),
    ("adv_grpo", {"adversary": {"schedule": "lag", "warmup": 2}}, {}, "use a warm-up of 1 or less"),
    ("adv_grpo", {"adversary": {"every": 0}}, {}, "1 or more"),
    ("adv_grpo", {"adversary": {"schedule": "alternate", "every": 1}}, {}, "would never be trained; use a warm-up"),
    ("adv_grpo", {"adversary": {}}, {"sampling": {"num_frames": 5}}, "references are pictures"),
    ("diff_instruct", {}, {"sampling": {"num_inference_steps": 8}}, r"inference_steps.*one step, found 8; write 1"),
    ("diff_instruct", {}, {"evaluation": {"num_inference_steps": 8}}, r"evaluation\.num_inference_steps.*write null"),
    ("diff_instruct", {}, {"sampling": {"guidance_scale": 4.0}}, r"guidance_scale.*learnt from the teacher.*write 1"),
    ("diff_instruct", {}, {"sampling": {"guidance_scale": None}}, r"sampling\.guidance_scale.*write 1"),
    (
        "diff_instruct",
        {},
        {"lora": {"frozen": ["org/distilled"]}},
        r"lora\.frozen.*distilled LoRA by model\.lora\.f",
    ),
    ("draft", {"steps": 4}, {}, r"trainer\.steps.*the sampler has 3 steps; use 3 or less"),
    ("draft", {}, {"reward": {"normalize": "group"}}, r"rewards\.0\.normalize.*write none"),
    ("draft", {}, {"reward": {"remote": "http://127.0.0.1:1"}}, r"remote.*stays in the process.*write null"),
    ("draft", {}, {"reward": {"isolate": True}}, r"rewards\.0\.isolate.*write false"),
    ("draft", {}, {"sampling": {"same_initial_noise": True}}, "one picture many times"),
    ("draft", {"truncation": "drafft"}, {}, "did you mean draft"),
    ("flow_grpo", KEPT | {"updates_per_iteration": 2}, {}, "trainer.updates_per_iteration"),
    ("flow_grpo", KEPT | {"inner_epochs": 2}, {}, "trainer.inner_epochs"),
    ("flow_grpo", KEPT | {"guidance_in_training": False}, {}, "trainer.guidance_in_training"),
    ("flow_grpo", KEPT, {"distributed": {"fsdp": True}}, "distributed.fsdp"),
    ("flow_grpo", {"kl": "x_prediction", "kl_weight": 0.1} | DDIM, {}, "of a velocity"),
    ("flow_grpo", {"history": {"size": 32}}, {}, "belongs to another trainer.algorithm"),
    ("flow_grpo", {}, {"sampling": {"group_size": 1}}, "nothing to be compared with"),
    ("flow_grpo", {"aggregate": "gdpo", "advantage_scale": "global"}, {}, "use group"),
    ("flow_grpo", {"aggregate": "gdpo"}, {"reward": {"normalize": "group"}}, "normalises the scores themselves"),
    (
        "flow_grpo",
        {},
        {"model": {"lora": ADAPTED, "offload": {"text_encoders": "between"}}},
        "change with the adapters",
    ),
    ("flow_grpo", {}, {"model": {"lora": ADAPTED, "encodings": "there"}}, "encodings change with the adapters"),
    ("flow_grpo", {}, {"model": {"lora": {"type": "dora", "text_encoders": True}}}, "was not tried with it"),
    ("flow_grpo", {}, {"model": {"lora": ADAPTED, "quantize": "int8"}}, "trained unquantised"),
    ("flow_grpo", {}, {"model": {"lora": ADAPTED}, "distributed": {"fsdp": True}}, "not held in shards"),
    ("flow_grpo", KEPT, {"model": {"lora": ADAPTED}}, "begin behind these"),
    ("flow_grpo", KEPT, {"sampling": {"fit_batch": True}}, "sampling.fit_batch"),
    ("flow_grpo", {}, {"sampling": {"fit_batch": True}, "distributed": {"fsdp": True}}, "sampling.fit_batch"),
    ("flow_grpo", {}, {"ema": {"every": 100}}, "the average would stay the model before training"),
    ("paco_grpo", {"aggregate": "log_tame_released"}, {}, "use none"),
    ("paco_grpo", {"advantage_scale": "prompt_history"}, {}, "one of group, global, none"),
    ("grpo_guard", DDIM, {}, "alpha-bars"),
    ("grpo_guard", {"log_prob_reduction": "sum"}, {}, "unknown key"),
    ("ddpo", {"guard": True}, {}, "unknown key"),
    ("ddpo", {"history": {"size": 4}}, {}, "never reached"),
    ("dgpo", {}, {"sampling": {"batch_size": 6}}, "needs whole groups .* use 4"),
    ("dgpo", {"first_steps": 4}, {}, "sampling grid has 3 steps; use 3 or less"),
    ("dgpo", {"first_steps": 1}, {}, "2 noise levels cannot be drawn from a grid of 1"),
    ("crd", {}, {"sampling": {"same_initial_noise": True}}, "one picture many times"),
    ("awm", {}, {"sampling": {"num_inference_steps": 1}}, "use 2 or more steps"),
    ("d3po", {}, {"sampling": EIGHT | {"batch_size": 2}}, "needs whole groups .* use 4"),
    ("d3po", {}, {"sampling": {"num_inference_steps": 1}}, "last step is never stochastic"),
    ("d3po", {"noise_level": 0.0}, {}, "deterministic and has no density"),
    ("dpo_offline", {}, {"sampling": EIGHT}, "dpo_offline has groups of 2, found 4; write 2"),
    ("gardo", {"diversity": "unlike"}, {}, "no reward is called 'unlike'"),
    ("gardo", {"gate": {"rewards": ["other"]}}, {}, "no reward is called 'other'"),
    ("gardo", {"gate": {"rewards": []}}, {}, "name one reward or more"),
    ("gardo", {"gate": {"rewards": ["warmth"], "share": 0.5}}, {}, "a share that lies between"),
    ("gardo", {"kl_weight": 0.0}, {}, "nothing is gated"),
    ("prdp", {}, {"sampling": {"num_inference_steps": 1}}, "nothing is trained"),
    ("prdp", {}, {"sampling": {"group_size": 1}}, "group of 2 or more"),
    ("prdp", {"noise_level": 0.0}, {}, "deterministic"),
    ("prdp", {"kernel": "flow_sde"}, {}, "is for flow models"),
    ("prdp", {"updates_per_iteration": 2}, {}, "updates_per_iteration"),
    ("prdp", {"beta": 0.0}, {}, "beta"),
    ("prompt_rl", {"retained": 4}, {}, "use 3 or less"),
    ("prompt_rl", {"tree": {"ways": 2}, "window": {"size": 1}}, {}, "trainer.tree: unknown key"),
    ("prompt_rl", {"advantage_scale": "prompt_history"}, {}, "one of group, global, none"),
    ("prompt_rl", {"aggregate": "gdpo"}, {}, "trainer.aggregate: unknown key"),
    ("prompt_rl", {"rewriter": {"instruction": "Rewrite it."}}, {}, "holds {prompt} 0 times"),
    ("prompt_rl", {"rewriter": {"dtype": "float16"}}, {}, "not scaled, and small gradients vanish.*use bfloat16"),
    ("spo", {"first": 3}, {}, "no step of 4 is left"),
    ("spo", {"noise_level": 0.0}, {}, "deterministic"),
    ("spo", {"noise_level": 1.5}, {}, "1 or less"),
    ("spo", {"candidates": 1}, {}, "candidates"),
    ("spo", {"clip_range": 1.0}, {}, "clip_range"),
    ("spo", {"kernel": "flow_sde"}, {}, "is for flow models"),
    ("talk2move", {"noise_level": 0.0}, {}, "deterministic and has no density"),
    ("talk2move", {"kernel": "ddim"}, {}, "the shortcut is for flow models"),
    ("talk2move", {}, {"sampling": {"inputs": {}}}, "name the argument of its call and the column of the files"),
    ("talk2move", {"exit_step": 5}, {}, "use 4 or less"),
    ("talk2move", {"shortcut": 5}, {}, "5 steps are no shortcut of 5"),
    ("talk2move", {"window": {"size": 2}}, {}, r"trainer\.window: unknown key"),
]


@pytest.mark.parametrize(("name", "keys", "sections", "says"), ROWS, ids=[f"{row[0]}: {row[3][:30]}" for row in ROWS])
def test_refused(
    folder: Path, model: Path, sd: Path, kontext: Path, name: str, keys: Tree, sections: Tree, says: str
) -> None:
    own, common = BASES.get(name, ({}, {}))
    sections = {k: common.get(k, {}) | sections.get(k, {}) for k in common.keys() | sections.keys()}
    sections["rewards"] = [runs.reward(folder, "warmth", **sections.pop("reward", {}))]
    trainer: Tree = {"algorithm": name, **own, **keys}
    if name == "adv_grpo":
        trainer["adversary"] = {"references": str(folder / "pictures"), **trainer["adversary"]}
    if name == "prompt_rl":
        trainer["rewriter"] = {"path": str(TINY), "instruction": "{prompt}", **trainer.get("rewriter", {})}
    with pytest.raises(ConfigError, match=says):
        if name in OF_STABLE_DIFFUSION:
            check_files(runs.config(folder, sd, trainer=trainer, **sections))  # which read what it predicts
        elif name == "talk2move":
            editing(folder, kontext, trainer=trainer, **sections)
        else:
            runs.config(folder, model, trainer=trainer, **sections)
