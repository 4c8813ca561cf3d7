"""ArCHer: what its steps are made of, and that its memory is in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import ConfigError
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.methods.archer.train import (
    Turns,
    UtteranceCritic,
    learn,
    loss,
    recorded,
    states_of,
    turns_of_walk,
    utterance_critic,
)
from genrl.vlm.train import check_processes
from tests.vlm.methods.episodes import agent_runs

CRITIC = {"hidden": [8], "updates": 2, "warmup": 0}


def config(place: Path, trainer: dict[str, Any] | None = None, **changes: Any) -> VLMConfig:
    """Four slots of three steps in which every answer is paid by its length."""
    own = {"algorithm": "archer", "critic": CRITIC, "batch": 6, "memory": 20, **(trainer or {})}
    return agent_runs.config(place, "vl_dac", trainer=own, **changes)


def test_a_turn_knows_what_followed_and_the_memory_forgets_the_oldest(tmp_path: Path) -> None:
    with agent_runs.opened(config(tmp_path)) as run:
        acted, _ = run.act()
        assert acted.walk is not None
        turns = turns_of_walk(acted.walk)
        steps = acted.walk.decisions
        assert len(turns) == 12 and {one.after is None for one in turns} == {True, False}
        for k in range(3):
            for slot in range(4):
                turn, one = turns[k * 4 + slot], steps[k][slot]
                assert turn.reward == one.reward and (turn.after is None) == one.terminated
                assert torch.equal(turn.tokens, one.tokens[one.mask])
                if k < 2 and not one.terminated:
                    assert turn.after is steps[k + 1][slot].prompt.source
        memory = Turns(5)
        memory.add(turns)
        assert memory.held == turns[-5:]
        parts = [part for one in memory.held for prompt in (one.prompt, one.after) if prompt for part in prompt.parts]
        shown = {(part.size, part.convert("RGB").tobytes()) for part in parts if not isinstance(part, str)}
        pictures = memory.state_dict()["pictures"]  # each once, in bytes
        assert len(pictures) == len(shown) < 10 and {one.dtype for one in pictures} == {torch.uint8}
        again = Turns(5)
        again.load_state_dict(memory.state_dict())
        assert [one.reward for one in again.held] == [one.reward for one in memory.held]
        for kept, one in zip(again.held, memory.held, strict=True):
            for prompt, own in ((kept.prompt, one.prompt), (kept.after, one.after)):
                if own is None or prompt is None:
                    assert prompt is own
                    continue
                now, then = run.policy.encode(prompt).tokens, run.policy.encode(own).tokens
                assert torch.equal(now.ids, then.ids) and now.pixels.keys() == then.pixels.keys() != set()
                assert all(torch.equal(value, then.pixels[name]) for name, value in now.pixels.items())


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """A batch has a turn for every process; a memory that was read from a checkpoint has no pictures to send."""
    with pytest.raises(ConfigError, match="generation.engine, trainer.algorithm"):
        config(tmp_path, generation={"engine": "vllm"})
    settings = config(tmp_path, {"batch": 2})
    check_processes(settings, 2)
    with pytest.raises(ValueError, match="trainer.batch: 2 is less than one for each of 4 processes"):
        check_processes(settings, 4)


def test_a_new_critic_says_nothing_and_a_step_is_that_of_the_formula(tmp_path: Path) -> None:
    settings = config(tmp_path)
    method: Any = settings.trainer
    with agent_runs.opened(settings) as run:
        acted, _ = run.act()
        assert acted.walk is not None
        turns = turns_of_walk(acted.walk)
        given = recorded(run, method, turns, 0, "critic")
        found = loss(method, run.actor, given)
        paid = torch.tensor([one.reward for one in turns])
        assert float(found["loss"].detach()) == pytest.approx(2 * float(paid.square().mean()), rel=1e-5)
        assert float(found["loss/v"].detach()) == 0.0
        critic = utterance_critic(run.actor)
        for head in (*critic.q, *critic.v):
            torch.nn.init.normal_(head.layers[-1].weight)
        critic.follow(1.0)
        given = recorded(run, method, turns, 1, "policy")
        now = states_of(run.policy, given.batch.prompts, given["answers"], given["mask"], 1.0)
        wanted = critic.quality(now.state, now.utterance).min(0).values - critic.value(now.state).min(0).values
        torch.testing.assert_close(given["advantages"], wanted.detach().cpu())
        assert float(wanted.detach().std()) > 0
        results = loss(method, run.actor, given)
        assert torch.equal(results["log_prob"].detach(), given["old_log_prob"])
        sums = (results["log_prob"] * given["mask"]).sum(1)
        assert float(results["loss"].detach()) == pytest.approx(-float((sums * wanted).mean().detach()), rel=1e-5)


def test_targets_are_slow_and_bootstrapped_where_an_episode_goes_on(tmp_path: Path) -> None:
    critic = UtteranceCritic(4, (3,), 0)
    for head in (*critic.q, *critic.v):
        torch.nn.init.normal_(head.layers[-1].weight)
    states, said = torch.randn(5, 4), torch.randn(5, 4)
    assert (critic.quality(states, said, slow=True) == 0).all() and (critic.value(states, slow=True) == 0).all()
    slow = [*critic.slow_q.parameters(), *critic.slow_v.parameters()]
    before = [p.clone() for p in slow]
    critic.follow(0.25)
    new = [*critic.q.parameters(), *critic.v.parameters()]
    for old, now, online in zip(before, slow, new, strict=True):
        torch.testing.assert_close(now, 0.75 * old + 0.25 * online)
    assert not any(p.requires_grad for p in slow)


def test_the_first_iterations_train_the_critic_alone(tmp_path: Path) -> None:
    settings = config(tmp_path, {"critic": {**CRITIC, "warmup": 1}})
    method: Any = settings.trainer
    with agent_runs.opened(settings) as run:
        memory = Turns(20)
        acted, _ = run.act()
        assert acted.walk is not None
        memory.add(turns_of_walk(acted.walk))
        before = {name: p.detach().clone() for name, p in run.loop.weights.named.items()}
        figures = learn(run, method, memory)
        assert "grad_norm" not in figures and figures["grad_norm/critic"] > 0
        assert all(torch.equal(before[name], p) for name, p in run.loop.weights.named.items())
