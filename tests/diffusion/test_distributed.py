"""The same run in 1, 2 and 4 processes (gloo), of which each holds everything or a part."""

import math
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models import transformers as networks
from safetensors.torch import load_file
from torch import Tensor

from genrl.diffusion.config.model_rules import DIVIDED
from genrl.diffusion.files.export import export
from genrl.diffusion.train import check_processes
from genrl.runtime.folder.run import Run, read_metrics
from tests import opened as opening
from tests.diffusion import ranks, runs
from tests.diffusion.families import saved

GRPO = {"algorithm": "flow_grpo", "clip_range": 1e-3}
NFT = {"algorithm": "diffusion_nft", "kl_weight": 1e-3}
# 9 samples in 5 micro-batches: 2 or 4 processes cut them anew
SAMPLING = {"prompts_per_iteration": 3, "group_size": 3, "batch_size": 2}
EVEN = {"prompts_per_iteration": 2, "group_size": 4, "batch_size": 2}
QUIET = {"evaluation": {"every": 0}, "checkpoint": {"every": 100}, "optimizer": {"max_grad_norm": 1e9}}
FSDP: dict[str, Any] = {"distributed": {"fsdp": True}}
BLOCKS = {"model": {"offload": {"denoiser": "blocks"}}}


def recorded(
    folder: Path, model: Path, count: int, name: str = "world", /, *, machines: int = 1, **changes: Any
) -> list[dict[str, Tensor]]:
    """What `ranks.record` wrote in the first iteration, by rank."""
    name = f"{name}-{count}"
    file = runs.written(folder, model, name, **{**QUIET, **changes})
    runs.finish(file, count, ranks.record, str(folder / name), machines=machines)
    return [load_file(folder / name / f"rank-{rank}-0.safetensors") for rank in range(count)]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference over the tensors of `other`; of `one` itself where `other` is empty."""
    zero = torch.zeros(())
    keys = other or one
    return math.sqrt(math.fsum(float((one[k] - other.get(k, zero)).double().square().sum()) for k in keys))


def near(actual: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return float((actual.double() - wanted.double()).abs().max()) <= tolerance * float(wanted.double().abs().max())


def check_equal(
    parts: list[dict[str, Tensor]], alone: dict[str, Tensor], within: float = 1e-6, rounding: float = 0.0
) -> None:
    """Each sample drawn once; gradients to `within`, all else to `rounding`, relative: 0 = to the bit."""
    sampled = sorted(key for key in alone if key.startswith("slot/"))
    assert sorted(key for part in parts for key in part if key.startswith("slot/")) == sampled
    for part in parts:
        same = [key for key in part if not key.startswith("gradient/")]
        assert all(near(part[key], alone[key], rounding) for key in same)
        assert {"scores", "group", "prompts"} <= set(same) and not part["scores"].isnan().any()
        gradients = [key for key in part if key.startswith("gradient/")]
        expected = {key: alone[key] for key in gradients}
        assert 0 < distance(expected, {}) and distance(part, expected) < within * distance(expected, {})
        assert all(torch.equal(part[key], parts[0][key]) for key in gradients)  # all take the same step


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_processes_draws_the_same(folder: Path, model: Path, count: int) -> None:
    """Up to rounding, where micro-batches are smaller lest a process waits."""
    changes = {"trainer": GRPO, "sampling": SAMPLING, "iterations": 1}
    (alone,) = recorded(folder, model, 1, **changes)
    check_equal(recorded(folder, model, count, **changes), alone, within=1e-3, rounding=1e-5)


def untrained(model: Path, names: dict[str, Tensor]) -> dict[str, Tensor]:
    saved = load_file(model / "transformer" / "diffusion_pytorch_model.safetensors")
    return {key: saved[key.removeprefix("transformer.")] for key in names}  # saved has buffers too


@pytest.mark.slow
def test_full_fine_tuning_is_the_same_however_weights_are_held(folder: Path, model: Path) -> None:
    """In shards (FSDP2), or waiting on the CPU with all state: beside one process that holds everything."""
    common: dict[str, Any] = {"trainer": {**GRPO, "kl_weight": 1e-3}, "sampling": EVEN, "lora": None}
    common |= {"iterations": 2, "optimizer": {"lr": 1e-4, "max_grad_norm": 1.0}}
    (alone,) = recorded(folder, model, 1, **common)
    one = runs.last_state(folder / "world-1" / "run").tensors
    for name, count, how in (("sharded", 2, FSDP), ("waiting", 1, BLOCKS)):
        check_equal(recorded(folder, model, count, name, **common, **how), alone)
        two = runs.last_state(folder / f"{name}-{count}" / "run").tensors
        for stem in ("weights", "snapshot-average", "optimizer"):
            assert {k: x.shape for k, x in one[stem].items()} == {k: x.shape for k, x in two[stem].items()}
        for stem in ("weights", "snapshot-average"):  # Adam makes a step of a rounding where a gradient is nearly 0
            moved = distance(one[stem], untrained(model, one["weights"]))
            assert moved > 0 and distance(two[stem], one[stem]) < 0.1 * moved


@pytest.mark.slow
def test_all_weights_in_shards_go_on_in_any_number_of_processes(folder: Path, model: Path) -> None:
    """In two processes to the bit; read and written by one, and the other way round, the same weights and state."""
    common: dict[str, Any] = {"trainer": GRPO, "sampling": EVEN, "lora": None, "evaluation": {"every": 1}, **FSDP}
    for name, iterations in (("straight", 2), ("stopped", 1)):
        runs.finish(runs.written(folder, model, name, iterations=iterations, **common), 2, runs.train_file)
    straight, stopped = folder / "straight" / "run", folder / "stopped" / "run"
    shards = stopped / "checkpoints" / "step-000001" / "shards"
    assert {path.name for path in shards.iterdir()} == {"weights", "snapshot-average", "optimizer"}
    file = folder / "stopped.yaml"
    text, first = file.read_text(), runs.last_state(stopped).tensors
    for count, fsdp in ((1, "false"), (2, "true")):
        file.write_text(text.replace("fsdp: true", f"fsdp: {fsdp}"))
        runs.finish(file, count, opening.saved_again)
        assert shards.is_dir() == (count > 1)
        other = runs.last_state(stopped).tensors
        assert first.keys() == other.keys() and all(first[stem].keys() == other[stem].keys() for stem in first)
        assert all(torch.equal(tensor, other[stem][k]) for stem in first for k, tensor in first[stem].items())
    file.write_text(text.replace("iterations: 1", "iterations: 2"))
    runs.finish(file, 2, runs.train_file, str(stopped))
    assert runs.differences(straight, stopped) == []
    exported = load_file(export(straight, folder / "out") / "transformer" / "diffusion_pytorch_model.safetensors")
    average = runs.last_state(straight).tensors["snapshot-average"]
    assert all(torch.equal(exported[key.removeprefix("transformer.")], tensor) for key, tensor in average.items())


HELD: dict[str, tuple[int, int, dict[str, Any]]] = {
    "two": (2, 1, FSDP),
    "two_offloaded": (2, 1, FSDP | BLOCKS),
    "pairs_of_two": (4, 2, {"distributed": {"fsdp": "node"}}),
    "one_offloaded": (1, 1, BLOCKS),
    "each_offloaded": (2, 1, BLOCKS),
}
"""Processes, machines, and how the base is held."""


@pytest.mark.slow
def test_adapters_on_shards_learn_the_same(folder: Path, model: Path) -> None:
    common: dict[str, Any] = {"trainer": {**GRPO, "kl_weight": 1e-3}, "sampling": EVEN, "iterations": 1}
    (alone,) = recorded(folder, model, 1, **common)
    for held, (count, machines, changes) in HELD.items():
        check_equal(recorded(folder, model, count, held, machines=machines, **common, **changes), alone)
        row = runs.rows(folder / f"{held}-{count}" / "run")[-1]
        assert row["updates"] == 1.0 and row.get("ratio/max_abs_dev", 0.0) == 0.0, held


FURTHER: dict[str, dict[str, Any]] = {
    "diffusion_nft": {"kl_weight": 1e-3},
    "awm": {"timesteps_per_sample": 2, "kl_weight": 1e-3},
    "dgpo": {"timesteps_per_sample": 2, "first_steps": 3},
    "crd": {"updates_per_iteration": 1},
    "dpo": {"timesteps_per_sample": 2},
    # only one process has a pair, and guided samples are called one by one: both make as many calls
    "dpo of ties": {"timesteps_per_sample": 2, "guidance_in_training": True},
    "d3po": {"kernel": "flow_sde", "noise_level": 0.7},
    "prdp": {"kernel": "flow_sde", "noise_level": 0.7, "beta": 0.1, "clip_range": 1e-3},
    "grpo_guard": {"clip_range": 4e-6},
    "ddpo": {"kernel": "flow_sde", "noise_level": 0.7, "history": {"min_count": 2}},
    "draft": {"steps": 2},
    # Adam makes a whole step of rounding where a gradient is nearly 0, and the generator's gradient would show it
    "diff_instruct": {"assistant_lr": 1e-9},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_every_method_learns_on_shards(folder: Path, model: Path, name: str) -> None:
    """A model in shards over two processes, beside one process that holds all: an adapter, or all weights."""
    lora = None if name in ("dpo", "prdp", "d3po", "diff_instruct") else runs.LORA
    trainer = {"algorithm": name.partition(" ")[0]} | FURTHER[name]
    changes: dict[str, Any] = {"trainer": trainer, "iterations": 1, "lora": lora}
    changes["sampling"] = {"prompts_per_iteration": 2, "group_size": 4, "batch_size": 4}
    if name == "prdp":  # whose table of pairs does not mind groups that are cut between processes
        changes["sampling"] |= {"batch_size": 2}
    if name in ("draft", "diff_instruct"):
        changes["rewards"] = [runs.reward(folder, "warmth")]
    if name == "diff_instruct":
        changes["sampling"] |= {"num_inference_steps": 1}
    if name == "dpo of ties":
        score = "[float(i.mean()) if len(text) % 2 else 0.0 for i, text in zip(images, prompts)]"
        (folder / "ties.py").write_text(f"def ties(images, prompts):\n    return {score}\n")
        changes["rewards"] = [{"name": f"{folder / 'ties.py'}:ties"}]
        changes["sampling"] |= {"prompts_per_iteration": 4, "group_size": 2, "guidance_scale": 4.0}
    (alone,) = recorded(folder, model, 1, **changes)
    # the assistant of all weights has made steps of rounding
    within = 1e-6 if lora and "ties" not in name else 3e-6
    check_equal(recorded(folder, model, 2, "sharded", **changes, **FSDP), alone, within)


@pytest.mark.slow
@pytest.mark.parametrize("held", ["two", "one_offloaded"])
def test_adapters_on_shards_are_saved_and_go_on(folder: Path, model: Path, held: str) -> None:
    """Loaded again by all together, resumed to the bit; as one process that holds all, up to the order of sums."""
    count, _, changes = HELD[held]
    common: dict[str, Any] = {"trainer": GRPO, "evaluation": {"every": 1}, "iterations": 2}
    for name, how in (("straight", changes), ("whole", {})):
        runs.finish(runs.written(folder, model, name, **common, **how), count if how else 1, runs.train_file)
    straight, whole, again = folder / "straight" / "run", folder / "whole" / "run", folder / "again"
    shutil.copytree(straight, again)
    shutil.rmtree(again / "checkpoints" / "step-000002")
    runs.finish(folder / "straight.yaml", count, runs.train_file, str(again))
    assert runs.differences(straight, again) == []
    one, other = (load_file(run / "lora" / "pytorch_lora_weights.safetensors") for run in (whole, straight))
    assert distance(one, {}) > 0 and distance(other, one) < 1e-3 * distance(one, {})


def test_what_cannot_be_shared_out_is_refused(folder: Path, model: Path) -> None:
    def sharded(group: int, batch: int, prompts: int) -> None:
        sampling = {"group_size": group, "batch_size": batch, "prompts_per_iteration": prompts}
        check_processes(runs.config(folder, model, sampling=sampling, **FSDP), 2)

    with pytest.raises(ValueError, match="leave a smaller one"):
        sharded(3, 4, 2)
    with pytest.raises(ValueError, match="cannot be shared out evenly to 2 .* write sampling.prompts_per_iteration=4"):
        sharded(3, 3, 3)
    sharded(4, 4, 3)  # 3 micro-batches, which are cut into 4
    waiting = runs.config(folder, model, lora=None, **BLOCKS)
    check_processes(waiting, 1)
    with pytest.raises(ValueError, match="not summed over processes"):
        check_processes(waiting, 2)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_goes_on_with_one_or_two(folder: Path, model: Path) -> None:
    """With two: equal to the bit. With one: the same samples and the same course, up to the order of sums."""
    common: dict[str, Any] = {"trainer": GRPO, "sampling": SAMPLING, "evaluation": {"every": 2}, "iterations": 2}
    file = runs.written(folder, model, "straight", **common)
    runs.finish(file, 2, runs.train_file)
    straight, (two, one) = folder / "straight" / "run", (folder / "again-2", folder / "again-1")
    for again, count in ((two, 2), (one, 1)):
        shutil.copytree(straight, again)
        shutil.rmtree(again / "checkpoints" / "step-000002")
        runs.finish(file, count, runs.train_file, str(again))
    assert runs.differences(straight, two) == []
    assert [row["step"] for row in runs.rows(one)] == [0, 1, 2]
    for mine, yours in zip(runs.rows(one), runs.rows(straight), strict=True):
        for key in (key for key in mine if not key.startswith("ratio/")):
            assert mine[key] == pytest.approx(yours[key], rel=1e-3, abs=1e-6), (mine["step"], key)
    left, right = (runs.last_state(run).tensors["weights"] for run in (one, straight))
    for key, tensor in left.items():
        torch.testing.assert_close(tensor, right[key], rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_one_process_stops_both(folder: Path, model: Path, number: int) -> None:
    """By SIGTERM with a checkpoint; where one is killed the other names it, and the checkpoint of a resume."""
    changes = {"trainer": GRPO, "sampling": SAMPLING, "iterations": 1000, "evaluation": {"every": 0}}
    file, run = runs.written(folder, model, "cut", **changes), folder / "cut" / "run"
    processes = runs.launch(file, 2, runs.train_file)
    deadline = time.monotonic() + 200
    while len(read_metrics(Run(run).metrics)) < 2:
        assert time.monotonic() < deadline and all(p.exitcode is None for p in processes), runs.printed(file)
        time.sleep(0.05)
    killed = processes[1].pid
    assert killed is not None
    os.kill(killed, number)
    codes = runs.wait(processes, 100)
    if number == signal.SIGTERM:
        assert codes in ([0, 143], [143, 143]), runs.printed(file)
        assert runs.last_state(run).step == len(read_metrics(Run(run).metrics)) >= 2
    else:
        assert codes == [1, -signal.SIGKILL], runs.printed(file)
        said = (folder / "cut-rank-0.log").read_text()
        assert f"RuntimeError: killed: rank 1 (process {killed}, " in said and "The other ranks stop" in said
        assert "Go on from step-00000" in said and f"genrl resume {run} --nproc 2" in said


# -- Two processes that compute every sample together, each half of its tokens, beside one that does all
NOT_DIVIDED = {
    "ChronoEditTransformer3DModel",
    "HeliosTransformer3DModel",
    "LTX2VideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "MiniMaxH3Transformer3DModel",
    "QwenImageTransformer2DModel",
}
"""Classes that have a plan in diffusers, and are refused."""
CALLS: dict[str, dict[str, Any]] = {
    "flux": {"guidance_scale": 3.5, "pipeline_args": {"max_sequence_length": 16}},
    "flux2": {"pipeline_args": {"max_sequence_length": 48, "text_encoder_out_layers": [1, 2]}},
    "wan_t2v": {"guidance_scale": 5.0, "num_frames": 5, "pipeline_args": {}},
}
PAIR: dict[str, Any] = {"distributed": {"context": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trainer", "lora"), [("flux", NFT, None), ("flux2", GRPO, None), ("wan_t2v", GRPO, runs.LORA)]
)
def test_learnt_from_alike(folder: Path, name: str, trainer: dict[str, Any], lora: dict[str, Any] | None) -> None:
    """Samples, log-probabilities and scores within rounding; the gradient is the sum over both processes."""
    (folder / "light.py").write_text("def light(images):\n    return images.flatten(1).mean(1)  # of a video, too\n")
    changes: dict[str, Any] = {"trainer": trainer, "sampling": CALLS[name], "iterations": 1, "lora": lora}
    changes["rewards"] = [{"name": f"{folder / 'light.py'}:light"}]
    model = saved(name, folder)
    (alone,) = recorded(folder, model, 1, **changes)
    parts = recorded(folder, model, 2, "context", **PAIR, **changes)
    gradients = {key: alone[key] for key in alone if key.startswith("gradient/")}
    for part in parts:
        assert part.keys() == alone.keys()  # both have all samples
        assert all(torch.equal(part[key], parts[0][key]) for key in alone)
        for key in alone:
            if not key.startswith(("gradient/", "slot")) or key.endswith("final") or "log-prob" in key:
                assert near(part[key], alone[key], 1e-5), key
        # advantages divide by the spread of nearly equal scores, which raises the rounding of the samples (Wan: 4e-4)
        assert 0 < distance(part, gradients) < 1e-3 * distance(gradients, {})
    rows = [read_metrics(Run(folder / run / "run").metrics)[-1] for run in ("world-1", "context-2")]
    for key in ("model_calls/sample", "model_calls/train", "updates"):
        assert rows[0][key] == rows[1][key]
    if trainer is GRPO:
        assert rows[1]["ratio/max_abs_dev"] == 0.0


@pytest.mark.slow
def test_groups_of_processes_share_samples_out(folder: Path) -> None:
    """Four processes, two to a sample, whose bases are in shards over all four: as two to a sample."""
    model = saved("flux", folder)
    changes = {"sampling": {**CALLS["flux"], "prompts_per_iteration": 4}, "iterations": 1}
    pair = recorded(folder, model, 2, "pair", **PAIR, **changes)[0]
    parts = recorded(folder, model, 4, "groups", distributed={"context": 2, "fsdp": True}, **changes)
    sampled = [{key for key in part if key.startswith("slot/")} for part in parts]
    assert sampled[0] == sampled[1] and sampled[2] == sampled[3] and not sampled[0] & sampled[2]
    gradients = {key: pair[key] for key in pair if key.startswith("gradient/")}
    for part in parts:
        assert all(torch.equal(part[key], pair[key]) for key in part if not key.startswith("gradient/"))
        assert distance(part, gradients) < 1e-6 * distance(gradients, {})


@pytest.mark.slow
def test_stops_and_goes_on(folder: Path) -> None:
    """To the bit; evaluations and the adapter that both processes verify included."""
    changes = {"sampling": CALLS["flux"], "iterations": 1, "evaluation": {"every": 1}, **PAIR}
    model = saved("flux", folder)
    files = [runs.written(folder, model, name, **changes | {"iterations": n}) for name, n in (("one", 2), ("two", 1))]
    for file in files:
        runs.finish(file, 2, runs.train_file)
    runs.finish(files[0], 2, runs.train_file, str(folder / "two" / "run"))
    assert runs.differences(folder / "one" / "run", folder / "two" / "run") == []
    assert (folder / "one" / "run" / "lora" / "README.md").is_file()


def test_every_plan_of_diffusers_is_known_here() -> None:
    """A plan that is new in diffusers is to be tried."""
    known = {name for name in dir(networks) if getattr(getattr(networks, name), "_cp_plan", None)}
    assert set(DIVIDED) <= known and known - set(DIVIDED) == NOT_DIVIDED
