"""vLLM itself as a sampler, in this process and on a server (`make vllm` builds an environment for it)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.engines.generation import Completions, Sampling, generate
from genrl.vlm.engines.server import Engine, Server
from genrl.vlm.engines.vllm import InProcess, Sampler
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.rollout.data import Questions
from genrl.vlm.train import train
from tests.ports import free_port
from tests.run_folders import rows
from tests.vlm import vlm_ranks, vlm_runs
from tests.vlm.methods.episodes import agent_runs

pytest.importorskip("vllm", reason="vLLM is not installed; `make vllm` builds an environment that has it")

VLLM = {"vllm": {"args": {"enable_sleep_mode": False, "enforce_eager": True}}}
ROUNDING = 1e-4
"""Most that log-probabilities of float32 models may be apart; under old weights they are more than 0.1 apart."""
START_S = 300.0


def questions(place: Path, policy: Policy) -> list[Encoded]:
    result = Questions(vlm_runs.config(place), "train")
    return [policy.encode(result[k].prompt) for k in range(4)]


def gap(policy: Policy, prompts: list[Encoded], sampled: Completions) -> float:
    scored = policy.log_probs(prompts, sampled.tokens, sampled.mask, group=sampled.group)
    return float((scored.log_prob - sampled.log_prob)[sampled.mask].abs().max())


def draws_as_the_trainer_scores(engine: Engine, policy: Policy, place: Path) -> None:
    """Before and after a change of the weights, with the weights' version, the same for the same keys."""
    sampler, prompts, keys = Sampler(engine, policy), questions(place, policy), [("a",), ("b",), ("c",), ("d",)]
    first = sampler.generate(prompts, 4, Sampling(12), keys)
    assert gap(policy, prompts, first) < ROUNDING
    assert sampler.generate(prompts, 4, Sampling(12), keys).texts == first.texts
    greedy = sampler.generate(prompts, 1, Sampling(12, temperature=0), keys)
    assert greedy.texts == generate(policy, prompts, 1, Sampling(12, temperature=0), keys).texts

    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(0.05)
    assert gap(policy, prompts, first) > 0.1
    sampler.stepped()
    second = sampler.generate(prompts, 4, Sampling(12), keys)
    assert gap(policy, prompts, second) < ROUNDING
    replies = engine.answer([sampler._asked(prompts[0], keys[0], 2, Sampling(12))])
    assert [one.versions for one in replies[0].answers] == [{"1"}] * 2
    sampler.stepped()
    sampler.loaded = sampler.version  # as if another run had loaded its own in between
    with pytest.raises(RuntimeError, match=r"version \['1'\], the trainer is at 2: does another run use the same"):
        sampler.generate(prompts, 1, Sampling(12), keys)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    """Of the embedded model, whose file has names that vLLM 0.32 has not."""
    return InProcess(vlm_runs.config(tmp_path_factory.mktemp("engine"), generation=VLLM))


@pytest.mark.parametrize("adapted", [False, True])
def test_an_engine_in_this_process(engine: InProcess, adapted: bool, tmp_path: Path) -> None:
    policy = Policy(str(vlm_runs.MODEL), lora=VLMLoRA(rank=2) if adapted else None)
    draws_as_the_trainer_scores(engine, policy, tmp_path)


def in_two_processes(place: Path, **changes: Any) -> list[Any]:
    """The metrics of a run of three iterations, whose gap stays that of rounding while the weights change."""
    common = {"optimizer": {"lr": 1e-3}, "evaluation": {"every": 1, "questions": 7}, "checkpoint": {"every": 3}}
    vlm_runs.config(place, iterations=3, **common, **changes)
    vlm_runs.in_processes(place, vlm_ranks.run)
    result = [row for row in rows(place / "run") if "sampler/gap_max" in row]
    assert len(result) == 3
    for row in result:
        assert row["sampler/gap_max"] < ROUNDING and row["sampler/corrected"] == 0
    return result


@pytest.mark.parametrize("fsdp", [False, True])
def test_an_engine_in_each_of_two_processes(fsdp: bool, tmp_path: Path) -> None:
    in_two_processes(tmp_path, generation=VLLM, distributed={"fsdp": fsdp})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address of a server and its model, the embedded one."""
    with serving(vlm_runs.MODEL, tmp_path_factory.mktemp("served") / "model") as result:
        yield result


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """A server of a copy in `folder`, under the names that this vLLM can read by itself. Its makers want other sampling
    than the trainer, who must not get it."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    older = {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in weights.items()}
    save_file(older, folder / "model.safetensors", metadata={"format": "pt"})
    makers = json.loads((folder / "generation_config.json").read_text())
    makers |= {"do_sample": True, "temperature": 0.3, "top_k": 2, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(makers))
    port = free_port()
    options = "--dtype float32 --enforce-eager --enable-scale-out --logprobs-mode processed_logprobs --host 127.0.0.1"
    if not torch.cuda.is_available():
        options += " --no-enable-chunked-prefill"  # as InProcess
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *options.split()]
    log = folder.parent / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}", folder
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:  # not yet
            time.sleep(1)
        else:
            return
    pytest.fail(f"no server after {START_S:.0f} s: {log.read_text()[-3000:]}")


def test_a_server(served: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = served
    draws_as_the_trainer_scores(Server(url, tmp_path / "weights", str(folder)), Policy(str(folder)), tmp_path)


def test_runs_on_a_server(served: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = served
    in_two_processes(tmp_path, vlm={"path": str(folder)}, generation={"vllm": {"url": url}})
    with serving(agent_runs.CROP, tmp_path / "model") as (url, folder):
        generation = agent_runs.TWO_BY_TWO | {"vllm": {"url": url}}
        own = {"vlm": {"path": str(folder)}, "generation": generation, "optimizer": {"lr": 1e-3}}
        train(agent_runs.config(tmp_path, "grpo", iterations=2, output=str(tmp_path / "agent"), **own))
    assert all(row["sampler/gap_max"] < ROUNDING for row in rows(tmp_path / "agent"))
