"""MixGRPO as released: windows, tails, transitions, sums of advantages (golden tree_mixgrpo and samplers_windows)."""

from __future__ import annotations

import json
import re

import pytest
import torch

from genrl.mdp import gaussian, kernels, schedules
from genrl.mdp.plan import compress_tail, make_plan
from genrl.mdp.windows import moving_window
from genrl.objectives.advantages.groups import group_advantages
from tests.golden_cases import Arrays, cases
from tests.reference.grids import shifted_grid
from tests.reference.released_windows import mixgrpo_window, released_points


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
        tail = schedules.compressed_tail(grid, last, points - 1, factor=shift)
        a.check(f"{tag}_sigmas", torch.cat([grid[:last], tail]), rtol=0, atol=5e-7)
    else:
        a.check(f"{tag}_sigmas", grid[: last + 1], rtol=0, atol=5e-7)
        with pytest.raises(ValueError, match="tail of 0 steps"):
            schedules.compressed_tail(grid, last, 0, factor=shift)
    if int(a.given(f"{tag}_nfe_paper")) == -1:
        assert start + size > cap
        return
    plan = make_plan(steps, noise=dict.fromkeys(range(start, start + size), 0.7))
    if start + size < steps:
        plan = compress_tail(plan, ratio)
        ours = schedules.compressed_tail(grid, start + size, plan.tail.steps, factor=shift)
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
        drawn, straight = gaussian.sample(step.mean, step.std, a.given(f"{tag}_noise")), kernels.ode(x, v, *level).mean
        a.check(f"{tag}_det0_next", drawn)
        a.check(f"{tag}_det1_next", straight)
        a.check(f"{tag}_x0", kernels.ode(x, v, level[0], 0.0).mean)
        # The peer's constant is of float32. An ODE step's value is meaningless: it is never asked for elsewhere.
        for name, at_point in (("given", given), ("det0", drawn), ("det1", straight)):
            a.check(f"{tag}_{name}_logp", gaussian.log_prob(at_point, step.mean, step.std), rtol=1e-9, atol=5e-8)
    for tag in a.tags(r"(dance\d+)_mean"):
        at = int(tag.removeprefix("dance"))
        step = kernels.dance_sde(x, v, sigmas[at], sigmas[at + 1], noise_level=eta)
        a.check(f"{tag}_mean", step.mean)
        a.check(f"{tag}_std", step.std.flatten()[0])
        full = gaussian.log_prob(given, step.mean, step.std)
        a.check(f"{tag}_given_logp_full", full, rtol=1e-9, atol=5e-8)
        peak = gaussian.log_prob(step.mean, step.mean, step.std)
        a.check(f"{tag}_given_logp_no_const", full - peak, rtol=1e-9, atol=5e-8)
    a.all_used(f"{STEPS}.*")


def test_windows_tails_and_advantages(golden) -> None:
    a = Arrays(golden("tree_mixgrpo"))
    for tag in a.tags(r"(sched_\w+)_cfg_json"):
        o = json.loads(a.text(f"{tag}_cfg_json"))
        windows = [
            mixgrpo_window(o["w"], o["M"], iteration=iteration, strategy=o["strategy"], every=o["tau"],
                           stride=o["stride"] if o["overlap"] else None, wrap=o["roll"], first=o["start"], seed=1000,
                           longest=o["max_it"], shortest=o["min_it"], rate=o["k"], threshold=o["thr"])
            for iteration in range(len(a.given(f"{tag}_start")))
        ]  # fmt: skip
        a.check(f"{tag}_start", [window.start for window in windows])
        a.check(f"{tag}_length", [len(window) for window in windows])
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
        windows = [
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
        assert [window.start for window in windows] == case["start"].tolist(), case.id
        assert [len(window) for window in windows] == case["size"].tolist(), case.id
