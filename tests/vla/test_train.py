"""What a run of a policy has beside its method: the average, what is watched, smaller micro-batches."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.cli.arguments import is_policy
from genrl.config import ConfigError, check_files
from genrl.runtime.loop.progress import Progress
from genrl.vla.config.schema import VLAConfig
from genrl.vla.methods.ppo import train as gae
from genrl.vla.policies.folder import load_policy
from genrl.vla.policies.layers import is_adapter
from genrl.vla.policies.policy import TOKENS
from genrl.vla.run import VLARun
from genrl.vla.setup import export, load_trained
from genrl.vla.train import judge_policy, train
from tests.run_folders import assert_resumes
from tests.vla import vla_runs
from tests.vla.openvla_folders import observation
from tests.vla.published_runs import OFT, PPO, SFT
from tests.vla.published_runs import oft_config as config

EVALUATED: dict[str, Any] = {"every": 1, "episodes": 4, "num_envs": 4}
AVERAGED: dict[str, Any] = {"ema": {"decay": 0.5}, "optimizer": {"lr": 1e-2}}


def test_evaluation_and_result_are_of_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged, seen = VLARun.judged, []

    def watched(self: VLARun, iteration: int) -> Any:
        seen.append({name: p.detach().clone() for name, p in self.loop.weights.named.items()})
        assert self.table in (None, self.env), "one set of simulators"
        return judged(self, iteration)

    monkeypatch.setattr(VLARun, "judged", watched)
    run = train(vla_runs.config(tmp_path, iterations=2, evaluation=EVALUATED, **AVERAGED))
    tensors = vla_runs.last_state(run).tensors
    average, trained = tensors["snapshot-average"], tensors["weights"]
    assert len(seen) == 3 and all(torch.equal(value, average[name]) for name, value in seen[-1].items())
    assert any(not torch.equal(value, trained[name]) for name, value in average.items())
    for written in (vla_runs.trained_weights(run), load_trained(run).state_dict()):
        assert all(torch.equal(written[name], value) for name, value in average.items())


def room_for(most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device that holds so many decisions in a pass, from the second update on; the sizes that are tried."""
    score, tried = gae.score, []

    def full(settings: Any, acting: Any, given: Any) -> Any:
        tried.append(len(given["step"]))
        if len(tried) > 1 and tried[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(settings, acting, given)

    monkeypatch.setattr(gae, "score", full)
    return tried


def test_an_iteration_out_of_memory_is_done_again_in_smaller_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    wanted = train(vla_runs.config(tmp_path, iterations=2, trainer={"microbatch": 4}, output=str(tmp_path / "by hand")))
    with monkeypatch.context() as patched:
        tried = room_for(7, patched)
        actual = train(vla_runs.config(tmp_path, iterations=1, trainer={"fit_batch": True}))
    said = capsys.readouterr().err
    assert "memory ran out in iteration 1 with 16 samples in a micro-batch: it is done again, with 8" in said
    assert "with 8 samples in a micro-batch: it is done again, with 4 from here on" in said
    assert tried[0] > 8 and tried[1] > 8 and tried[2] == 8 and max(tried[3:]) <= 4
    train(vla_runs.config(tmp_path, iterations=2, trainer={"fit_batch": True}), actual)
    first, second = vla_runs.last_state(actual), vla_runs.last_state(wanted)
    assert first.state["memory"].pop("batch_size") == 4 and first.state == second.state
    for stem, tensors in first.tensors.items():
        assert all(torch.equal(value, second.tensors[stem][name]) for name, value in tensors.items())
    assert vla_runs.rows(actual) == vla_runs.rows(wanted)
    # Without the key the error says what to do
    room_for(7, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError) as error:
        train(vla_runs.config(tmp_path, output=str(tmp_path / "without")))
    assert "micro-batches of 16 samples do not fit: lower trainer.microbatch" in error.value.__notes__[0]


# -- Runs of tiny OpenVLA-OFTs on MiniTable: imitated, reinforced, resumed, exported; what a configuration cannot ask
def logits(policy: Any) -> torch.Tensor:
    with torch.no_grad():
        given = observation(state=3) | {TOKENS: policy.tokenise(["touch the red block"] * 3)}
        result: torch.Tensor = policy.encode(given)["logits"]
    return result


RUNS: dict[str, dict[str, Any]] = {
    "sft": {**SFT, "evaluation": {"every": 2}},
    "ppo": {"trainer": {**PPO, "values": "action", "level": "action", "discount": "smdp", "entropy_weight": 0.01}},
    "sft of the continuous head": {**SFT, "head": True, "evaluation": {"every": 2}},
    "ppo of adapters": {"policy": {"lora": {"rank": 2}, "gradient_checkpointing": True, "dtype": "bfloat16"}},
}


@pytest.mark.parametrize("kind", ["sft", "ppo", *(pytest.param(k, marks=pytest.mark.slow) for k in list(RUNS)[2:])])
def test_a_run_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    assert_resumes(train, config(tmp_path, **RUNS[kind], iterations=2), tmp_path)
    rows = vla_runs.rows(tmp_path / "run")
    if kind.startswith("sft"):
        assert len([row for row in rows if "eval/success_mean" in row]) == 2
    if kind.startswith("ppo"):
        assert [row["rollout/log_prob_off"] for row in rows] == [0.0, 0.0] and rows[0]["rollout/action_std"] > 0.1


def test_adapters_are_merged_into_an_exported_folder(tmp_path: Path) -> None:
    lora = {"lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}, "dtype": "bfloat16"}
    changes = {"policy": lora, "optimizer": {"lr": 1e-2}}
    run = train(config(tmp_path, **changes))
    names = vla_runs.last_state(run).tensors["weights"]
    assert {n.split(".")[0] for n in names if is_adapter(n)} == {"language_model"}
    assert {n.split(".lora_")[0].split(".")[-1] for n in names if is_adapter(n)} == {"q_proj", "down_proj"}
    out = export(run, tmp_path / "out")
    written, base = load_policy(out), load_policy(run / "policy")
    assert torch.equal(logits(written), logits(base)) and torch.equal(logits(written), logits(load_trained(run)))
    original = load_trained(tmp_path / "base", adapt=None)
    assert written.horizon == 4 and original.horizon == 8  # the chunk is written with the policy
    files = {f.name for f in (tmp_path / "base").iterdir()} | {"oft.json", "genrl_heads.safetensors"}
    assert {f.name for f in out.iterdir()} == files
    with Progress(1, unit="episodes") as progress:  # as `genrl eval` does, of a configuration that has policy.oft
        assert len(judge_policy(config(tmp_path, **changes), run, progress).success) == 8


def test_the_check_reads_the_folder(tmp_path: Path) -> None:

    def refusal(run: VLAConfig) -> str:
        with pytest.raises(ConfigError) as caught:
            check_files(run)
        return str(caught.value)

    run = config(tmp_path)
    check_files(run)
    assert is_policy(tmp_path / "base")
    (tmp_path / "base" / "action_head--5_checkpoint.pt").touch()
    assert "tokens does not fit" in refusal(run) and "which predicts actions; write regression" in refusal(run)
    (tmp_path / "base" / "action_head--5_checkpoint.pt").unlink()
    wrong = config(tmp_path, policy={"oft": {**OFT, "unnorm_key": "minitabel"}})
    assert "found 'minitabel'; the nearest: minitable" in refusal(wrong)
    assert "5 actions cannot be executed of chunks of 4" in refusal(config(tmp_path, environment={"chunk": 5}))
