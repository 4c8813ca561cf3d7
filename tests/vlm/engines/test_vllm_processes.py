"""Several processes (gloo) that answer by the stand-in of vLLM: an engine in each, or one server; in shards, too."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.policies.folder import checkpoint_weights, stream_of
from genrl.vlm.policies.policy import Policy
from genrl.vlm.train import check_processes, train
from tests.run_folders import rows, start_ranks, wait
from tests.vlm import fake_vllm, vlm_ranks, vlm_runs
from tests.vlm.fake_vllm_server import Handler, serving
from tests.vlm.methods.episodes import agent_runs

COMMON: dict[str, Any] = {
    "iterations": 3,
    "optimizer": {"lr": 1e-3},
    "evaluation": {"every": 1, "questions": 1, "blind": False},  # one process has nothing to ask
    "checkpoint": {"every": 3},
}


@contextmanager
def served(shared: bool, model: Path) -> Iterator[dict[str, Any]]:
    """Settings of one server, or of an engine in each process."""
    if not shared:
        yield {"args": {"enable_sleep_mode": False}}
        return
    with serving(model) as url:
        yield {"url": url}


def trained(place: Path, vllm: dict[str, Any], make: Any = vlm_runs.config, *given: Any, **changes: Any) -> list[Any]:
    """The metrics of a run in two processes, which answer with the weights after the last step."""
    place.mkdir()
    make(place, *given, generation={"vllm": vllm}, **{**COMMON, **changes})
    processes = start_ranks(2, vlm_ranks.by_vllm, str(place / "tiny.yaml"), log=place / "log.txt")
    codes = wait(processes, 300)
    assert codes == [0, 0], [path.read_text()[-2000:] for path in sorted(place.glob("log*"))]
    found = rows(place / "run")
    assert all(row["sampler/gap_max"] < 1e-4 for row in found[1:])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "fsdp", "lora"), [(False, False, None), (False, True, {"rank": 2}), (True, True, None)]
)
def test_two_processes_draw_what_one_draws(
    shared: bool, fsdp: bool, lora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an engine in each or by one server, which gets the weights once for each version; also from shards."""
    own = {"vlm": {"lora": lora, "gradient_checkpointing": True}}
    with served(shared, vlm_runs.MODEL) as vllm:
        two = trained(tmp_path / "two", vllm, **own, distributed={"fsdp": fsdp})
        if shared:
            assert Handler.llm.version == "3" and Handler.llm.calls.count("reload_weights") == 4
    fake_vllm.install(monkeypatch)
    (tmp_path / "one").mkdir()
    generation = {"vllm": {"args": {"enable_sleep_mode": False}}}
    one = rows(train(vlm_runs.config(tmp_path / "one", generation=generation, **COMMON, **own)))
    names = [name for name in one[-1] if name.startswith(("reward/", "eval/", "rollout/tokens")) or name == "grad_norm"]
    assert len(names) > 5 and len(one) == len(two)
    for mine, yours in zip(one, two, strict=True):
        for name in [name for name in names if name in mine]:
            assert mine[name] == pytest.approx(yours[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_agents_share_a_server(tmp_path: Path) -> None:
    with served(True, agent_runs.MODEL) as vllm:
        trained(tmp_path / "two", vllm, agent_runs.config, "vl_dac")


def test_shards_are_of_several_processes_and_a_server_that_draws_ahead_is_for_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to shard over"):
        check_processes(vlm_runs.config(tmp_path, distributed={"fsdp": True}), 1)
    generation = {"staleness": 1, "vllm": {"url": "http://localhost:1"}}
    config = vlm_runs.config(tmp_path, generation=generation, iterations=2)
    check_processes(config, 1)
    with pytest.raises(ValueError, match="generation.staleness: a server samples ahead for one process"):
        check_processes(config, 2)


def test_weights_come_layer_by_layer() -> None:
    """Names are known before; a merged weight is made when its layer's turn comes, not with all others."""
    policy = Policy(str(vlm_runs.MODEL), lora=VLMLoRA(rank=2))
    stream = stream_of(policy)
    tensors = iter(stream.tensors)
    turns = [next(tensors)[0]]
    for parameter in policy.parameters:
        parameter.data.fill_(0.1)
    late = dict(tensors)
    assert [*turns, *late] == stream.names == list(checkpoint_weights(policy))
    for name, value in checkpoint_weights(policy).items():
        assert name in turns or torch.equal(late[name], value)
