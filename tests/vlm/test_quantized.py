"""LoRA on weights in fewer bits (`vlm.quantize`): trained, resumed, exported; nf4 by bitsandbytes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from genrl.config import ConfigError
from genrl.vlm.policies.folder import load_trained, save_model
from genrl.vlm.policies.loading import loaded
from genrl.vlm.policies.policy import Policy
from genrl.vlm.train import train
from tests.run_folders import assert_resumes, rows
from tests.vlm import tiny_checkpoints, vlm_runs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
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
        ({"vlm": {"quantize": "int8", "lora": {}}, "generation": {"engine": "vllm"}}, "vLLM is sent merged weights"),
    ):
        with pytest.raises(ConfigError, match=match):
            vlm_runs.config(tmp_path, **more)
