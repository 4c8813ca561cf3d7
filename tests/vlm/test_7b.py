"""configs/vlm/qwen2_5_vl_7b_fsdp.yaml rehearsed: random weights of the true format, a tenth of the depth, tiny width;
two processes with shards (gloo, float32) beside one that holds all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from genrl.config import load
from genrl.runtime.folder import checkpoint
from genrl.vlm.config.schema import VLMConfig
from tests.run_folders import last_state
from tests.vlm import tiny_checkpoints, vlm_runs
from tests.vlm.policies.test_token_policy import picture
from tests.vlm.test_shards import recorded

pytestmark = pytest.mark.slow
FILE = Path(__file__).resolve().parents[2] / "configs" / "vlm" / "qwen2_5_vl_7b_fsdp.yaml"


def rows(place: Path, count: int, seed: int) -> str:
    """Questions with two kinds of answer in the columns of Geometry3K."""
    place.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        picture(seed + number, 24, 20).save(place / f"{number}.png")
        answer = ("2 \\sqrt{221}", "\\frac{1}{2}")[number % 2]
        lines.append(json.dumps({"images": [f"{number}.png"], "problem": f"Find x{number}.", "answer": answer}))
    (place / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return str(place / "rows.jsonl")


def written(place: Path, **changes: Any) -> VLMConfig:
    """place/tiny.yaml: the shipped file but for its model, data and sizes. Runs share the data: keys have its path."""
    tree = yaml.safe_load(FILE.read_text())
    tree["vlm"] |= {"path": str(place.parent / "model"), "dtype": "float32"}
    tree["task"] |= {"train": rows(place.parent / "train", 4, 0), "eval": rows(place.parent / "eval", 2, 50)}
    tree["generation"] |= {"prompts_per_iteration": 4, "group_size": 4, "max_new_tokens": 8, "batch_size": 8}
    tree["rewards"] = [{"name": "math"}, vlm_runs.low(place)]
    tree["trainer"] |= {"updates": 2}
    tree |= {"iterations": 2, "trackers": [], "output": str(place / "run"), "checkpoint": {"every": 1}}
    tree["evaluation"] = {"every": 0, "questions": 2}
    tree["optimizer"] = {"lr": 1e-4}
    (place / "tiny.yaml").write_text(yaml.safe_dump({**tree, **changes}))
    found = load(place / "tiny.yaml")
    assert isinstance(found, VLMConfig)
    return found


def test_rehearsal(tmp_path: Path) -> None:
    tiny_checkpoints.save("qwen2_5_vl", tmp_path / "model", layers=3)
    shards = recorded(tmp_path / "shards", written)
    assert int(load_file(shards / "rank-1-3.safetensors")["whole"]) == 1  # one of three layers at a time

    # one process: the same answers and log-probabilities to the bit, until gradients are summed in another order
    alone = recorded(tmp_path / "alone", written, count=1, distributed={"fsdp": False})
    mine = load_file(alone / "rank-0-0.safetensors")
    both = [load_file(shards / f"rank-{rank}-0.safetensors") for rank in (0, 1)]
    for name in ("tokens", "old", "reference"):
        parts = [tensors[name] for tensors in both]
        width = min(part.shape[1] for part in (*parts, mine[name]))
        assert torch.equal(torch.cat([part[:, :width] for part in parts]), mine[name][:, :width]), name
    gradients = [key for key in mine if key.startswith("gradient/")]
    for key in gradients:
        torch.testing.assert_close(both[0][key], mine[key], rtol=0, atol=1e-6 + 1e-5 * float(mine[key].abs().max()))
    states = [checkpoint.load(checkpoint.latest(place / "run" / "checkpoints")).tensors for place in (shards, alone)]
    assert states[0].keys() == states[1].keys() and last_state(shards / "run").step == 2
