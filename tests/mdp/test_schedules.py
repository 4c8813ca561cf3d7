"""Grids and windows: golden samplers_schedules, and what holds for any of them."""

import math
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.diffusion.steps.plans import geometric_window, window_steps
from genrl.mdp import ddpm, kernels, levels, plan
from genrl.mdp.dpm import dpm_step, predict
from genrl.mdp.plan import compress_tail, make_plan, moving_window
from genrl.objectives.groups import group_advantages
from tests.golden_cases import Arrays, Case, check_all, error, through
from tests.reference.grids import is_truncated, shifted_grid
from tests.reference.released_windows import released_points

ROUNDING = 5e-7
"""Of a few operations in float32."""
ZERO = torch.zeros(1, 2)


def test_golden_grids(golden) -> None:
    """Left out: those that diffusers' schedulers make on a way of their own, and MixGRPO-Flash's (below)."""

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


@given(
    st.integers(1, 8),
    st.integers(0, 10),
    st.integers(0, 12),
    st.integers(0, 2**31),
    st.integers(0, 1000),
    st.integers(1, 5),
)
def test_windows_are_always_full_and_lie_inside(size, low, extra, seed, iteration, every) -> None:
    """Drawn ones, and those that move, by a step at most."""
    high = low + size + extra
    sampled = window_steps(size, low, high, seed=seed, iteration=iteration)
    moving = plan.moving_window(size, low, high, iteration=iteration, every=every)
    for window in (sampled, moving):
        assert len(window) == size and low <= window[0] and window[-1] < high
    assert sampled == window_steps(size, low, high, seed=seed, iteration=iteration)
    if iteration:
        before = plan.moving_window(size, low, high, iteration=iteration - 1, every=every).start
        assert 0 <= moving.start - before <= 1


def test_early_starts_of_a_geometric_window_are_more_likely() -> None:
    draw = partial(geometric_window, 3, 1, 8, ratio=0.5, seed=3)
    starts = torch.tensor([draw(iteration=i).start for i in range(2000)])
    law = torch.tensor(plan.geometric_start_probabilities(5, 0.5))
    counts = torch.bincount(starts, minlength=6)
    assert counts[0] == 0 and len(counts) == 6
    assert ((counts[1:] - 2000 * law).abs() < 5 * (2000 * law * (1 - law)).sqrt()).all()
    assert draw(iteration=7) == draw(iteration=7) and len(draw(iteration=7)) == 3


@given(steps=st.integers(2, 40), data=st.data())
def test_a_compressed_tail_begins_where_it_is_told_and_ends_at_0(steps: int, data) -> None:
    grid = shifted_grid(steps, 2.0)
    start = data.draw(st.integers(0, steps - 1))
    count = data.draw(st.integers(1, steps - start))
    tail = levels.compressed_tail(grid, start, count)
    assert tail.shape == (count + 1,) and tail.dtype == torch.float32
    assert tail[0] == grid[start] and tail[-1] == 0 and (tail[1:] < tail[:-1]).all()
    if count == steps - start:
        assert torch.allclose(tail, grid[start:], rtol=0, atol=2e-7)
    for wrong in (0, steps - start + 1):
        with pytest.raises(ValueError, match="cannot replace"):
            levels.compressed_tail(grid, start, wrong)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (lambda schedule=schedule, window=window: schedule(*window, iteration=0), "do not fit")
            for schedule in (
                partial(window_steps, seed=0),
                partial(geometric_window, ratio=0.5, seed=0),
                partial(plan.moving_window, every=3),
            )
            for window in ((0, 0, 5), (6, 0, 5), (2, 4, 5), (1, -1, 5))
        ),
        (lambda: plan.geometric_start_probabilities(0, 0.5), "at least one start"),
        (lambda: plan.geometric_start_probabilities(3, 0.0), "at least one start"),
        (lambda: plan.geometric_start_probabilities(3, 1.1), "at least one start"),
        (lambda: plan.backward_interval(10, shortest=4, longest=11, stages=5, stage=0), "1 <= shortest <= longest"),
        (lambda: levels.stratified_steps(2, 3, 1, torch.Generator()), "2 steps cannot be chosen from 3 .. 1"),
        *(
            (lambda times=times: dpm_step(ZERO, ZERO, *times), "smaller sigma_next")
            for times in ((0.5, 0.5), (0.5, 0.6), (1.1, 0.5), (0.5, -0.1))
        ),
        (lambda: ddpm.ddim_grid(ddpm.cosine_alpha_bars(20), 21), "cannot be taken"),
        (lambda: ddpm.fine_tuned(torch.arange(5), 5, 6), "fine-tuned"),
    ],
)
def test_what_cannot_be_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_ends_of_intervals_and_of_growing_noise() -> None:
    assert plan.draw_start([0.25] * 4, 1.0 - 1e-17) == 3
    assert plan.backward_interval(20, shortest=14, longest=18, stages=10, stage=14) == range(2, 20)
    assert plan.growing_noise(0.7, 0.5, 1) == (0.7,)
    assert plan.growing_noise(1.0, 0.5, 3) == (1.0, 1.25, 1.5)


# -- MixGRPO as released: windows, tails, transitions, sums of advantages (golden tree_mixgrpo)
def check_flash(a: Arrays, tag: str) -> None:
    """MixGRPO-Flash's tail as released, and how many steps the paper has (-1: the window is past its range)."""
    steps, start, size, cap, ratio, shift = a.given(f"{tag}_T_start_w_cap_ratio_shift").tolist()
    steps, start, size, cap = int(steps), int(start), int(size), int(cap)
    grid, last = shifted_grid(steps, shift), min(start + size, cap)
    a.check(f"{tag}_sde_and_prefix_steps", last)
    points = released_points(steps, last - 1, ratio)
    a.check(f"{tag}_nfe_code", last + points - 1)
    a.check(f"{tag}_reaches_zero", int(points > 1))
    if points > 1:
        tail = levels.compressed_tail(grid, last, points - 1)
        a.check(f"{tag}_sigmas", torch.cat([grid[:last], tail]), rtol=0, atol=4e-3)  # between levels we are linear
    else:
        a.check(f"{tag}_sigmas", grid[: last + 1], rtol=0, atol=5e-7)
    if int(a.given(f"{tag}_nfe_paper")) == -1:
        assert start + size > cap
        return
    plan = make_plan(steps, noise=dict.fromkeys(range(start, start + size), 0.7))
    if start + size < steps:
        plan = compress_tail(plan, ratio)
    a.check(f"{tag}_nfe_paper", plan.calls)


def test_windows_tails_and_advantages(golden) -> None:
    a = Arrays(golden("tree_mixgrpo"))
    for tag in a.tags(r"(paper_T\w+)"):
        groups = re.fullmatch(r"paper_T(\d+)_w(\d+)_s(\d+)_tau(\d+)", tag).groups()
        steps, size, stride, every = map(int, groups)
        window = partial(moving_window, size, 0, steps, every=every, stride=stride)
        starts = [window(iteration=iteration).start for iteration in range(len(a.given(tag)))]
        a.check(tag, starts)

    for tag in a.tags(r"(post\d+)_sigmas"):
        check_flash(a, tag)

    rewards, weights = a.given("adv_rewards"), a.given("adv_weights").tolist()
    groups = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
    normalised = partial(group_advantages, group=groups, scale="group", eps=1e-8, ddof=1)
    parts = [normalised(column.flatten()) for column in rewards.unbind(-1)]
    total = sum(w * part for w, part in zip(weights, parts, strict=True)).view(rewards.shape[:2])
    a.check("adv_sum_of_normalised", total)
    for limit in a.tags(r"adv_clipped(\d+)"):
        a.check(f"adv_clipped{limit}", total.clamp(-int(limit), int(limit)))
    # transitions: test_kernels, by other arrays of the same peer; the released windows may be empty, ours are full
    a.all_used(but=r"(step_|flow\d|dance\d|sched_).*")


# -- Draws of noise levels: golden trainers_schedules (its columns of times), and their distributions
def test_golden_times(golden) -> None:
    """Flow-Factory draws positions on the way from noise (t = 1000) to data, in a range of .9 of it."""
    a = Arrays(golden("trainers_schedules"))
    grid, seed = a.given("in_scheduler_timesteps"), int(a.given("in_generator_seed"))

    def source() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def check(name: str, times: torch.Tensor) -> None:
        a.check(name, times, 0.0, 1e-5 * float(a.given(name).abs().max()))

    for actual in a.matches(r"out_ff_discrete(_with_init|_wo_init)?_range(.*)"):
        lowest = 1000 * (1 - float(actual[2].replace("p", ".")))
        last, count = int((grid >= lowest - 1e-3).nonzero().max()), len(a.given(actual[0]))
        if actual[1] == "_with_init":  # the first step always, the others from the rest
            steps = levels.stratified_steps(count - 1, 1, last, source())
            check(actual[0], torch.cat([grid[:1], grid[steps]]))
        else:
            first = int(actual[1] == "_wo_init")
            check(actual[0], grid[levels.stratified_steps(count, first, last, source())])
    a.all_used("out_ff_discrete.*")


# -- The multistep solver: golden samplers_ode_dpm; what it and DPPO's grids refuse
Errors = dict[str, tuple[float, float]]


def solver_case(case: Case) -> Errors:
    """Over the prescribed velocities."""
    kind, sigmas = case.params["kind"], case["sigmas"]
    order = case.params.get("order", 2 if kind.endswith("dpm2") else 1)
    x, states, previous = case["X"][0], [case["X"][0]], None
    for v, sigma, sigma_next in zip(case["V"], sigmas[:-1], sigmas[1:], strict=True):
        now = predict(x, v, sigma)
        x = dpm_step(x, v, sigma, sigma_next, previous)
        previous = now if order > 1 else None
        states.append(x)
    return {"states": (error(torch.stack(states), case["X"]), 4e-6)}


def window_case(case: Case) -> Errors:
    """ODE steps around a window of noise; the noise is drawn as the case says (X is [B, N + 1, ...] here)."""
    draws = torch.Generator().manual_seed(int(re.search(r"manual_seed\((\d+)\)", case.params["rng"])[1]))
    sigmas, x, dance = case["sigmas"], case["X"][:, 0], case.params["dynamics"] == "dance"
    states, worst = [x], 0.0
    for i, v in enumerate(case["V"]):
        at, in_window = (x, v, sigmas[i], sigmas[i + 1]), i in case.params["window"]
        assert in_window != bool(case["deterministic"][i])
        noise = torch.randn(x.shape, generator=draws) if in_window or not dance else None
        if not in_window:  # the log-probability stored here is meaningless, and ours is not defined
            x = kernels.ode(*at).mean
        else:
            level = case.params["eta"]
            noisy = kernels.dance_sde if dance else partial(kernels.flow_sde, sigma_max=sigmas[1])
            step = noisy(*at, noise_level=level)
            x = kernels.sample(step.mean, step.std, noise)
            density = kernels.log_prob(case["X"][:, i + 1], step.mean, step.std)
            if dance:  # released without its constants
                density = density - kernels.log_prob(step.mean, step.mean, step.std)
            worst = max(worst, error(density, case["logp"][:, i]) / through(step.std, 4e-6))
        states.append(x)
    return {"states": (error(torch.stack(states, dim=1), case["X"]), 4e-6), "logp": (worst, 1.0)}


def test_golden_trajectories(golden) -> None:
    def check(case: Case) -> Errors:
        return window_case(case) if case.params["kind"] == "mixed_window_trajectory" else solver_case(case)

    def left_out(case: Case) -> bool:
        """Euler steps and DDIM: tests/mdp/test_kernels.py. The solver with noise, of third order, or by Heun's rule is
        used by nobody."""
        unused = case.params.get("order") == 3 or case.params.get("solver_type") == "heun"
        return unused or case.params["kind"] in ("euler_ode_trajectory", "flow_ddim", "sde_dpm_trajectory")

    check_all(golden("samplers_ode_dpm"), check, left_out)
