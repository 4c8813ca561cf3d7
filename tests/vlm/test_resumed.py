"""Runs of every kind of method and policy that answers in tokens: trained for two iterations, and stopped between them
and resumed to the bit, with all that they remember."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file

from genrl.config import ConfigError, load
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.folder import load_trained, save_model
from genrl.vlm.policies.loading import loaded
from genrl.vlm.policies.policy import Policy
from genrl.vlm.recipe.shaping import ConsistencyBonus
from genrl.vlm.train import train
from tests.run_folders import assert_resumes, rows
from tests.vlm import test_economy, test_music, test_sequence_training, tiny_checkpoints, tiny_musicgen, vlm_runs
from tests.vlm.methods import test_rlfr, test_sft
from tests.vlm.methods.episodes import agent_runs, test_archer, test_sub_agents
from tests.vlm.policies import test_sequences
from tests.vlm.policies.test_token_policy import picture
from tests.vlm.tiers import fast_first

STAGES = [
    {"iterations": 1, "trainer": test_sft.SFT, "optimizer": {"lr": 1e-3}},
    {"iterations": 1, "optimizer": {"lr": 1e-4}},
]
SPREAD = [{"name": f"{test_sequences.__file__}:shortness"}]
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
    "trloo": lambda place: test_archer.config_of_paid_turns(place, {"preset": "trloo"}),
    "ui_s1": lambda place: test_archer.config_of_paid_turns(place, {"preset": "ui_s1"}),
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


# -- LoRA on weights in fewer bits (`vlm.quantize`): trained, resumed, exported; nf4 by bitsandbytes on the CPU


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "again"),
    [("qwen2_5_vl", "int8", False), ("qwen2_5_vl", "nf4", True), ("smolvlm", "nf4", False), ("gemma3", "fp8", False)],
)
def test_train_resume_export(family: str, kind: str, again: bool, tmp_path: Path) -> None:
    model = tiny_checkpoints.save(family, tmp_path / "model")
    config = vlm_runs.config(
        tmp_path,
        vlm={"path": str(model), "lora": {"rank": 2}, "quantize": kind, "gradient_checkpointing": again},
        rewards=[vlm_runs.low(tmp_path)],
        trainer={"preset": "grpo", "regularisers": [{"name": "kl"}], "micro_batch": 4},
        optimizer={"lr": 1e-2},
        iterations=2,
    )
    assert_resumes(train, config, tmp_path)
    run = Path(config.output)
    trained = [row for row in rows(run) if "grad_norm" in row]
    assert len(trained) == 2 and all(abs(row["ratio/max"] - 1) < 1e-5 for row in trained)
    assert all(row["grad_norm"] > 0 for row in trained) and trained[0]["sampler/gap_max"] < 1e-4

    policy = load_trained(config, run)
    question = policy.encode(vlm_runs.first_question(config))
    tokens, mask, group = torch.arange(65, 71)[None], torch.ones(1, 6), torch.tensor([0])

    def scored(judge: Policy) -> torch.Tensor:
        with torch.no_grad():
            return judge.log_probs([question], tokens, mask, group=group).log_prob

    held = scored(policy)
    layers = dict(policy.model.named_modules())
    linear = next(m for name, m in layers.items() if name.endswith("q_proj.base_layer"))
    assert linear.weight.dtype == torch.uint8 if kind == "nf4" else type(linear.weight) is not torch.nn.Parameter
    assert policy.model.get_output_embeddings().weight.dtype == torch.float32

    # the adapter loads into the published weights, and merged into these it is the same model
    adapter = save_model(policy, str(model), tmp_path / "adapter")
    plain = Policy(str(model))
    before = scored(plain)
    plain.model = PeftModel.from_pretrained(loaded(str(model), torch.float32).model, adapter).get_base_model().eval()
    adapted = scored(plain)
    whole = scored(Policy(str(save_model(policy, str(model), tmp_path / "whole", full=True))))
    torch.testing.assert_close(whole, adapted, rtol=0, atol=2e-5)
    assert 1e-4 < (adapted - before).abs().max()  # it has learnt
    assert 1e-6 < (held - adapted).abs().max()  # and what it learnt on was rounded


def test_what_cannot_be_quantised(tmp_path: Path) -> None:
    for more, match in (
        ({"vlm": {"quantize": "int4", "lora": {"rank": 2}}}, r"vlm.quantize.*packed four-bit"),
        ({"vlm": {"quantize": "nf4"}}, r"vlm.quantize, vlm.lora|quantised weights cannot be trained"),
        ({"vlm": {"quantize": "nf4", "lora": {}}, "distributed": {"fsdp": True}}, "cannot be divided"),
        ({"vlm": {"quantize": "int8", "lora": {}}, "generation": {"vllm": {}}}, "vLLM is sent merged weights"),
    ):
        with pytest.raises(ConfigError, match=match):
            vlm_runs.config(tmp_path, **more)


# -- Whole runs of models as users have them: trained, resumed bit for bit, exported; all weights, or LoRA


NEWER = ("llava_onevision", "internvl", "gemma3", "mistral3", "pixtral", "glm4v", "glm46v", "kimi_k25")
RUNS_FAMILIES_TRAIN = [("qwen2_5_vl", False), ("qwen2_5_vl", True), ("qwen3_vl", True), ("smolvlm", False)]
RUNS_FAMILIES_TRAIN += [(family, number % 2 == 1) for number, family in enumerate(NEWER)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "adapted"), RUNS_FAMILIES_TRAIN)
def test_train_resume_export_families_train(family: str, adapted: bool, tmp_path: Path) -> None:
    """VPPO with a KL: pictures with black patches and a reference beside the usual passes, ragged pixels cut."""
    model = tiny_checkpoints.save(family, tmp_path / "model")
    changes = {
        "vlm": {"path": str(model), **({"lora": {"rank": 2}} if adapted else {})},
        "rewards": [vlm_runs.low(tmp_path)],
        "trainer": {"preset": "vppo", "regularisers": [{"name": "kl"}], "updates": 2, "micro_batch": 3},
        "optimizer": {"lr": 1e-3},
    }
    config = vlm_runs.config(tmp_path, iterations=2, **changes)
    assert_resumes(train, config, tmp_path)
    run = Path(config.output)
    trained = [row for row in rows(run) if "grad_norm" in row]
    assert len(trained) == 2 and all(row["grad_norm"] > 0 and row["sampler/gap_max"] < 1e-4 for row in trained)

    # exported whole, it is a model of transformers' with the names of the one that was trained, and answers alike
    policy = load_trained(config, run)
    question = policy.encode(vlm_runs.first_question(config))
    tokens, mask, group = torch.arange(65, 71)[None], torch.ones(1, 6), torch.tensor([0])
    with torch.no_grad():
        want = policy.log_probs([question], tokens, mask, group=group).log_prob
        whole = Policy(str(save_model(policy, str(model), tmp_path / "whole", full=True)))
        found = whole.log_probs([question], tokens, mask, group=group).log_prob
        before = Policy(str(model)).log_probs([question], tokens, mask, group=group).log_prob
    torch.testing.assert_close(found, want, rtol=0, atol=2e-5)
    assert (found - before).abs().max() > 1e-3
    names = [set(load_file(folder / "model.safetensors")) for folder in (model, tmp_path / "whole")]
    assert names[0] == names[1]


# -- The files of docs/from_easyr1.md: shown as they are, and run on a few rows of their format with tiny models


ROOT = Path(__file__).resolve().parents[2]
NAMES = ("from_trl_geometry3k", "from_easyr1_video", "from_verl_tool")


def file(name: str) -> Path:
    return ROOT / "configs" / "vlm" / f"{name}.yaml"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_file(name: str) -> None:
    shown = "\n".join(line for line in file(name).read_text().splitlines() if not line.startswith("#"))
    assert f"```yaml\n{shown}\n```" in (ROOT / "docs" / "from_easyr1.md").read_text()


def data(place: Path, columns: dict[str, Any], pictures: int) -> str:
    """Four questions whose pictures are in the second column, and their answers."""
    place.mkdir()
    (prompt, image), lines = columns.items(), []
    for number in range(4):
        names = [f"{number}-{k}.png" for k in range(pictures)]
        for k, one in enumerate(names):
            picture(10 * number + k, 24, 20).save(place / one)
        answer = ("2 \\sqrt{221}", "\\frac{1}{2}", "5", "37")[number] if pictures == 1 else "ABCD"[number]
        asked = f"{'<image>' if pictures == 1 else 'See <video>. '}Question {number}?"
        lines.append(json.dumps({prompt[1]: asked, image[1]: names, "answer": answer}))
    (place / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return str(place / "rows.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_on_rows_of_its_format(name: str, tmp_path: Path) -> None:
    tree = yaml.safe_load(file(name).read_text())
    tree["vlm"] |= {"dtype": "float32"}
    if "task" in tree:
        tree["vlm"]["path"] = str(tiny_checkpoints.save("qwen2_5_vl", tmp_path / "model"))
        columns = {key: tree["task"][key] for key in ("prompt", "image", "video") if tree["task"].get(key)}
        for part in ("train", "eval"):
            tree["task"][part] = data(tmp_path / part, columns, 3 if name == "from_easyr1_video" else 1)
        tree["rewards"].append(vlm_runs.low(tmp_path))
    else:
        tree["vlm"]["path"] = str(ROOT / "assets" / "tiny-vlm-crop")
    tree["generation"] |= {"prompts_per_iteration": 4, "group_size": 4, "max_new_tokens": 24}
    tree |= {"distributed": {}, "iterations": 1, "trackers": [], "output": str(tmp_path / "run")}
    tree["evaluation"] = {"every": 0, "questions": 4}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tree))
    (row,) = rows(train(load(tmp_path / "tiny.yaml")))
    assert row["grad_norm"] > 0
