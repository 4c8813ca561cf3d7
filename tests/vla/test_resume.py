"""A run of a policy that is stopped goes on as if nothing had been; two processes do what one does,
also with a policy in shards (FSDP2, gloo)."""

import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from genrl.config import load
from genrl.runtime.folder.run import Run
from genrl.runtime.loop.progress import Progress
from genrl.vla.policies.folder import load_policy
from genrl.vla.setup import load_trained
from genrl.vla.train import check_processes, open_policy, train
from tests.run_folders import differences, last_state, rows, start_ranks, tiered, wait
from tests.vla import published_runs, vla_ranks, vla_runs

EVALUATED = {"evaluation": {"every": 2, "episodes": 6, "num_envs": 3}}
MLP = {"type": "diffusion_mlp", "image_size": 0}
TRAINERS: dict[str, dict[str, Any]] = {
    "ppo": {"optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 3}},
    "dppo": {"sampler": "diffusion"},
    "ppo after a warm-up": {"trainer": {"critic_warmup": 2, "episodes": "all", "decisions": 6}},
    "ppo of the encoder, too, by Muon": {"policy": {"freeze": "nothing"}, "optimizer": {"name": "muon", "lr": 1e-4}},
    "ppo by AdamW of 8 bits": {"optimizer": {"name": "adamw_8bit", "lr": 1e-4}},
    "grpo": vla_runs.GRPO,
    "sft": vla_runs.SFT,
    "dagger": vla_runs.DAGGER,
    "sft of a diffusion policy": {**vla_runs.SFT, "sampler": "diffusion", "policy": {"path": None, "new": MLP}},
}


def stop_in(monkeypatch: pytest.MonkeyPatch, phase: str, iteration: int, after: int = 0) -> None:
    """Let the process send itself SIGTERM in that phase of that (0-based) iteration, once."""
    advance, left = Progress.advance, [after + 1]

    def watched(self: Progress, count: float) -> None:
        if left[0] and (self.name, self.done) == (phase, iteration):
            left[0] -= 1
            if not left[0]:
                signal.raise_signal(signal.SIGTERM)
        advance(self, count)

    monkeypatch.setattr(Progress, "advance", watched)


def straight_and_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, places: list[tuple[str, int]], after: int = 0, **changes: Any
) -> tuple[Path, Path]:
    """The same run in one go, and stopped at each of these places and resumed."""
    sampler = changes.pop("sampler", "flow_sde")

    def config(name: str) -> Any:
        return vla_runs.config(folder, sampler=sampler, output=str(folder / name), **changes)

    straight = train(config("straight"))
    run: Path | None = None
    for phase, iteration in places:
        with monkeypatch.context() as patched:
            stop_in(patched, phase, iteration, after)
            with pytest.raises(SystemExit) as stopped:
                train(load(Run(run).config) if run else config("stopped"), run)  # type: ignore[arg-type]
        assert stopped.value.code == 143
        run = folder / "stopped"
    assert run is not None
    train(load(Run(run).config), run)  # type: ignore[arg-type]
    return straight, run


@pytest.mark.parametrize("name", tiered(TRAINERS, ("ppo", "grpo", "sft", "dagger")))
def test_one_and_two_iterations_are_three(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are stopped in the middle of a rollout, which has changed nothing and is done again."""
    acting, changes = name in ("dppo", "grpo"), {"iterations": 3, **TRAINERS[name]}
    places = [("acting", 0), ("acting", 1)] if acting else [("training", 0)]
    runs = straight_and_stopped(tmp_path, monkeypatch, places, after=int(acting), **changes)
    assert vla_runs.differences(*runs) == []
    assert [row["step"] for row in vla_runs.rows(runs[1])] == [1, 2, 3]
    first, second = (vla_runs.trained_weights(run) for run in runs)
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_stopped_in_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done again on resume, and its row is written once, however often the run is stopped."""
    places = [("evaluating", 0), ("acting", 0), ("evaluating", 1), ("evaluating", 2), ("evaluating", 2)]
    changes: dict[str, Any] = {"iterations": 3, **EVALUATED, "checkpoint": {"every": 9}}
    runs = straight_and_stopped(tmp_path, monkeypatch, places, **changes)
    assert vla_runs.differences(*runs) == []
    rows = vla_runs.rows(runs[1])
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "eval/success_mean" in row] == [0, 2, 3]


BATCH = {**vla_runs.SAMPLERS["flow_sde"], "selection": "random_per_batch"}
SIXTEEN = {"environment": {"group_size": 4, "num_envs": 16}, "evaluation": {"every": 0}}
DISTRIBUTED: dict[str, dict[str, Any]] = {
    "ppo": {"sampler": BATCH, "trainer": {"weighting": "episodes", "microbatch": 3, "minibatch": 10}},
    "grpo of dppo's chain, one process learns nothing": {**vla_runs.GRPO, "sampler": "diffusion", **SIXTEEN},
    "sft": {**vla_runs.SFT, "trainer": {**vla_runs.SFT["trainer"], "batch_size": 17}},
}


def trained_by(count: int, folder: Path, name: str) -> Path:
    common = {"evaluation": {"every": 1, "episodes": 7}, "optimizer": {"lr": 1e-3, "max_grad_norm": 1e9}}
    place = folder / str(count)
    place.mkdir()
    vla_runs.config(place, **{**common, **DISTRIBUTED[name]})
    arguments = (str(place / "tiny.yaml"), str(place), 8 if name.startswith("grpo") else None)
    if count == 1:
        processes = [vla_runs.start(vla_ranks.record, *arguments, log=place / "log")]
    else:
        processes = vla_runs.start_ranks(count, vla_ranks.record, *arguments, log=place / "log")
    codes = vla_runs.wait(processes, 240)
    assert codes == [0] * count, "\n".join(file.read_text()[-2000:] for file in place.glob("log*"))
    return place


def rollout_of(place: Path) -> dict[str, Tensor]:
    """Of the first iteration, its processes' slots side by side; as long as the shortest."""
    parts = [load_file(path) for path in sorted(place.glob("rollout-0-*.safetensors"))]
    for part in parts:
        part["group"] = part["group"][None]
    names = parts[0].keys() if parts else ()
    return {name: torch.cat([part[name][: min(len(p[name]) for p in parts)] for part in parts], 1) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_two_processes_do_what_one_does(name: str, tmp_path: Path) -> None:
    one, two = (trained_by(count, tmp_path, name) for count in (1, 2))
    ours, theirs = rollout_of(one), rollout_of(two)
    assert ours.keys() == theirs.keys() and (ours or name == "sft")
    for key, value in ours.items():
        length = min(len(value), len(theirs[key]))
        bound = {"rtol": 1e-3, "atol": 2e-3} if value.is_floating_point() else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(value[:length], theirs[key][:length], **bound, msg=key)  # type: ignore[call-overload]
    trained, again = (vla_runs.last_state(place / "run").tensors["weights"] for place in (one, two))
    start = open_policy(load(one / "tiny.yaml"))[0].state_dict()  # type: ignore[arg-type]
    for key, value in trained.items():
        torch.testing.assert_close(value, again[key], rtol=0, atol=3e-5, msg=key)
    assert max(float((value - start[key]).abs().max()) for key, value in trained.items()) > 3e-4
    rows = [vla_runs.rows(place / "run") for place in (one, two)]
    assert [row.keys() for row in rows[0]] == [row.keys() for row in rows[1]]
    for mine, yours in zip(*rows, strict=True):
        for key in mine.keys() - {"rollout/action_std"}:  # of the first slots of one process
            assert mine[key] == pytest.approx(yours[key], rel=2e-3, abs=2e-4), (mine["step"], key)


FSDP: dict[str, Any] = {"distributed": {"fsdp": True}}
LORA: dict[str, Any] = {"policy": {"lora": {"rank": 2}, "dtype": "bfloat16"}}
FROZEN: dict[str, Any] = {"policy": {"freeze": "encoder", "gradient_checkpointing": True}}
ROUNDING = 1e-6
"""Largest difference of a weight after four updates, whose steps are 1e-4 at most: shards of a gradient are summed pass
by pass. Largest seen: 1.2e-7."""


def finish(place: Path, count: int, target: Any, *arguments: str | None) -> Path:
    """Run `target` on place/tiny.yaml in so many processes."""
    processes = start_ranks(count, target, str(place / "tiny.yaml"), *arguments, log=place / "log.txt")
    logs = sorted(place.glob("log*"))
    assert wait(processes, 400) == [0] * count, "\n".join(path.read_text()[-3000:] for path in logs)
    return place / "run"


def prepared(place: Path, kind: str, base: Path, **changes: Any) -> Path:
    """A folder with a configuration. base: where the policy is, or is put."""
    place.mkdir()
    base.mkdir(exist_ok=True)
    changes["output"] = str(place / "run")
    make = published_runs.oft_config if kind == "openvla" else partial(published_runs.config, kind=kind)
    make(base, **changes)
    shutil.copy(base / "tiny.yaml", place / "tiny.yaml")
    return place


def largest(one: Path, other: Path) -> float:
    ours, theirs = (last_state(run).tensors["weights"] for run in (one, other))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - value).abs().max()) for name, value in theirs.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("pi0", LORA), ("smolvla", FROZEN), ("openvla", {"optimizer": {"lr": 1e-4}})],
    ids=["pi0-lora", "smolvla-frozen encoder", "openvla-full"],
)
def test_shards_learn_what_whole_policies_do(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Two updates of several passes in each of two iterations, in which a process has nothing to pass now and then; the
    second again from the checkpoint of the first."""
    common: dict[str, Any] = {
        "ema": {"decay": 0.5},
        "trainer": {"minibatch": 3, "microbatch": 1},
        "evaluation": {"every": 2, "episodes": 3},  # one process has one more than the other
        "iterations": 2,
        **changes,
    }
    runs = []
    for name, held in (("whole", {}), ("shards", FSDP)):
        place = prepared(tmp_path / name, kind, tmp_path / "begun", **common, **held)
        runs.append(finish(place, 2, vla_ranks.record, str(place)))
    whole, shards = runs
    again = shutil.copytree(tmp_path / "shards", tmp_path / "again")
    shutil.rmtree(again / "run" / "checkpoints" / "step-000002")
    finish(again, 2, vla_ranks.record, str(again), None, str(again / "run"))
    assert differences(shards, again / "run") == []
    for path in (tmp_path / "whole").glob("rollout-0-*.safetensors"):
        ours, theirs = load_file(tmp_path / "shards" / path.name), load_file(path)
        assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    assert [row.get("rollout/log_prob_off") for row in rows(shards)[1:]] == [0.0, 0.0]
    for rank in (0, 1):
        count, own, every = load_file(tmp_path / "shards" / f"shares-{rank}.safetensors")["shares"].tolist()
        assert count > 90 and own < 0.6 * every
        assert load_file(tmp_path / "whole" / f"shares-{rank}.safetensors")["shares"].sum() == 0
    if "lora" in changes.get("policy", {}):
        assert differences(shards, whole) == []
    for mine, other in zip(rows(shards), rows(whole), strict=True):
        for key, value in other.items():
            assert mine[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert largest(shards, whole) <= ROUNDING and rows(shards)[1]["updates"] > 1
    start = load_policy(tmp_path / "begun" / "base").state_dict()
    written = load_policy(shards / "policy").state_dict()
    assert max(float((written[name] - value).abs().max()) for name, value in start.items()) > 50 * ROUNDING
    assert all(torch.equal(value, written[name]) for name, value in load_trained(shards).state_dict().items())


def test_a_failed_start_leaves_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, put right, would be refused because of it."""
    config = published_runs.config(tmp_path, "pi0", **FSDP)
    folder = Path(config.output) / "policy"
    seen = []

    def failing(*_: Any, **__: Any) -> None:
        seen.append(folder.is_dir())
        raise ValueError("this optimiser is not there")

    monkeypatch.setattr("genrl.vla.train.Sharding.over", lambda *_: None)
    monkeypatch.setattr("genrl.vla.train.hold", failing)
    with pytest.raises(ValueError, match="is not there"), vla_runs.opened(config):
        pass
    assert seen == [True] and not folder.exists()


def test_what_cannot_be_held_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = published_runs.config(tmp_path, "pi0", **FSDP)
    check_processes(config, 2)
    with pytest.raises(ValueError, match="nothing to shard over"):
        check_processes(config, 1)
    monkeypatch.setattr("genrl.runtime.weights.sharding.HuggingFaceStorageWriter", object)
    with pytest.raises(ValueError, match="cannot save weights that are trained in shards"):
        check_processes(config, 2)
    check_processes(published_runs.config(tmp_path, "pi0", **LORA, **FSDP), 2)
    imitation = {key: value for key, value in vla_runs.SFT.items() if key != "policy"}  # `ray` is `ray_simulators` then
    published_runs.config(tmp_path, "pi0", **imitation, environment={"workers": "ray"}, **FSDP)
