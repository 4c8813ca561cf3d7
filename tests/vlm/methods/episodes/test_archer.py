"""ArCHer: what its steps are made of, and that its memory is in a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import ConfigError
from genrl.objectives.token_credit import semi_online_advantages, token_gae, turn_leave_one_out
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.episodes.critic import ValueHead, credit_of_steps, credit_of_tokens
from genrl.vlm.methods.archer import train as archer
from genrl.vlm.recipe.advantages import SemiOnline
from genrl.vlm.train import check_processes
from tests.vlm import vlm_runs
from tests.vlm.methods.episodes import agent_runs

CRITIC = {"hidden": [8], "updates": 2, "warmup": 0}


def config(place: Path, trainer: dict[str, Any] | None = None, **changes: Any) -> VLMConfig:
    """Four slots of three steps in which every answer is paid by its length."""
    own = {"algorithm": "archer", "critic": CRITIC, "batch_size": 6, "memory": 20, **(trainer or {})}
    return agent_runs.config(place, "vl_dac", trainer=own, **changes)


def test_a_turn_knows_what_followed_and_the_memory_forgets_the_oldest(tmp_path: Path) -> None:
    with agent_runs.opened(config(tmp_path)) as run:
        acted, _ = run.act()
        turns, steps = archer.turns_of_walk(acted.walk), acted.walk.decisions
        assert len(turns) == 12 and {one.after is None for one in turns} == {True, False}
        for k in range(3):
            for slot in range(4):
                turn, one = turns[k * 4 + slot], steps[k][slot]
                assert turn.reward == one.reward and (turn.after is None) == one.terminated
                assert torch.equal(turn.tokens, one.tokens[one.mask])
                if k < 2 and not one.terminated:
                    assert turn.after is steps[k + 1][slot].prompt.source
        memory = archer.Turns(5)
        memory.add(turns)
        assert memory.held == turns[-5:]
        parts = [part for one in memory.held for prompt in (one.prompt, one.after) if prompt for part in prompt.parts]
        shown = {(part.size, part.convert("RGB").tobytes()) for part in parts if not isinstance(part, str)}
        pictures = memory.state_dict()["pictures"]  # each once, in bytes
        assert len(pictures) == len(shown) < 10 and {one.dtype for one in pictures} == {torch.uint8}


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="generation.vllm, trainer.algorithm"):
        config(tmp_path, generation={"vllm": {}})
    settings = config(tmp_path, {"batch_size": 2})
    check_processes(settings, 2)
    with pytest.raises(ValueError, match="trainer.batch_size: 2 is less than one for each of 4 processes"):
        check_processes(settings, 4)


def test_a_new_critic_says_nothing_and_a_step_is_that_of_the_formula(tmp_path: Path) -> None:
    settings = config(tmp_path)
    method: Any = settings.trainer
    with agent_runs.opened(settings) as run:
        turns = archer.turns_of_walk(run.act()[0].walk)
        given = archer.recorded(run, method, turns, 0, "critic")
        actual = archer.loss(method, run.actor, given)
        paid = torch.tensor([one.reward for one in turns])
        assert float(actual["loss"].detach()) == pytest.approx(2 * float(paid.square().mean()), rel=1e-5)
        assert float(actual["loss/v"].detach()) == 0.0
        critic = archer.utterance_critic(run.actor)
        for head in (*critic.q, *critic.v):
            torch.nn.init.normal_(head.layers[-1].weight)
        critic.follow(1.0)
        given = archer.recorded(run, method, turns, 1, "policy")
        now = archer.states_of(run.policy, given.batch.prompts, given["answers"], given["mask"], 1.0)
        wanted = critic.quality(now.state, now.utterance).min(0).values - critic.value(now.state).min(0).values
        torch.testing.assert_close(given["advantages"], wanted.detach().cpu())
        assert float(wanted.detach().std()) > 0
        results = archer.loss(method, run.actor, given)
        assert torch.equal(results["log_prob"].detach(), given["old_log_prob"])
        sums = (results["log_prob"] * given["mask"]).sum(1)
        assert float(results["loss"].detach()) == pytest.approx(-float((sums * wanted).mean().detach()), rel=1e-5)


def test_targets_are_slow_and_bootstrapped_where_an_episode_goes_on(tmp_path: Path) -> None:
    critic = archer.UtteranceCritic(4, (3,), 0)
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


# -- Credit at the ends of episodes, the value head, and turns laid out as rows
CONSTANTS = {"gamma": 0.9, "lam": 0.8}


def test_steps_are_bootstrapped_where_the_walk_ends_and_have_no_credit_where_they_are_cut() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    values = torch.tensor([[0.5, 0.1], [0.2, 0.3]])
    terminated = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    truncated = torch.tensor([[True, False], [False, False]])
    result = credit_of_steps(values, rewards, terminated, truncated, torch.tensor([0.7, 9.0]), **CONSTANTS)
    last = [0.0 + 0.9 * 0.7 - 0.2, 2.0 - 0.3]  # goes on; terminated
    first = [0.0, 0.0 + 0.9 * 0.3 - 0.1 + 0.9 * 0.8 * last[1]]  # cut; followed by the terminated one
    torch.testing.assert_close(result.advantages, torch.tensor([*first, *last], dtype=torch.float64))
    assert float(result.returns[0]) == pytest.approx(0.5)  # its value is its own target


def test_tokens_of_an_episode_are_those_of_bad_and_cuts_are_bootstrapped() -> None:
    """One slot: an episode of two actions that is cut, one of one action that is terminated, one that goes on."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(4, 1, 3, generator=generator)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()[:, None]
    rewards = torch.tensor([[0.1], [0.2], [0.3], [0.4]])
    terminated = torch.tensor([[0], [0], [1], [0]]).bool()
    truncated = torch.tensor([[0], [1], [0], [0]]).bool()
    after = torch.tensor([[0.0], [5.0], [0.0], [7.0]])
    actual = credit_of_tokens(values, mask, rewards, terminated, truncated, after, **CONSTANTS)

    def alone(rows: slice, following: float, done: list[bool]) -> torch.Tensor:
        last = torch.tensor([[following, 0.0, 0.0]])
        lengths = mask[rows, 0].sum(1)
        own = torch.cat([values[rows, 0], last])
        return token_gae(own, lengths, rewards[rows, 0], torch.tensor(done), **CONSTANTS)

    ends = ((slice(0, 2), 5.0, [False, False]), (slice(2, 3), 0.0, [True]), (slice(3, 4), 7.0, [False]))
    wanted = torch.cat([alone(*end) for end in ends])
    torch.testing.assert_close(actual.advantages, wanted)
    # by hand: the action that is cut, from its last token back; gamma counts between actions, not inside of them
    v = values[:, 0].double()
    third = 0.2 + 0.9 * 5.0 - v[1, 2]
    second = v[1, 2] - v[1, 1] + 0.8 * third
    torch.testing.assert_close(actual.advantages[1, 1:], torch.stack([second, third]))
    kept = mask[:, 0]
    torch.testing.assert_close(actual.returns[kept], (wanted + v)[kept])
    # MA-RLHF: two tokens of the action that is cut have the mean of their values, and its last token is one by itself
    macro = credit_of_tokens(values, mask, rewards, terminated, truncated, after, **CONSTANTS, macro=2)
    mean = (v[1, 0] + v[1, 1]) / 2
    first = v[1, 2] - mean + 0.8 * third
    torch.testing.assert_close(macro.advantages[1], torch.stack([first, first, third]))
    torch.testing.assert_close(macro.returns[1], torch.stack([first + mean, first + mean, third + v[1, 2]]))
    torch.testing.assert_close(macro.advantages[2:], wanted[2:])  # of one and of two tokens


def test_a_new_critic_says_nothing_and_does_not_train_the_model() -> None:
    states = torch.randn(2, 3, 4, requires_grad=True)
    head = ValueHead(4, (6, 5), seed=0)
    values = head(states)
    assert values.shape == (2, 3) and bool((values == 0).all())
    values.sum().backward()
    assert states.grad is None and sum(isinstance(layer, torch.nn.Linear) for layer in head.layers) == 3
    for one, other in zip(head.parameters(), ValueHead(4, (6, 5), seed=0).parameters(), strict=True):
        assert torch.equal(one, other)


# -- TRLOO and UI-S1 on a planner's walks: which tokens have the worth of a turn, which groups are played again
def config_of_paid_turns(place: Path, trainer: dict[str, Any], **changes: Any) -> VLMConfig:
    sections: dict[str, Any] = {
        "vlm": {"path": str(agent_runs.MODEL)},
        "task": None,
        "rewards": None,
        "environment": {"name": "trajectories", "options": {"patches": 3}},
        "generation": {"prompts_per_iteration": 2, "group_size": 4, "max_new_tokens": 6},
    }
    return vlm_runs.config(place, trainer=trainer, **sections, **changes)


@pytest.mark.parametrize("trainer", [{"preset": "trloo", "advantage": {"gamma": 0.5}}, {"preset": "ui_s1"}])
def test_each_token_has_the_advantage_of_its_turn(trainer: dict[str, Any], tmp_path: Path) -> None:
    """What the functions of tests/objectives/tokens give for the turns that were played."""
    with agent_runs.opened(config_of_paid_turns(tmp_path, trainer)) as run:
        acted, _ = run.act()
        ready, _ = run.estimate(acted)
    advantage = ready.batch.advantage
    assert advantage is not None and len(acted.played) == 8 and {len(one) for one in acted.played} != {1}
    turns, group = range(max(map(len, acted.played))), torch.arange(2).repeat_interleave(4)
    rewards, matched = (
        torch.tensor([[getattr(one[k], name) if k < len(one) else absent for k in turns] for one in acted.played])
        for name, absent in (("reward", torch.nan), ("matched", False))
    )
    if trainer["preset"] == "trloo":
        wanted = turn_leave_one_out(rewards, group, gamma=0.5)
    else:
        wanted = semi_online_advantages(rewards, matched, group, gamma=0.5, episode=1.0, step=1.0)
    for row, episode in enumerate(acted.played):
        place = 0
        for turn, one in enumerate(episode):
            actual = advantage[row, place : place + int(one.mask.sum())]
            torch.testing.assert_close(actual, wanted[row, turn].expand_as(actual), atol=1e-5, rtol=1e-5)
            place += len(actual)
        assert (advantage[row, place:] == 0).all()


def test_groups_that_hardly_differ_are_played_again_from_other_starts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(SemiOnline, "spread", 100.0)
    monkeypatch.setattr(SemiOnline, "rounds", 3)
    with agent_runs.opened(config_of_paid_turns(tmp_path, {"preset": "ui_s1"})) as run:
        seeds: list[dict[int, int]] = []
        begin = run.table.begin
        run.table.begin = lambda given, split: (seeds.append(dict(given)), begin(given, split))[1]  # type: ignore[method-assign, func-returns-value]
        acted, _ = run.act()
    starts = [one for one in seeds if len(one) == 8]
    assert len(starts) == 3 and len({tuple(one.values()) for one in starts}) == 3
    assert all(len(set(list(one.values())[:4])) == 1 for one in starts), "a group begins alike"
    assert len(acted.played) == 8
