"""Chunk and step GAE against the golden arrays and against sums written out.

Covered: vla_advantages (with `episodes`), vla_reference but its FISOR case (test_actor_critic), the GAE of vla_dppo.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from genrl.objectives import episodes
from genrl.objectives.episodes import action_gae, chunk_gae, chunk_rewards, executed_mask, gae, normalise_advantages
from tests.golden_cases import Case, check_all, error

Errors = dict[str, tuple[float, float]]


def actions_as_rows(x: Tensor) -> Tensor:
    """[T, B, C] -> [T C, B]."""
    return x.transpose(1, 2).flatten(0, 1)


def rows_as_actions(x: Tensor, size: int) -> Tensor:
    return x.unflatten(0, (-1, size)).transpose(1, 2)


def pi_rl_gae(case: Case) -> Errors:
    """The released rules: a time limit is an end, the value of the next row stands for the next observation."""
    rewards, done, values = case["rewards"], case["dones"], case["values"]
    size, by_action = rewards.shape[-1], case.params["reward_type"] == "action_level"
    if by_action:
        reward, ended, value = actions_as_rows(rewards), actions_as_rows(done[1:]), actions_as_rows(values)
        value = value[: len(reward) + 1]
    else:
        reward, ended, value = rewards.sum(-1), done[1:].any(-1), values[..., 0]
    never = torch.zeros_like(ended)
    estimate = gae(reward, ended, never, value[:-1], value[1:], discount=case.params["gamma"], lam=case.params["lam"])
    raw, returns = (rows_as_actions(t, size) if by_action else t[..., None] for t in estimate)
    valid = case["loss_mask"] if "loss_mask" in case else None
    result = {
        "raw": (error(raw, case["advantages_raw"]), 2e-5),
        "returns": (error(returns, case["returns"]), 2e-5),
        "advantages": (error(normalise_advantages(raw, valid, eps=1e-5), case["advantages"]), 2e-5),
    }
    if by_action:
        result |= executed_only(case, raw, returns)
    return result | (check_mask(case, done) if valid is not None else {})


def executed_only(case: Case, raw: Tensor, returns: Tensor) -> Errors:
    """The same by `action_gae`, as far as chunks were executed: to the first end in them."""
    rewards, done, values = case["rewards"], case["dones"][1:], case["values"]
    count = (done.long().cumsum(-1) == 0).sum(-1).add(1).clamp(max=rewards.shape[-1])
    ended = done.any(-1)
    flags = ended, torch.zeros_like(ended)
    how = {"gamma": case.params["gamma"], "lam": case.params["lam"]}
    ours = action_gae(rewards, count, *flags, values[:-1], values[1:, :, 0], **how)
    there = executed_mask(count, rewards.shape[-1])
    return {
        "executed": (error(ours.advantages[there], raw[there]), 2e-5),
        "executed returns": (error(ours.returns[there], returns[there]), 2e-5),
    }


def check_mask(case: Case, done: Tensor, name: str = "loss_mask") -> Errors:
    """Exactly: the steps of the first episode, and its length."""
    valid = episodes.first_episode_steps(done[1:])
    length = valid.sum((0, 2))[None, :, None].expand(valid.shape)
    if case.params["reward_type"] == "chunk_level":
        valid, length = valid.any(-1, keepdim=True), length[..., :1]
    assert torch.equal(valid, case[name]), f"{case.id}: another mask"
    assert torch.equal(length, case["loss_mask_sum"]), f"{case.id}: other lengths"
    return {"mask": (0.0, 0.0)}


def pi_rl_groups(case: Case) -> Errors:
    rewards, done = case["rewards"], case["dones"][1:]
    if case.params["reward_type"] == "chunk_level":  # a chunk pays in full, what it did after its end included
        rewards, done = rewards.sum(-1, keepdim=True), done.any(-1, keepdim=True)
    group = torch.arange(rewards.shape[1]) // case.params["group_size"]
    returns = episodes.first_episode_returns(rewards, done)
    advantage = episodes.episode_group_advantages(returns, group)
    spread = advantage[None, :, None] * case["loss_mask"]
    return check_mask(case, case["dones"]) | {"advantages": (error(spread, case["advantages"]), 2e-5)}


def pi_rl_batch(case: Case) -> Errors:
    epochs, options = case.params["rollout_epoch"], case.params
    rewards, done = (
        torch.cat(case[f"in_{name}"].tensor_split(epochs), dim=1) for name in ("rewards", "dones")
    )  # several rollouts of the same environments as one wide one
    assert torch.equal(rewards, case["rewards"]) and torch.equal(done, case["dones"])
    result = check_mask(case, done, "loss_mask_unfiltered")
    group = torch.arange(rewards.shape[1]) // options["group_size"]
    returns = episodes.first_episode_returns(rewards, done[1:])
    kept = episodes.informative_groups(returns, group, low=options["lower"], high=options["upper"])
    assert torch.equal(case["loss_mask_unfiltered"] & kept[None, :, None], case["loss_mask_filtered"])
    return result


def test_pi_rl(golden) -> None:
    def check(case: Case) -> Errors:
        if "in_rewards" in case:
            return pi_rl_batch(case)
        return pi_rl_groups(case) if "group_size" in case.params else pi_rl_gae(case)

    # left out: how it folds bootstrapped values into the rewards
    check_all(golden("vla_advantages"), check, lambda case: "out_rewards" in case)


def test_reference(golden) -> None:
    def check(case: Case) -> Errors:
        options = case.params
        values = case["values"], case["next_values"]
        if case.fn == "rl100_gae":  # every chunk was executed whole
            done, terminated = case["done"].bool(), case["terminated"].bool()
            discount = options["gamma"] ** options["n_action_steps"]
            ours = gae(case["rewards"], terminated, done, *values, discount=discount, lam=options["lam"])
            extra: Errors = {}
        else:
            how = {"gamma": options["gamma"], "mode": options["mode"]}
            flags = case["terminated"], case["truncated"]
            ours = chunk_gae(case["rewards"], case["n_executed"], *flags, *values, lam=options["lam"], **how)
            chunk = chunk_rewards(case["rewards"], case["n_executed"], **how)
            extra = {
                "reward": (error(chunk.reward, case["chunk_rewards"]), 1e-9),
                "discount": (error(chunk.discount, case["chunk_discount"]), 1e-9),
            }
        return extra | {
            "advantages": (error(ours.advantages, case["advantages"]), 1e-9),
            "returns": (error(ours.returns, case["returns"]), 1e-9),
        }

    check_all(golden("vla_reference"), check, lambda case: case.fn == "fisor")  # test_actor_critic


def test_dppo(golden) -> None:
    """Its GAE takes no note of time limits. Left out: how it scales rewards."""

    def check(case: Case) -> Errors:
        options, values = case.params, case["values"]
        following = torch.cat([values[1:], case["last_values"][None]])
        ended = case["terminated"].bool()
        never = torch.zeros_like(ended)
        ours = gae(case["rewards"], ended, never, values, following, discount=options["gamma"], lam=options["lam"])
        return {
            "advantages": (error(ours.advantages, case["advantages"]), 1e-10),
            "returns": (error(ours.returns, case["returns"]), 1e-10),
        }

    check_all(golden("vla_dppo"), check, lambda case: "terminated" not in case)  # a loss: test_actor_critic


def test_a_chunk_that_is_cut_short_is_bootstrapped_from_its_final_observation() -> None:
    """By hand: three actions, the second is the last; gamma .5, lambda .5."""
    rewards, values = torch.tensor([[[1.0, 2.0, 50.0]]]), torch.tensor([[[3.0, 4.0, 60.0]]])
    n, yes, no, after = torch.tensor([[2]]), torch.tensor([[True]]), torch.tensor([[False]]), torch.tensor([[8.0]])
    cut = action_gae(rewards, n, no, yes, values, after, gamma=0.5, lam=0.5)
    assert cut.advantages.flatten().tolist() == pytest.approx([1 + 0.5 * 4 - 3 + 0.25 * 2, 2 + 0.5 * 8 - 4, 0])
    over = action_gae(rewards, n, yes, no, values, after, gamma=0.5, lam=0.5)
    assert over.advantages.flatten().tolist() == pytest.approx([1 + 0.5 * 4 - 3 + 0.25 * -2, 2 - 4, 0])
    with pytest.raises(ValueError, match="cannot have been executed"):
        action_gae(rewards, torch.tensor([[4]]), no, yes, values, after, gamma=0.5, lam=0.5)
    with pytest.raises(ValueError, match=r"must be \[T, B, C\]"):
        action_gae(rewards, n, no, yes, values[..., 0], after, gamma=0.5, lam=0.5)


def test_a_time_limit_is_bootstrapped_and_success_is_not() -> None:
    """Reward 1 for ever at gamma .5: a critic that says 2 is right in every row, cut or not; success is worth its 1."""
    ones = torch.ones(3, 1)
    cut, never = torch.tensor([[False], [True], [False]]), torch.zeros(3, 1, dtype=torch.bool)
    right = gae(ones, never, cut, 2 * ones, 2 * ones, discount=0.5, lam=0.9)
    assert right.advantages.flatten().tolist() == pytest.approx([0, 0, 0])
    success = gae(ones, cut, never, 2 * ones, 2 * ones, discount=0.5, lam=0.9)
    assert success.advantages[1, 0].item() == pytest.approx(-1.0)


def test_what_came_after_the_end_of_a_chunk_does_not_count() -> None:
    rewards = torch.tensor([[[1.0, 2.0, 100.0]]])
    chunk = chunk_rewards(rewards, torch.tensor([[2]]), gamma=0.5, mode="smdp")
    assert chunk.reward.item() == pytest.approx(2.0) and chunk.discount.item() == pytest.approx(0.25)
    with pytest.raises(ValueError, match="cannot have been executed"):
        chunk_rewards(rewards, torch.tensor([[4]]), gamma=0.5, mode="smdp")
    with pytest.raises(ValueError, match="mode must be"):
        chunk_rewards(rewards, torch.tensor([[3]]), gamma=0.5, mode="steps")  # type: ignore[arg-type]


def test_normalising_refuses_what_it_cannot() -> None:
    with pytest.raises(ValueError, match="no entry is valid"):
        normalise_advantages(torch.ones(3), torch.zeros(3, dtype=torch.bool), eps=1e-5)
    with pytest.raises(ValueError, match="NaN"):
        normalise_advantages(torch.tensor([1.0, torch.nan]), eps=1e-5)
    assert normalise_advantages(torch.tensor([4.0]), eps=1e-5).tolist() == [0.0]


def test_shapes_that_differ_are_refused() -> None:
    one, two = torch.zeros(3, 1), torch.zeros(3, 2)
    with pytest.raises(ValueError, match="one shape"):
        gae(one, one, one, one, two, discount=0.9, lam=0.9)
