"""RLFR: what tokens are charged in a run, how its flow learns, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import ConfigError
from genrl.objectives.advantages.groups import group_advantages
from genrl.vlm.config.files import file_problems
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.methods.rlfr.settings import Flow
from genrl.vlm.methods.rlfr.train import LatentFlow, Latents, latents, layers_of, noise_of, opened, shaped
from genrl.vlm.rollout.data import tell
from genrl.vlm.rollout.rollout import totals
from genrl.vlm.train import train
from tests.run_folders import rows
from tests.vlm import vlm_runs

TARGET = "<think> i see {answer} </think> <answer> {answer} </answer>"


def config(place: Path, flow: dict[str, Any] | None = None, **changes: Any) -> VLMConfig:
    own = {"demonstrations": TARGET, "pretraining": 2, "batch_size": 4, "depth": 1, "lr": 1e-2, **(flow or {})}
    trainer = {"algorithm": "rlfr", "preset": "grpo", "regularisers": [], "flow": own, **changes.pop("trainer", {})}
    return vlm_runs.config(place, trainer=trainer, **changes)


def test_hidden_states_are_those_of_the_answers_tokens_and_of_the_ones_before(tmp_path: Path) -> None:
    with vlm_runs.opened(config(tmp_path)) as run:
        answers, _ = run.draw()
        prompts = [answers.prompts[k] for k in answers.group.tolist()]
        found = latents(run.policy, prompts, answers.tokens, answers.mask, (0.5, 1.0))
        assert found.places.tolist() == [0.5] and found.states.shape == (int(answers.mask.sum()), 1, 128)
        scored = run.policy.log_probs(prompts, answers.tokens, answers.mask, group=torch.arange(16), share_prefix=False)
        kept = answers.mask.bool()
        torch.testing.assert_close(found.before[:, 0], scored.states[kept].detach())  # of the last layer
        lengths, first = answers.mask.sum(1).tolist(), 0
        for length in lengths:  # what a token's state is, is the state before the next
            own = slice(first, first + length)
            assert torch.equal(found.states[own][:-1], found.before[own][1:])
            first += length


def test_a_new_flow_is_still_and_noise_does_not_depend_on_who_draws_it() -> None:
    assert layers_of((0.25, 0.5, 0.75), 28) == [7, 14, 21] and layers_of((0.5, 0.75, 1.0), 2) == [1]
    flow = LatentFlow(8, 2, 0)
    of = Latents(torch.randn(5, 2, 8), torch.randn(5, 2, 8), torch.tensor([0.25, 0.5]))
    noise = noise_of([("a",), ("b",)], [2, 3], (2, 8))
    assert torch.equal(noise[2:], noise_of([("b",)], [3], (2, 8)))
    found = flow.deviation(of, noise, (0.8,))
    torch.testing.assert_close(found.error, (of.states - noise).square().mean((1, 2)))
    torch.testing.assert_close(found.score, 4 * found.error)
    assert torch.equal(flow.error(of, noise, torch.full((5,), 0.8)), found.error)


def test_advantages_are_those_of_the_group_less_what_the_flow_charges_from_a_token_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flow, "most", 2)
    settings = config(tmp_path, {"coefficient": 0.5}, trainer={"micro_batch": 8})
    method: Any = settings.trainer
    with vlm_runs.opened(settings) as run:
        flow, _ = opened(run, method)
        answers, _ = run.draw()
        answers.scores["exact"][3] = answers.scores["tag_format"][3] = torch.nan
        ready = run.estimate(answers)
        assert ready is not None
        found, figures = shaped(run, method, flow, answers, ready)
        advantage, mask = found.batch.advantage, answers.mask.bool()
        assert advantage is not None
        ours = group_advantages(totals(settings, answers.scores), answers.group, scale="group", eps=1e-4, ddof=1)
        charged = (ours.nan_to_num()[:, None] - advantage) / 0.5
        steps = charged - torch.nn.functional.pad(charged[:, 1:] * mask[:, 1:], (0, 1))  # u of each token
        assert (advantage[3] == 0).all(), "no score, nothing to learn"
        for k in range(16):
            paid = steps[k][mask[k]]
            assert k == 3 or ((paid > 1e-9).sum() <= 2 and float(paid.max()) == pytest.approx(1.0))
            assert (paid[paid > 1e-9] > 0.6).all() and (paid > -1e-9).all()
        right = answers.scores["exact"] >= 1
        assert figures["flow/charged"] > 0 and right.any() and flow.leave.weight.grad is not None
        assert float(flow.leave.weight.grad.abs().max()) > 0


@pytest.mark.slow
def test_the_flow_learns_the_demonstrations_and_then_the_right_answers(tmp_path: Path) -> None:
    settings = config(tmp_path, {"pretraining": 30})
    method: Any = settings.trainer
    with vlm_runs.opened(settings) as run:
        flow, _ = opened(run, method)
        told = tell(run.policy, [run.questions[k] for k in range(8)], TARGET)
        of = latents(run.policy, told.prompts, told.tokens, told.mask, method.flow.layers)
        noise, t = torch.randn(of.states.shape), torch.full((len(of.states),), 0.5)
        fitted, new = (float(one.error(of, noise, t).mean().detach()) for one in (flow, LatentFlow(128, 1, 0)))
        assert fitted < 0.8 * new
    found = rows(train(config(tmp_path, {"demonstrations": None}, iterations=4, optimizer={"lr": 1e-5})))
    assert found[-1]["flow/error_right"] < 0.9 * found[0]["flow/error_right"]
    assert all(row["updates"] == 1 and row["grad_norm"] > 0 and row["flow/advantage"] > 0 for row in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"preset": "gspo"}}, "the flow pays tokens, and sequence_clip takes one advantage"),
        ({"generation": {"staleness": 1}}, "rlfr learns from samples of the present weights"),
        ({"distributed": {"fsdp": True}}, "not tried in shards"),
        ({"flow": {"threshold": 1.0}}, "threshold"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **changes)


def test_a_column_of_the_demonstrations_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = [text for _, text in file_problems(config(tmp_path, {"demonstrations": "{solution}"}), [])]
    assert any("trainer.flow.demonstrations asks for the column solution" in text for text in found)
