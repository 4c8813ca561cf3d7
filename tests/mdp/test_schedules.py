"""Grids and windows: golden samplers_schedules, and what holds for any of them."""

import json
import math
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.diffusion.steps.plans import geometric_window, window_steps
from genrl.mdp import kernels, levels, plan
from genrl.mdp.plan import compress_tail, make_plan, moving_window
from genrl.objectives.groups import group_advantages
from tests.golden_cases import Arrays, Case, cases, check_all, error
from tests.reference.grids import is_truncated, shifted_grid
from tests.reference.released_windows import mixgrpo_window, released_points

ROUNDING = 5e-7
"""Of a few operations in float32."""


def test_golden_grids(golden) -> None:
    """Left out: those that diffusers' schedulers make on a way of their own, and MixGRPO-Flash's (test_dpm)."""

    def check(case: Case) -> dict[str, tuple[float, float]]:
        kind, steps = case.params["kind"], case.params["N"]
        if kind == "pi_rl":
            return {"sigmas": (error(levels.linspace_grid(steps), case["timesteps"]), ROUNDING)}
        factor = case.params["shift"]
        if kind.startswith("dynamic"):
            factor = float(case["mu"]) if kind == "dynamic_linear" else math.exp(case["mu"])
        sigmas = shifted_grid(steps, factor)
        result = {"sigmas": (error(sigmas, case["sigmas"]), ROUNDING)}
        if "sigmas_f64" in case:
            result["sigmas_f64"] = error(sigmas, case["sigmas_f64"]), ROUNDING
        if "timesteps" in case:
            result["timesteps"] = error(sigmas[:-1], case["timesteps"] / 1000), ROUNDING
        else:
            result["timesteps"] = float(not is_truncated(sigmas, case["model_timesteps_int"])), 0.0
        return result

    kinds = ("pi_rl", "static_custom_sigmas", "linspace_N+1_shift", "dynamic_exponential", "dynamic_linear")
    check_all(golden("samplers_schedules"), check, lambda case: case.params["kind"] not in kinds)


@given(st.floats(0.0, 1.0), st.floats(0.1, 20.0), st.floats(0.1, 20.0))
def test_shifts_compose_and_are_undone_by_the_inverse(u: float, s: float, t: float) -> None:
    x = torch.tensor([0.0, u, 1.0], dtype=torch.float64)
    assert torch.allclose(levels.shift(levels.shift(x, s), t), levels.shift(x, s * t), rtol=0, atol=1e-12)
    assert torch.allclose(levels.shift(levels.shift(x, s), 1 / s), x, rtol=0, atol=1e-12)


@given(st.integers(1, 8), st.integers(0, 10), st.integers(0, 10), st.integers(0, 2**31), st.integers(0, 1000))
def test_a_window_is_never_empty_and_lies_inside(size: int, low: int, extra: int, seed: int, iteration: int) -> None:
    high = low + size + extra
    window = window_steps(size, low, high, seed=seed, iteration=iteration)
    assert len(window) == size and low <= window[0] and window[-1] < high
    assert window == window_steps(size, low, high, seed=seed, iteration=iteration)


def test_early_starts_of_a_geometric_window_are_more_likely() -> None:
    draw = partial(geometric_window, 3, 1, 8, ratio=0.5, seed=3)
    starts = torch.tensor([draw(iteration=i).start for i in range(2000)])
    law = torch.tensor(plan.geometric_start_probabilities(5, 0.5))
    counts = torch.bincount(starts, minlength=6)
    assert counts[0] == 0 and len(counts) == 6
    assert ((counts[1:] - 2000 * law).abs() < 5 * (2000 * law * (1 - law)).sqrt()).all()
    assert draw(iteration=7) == draw(iteration=7) and len(draw(iteration=7)) == 3


@pytest.mark.parametrize("factor", [None, 1.0, 3.0])
@given(steps=st.integers(2, 40), data=st.data())
def test_a_compressed_tail_begins_where_it_is_told_and_ends_at_0(factor: float | None, steps: int, data) -> None:
    grid = shifted_grid(steps, factor or 2.0)
    start = data.draw(st.integers(0, steps - 1))
    count = data.draw(st.integers(1, steps - start))
    tail = levels.compressed_tail(grid, start, count, factor=factor)
    assert tail.shape == (count + 1,) and tail.dtype == torch.float32
    assert tail[0] == grid[start] and tail[-1] == 0 and (tail[1:] < tail[:-1]).all()
    if count == steps - start:
        assert torch.allclose(tail, grid[start:], rtol=0, atol=2e-7)
    for wrong in (0, steps - start + 1):
        with pytest.raises(ValueError, match="cannot replace"):
            levels.compressed_tail(grid, start, wrong, factor=factor)


@pytest.mark.parametrize(("size", "low", "high"), [(0, 0, 5), (6, 0, 5), (2, 4, 5), (1, -1, 5)])
def test_a_window_that_does_not_fit_is_refused(size: int, low: int, high: int) -> None:
    for schedule in (
        partial(window_steps, seed=0),
        partial(geometric_window, ratio=0.5, seed=0),
        partial(plan.moving_window, every=3),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            schedule(size, low, high, iteration=0)


# -- Windows that move, and the laws of those that are drawn: full at every iteration, where they should be


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 12), st.integers(1, 5), st.integers(0, 200))
def test_a_moving_window_is_always_full(size: int, low: int, extra: int, every: int, iteration: int) -> None:
    high = low + size + extra
    window = plan.moving_window(size, low, high, iteration=iteration, every=every)
    assert len(window) == size and low <= window[0] and window[-1] < high
    if iteration:
        before = plan.moving_window(size, low, high, iteration=iteration - 1, every=every).start
        assert 0 <= window.start - before <= 1


def test_a_moving_window_reaches_every_step_and_stays_as_long_as_told() -> None:
    starts = [plan.moving_window(4, 0, 8, iteration=i, every=3).start for i in range(40)]
    assert starts[:15] == [start for start in range(5) for _ in range(3)] and set(starts[12:]) == {4}


def test_a_ratio_of_1_makes_all_starts_alike() -> None:
    assert plan.geometric_start_probabilities(4, 1.0) == [0.25] * 4
    assert plan.draw_start([0.25] * 4, 1.0 - 1e-17) == 3
    for starts, ratio in ((0, 0.5), (3, 0.0), (3, 1.1)):
        with pytest.raises(ValueError, match="at least one start"):
            plan.geometric_start_probabilities(starts, ratio)


def test_the_backward_interval_grows_to_the_longest_and_stays() -> None:
    intervals = [plan.backward_interval(20, shortest=14, longest=18, stages=10, stage=s) for s in range(15)]
    assert all(interval.stop == 20 for interval in intervals)
    lengths = [len(interval) for interval in intervals]
    assert lengths[0] == 14 and lengths == sorted(lengths) and lengths[9:] == [18] * 6
    with pytest.raises(ValueError, match="1 <= shortest <= longest <= steps"):
        plan.backward_interval(10, shortest=4, longest=11, stages=5, stage=0)


def test_the_noise_of_one_depth_does_not_grow() -> None:
    assert plan.growing_noise(0.7, 0.5, 1) == (0.7,)
    assert plan.growing_noise(1.0, 0.5, 3) == (1.0, 1.25, 1.5)


# -- MixGRPO as released: windows, tails, transitions, sums of advantages (golden tree_mixgrpo and samplers_windows)


def check_flash(a: Arrays, tag: str) -> None:
    """A compressed tail as released, and how many steps the paper has (-1: the window is past its range)."""
    steps, start, size, cap, ratio, shift = a.given(f"{tag}_T_start_w_cap_ratio_shift").tolist()
    steps, start, size, cap = int(steps), int(start), int(size), int(cap)
    grid, last = shifted_grid(steps, shift), min(start + size, cap)
    a.check(f"{tag}_sde_and_prefix_steps", last)
    points = released_points(steps, last - 1, ratio)
    a.check(f"{tag}_nfe_code", last + points - 1)
    a.check(f"{tag}_reaches_zero", int(points > 1))
    if points > 1:
        tail = levels.compressed_tail(grid, last, points - 1, factor=shift)
        a.check(f"{tag}_sigmas", torch.cat([grid[:last], tail]), rtol=0, atol=5e-7)
    else:
        a.check(f"{tag}_sigmas", grid[: last + 1], rtol=0, atol=5e-7)
        with pytest.raises(ValueError, match="tail of 0 steps"):
            levels.compressed_tail(grid, last, 0, factor=shift)
    if int(a.given(f"{tag}_nfe_paper")) == -1:
        assert start + size > cap
        return
    plan = make_plan(steps, noise=dict.fromkeys(range(start, start + size), 0.7))
    if start + size < steps:
        plan = compress_tail(plan, ratio)
        ours = levels.compressed_tail(grid, start + size, plan.tail.steps, factor=shift)
        assert len(ours) == plan.tail.steps + 1 and ours[-1] == 0
    a.check(f"{tag}_nfe_paper", plan.calls)


STEPS = r"(step_|flow\d|dance\d)"
"""Names in the file that belong to single transitions."""


def test_transitions(golden) -> None:
    a = Arrays(golden("tree_mixgrpo"))
    x, v, given, sigmas = (a.given(f"step_{name}") for name in ("x", "v", "given_next", "sigmas"))
    eta = float(a.given("step_eta"))
    for tag in a.tags(r"(flow\d+)_mean"):
        at = int(tag.removeprefix("flow"))
        level = sigmas[at], sigmas[at + 1]
        step = kernels.flow_sde(x, v, *level, noise_level=eta, sigma_max=sigmas[1])
        a.check(f"{tag}_mean", step.mean)
        a.check(f"{tag}_std", step.std.flatten()[0])
        drawn, straight = kernels.sample(step.mean, step.std, a.given(f"{tag}_noise")), kernels.ode(x, v, *level).mean
        a.check(f"{tag}_det0_next", drawn)
        a.check(f"{tag}_det1_next", straight)
        a.check(f"{tag}_x0", kernels.ode(x, v, level[0], 0.0).mean)
        # The peer's constant is of float32. An ODE step's value is meaningless: it is never asked for elsewhere.
        for name, at_point in (("given", given), ("det0", drawn), ("det1", straight)):
            a.check(f"{tag}_{name}_logp", kernels.log_prob(at_point, step.mean, step.std), rtol=1e-9, atol=5e-8)
    for tag in a.tags(r"(dance\d+)_mean"):
        at = int(tag.removeprefix("dance"))
        step = kernels.dance_sde(x, v, sigmas[at], sigmas[at + 1], noise_level=eta)
        a.check(f"{tag}_mean", step.mean)
        a.check(f"{tag}_std", step.std.flatten()[0])
        full = kernels.log_prob(given, step.mean, step.std)
        a.check(f"{tag}_given_logp_full", full, rtol=1e-9, atol=5e-8)
        peak = kernels.log_prob(step.mean, step.mean, step.std)
        a.check(f"{tag}_given_logp_no_const", full - peak, rtol=1e-9, atol=5e-8)
    a.all_used(f"{STEPS}.*")


def test_windows_tails_and_advantages(golden) -> None:
    a = Arrays(golden("tree_mixgrpo"))
    for tag in a.tags(r"(sched_\w+)_cfg_json"):
        o = json.loads(a.text(f"{tag}_cfg_json"))
        plan = [
            mixgrpo_window(o["w"], o["M"], iteration=iteration, strategy=o["strategy"], every=o["tau"],
                           stride=o["stride"] if o["overlap"] else None, wrap=o["roll"], first=o["start"], seed=1000,
                           longest=o["max_it"], shortest=o["min_it"], rate=o["k"], threshold=o["thr"])
            for iteration in range(len(a.given(f"{tag}_start")))
        ]  # fmt: skip
        a.check(f"{tag}_start", [window.start for window in plan])
        a.check(f"{tag}_length", [len(window) for window in plan])
    for tag in a.tags(r"(paper_T\w+)"):
        steps, size, stride, every = (
            int(number) for number in re.fullmatch(r"paper_T(\d+)_w(\d+)_s(\d+)_tau(\d+)", tag).groups()
        )
        starts = [
            moving_window(size, 0, steps, iteration=iteration, every=every, stride=stride).start
            for iteration in range(len(a.given(tag)))
        ]
        a.check(tag, starts)

    for tag in a.tags(r"(post\d+)_sigmas"):
        check_flash(a, tag)

    rewards, weights = a.given("adv_rewards"), a.given("adv_weights").tolist()
    groups = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
    parts = [
        group_advantages(column.flatten(), groups, scale="group", eps=1e-8, ddof=1) for column in rewards.unbind(-1)
    ]
    total = sum(w * part for w, part in zip(weights, parts, strict=True)).view(rewards.shape[:2])
    a.check("adv_sum_of_normalised", total)
    for limit in a.tags(r"adv_clipped(\d+)"):
        a.check(f"adv_clipped{limit}", total.clamp(-int(limit), int(limit)))
    a.all_used(but=f"{STEPS}.*")


def test_windows_of_whole_runs(golden) -> None:
    """Left out: draws of Flow-GRPO-Fast, Adv-GRPO and Flow-Factory, whose windows nothing here has."""
    kinds = [case for case in cases(golden("samplers_windows")) if case.params["kind"] == "mixgrpo_window"]
    assert kinds
    for case in kinds:
        p = case.params
        plan = [
            mixgrpo_window(
                p["group_size"],
                p["max_timesteps"],
                iteration=iteration,
                strategy=p["sample_strategy"],
                every=p["iters_per_group"],
                stride=p.get("prog_overlap_step", 1) if p.get("prog_overlap", True) else None,
                wrap=p.get("roll_back", True),
                longest=p.get("max_iters_per_group"),
                shortest=p.get("min_iters_per_group"),
                rate=p.get("exp_decay_k", 0.1),
                threshold=p.get("exp_decay_thre_timestep", 13),
            )
            for iteration in range(len(case["start"]))
        ]
        assert [window.start for window in plan] == case["start"].tolist(), case.id
        assert [len(window) for window in plan] == case["size"].tolist(), case.id


# -- Draws of noise levels: golden trainers_schedules (its columns of times), and their distributions


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
        draws = levels.logit_normal_draws(count, source(), factor=3.0, stratified=stratified)
        check(f"out_ff_logit_normal_{kind}", 1000 * (1 - 0.9 * draws))
    for found in a.matches(r"out_ff_discrete(_with_init|_wo_init)?_range(.*)"):
        lowest = 1000 * (1 - float(found[2].replace("p", ".")))
        last, count = int((grid >= lowest - 1e-3).nonzero().max()), len(a.given(found[0]))
        if found[1] == "_with_init":  # the first step always, the others from the rest
            steps = levels.stratified_steps(count - 1, 1, last, source())
            check(found[0], torch.cat([grid[:1], grid[steps]]))
        else:
            first = int(found[1] == "_wo_init")
            check(found[0], grid[levels.stratified_steps(count, first, last, source())])
    a.all_used("out_ff_(discrete|logit_normal).*")


@given(st.integers(1, 20), st.integers(0, 999))
def test_stratified_draws_fall_one_into_each_part(count: int, seed: int) -> None:
    normal = levels.logit_normal_draws(count, torch.Generator().manual_seed(seed))
    assert normal.min() >= 0.01 and normal.max() < 1.0
    quantiles = torch.special.ndtr(normal.logit())
    inside = (normal > 0.01) & (normal < 1 - 1e-6)  # where the floor did not act
    parts = (quantiles.sort().values * count + 1e-3).floor()
    assert ((parts - torch.arange(count)).abs()[inside.sort().values] <= 1).all()


@given(st.integers(1, 12), st.integers(0, 5), st.integers(0, 20), st.integers(0, 999))
def test_steps_ascend_inside_their_range(count: int, first: int, length: int, seed: int) -> None:
    steps = levels.stratified_steps(count, first, first + length, torch.Generator().manual_seed(seed))
    assert len(steps) == count and (steps.diff() >= 0).all()
    assert steps[0] >= first and steps[-1] <= max(first, first + length - 1) + (length < count)
    if length >= count and length % count == 0:
        part = length // count
        assert ((steps - first) // part).tolist() == list(range(count))


def test_no_draw_is_refused() -> None:
    source = torch.Generator()
    with pytest.raises(ValueError, match="at least one draw"):
        levels.logit_normal_draws(0, source)
    with pytest.raises(ValueError, match="2 steps cannot be chosen from 3 .. 1"):
        levels.stratified_steps(2, 3, 1, source)
