"""Draws of noise levels: golden trainers_schedules (its columns of times), and their distributions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.mdp import noise_levels
from tests.golden_cases import Arrays


def test_golden_times(golden) -> None:
    """Flow-Factory draws positions on the way from noise (t = 1000) to data, in a range of .9 of it."""
    a = Arrays(golden("trainers_schedules"))
    grid, seed = a.given("in_scheduler_timesteps"), int(a.given("in_generator_seed"))

    def source() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def check(name: str, times: torch.Tensor) -> None:
        a.check(name, times, 0.0, 1e-5 * float(a.given(name).abs().max()))

    for kind, stratified in (("stratified", True), ("iid", False)):
        count = len(a.given(f"out_ff_logit_normal_{kind}"))
        draws = noise_levels.logit_normal_draws(count, source(), factor=3.0, stratified=stratified)
        check(f"out_ff_logit_normal_{kind}", 1000 * (1 - 0.9 * draws))
    for found in a.matches(r"out_ff_discrete(_with_init|_wo_init)?_range(.*)"):
        lowest = 1000 * (1 - float(found[2].replace("p", ".")))
        last, count = int((grid >= lowest - 1e-3).nonzero().max()), len(a.given(found[0]))
        if found[1] == "_with_init":  # the first step always, the others from the rest
            steps = noise_levels.stratified_steps(count - 1, 1, last, source())
            check(found[0], torch.cat([grid[:1], grid[steps]]))
        else:
            first = int(found[1] == "_wo_init")
            check(found[0], grid[noise_levels.stratified_steps(count, first, last, source())])
    a.all_used("out_ff_(discrete|logit_normal).*")


@given(st.integers(1, 20), st.integers(0, 999))
def test_stratified_draws_fall_one_into_each_part(count: int, seed: int) -> None:
    normal = noise_levels.logit_normal_draws(count, torch.Generator().manual_seed(seed))
    assert normal.min() >= 0.01 and normal.max() < 1.0
    quantiles = torch.special.ndtr(normal.logit())
    inside = (normal > 0.01) & (normal < 1 - 1e-6)  # where the floor did not act
    parts = (quantiles.sort().values * count + 1e-3).floor()
    assert ((parts - torch.arange(count)).abs()[inside.sort().values] <= 1).all()


@given(st.integers(1, 12), st.integers(0, 5), st.integers(0, 20), st.integers(0, 999))
def test_steps_ascend_inside_their_range(count: int, first: int, length: int, seed: int) -> None:
    steps = noise_levels.stratified_steps(count, first, first + length, torch.Generator().manual_seed(seed))
    assert len(steps) == count and (steps.diff() >= 0).all()
    assert steps[0] >= first and steps[-1] <= max(first, first + length - 1) + (length < count)
    if length >= count and length % count == 0:
        part = length // count
        assert ((steps - first) // part).tolist() == list(range(count))


def test_no_draw_is_refused() -> None:
    source = torch.Generator()
    with pytest.raises(ValueError, match="at least one draw"):
        noise_levels.logit_normal_draws(0, source)
    with pytest.raises(ValueError, match="2 steps cannot be chosen from 3 .. 1"):
        noise_levels.stratified_steps(2, 3, 1, source)
