"""The same run in 1, 2 and 4 processes (gloo)."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from genrl.diffusion.policy.export import export
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.rollout.rollout import call_arguments
from genrl.diffusion.train import check_processes
from genrl.runtime.guards import read_dump
from genrl.runtime.run import Run, read_metrics
from tests import opened as opening
from tests.diffusion import ranks, runs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

GRPO = {"algorithm": "flow_grpo", "clip_range": 1e-3}
NFT = {"algorithm": "diffusion_nft", "kl_weight": 1e-3}
# 9 samples in 5 micro-batches: neither 2 nor 4 processes share them out evenly
SAMPLING = {"prompts_per_iteration": 3, "group_size": 3, "batch_size": 2}
FINISHED: dict[str, dict[str, Any]] = {
    "awm": {"timesteps_per_sample": 2, "kl_weight": 1e-3},
    "dgpo": {"timesteps_per_sample": 2, "first_steps": 3},
    "crd": {"updates_per_iteration": 1},
    "dpo": {"timesteps_per_pair": 2},
    "d3po": {"kernel": "flow_sde", "noise_level": 0.7},
    "prdp": {"kernel": "flow_sde", "noise_level": 0.7, "beta": 0.1, "clip_range": 1e-3},
    "guard": {"algorithm": "grpo_guard", "clip_range": 4e-6},
    "ddpo": {"algorithm": "ddpo", "kernel": "flow_sde", "noise_level": 0.7, "history": {"min_count": 2}},
}
QUIET = {"evaluation": {"every": 0}, "checkpoint": {"every": 100}, "optimizer": {"max_grad_norm": 1e9}}


def start(
    folder: Path, model: Path, name: str, count: int, target: Any, /, *arguments: Any, machines: int = 1, **changes: Any
) -> list[Any]:
    """Processes of a run in `folder/name`."""
    (folder / name).mkdir()
    runs.config(folder, model, output=str(folder / name / "run"), **changes)
    path = (folder / "tiny.yaml").rename(folder / f"{name}.yaml")
    log = folder / f"{name}.log"
    if count == 1:
        return [runs.start(target, str(path), *arguments, log=log)]
    return runs.start_ranks(count, target, str(path), *arguments, log=log, machines=machines)


def logs(folder: Path, name: str) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob(f"{name}*.log")))


def recorded(folder: Path, model: Path, count: int, name: str = "world", /, **changes: Any) -> list[dict[str, Tensor]]:
    """What `ranks.record` wrote in the first iteration, by rank."""
    name = f"{name}-{count}"
    processes = start(folder, model, name, count, ranks.record, str(folder / name), **{**QUIET, **changes})
    assert runs.wait(processes, 300) == [0] * count, logs(folder, name)
    return [load_file(folder / name / f"rank-{rank}-0.safetensors") for rank in range(count)]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference over the tensors of `other`; of `one` itself where `other` is empty."""
    zero = torch.zeros(())
    keys = other or one
    return math.sqrt(math.fsum(float((one[k] - other.get(k, zero)).double().square().sum()) for k in keys))


def check_equal(parts: list[dict[str, Tensor]], alone: dict[str, Tensor], within: float = 1e-6) -> None:
    """Everything but the gradients to the bit, each sample drawn once; gradients to `within`, relative."""
    drawn = sorted(key for key in alone if key.startswith("position/"))
    assert sorted(key for part in parts for key in part if key.startswith("position/")) == drawn
    for part in parts:
        same = [key for key in part if not key.startswith("gradient/")]
        assert all(torch.equal(part[key], alone[key]) for key in same)
        assert {"scores", "group", "prompts"} <= set(same) and not part["scores"].isnan().any()
        gradients = [key for key in part if key.startswith("gradient/")]
        expected = {key: alone[key] for key in gradients}
        assert 0 < distance(expected, {}) and distance(part, expected) < within * distance(expected, {})
        assert all(torch.equal(part[key], parts[0][key]) for key in gradients)  # all take the same step


@pytest.mark.parametrize("trainer", [GRPO, NFT], ids=["flow_grpo", "diffusion_nft"])
def test_any_number_of_processes_draws_the_same(folder: Path, model: Path, trainer: dict[str, Any]) -> None:
    changes = {"trainer": trainer, "sampling": SAMPLING, "iterations": 1}
    (alone,) = recorded(folder, model, 1, **changes)
    assert len({key.split("/")[1] for key in alone if key.startswith("position/")}) == 5
    for count in (2, 4):
        check_equal(recorded(folder, model, count, **changes), alone)


@pytest.mark.parametrize("name", FINISHED)
def test_finished_samples_and_pairs_are_learnt_from_alike(folder: Path, model: Path, name: str) -> None:
    """Whole groups in 3 micro-batches over two processes beside one."""
    sampling = {"prompts_per_iteration": 3, "group_size": 3, "batch_size": 3}
    changes: dict[str, Any] = {"trainer": {"algorithm": name} | FINISHED[name], "sampling": sampling, "iterations": 1}
    (alone,) = recorded(folder, model, 1, **changes)
    check_equal(recorded(folder, model, 2, **changes), alone)


@pytest.mark.parametrize("name", ["draft", "diff_instruct"])
def test_rewards_are_differentiated_alike(folder: Path, model: Path, name: str) -> None:
    """5 micro-batches over two processes beside one. The assistant's rate is tiny: Adam makes a whole step of rounding
    where a gradient is nearly 0, and the generator's gradient would show it."""
    trainer = {"draft": {"steps": 2}, "diff_instruct": {"assistant_lr": 1e-9}}[name]
    changes: dict[str, Any] = {"trainer": {"algorithm": name} | trainer, "iterations": 1}
    changes["sampling"] = SAMPLING | ({"num_inference_steps": 1} if name == "diff_instruct" else {})
    changes["rewards"] = [runs.reward(folder, "warmth")]
    (alone,) = recorded(folder, model, 1, **changes)
    check_equal(recorded(folder, model, 2, **changes), alone)


PAIRS = [{"algorithm": name} | FINISHED[name] for name in ("prdp", "dpo", "d3po")]


@pytest.mark.parametrize("trainer", PAIRS, ids=lambda trainer: trainer["algorithm"])
def test_sharded_pairs_are_learnt_from_alike(folder: Path, model: Path, trainer: dict[str, Any]) -> None:
    """FSDP2 over two processes beside one process that holds everything."""
    sampling = {"prompts_per_iteration": 2, "group_size": 4, "batch_size": 4}
    common: dict[str, Any] = {"trainer": trainer, "sampling": sampling, "lora": None, "iterations": 1}
    (alone,) = recorded(folder, model, 1, **common)
    check_equal(recorded(folder, model, 2, "sharded", distributed={"fsdp": True}, **common), alone)


@pytest.mark.parametrize(("trainer", "name"), [(GRPO, "adamw"), (NFT, "adamw"), (GRPO, "lion")])
def test_sharded_full_fine_tuning_is_the_same(folder: Path, model: Path, trainer: dict[str, Any], name: str) -> None:
    """FSDP2 over two processes beside one process that holds everything, from the first iteration to the second."""
    sampling = {"prompts_per_iteration": 2, "group_size": 4, "batch_size": 2}
    common: dict[str, Any] = {"trainer": {**trainer, "kl_weight": 1e-3}, "sampling": sampling, "lora": None}
    common |= {"iterations": 2, "optimizer": {"name": name, "lr": 1e-4, "max_grad_norm": 1.0}}
    (alone,) = recorded(folder, model, 1, **common)
    check_equal(recorded(folder, model, 2, "sharded", distributed={"fsdp": True}, **common), alone)
    one, two = (runs.last_state(folder / name / "run").tensors for name in ("world-1", "sharded-2"))
    for stem in ("weights", "snapshot-average", "optimizer"):
        assert {key: tensor.shape for key, tensor in one[stem].items()} == {k: x.shape for k, x in two[stem].items()}
    saved = load_file(model / "transformer" / "diffusion_pytorch_model.safetensors")
    untrained = {key: saved[key.removeprefix("transformer.")] for key in one["weights"]}  # saved has buffers too
    for stem in ("weights", "snapshot-average"):  # Adam makes a step of a rounding where a gradient is nearly 0
        moved = distance(one[stem], untrained)
        assert moved > 0 and distance(two[stem], one[stem]) < 0.1 * moved


FSDP: dict[str, Any] = {"distributed": {"fsdp": True}}


def test_all_weights_in_shards_go_on_in_any_number_of_processes(folder: Path, model: Path) -> None:
    """Stopped and gone on with in two processes: the same to the bit. Read by one process, which holds all, and written
    by it, and the other way round: the same weights and optimiser state."""
    sampling = {"prompts_per_iteration": 2, "group_size": 4, "batch_size": 2}
    common: dict[str, Any] = {"trainer": GRPO, "sampling": sampling, "lora": None, "evaluation": {"every": 1}, **FSDP}
    for name, iterations in (("straight", 2), ("stopped", 1)):
        processes = start(folder, model, name, 2, runs.train_file, iterations=iterations, **common)
        assert runs.wait(processes, 300) == [0, 0], logs(folder, name)
    straight, stopped = folder / "straight" / "run", folder / "stopped" / "run"
    shards = stopped / "checkpoints" / "step-000001" / "shards"
    assert {path.name for path in shards.iterdir()} == {"weights", "snapshot-average", "optimizer"}

    path = folder / "stopped.yaml"
    text, first = path.read_text(), runs.last_state(stopped).tensors
    for count, fsdp in ((1, "false"), (2, "true")):
        path.write_text(text.replace("fsdp: true", f"fsdp: {fsdp}"))
        log = folder / f"again-{count}.log"
        again = (
            runs.start_ranks(2, opening.saved_again, str(path), log=log)
            if count > 1
            else [runs.start(opening.saved_again, str(path), log=log)]
        )
        assert runs.wait(again, 300) == [0] * count, logs(folder, "again")
        assert shards.is_dir() == (count > 1)
        other = runs.last_state(stopped).tensors
        assert first.keys() == other.keys() and all(first[stem].keys() == other[stem].keys() for stem in first)
        assert all(torch.equal(tensor, other[stem][k]) for stem in first for k, tensor in first[stem].items())

    path.write_text(text.replace("iterations: 1", "iterations: 2"))
    both = runs.start_ranks(2, runs.train_file, str(path), str(stopped), log=folder / "two.log")
    assert runs.wait(both, 300) == [0, 0], logs(folder, "two")
    assert runs.differences(straight, stopped) == []
    written = load_file(export(straight, folder / "out") / "transformer" / "diffusion_pytorch_model.safetensors")
    average = runs.last_state(straight).tensors["snapshot-average"]
    assert all(torch.equal(written[key.removeprefix("transformer.")], tensor) for key, tensor in average.items())
    alone = str(folder / "alone.yaml")
    Path(alone).write_text(text.replace("iterations: 1", "iterations: 3").replace("fsdp: true", "fsdp: false"))
    assert runs.wait([runs.start(runs.train_file, alone, str(stopped), log=folder / "one.log")], 300) == [0], logs(
        folder, "one"
    )
    assert [row["step"] for row in runs.rows(stopped)] == [0, 1, 2, 3]
    assert (stopped / "checkpoints" / "step-000003" / "weights.safetensors").is_file()


BLOCKS = {"model": {"offload": {"denoiser": "blocks"}}}
HELD: dict[str, tuple[int, int, dict[str, Any]]] = {
    "two": (2, 1, FSDP),
    "two_offloaded": (2, 1, FSDP | BLOCKS),
    "pairs_of_two": (4, 2, {"distributed": {"fsdp": True, "shard": "node"}}),
    "one_offloaded": (1, 1, BLOCKS),
    "each_offloaded": (2, 1, BLOCKS),
}
"""Processes, machines, and how the base is held."""


@pytest.mark.parametrize("trainer", [GRPO, NFT], ids=["flow_grpo", "diffusion_nft"])
def test_adapters_on_shards_learn_the_same(folder: Path, model: Path, trainer: dict[str, Any]) -> None:
    """However they are held, beside one process that holds all."""
    sampling = {"prompts_per_iteration": 2, "group_size": 4, "batch_size": 2}
    common: dict[str, Any] = {"trainer": {**trainer, "kl_weight": 1e-3}, "sampling": sampling, "iterations": 1}
    (alone,) = recorded(folder, model, 1, **common)
    for held, (count, machines, changes) in HELD.items():
        check_equal(recorded(folder, model, count, held, machines=machines, **common, **changes), alone)
        row = runs.rows(folder / f"{held}-{count}" / "run")[-1]
        assert row["updates"] == 1.0 and row.get("ratio/max_abs_dev", 0.0) == 0.0, held


@pytest.mark.parametrize(
    ("name", "lora"), [(name, runs.LORA) for name in (*FINISHED, "draft", "diff_instruct")] + [("diff_instruct", None)]
)
def test_every_method_learns_on_shards(folder: Path, model: Path, name: str, lora: dict[str, Any] | None) -> None:
    """A model in shards over two processes, beside one process that holds all."""
    gradients: dict[str, dict[str, Any]] = {"draft": {"steps": 2}, "diff_instruct": {"assistant_lr": 1e-9}}
    changes: dict[str, Any] = {"trainer": {"algorithm": name} | (FINISHED | gradients)[name], "iterations": 1}
    changes |= {"lora": lora, "sampling": {"prompts_per_iteration": 2, "group_size": 4, "batch_size": 4}}
    if name in gradients:
        changes["rewards"] = [runs.reward(folder, "warmth")]
    if name == "diff_instruct":
        changes["sampling"] |= {"num_inference_steps": 1}
    (alone,) = recorded(folder, model, 1, **changes)
    # the assistant of all weights has made steps of rounding
    check_equal(recorded(folder, model, 2, "sharded", **changes, **FSDP), alone, 1e-6 if lora else 3e-6)


@pytest.mark.parametrize("held", ["two", "two_offloaded", "one_offloaded"])
def test_adapters_on_shards_are_saved_and_go_on(folder: Path, model: Path, held: str) -> None:
    """The adapter is loaded again by all processes together; stopped and gone on with, the run is the same to the bit,
    and that of one process which holds all up to the order of sums."""
    count, _, changes = HELD[held]
    common: dict[str, Any] = {"trainer": GRPO, "evaluation": {"every": 1}}
    for name, iterations, how in (("straight", 3, changes), ("stopped", 1, changes), ("whole", 3, {})):
        processes = start(
            folder, model, name, count if how else 1, runs.train_file, iterations=iterations, **common, **how
        )
        assert set(runs.wait(processes, 300)) == {0}, logs(folder, name)
    path = folder / "stopped.yaml"
    path.write_text(path.read_text().replace("iterations: 1", "iterations: 3"))
    again = [str(path), str(folder / "stopped" / "run")]
    log = folder / "again.log"
    go_on = (
        runs.start_ranks(count, runs.train_file, *again, log=log)
        if count > 1
        else [runs.start(runs.train_file, *again, log=log)]
    )
    assert set(runs.wait(go_on, 300)) == {0}, logs(folder, "again")
    straight, stopped, whole = (folder / name / "run" for name in ("straight", "stopped", "whole"))
    assert runs.differences(straight, stopped) == []
    one, other = (load_file(run / "lora" / "pytorch_lora_weights.safetensors") for run in (whole, straight))
    assert distance(one, {}) > 0 and distance(other, one) < 1e-3 * distance(one, {})


def test_the_assistant_of_all_weights_learns_in_shards(folder: Path, model: Path) -> None:
    """Its steps are made while its weights stand in for the generator's, by copies: they are not lost."""
    trainer = {"algorithm": "diff_instruct"}
    common: dict[str, Any] = {"trainer": trainer, "lora": None, "rewards": [runs.reward(folder, "warmth")]}
    common |= {"sampling": {"num_inference_steps": 1}, "iterations": 1, "evaluation": {"every": 0}}
    found = []
    for name, how in (("whole", {}), ("waiting", BLOCKS)):
        assert runs.wait(start(folder, model, name, 1, runs.train_file, **common, **how), 300) == [0], logs(
            folder, name
        )
        found.append(runs.last_state(folder / name / "run").tensors["snapshot-assistant"])
    saved = load_file(model / "transformer" / "diffusion_pytorch_model.safetensors")
    untrained = {key: saved[key.removeprefix("transformer.")] for key in found[0]}
    moved = distance(found[0], untrained)
    assert moved > 0 and distance(found[1], found[0]) < 0.1 * moved  # Adam makes a whole step of rounding


@pytest.mark.parametrize("guided", [False, True])
def test_pairs_of_which_some_are_ties_learn_on_shards(folder: Path, model: Path, guided: bool) -> None:
    """Only one process has a pair, and guided samples are called one by one: both make as many calls."""
    (folder / "ties.py").write_text(
        "def ties(images, prompts):\n"
        "    return [float(images[i].mean()) if len(text) % 2 else 0.0 for i, text in enumerate(prompts)]\n"
    )
    trainer = {"algorithm": "dpo", "timesteps_per_pair": 2, "guidance_in_training": guided}
    sampling = {"prompts_per_iteration": 4, "group_size": 2, "batch_size": 4, "guidance_scale": 4.0 if guided else 1.0}
    changes: dict[str, Any] = {"trainer": trainer, "sampling": sampling, "iterations": 1}
    changes["rewards"] = [{"name": f"{folder / 'ties.py'}:ties"}]
    (alone,) = recorded(folder, model, 1, **changes)
    check_equal(recorded(folder, model, 2, "sharded", **changes, **FSDP), alone, 3e-6 if guided else 1e-6)


def test_micro_batches_of_unequal_size_are_refused_on_shards(folder: Path, model: Path) -> None:
    uneven = runs.config(folder, model, sampling={"group_size": 3, "batch_size": 4, "prompts_per_iteration": 2}, **FSDP)
    with pytest.raises(ValueError, match="leave a smaller one"):
        check_processes(uneven, 2)
    waiting = runs.config(folder, model, lora=None, **BLOCKS)
    check_processes(waiting, 1)
    with pytest.raises(ValueError, match="not summed over processes"):
        check_processes(waiting, 2)


def test_all_weights_are_trained_from_the_cpu(folder: Path, model: Path) -> None:
    """Weights, gradients and optimiser state wait on the CPU."""
    sampling = {"prompts_per_iteration": 2, "group_size": 4, "batch_size": 2}
    common: dict[str, Any] = {"trainer": GRPO, "sampling": sampling, "lora": None, "iterations": 1}
    (alone,) = recorded(folder, model, 1, **common)
    check_equal(recorded(folder, model, 1, "waiting", **BLOCKS, **common), alone)


@pytest.mark.parametrize("rank", [0, 1])
def test_nan_on_one_rank_stops_all_before_the_step(folder: Path, model: Path, rank: int) -> None:
    """The guilty rank leaves a dump from which its micro-batch can be made again."""
    changes = {**QUIET, "trainer": GRPO, "sampling": {**SAMPLING, "group_size": 4}, "iterations": 1}
    processes = start(folder, model, "nan", 2, ranks.planted, str(folder / "nan"), rank, 3, **changes)
    assert runs.wait(processes, 300) == [1, 1], logs(folder, "nan")
    for r in range(2):
        before, after = (load_file(folder / "nan" / f"{name}-{r}.safetensors") for name in ("before", "after"))
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert "NonFiniteError: stopped before the update of step 0" in (folder / f"nan-rank-{r}.log").read_text()

    run = Run(folder / "nan" / "run")
    dump = read_dump(run.dumps / f"step-000000-loss-rank-{rank}")
    assert dump.where == "loss" and dump.checked["loss"].isnan().all()
    assert [path.name for path in run.dumps.iterdir()] == [f"step-000000-loss-rank-{rank}"]
    assert dump.results["log_prob"].isfinite().all()
    (folder / "nan.yaml").rename(folder / "tiny.yaml")
    config = runs.load(folder / "tiny.yaml", [f"output={folder}/again"])
    batch = Batch(dump.info["prompts"], [tuple(key) for key in dump.info["keys"]], call_arguments(config.sampling))
    with runs.opened(config) as opened, torch.no_grad():
        again = opened.policy.roll_out(batch, Kernel("flow_sde", 0.7), (0, 1))
    step = 3 % 2  # the fourth backward pass is of its second micro-batch's second step
    assert torch.equal(again.states[step], dump.batch["state"])
    assert torch.equal(again.log_probs[step], dump.batch["old_log_prob"])


def test_a_checkpoint_of_two_processes_goes_on_with_one_or_two(folder: Path, model: Path) -> None:
    """With two: equal to the bit. With one: the same samples and the same course, up to the order of sums."""
    common: dict[str, Any] = {"trainer": GRPO, "sampling": SAMPLING, "evaluation": {"every": 2}}
    for name, iterations in (("straight", 4), ("stopped", 2)):
        processes = start(folder, model, name, 2, runs.train_file, iterations=iterations, **common)
        assert runs.wait(processes, 300) == [0, 0], logs(folder, name)
    stopped = folder / "stopped" / "run"
    kept = folder / "kept"
    kept.mkdir()
    os.system(f"cp -r {stopped} {kept}/run")

    path = folder / "stopped.yaml"
    path.write_text(path.read_text().replace("iterations: 2", "iterations: 4"))
    both = runs.start_ranks(2, runs.train_file, str(path), str(stopped), log=folder / "two.log")
    assert runs.wait(both, 300) == [0, 0], logs(folder, "two")
    assert [d for d in runs.differences(folder / "straight" / "run", stopped) if "row 2" not in d] == []

    one = runs.start(runs.train_file, str(path), str(kept / "run"), log=folder / "one.log")
    assert runs.wait([one], 300) == [0], logs(folder, "one")
    ours, theirs = runs.rows(kept / "run"), runs.rows(stopped)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [0, 1, 2, 3, 4]
    for mine, yours in zip(ours, theirs, strict=True):
        for key, value in mine.items():
            if not key.startswith("ratio/"):
                assert value == pytest.approx(yours[key], rel=1e-3, abs=1e-6), (mine["step"], key)
    left, right = (runs.last_state(run).tensors["weights"] for run in (kept / "run", stopped))
    for key, tensor in left.items():
        torch.testing.assert_close(tensor, right[key], rtol=1e-2, atol=1e-3)


def under_way(folder: Path, model: Path, name: str) -> tuple[Path, list[Any]]:
    """A run of two processes that has finished two iterations and would go on for long, and its processes."""
    changes = {"trainer": GRPO, "sampling": SAMPLING, "iterations": 1000, "evaluation": {"every": 0}}
    processes = start(folder, model, name, 2, runs.train_file, **changes)
    run = folder / name / "run"
    deadline = time.monotonic() + 200
    while len(read_metrics(Run(run).metrics)) < 2:
        assert time.monotonic() < deadline and all(p.exitcode is None for p in processes), logs(folder, name)
        time.sleep(0.05)
    return run, processes


def test_a_signal_to_one_process_stops_both_together(folder: Path, model: Path) -> None:
    run, processes = under_way(folder, model, "stopped")
    os.kill(processes[1].pid, signal.SIGTERM)
    assert runs.wait(processes, 100) in ([0, 143], [143, 143]), logs(folder, "stopped")
    state = runs.last_state(run)
    assert state.step == len(read_metrics(Run(run).metrics)) >= 2


def test_a_rank_that_is_killed_is_named_by_the_other(folder: Path, model: Path) -> None:
    """And which checkpoint a resume takes."""
    run, processes = under_way(folder, model, "killed")
    os.kill(processes[1].pid, signal.SIGKILL)
    assert runs.wait(processes, 100) == [1, -signal.SIGKILL], logs(folder, "killed")
    said = (folder / "killed-rank-0.log").read_text()
    assert f"RuntimeError: killed: rank 1 (process {processes[1].pid}, " in said and "The other ranks stop" in said
    assert "Go on from step-00000" in said and f"genrl resume {run} --nproc 2" in said
