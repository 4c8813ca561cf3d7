"""Policies in shards (FSDP2) over several processes (gloo), beside the same processes that hold all."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from genrl.config import ConfigError
from genrl.vla.policies.folder import load_policy
from genrl.vla.setup import load_trained
from genrl.vla.train import check_processes
from tests.run_folders import differences, last_state, rows, start_ranks, wait
from tests.vla import openvla_runs, published_runs, vla_ranks, vla_runs

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
    _ = openvla_runs.config(base, **changes) if kind == "openvla" else published_runs.config(base, kind, **changes)
    shutil.copy(base / "tiny.yaml", place / "tiny.yaml")
    return place


def largest(one: Path, other: Path) -> float:
    """Difference of a trained weight."""
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
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"environment": {"workers": "ray"}}, "write ray_simulators"),
        ({"environment": {"staleness": 1}, "iterations": 2}, "not there for policies in shards; write 0"),
        ({"trainer": {"fit_batch": True}}, "find microbatch by hand"),
        ({"optimizer": {"name": "muon"}}, "cannot be sharded"),
    ]
    for changes, message in wrong:
        with pytest.raises(ConfigError, match=message):
            published_runs.config(tmp_path, "pi0", **{**FSDP, **changes})
    monkeypatch.setattr("genrl.runtime.weights.sharding.HuggingFaceStorageWriter", object)
    with pytest.raises(ValueError, match="cannot save weights that are trained in shards"):
        check_processes(config, 2)
    check_processes(published_runs.config(tmp_path, "pi0", **LORA, **FSDP), 2)
    imitation = {key: value for key, value in vla_runs.SFT.items() if key != "policy"}  # `ray` is `ray_simulators` then
    published_runs.config(tmp_path, "pi0", **imitation, environment={"workers": "ray"}, **FSDP)
