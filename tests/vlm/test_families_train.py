"""Whole runs of models as users have them: trained, resumed bit for bit, exported; all weights, or LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from genrl.vlm.policies.folder import load_trained, save_model
from genrl.vlm.policies.policy import Policy
from genrl.vlm.train import train
from tests.run_folders import assert_resumes, rows
from tests.vlm import tiny_checkpoints, vlm_runs

NEWER = ("llava_onevision", "internvl", "gemma3", "mistral3", "pixtral", "glm4v", "glm46v", "kimi_k25")
RUNS = [("qwen2_5_vl", False), ("qwen2_5_vl", True), ("qwen3_vl", True), ("smolvlm", False)]
RUNS += [(family, number % 2 == 1) for number, family in enumerate(NEWER)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "adapted"), RUNS)
def test_train_resume_export(family: str, adapted: bool, tmp_path: Path) -> None:
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
