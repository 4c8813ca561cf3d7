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

from genrl.config import load
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.folder import load_trained, save_model
from genrl.vlm.policies.loading import loaded
from genrl.vlm.policies.policy import Policy
from genrl.vlm.recipe.shaping import ConsistencyBonus
from genrl.vlm.train import train
from tests.run_folders import assert_resumes, rows, tiered
from tests.vlm import test_music, test_sequence_training, test_train, tiny_checkpoints, tiny_musicgen, vlm_runs
from tests.vlm.methods import test_rlfr, test_sft
from tests.vlm.methods.episodes import agent_runs, test_archer, test_sub_agents
from tests.vlm.policies import test_sequences
from tests.vlm.policies.test_token_policy import picture

STAGES = [
    {"iterations": 1, "trainer": test_sft.SFT, "optimizer": {"lr": 1e-3}},
    {"iterations": 1, "optimizer": {"lr": 1e-4}},
]
SPREAD = [{"name": f"{test_sequences.__file__}:shortness"}]
ONE = {"iterations": 1}


def answers(place: Path, preset: str, **changes: Any) -> VLMConfig:
    return vlm_runs.config(place, trainer={"preset": preset}, task={"rows": 6}, **changes)


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
    "chosen questions and answers": lambda place: test_train.economical(place),
    "chosen questions of rlfr": lambda place: test_train.economical(place, trainer={"preset": "rlfr"}),
    "rlfr": lambda place: test_rlfr.config(place),
    "sft, then grpo": lambda place: vlm_runs.config(place, stages=STAGES, iterations=2),
    "sft at its rate, then grpo": lambda place: vlm_runs.config(place, stages=[STAGES[0], ONE], iterations=2),
    "episodes that go on": lambda place: agent_runs.config(place, "vl_dac"),
    "groups of episodes": lambda place: agent_runs.config(place, "para_grpo"),
    "sub-agents": asking,
    "archer": lambda place: test_archer.config(place),
    "trloo": lambda place: test_archer.config_of_paid_turns(place, {"preset": "trloo"}),
    "ui_s1": lambda place: test_archer.config_of_paid_turns(place, {"preset": "ui_s1"}),
    "pictures": sequences("image", "grpo"),
    "masked text": sequences("masked_text", "just_grpo", rewards=SPREAD),
    "bodies": sequences("voxels", "hi_grpo"),
    "tunes": sequences("audio", "music_rl"),
    "musicgen": lambda place: music(place, "music_rl"),
    "an adapter of musicgen": lambda place: music(place, "music_rl", test_music.LORA),
    "preferences of music": music_preference,
}
FAST = (
    *("grpo", "chosen questions and answers", "sft, then grpo", "episodes that go on", "pictures", "tunes", "musicgen"),
    "preferences of music",
)
"""One of each kind of run, and of what it remembers."""


@pytest.mark.parametrize("name", tiered(RUNS, FAST))
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConsistencyBonus, "average", (0.995, 1))
    config = RUNS[name](tmp_path)
    evaluated = config.evaluation.model_copy(update={"every": 0})
    assert_resumes(train, config.model_copy(update={"iterations": 2, "evaluation": evaluated}), tmp_path)
    first, second = rows(Path(config.output))
    assert first.get("ratio/max", 1.0) == first.get("ratio/mean", 1.0) == 1.0, "on policy to the bit"
    assert all(row["grad_norm"] > 0 for row in (first, second))


# -- Whole runs of models as users have them: trained, resumed bit for bit, exported; all weights, LoRA, and LoRA on
# weights in fewer bits (`vlm.quantize`; nf4 by bitsandbytes on the CPU)
LORA: dict[str, Any] = {"lora": {"rank": 2}}
NEWER = ("llava_onevision", "internvl", "gemma3", "mistral3", "pixtral", "glm4v", "glm46v", "kimi_k25")
MODELS: list[tuple[str, dict[str, Any]]] = [
    *(("qwen2_5_vl", {}), ("qwen2_5_vl", LORA), ("qwen3_vl", LORA), ("smolvlm", {})),
    *((family, LORA if number % 2 else {}) for number, family in enumerate(NEWER)),
    *(("qwen2_5_vl", LORA | {"quantize": "int8"}), ("gemma3", LORA | {"quantize": "fp8"})),
    *(("smolvlm", LORA | {"quantize": "nf4"}),),
    ("qwen2_5_vl", LORA | {"quantize": "nf4", "gradient_checkpointing": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "vlm"), MODELS)
def test_train_resume_export(family: str, vlm: dict[str, Any], tmp_path: Path) -> None:
    """VPPO with a KL: pictures with black patches and a reference beside the usual passes, ragged pixels cut. In fewer
    bits, whose rounding depends on the pass, one update of GRPO."""
    model, kind = tiny_checkpoints.save(family, tmp_path / "model"), vlm.get("quantize")
    trainer = {"preset": "grpo", "micro_batch": 4} if kind else {"preset": "vppo", "updates": 2, "micro_batch": 3}
    config = vlm_runs.config(
        tmp_path,
        vlm={"path": str(model), **vlm},
        rewards=[vlm_runs.low(tmp_path)],
        trainer={**trainer, "regularisers": [{"name": "kl"}]},
        optimizer={"lr": 1e-2 if kind else 1e-3},
        iterations=2,
    )
    assert_resumes(train, config, tmp_path)
    run = Path(config.output)
    trained = [row for row in rows(run) if "grad_norm" in row]
    assert len(trained) == 2 and all(row["grad_norm"] > 0 for row in trained)
    assert all(abs(row["ratio/max"] - 1) < 1e-5 if kind else row["sampler/gap_max"] < 1e-4 for row in trained)
    assert trained[0]["sampler/gap_max"] < 1e-4

    policy = load_trained(config, run)
    question = policy.encode(vlm_runs.first_question(config))
    tokens, mask, group = torch.arange(65, 71)[None], torch.ones(1, 6), torch.tensor([0])

    def scored(judge: Policy) -> torch.Tensor:
        with torch.no_grad():
            return judge.log_probs([question], tokens, mask, group=group).log_prob

    # exported whole, it is a model of transformers' with the names of the one that was trained, and answers alike
    whole, plain = save_model(policy, str(model), tmp_path / "whole", full=True), Policy(str(model))
    held, before, result = scored(policy), scored(plain), scored(Policy(str(whole)))
    if not kind:
        assert {*load_file(model / "model.safetensors")} == {*load_file(whole / "model.safetensors")}
        torch.testing.assert_close(result, held, rtol=0, atol=2e-5)
        assert (result - before).abs().max() > 1e-3
        return
    # of fewer bits, the adapter loads into the published weights, and merged into these it is the same model
    layers = dict(policy.model.named_modules())
    linear = next(m for name, m in layers.items() if name.endswith("q_proj.base_layer"))
    assert linear.weight.dtype == torch.uint8 if kind == "nf4" else type(linear.weight) is not torch.nn.Parameter
    assert policy.model.get_output_embeddings().weight.dtype == torch.float32
    adapter = save_model(policy, str(model), tmp_path / "adapter")
    plain.model = PeftModel.from_pretrained(loaded(str(model), torch.float32).model, adapter).get_base_model().eval()
    adapted = scored(plain)
    torch.testing.assert_close(result, adapted, rtol=0, atol=2e-5)
    assert 1e-4 < (adapted - before).abs().max()  # it has learnt
    assert 1e-6 < (held - adapted).abs().max()  # and what it learnt on was rounded


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
