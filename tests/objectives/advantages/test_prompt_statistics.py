"""DDPO's per-prompt statistics: golden ddpo_prompt_tracker, and properties."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.diffusion.methods.ddpo.train import History, prompt_advantages

NAN = float("nan")


def test_golden_successive_calls(golden) -> None:
    data = golden("ddpo_prompt_tracker")
    sizes = {"buffer_size": int(data["buffer_size"]), "min_count": int(data["min_count"])}
    history: History = {}
    for prompts, rewards, want in zip(data["prompt_id"], data["rewards"], data["advantages"], strict=True):
        names = [str(p) for p in prompts.tolist()]
        got, history = prompt_advantages(torch.from_numpy(rewards), names, history, **sizes)
        assert (got - torch.from_numpy(want)).abs().max() <= 1e-9 * max(1.0, abs(want).max())
        history = json.loads(json.dumps(history))  # what a checkpoint does to it


CALLS = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.floats(-9, 9), st.just(NAN))), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


@given(CALLS, st.integers(1, 5), st.integers(1, 5))
def test_it_is_the_definition(calls: list[list[tuple[str, float]]], buffer_size: int, min_count: int) -> None:
    history: History = {}
    seen: dict[str, list[float]] = {}
    for call in calls:
        rewards = torch.tensor([r for _, r in call], dtype=torch.float64)
        before = json.dumps(history)
        got, new = prompt_advantages(
            rewards, [p for p, _ in call], history, buffer_size=buffer_size, min_count=min_count
        )
        assert json.dumps(history) == before
        history = new
        for prompt, reward in call:
            if reward == reward:
                seen.setdefault(prompt, []).append(reward)
        everyone = [r for _, r in call if r == r]
        for value, (prompt, reward) in zip(got.tolist(), call, strict=True):
            recent = seen.get(prompt, [])[-buffer_size:]
            pool = torch.tensor(recent if len(recent) >= min_count else everyone, dtype=torch.float64)
            want = 0.0
            if reward == reward:
                want = float((reward - pool.mean()) / (pool.std(unbiased=False) + 1e-6))
            assert value == pytest.approx(want, rel=1e-6, abs=1e-6)
        assert {p: r[-buffer_size:] for p, r in seen.items()} == history


def test_equal_rewards_give_exactly_zero() -> None:
    got, _ = prompt_advantages(torch.full((7,), 0.1), ["a"] * 7, {"a": [0.1] * 0}, min_count=3)
    assert (got == 0).all()


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="one prompt per reward"):
        prompt_advantages(torch.zeros(2), ["a"], {})
    with pytest.raises(ValueError, match=r"samples \[1\] are infinite"):
        prompt_advantages(torch.tensor([0.0, math.inf]), ["a", "b"], {})
    with pytest.raises(ValueError, match="at least 1"):
        prompt_advantages(torch.zeros(1), ["a"], {}, buffer_size=0)
