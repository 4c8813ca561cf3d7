"""Liger's kernels: a stand-in for the package records what it is asked for; without a GPU they are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from genrl.config import ConfigError, check_files
from genrl.config.loading import load_located
from genrl.vlm.policies.loading import use_liger
from genrl.vlm.policies.policy import Policy
from tests.vlm import tiny_checkpoints, vlm_runs

NAMES = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the stand-in was asked for; a GPU seems to be there."""
    calls: list[dict[str, Any]] = []
    made: Any = [ModuleType(name) for name in NAMES]
    made[-1].MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2_5_vl": None}
    made[-1]._apply_liger_kernel_to_instance = lambda **given: calls.append(given)
    for name, module in zip(NAMES, made, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return calls


def test_the_model_of_a_run_gets_them_once_and_without_their_loss(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    model = tiny_checkpoints.save("qwen2_5_vl", tmp_path / "model")
    config = vlm_runs.config(tmp_path, vlm={"path": str(model), "kernels": "liger", "lora": {"rank": 2}})
    policy = Policy.open(config, "cpu", str(model))
    assert len(asked) == 1 and asked[0].pop("model") is policy.model
    assert asked[0] == {"fused_linear_cross_entropy": False}
    assert policy.model.config.model_type == "qwen2_5_vl"


def test_other_types_and_no_gpu_or_package_are_refused(
    asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="Liger has no kernels for 'idefics3'"):
        use_liger(SimpleNamespace(config=SimpleNamespace(model_type="idefics3")))
    assert asked == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="need a GPU, and there is none here"):
        use_liger(SimpleNamespace(config=SimpleNamespace(model_type="qwen2_5_vl")))
    monkeypatch.setattr("genrl.vlm.config.files.find_spec", lambda name: None)
    vlm_runs.config(tmp_path, vlm={"kernels": "liger"})
    with pytest.raises(ConfigError, match=r"vlm.kernels.*pip install liger-kernel"):
        check_files(*load_located(tmp_path / "tiny.yaml"))
