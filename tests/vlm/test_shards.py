"""Vision-language models in shards (FSDP2) over several processes (gloo), beside the same processes that hold all."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from genrl.runtime.folder import checkpoint
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.folder import load_trained
from genrl.vlm.policies.policy import Policy
from genrl.vlm.train import train
from tests import opened as opening
from tests.ports import free_port
from tests.run_folders import differences, last_state, rows
from tests.vlm import tiny_checkpoints, vlm_ranks, vlm_runs
from tests.vlm.methods import test_rlfr, test_sft
from tests.vlm.methods.episodes import agent_runs

pytestmark = pytest.mark.slow

FSDP: dict[str, Any] = {"distributed": {"fsdp": True}}
LORA = {"rank": 2}
KL = [{"name": "kl"}]
ROUNDING = 2e-6
"""Norm of the difference of two gradients over that of one: shards are summed process by process, and the same weights
are then Adam's steps apart. Largest seen: 9.1e-7."""


def recorded(place: Path, make: Any = vlm_runs.config, *given: Any, count: int = 2, **changes: Any) -> Path:
    """The folder with what `vlm_ranks.record` wrote of a run."""
    place.mkdir()
    make(place, *given, **changes)
    machines = 2 if changes.get("distributed", {}).get("fsdp") == "node" else 1
    vlm_runs.in_processes(place, vlm_ranks.record, place, count=count, machines=machines)
    return place


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference, relative to `other`."""
    apart, size = (
        math.sqrt(math.fsum(float((one[k].double() * sign - other[k].double()).square().sum()) for k in other))
        for sign in (1, 0)
    )
    return apart / size


def check_equal(shards: Path, whole: Path, *, exact: bool) -> list[int]:
    """Of the first update answers and all log-probabilities are equal to the bit, and each process's log-probabilities
    are those before it. Gradients of all updates are equal within rounding, or exactly. Returns idle passes by file."""
    files = sorted(path.name for path in whole.glob("rank-*.safetensors"))
    assert files and files == sorted(path.name for path in shards.glob("rank-*.safetensors"))
    idle = []
    for name in files:
        ours, theirs = load_file(shards / name), load_file(whole / name)
        passes = {key for key in ours if key.startswith("pass-") and not ours[key].numel()}  # whole models make none
        assert ours.keys() - passes == theirs.keys()
        first = name.endswith("-0.safetensors")
        gradients = [key for key in ours if key.startswith("gradient/")]
        same = [key for key in theirs if key not in gradients and not key.startswith(("apart-", "whole"))]
        for key in same if first or exact else ("tokens", "mask"):
            assert torch.equal(ours[key], theirs[key]), (name, key)
        for key in [key for key in ours if first and key.startswith("apart-")]:
            assert float(ours[key]) == 0.0
        mine, others = ({key: tensors[key] for key in gradients} for tensors in (ours, theirs))
        assert distance(mine, others) <= (0.0 if exact else ROUNDING), name
        idle.append(len(passes))
    return idle


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_shards_learn_what_whole_models_do(lora: Any, tmp_path: Path) -> None:
    """With a reference, black patches in pictures, two updates of several passes. Prompts are computed for each answer
    in both. All weights are those of a Qwen2.5-VL, as in the shipped configuration of the one with 7B."""
    model = vlm_runs.MODEL if lora else tiny_checkpoints.save("qwen2_5_vl", tmp_path / "model", layers=3)
    common: dict[str, Any] = {
        "rewards": [vlm_runs.low(tmp_path)],
        "trainer": {"preset": "vppo", "regularisers": KL, "updates": 2, "micro_batch": 3},
        "evaluation": {"every": 1, "questions": 1, "blind": False},  # one process has nothing to ask
        "iterations": 2,
    }
    again = {"vlm": {"path": str(model), "lora": lora, "gradient_checkpointing": True}}
    whole = recorded(tmp_path / "whole", **again, **common)
    shards = recorded(tmp_path / "shards", vlm={"path": str(model), "lora": lora}, **common, **FSDP)
    check_equal(shards, whole, exact=lora is not None)
    held = [int(load_file(place / "rank-1-3.safetensors")["whole"]) for place in (shards, whole)]
    assert held[0] == 1 < held[1]  # layers at a time, in a pass that learns
    if lora is not None:  # blocks that are computed again: the same to the bit
        assert differences(shards / "run", recorded(tmp_path / "again", **again, **common, **FSDP) / "run") == []
    assert all(row["updates"] == 2 and row["grad_norm"] > 0 for row in rows(shards / "run")[1:])


def test_a_process_without_answers_makes_the_passes_of_the_others(tmp_path: Path) -> None:
    """Three updates of six groups, a row to a pass, with a second pass for spoilt pictures."""
    common: dict[str, Any] = {
        "vlm": {"lora": LORA, "gradient_checkpointing": True},
        "generation": {"prompts_per_iteration": 6, "group_size": 2},
        "trainer": {"preset": "q_hawkeye", "updates": 3, "micro_batch": 1},
    }
    whole, shards = recorded(tmp_path / "whole", **common), recorded(tmp_path / "shards", **common, **FSDP)
    assert max(check_equal(shards, whole, exact=True)) == 4


def test_a_process_without_any_group_learns_along(tmp_path: Path) -> None:
    reward = tmp_path / "first.py"
    rule = "[len(c) % 5 / 4 * (os.environ['RANK'] == '0') for c in completions]"
    reward.write_text(f"import os\ndef first(completions):\n    return {rule}\n")
    common = {"rewards": [{"name": f"{reward}:first"}], "trainer": {"filter": "spread", "micro_batch": 4}}
    common |= {"vlm": {"gradient_checkpointing": True}}
    whole, shards = recorded(tmp_path / "whole", **common), recorded(tmp_path / "shards", **common, **FSDP)
    idle = check_equal(shards, whole, exact=False)
    assert idle[0] == 0 and idle[1] > 0
    assert rows(shards / "run")[0]["updates"] == 1


def test_agents_learn_in_shards(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "whole", agent_runs.config, "vl_dac", iterations=2)
    shards = recorded(tmp_path / "shards", agent_runs.config, "vl_dac", iterations=2, **FSDP)
    check_equal(shards, whole, exact=False)


def test_machines_hold_a_copy_each(tmp_path: Path) -> None:
    common: dict[str, Any] = {"vlm": {"gradient_checkpointing": True}, "trainer": {"micro_batch": 4}}
    whole = recorded(tmp_path / "whole", count=4, **common)
    node = {"fsdp": "node"}
    check_equal(recorded(tmp_path / "shards", count=4, distributed=node, **common), whole, exact=False)


RESUMED: dict[str, dict[str, Any]] = {
    "lora": {"vlm": {"lora": LORA}, "ema": {"decay": 0.5}},
    "full-bfloat16": {"vlm": {"dtype": "bfloat16"}, "ema": {"decay": 0.5}},
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_in_shards_goes_on_and_is_handed_over(name: str, tmp_path: Path) -> None:
    """Stopped and gone on with, the run is the same to the bit. What is written is a model of transformers', or an
    adapter of PEFT's, with the weights of the checkpoint."""
    common = {**RESUMED[name], "trainer": {"regularisers": KL, "updates": 2, "micro_batch": 3}, **FSDP}
    common |= {"generation": {"prompts_per_iteration": 6, "group_size": 4}, "optimizer": {"lr": 1e-3}}
    (tmp_path / "straight").mkdir()
    vlm_runs.config(tmp_path / "straight", iterations=2, **common)
    vlm_runs.in_processes(tmp_path / "straight", vlm_ranks.run)
    shutil.copytree(tmp_path / "straight", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "run" / "checkpoints" / "step-000002")
    vlm_runs.config(tmp_path / "stopped", iterations=2, **common)
    vlm_runs.in_processes(tmp_path / "stopped", vlm_ranks.run, tmp_path / "stopped" / "run")
    straight = tmp_path / "straight" / "run"
    assert differences(straight, tmp_path / "stopped" / "run") == []

    config = vlm_runs.config(tmp_path / "straight", iterations=2, **common)
    written, trained = straight / "model", load_trained(config, straight)
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    load = transformers.AutoModelForImageTextToText.from_pretrained
    if "lora" in name:
        plain: Any = PeftModel.from_pretrained(load(vlm_runs.MODEL, dtype=dtype), written, autocast_adapter_dtype=True)
    else:
        plain = load(written, dtype=dtype)
    inputs = trained.inputs([trained.encode(vlm_runs.first_question(config))])
    with torch.no_grad():
        result, want = plain(**inputs).logits, trained.model(**inputs).logits
        before = Policy(str(vlm_runs.MODEL), dtype=dtype).model(**inputs).logits
    assert torch.equal(result, want) and not torch.equal(result, before)


def test_a_checkpoint_in_shards_is_of_any_number_of_processes(tmp_path: Path) -> None:
    """Written by two, read and written by one that holds all, and by two again: the same weights and state."""
    vlm_runs.config(tmp_path, ema={"decay": 0.5}, **FSDP)
    vlm_runs.in_processes(tmp_path, vlm_ranks.run)
    run = tmp_path / "run"
    shards, first = run / "checkpoints" / "step-000001" / "shards", last_state(run).tensors
    assert {path.name for path in shards.iterdir()} == {"weights", "snapshot-average", "optimizer"}
    for count in (1, 2):
        vlm_runs.config(tmp_path, ema={"decay": 0.5}, distributed={"fsdp": count > 1})
        vlm_runs.in_processes(tmp_path, opening.saved_again, count=count)
        assert shards.is_dir() == (count > 1)
        other = last_state(run).tensors
        assert first.keys() == other.keys() and all(first[stem].keys() == other[stem].keys() for stem in first)
        assert all(torch.equal(tensor, other[stem][k]) for stem in first for k, tensor in first[stem].items())


def test_the_best_weights_come_back(tmp_path: Path) -> None:
    monitor = {"reward": "accuracy", "tolerance": 0.05}
    common: dict[str, Any] = {"evaluation": {"every": 1, "questions": 16, "blind": False, "monitor": monitor}}
    common["evaluation"]["on_collapse"] = "back"
    vlm_runs.config(tmp_path, optimizer={"lr": 0.05}, iterations=2, **common, **FSDP)
    vlm_runs.in_processes(tmp_path, vlm_ranks.run)
    assert last_state(tmp_path / "run").step == 2
    before, after = Policy(str(vlm_runs.MODEL)), Policy(str(tmp_path / "run" / "model"))
    assert all(torch.equal(a, b) for a, b in zip(before.parameters, after.parameters, strict=True))
    saved = [checkpoint.load(tmp_path / "run" / "checkpoints" / f"step-00000{step}").tensors for step in (0, 2)]
    assert all(torch.equal(saved[1]["weights"][name], best) for name, best in saved[0]["weights"].items())


# -- two processes (gloo) do what one does
ONE = {"every": 1, "questions": 4}
UNEVEN = test_sft.SFT | {"updates": None, "batch_size": 4, "micro_batch": 1}
RUNS: dict[str, Callable[[Path], VLMConfig]] = {
    "statistics of all answers": lambda place: vlm_runs.config(
        place, trainer={"preset": "stable_reinforce", "updates": 2, "micro_batch": 4}, evaluation=ONE
    ),
    "rlfr": lambda place: test_rlfr.config(place),
    # the last step has three questions: one process has a pass more than the other
    "sft": lambda place: vlm_runs.config(place, trainer=UNEVEN, task={"rows": 7}, evaluation=ONE),
    "sft in shards": lambda place: vlm_runs.config(
        place, trainer=UNEVEN, task={"rows": 7}, distributed={"fsdp": place.name == "two"}
    ),
    # the preset's token_mean is one of each process's tokens
    "agents": lambda place: agent_runs.config(
        place, "vl_dac", trainer={"aggregation": "token_mean_global"}, evaluation=ONE
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_do_what_one_does(name: str, tmp_path: Path) -> None:
    """The same answers, statistics over all of them, and one gradient. (Adam makes steps of its rounding.)"""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    train(RUNS[name](tmp_path / "one"))
    RUNS[name](tmp_path / "two")
    vlm_runs.in_processes(tmp_path / "two", vlm_ranks.run)
    for one, two in zip(rows(tmp_path / "one" / "run"), rows(tmp_path / "two" / "run"), strict=True):
        assert one.keys() == two.keys()
        for key in one:
            assert two[key] == pytest.approx(one[key], rel=2e-3, abs=5e-5), key


def test_where_the_environments_of_one_process_die_no_other_waits(tmp_path: Path) -> None:
    dies = {"parallel": 2, "steps": 2, "timeout_s": 60.0}
    agent_runs.config(tmp_path, "vl_dac", environment={**dies, "name": f"{tmp_path / 'pays.py'}:Pays"})
    own = "        if os.environ['RANK'] == '1': os._exit(7)\n        self.left -= 1\n"
    text = agent_runs.PAYS.replace("import numpy", "import os, numpy").replace("        self.left -= 1\n", own)
    (tmp_path / "pays.py").write_text(text)
    command = [sys.executable, "-c", "from genrl.cli.app import app; app()", "train", str(tmp_path / "tiny.yaml")]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    ranks = [  # not `start_ranks`, whose processes may have none of their own
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        for process in ranks:
            output = " ".join(process.communicate(timeout=400)[0].split())  # who waits does so for 600 s
            assert process.returncode == 1
            assert "all environments of process 1 hung or died in one iteration" in output, output[-3000:]
    finally:
        for process in ranks:
            process.kill()
