"""Evaluation: the same episodes however many run side by side, counts by task, films of both kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genrl.runtime.intervals import wilson
from genrl.runtime.metrics import document
from genrl.vla.data.videos import Clip
from genrl.vla.evaluate import Judged, balanced, by_task, evaluate, slug, success_rates
from genrl.vla.policies.folder import load_policy
from genrl.vla.rollout.sampling import Acting, Diffusion, FlowSteps
from genrl.vla.simulators.contract import Environment, Simulation
from genrl.vla.simulators.environments import open_environment
from genrl.vla.simulators.minitable import INSTRUCTIONS, TOUCH
from genrl.vla.train import judge_policy, train
from tests.vla import vla_runs


def tables(num_envs: int, **changes: Any) -> Environment:
    how: dict[str, Any] = {"chunk": 4, "tasks": ("touch",), "max_steps": 16} | changes
    return open_environment(Simulation("minitable", num_envs=num_envs, **how))


def policy(kind: str = "flow") -> Any:
    return load_policy(vla_runs.folder(kind))


def judged(num_envs: int = 12, **changes: Any) -> Judged:
    how: dict[str, Any] = {"episodes": 12, "seed": 5} | changes
    return evaluate(Acting(policy(), FlowSteps()), tables(num_envs), **how)


def facts(found: Judged) -> list[tuple[str, bool, int, float]]:
    return list(zip(found.instruction, found.success, found.steps, found.returns, strict=True))


@pytest.mark.parametrize("num_envs", [1, 5, 12, 20])
def test_the_episodes_do_not_depend_on_how_many_run_side_by_side(num_envs: int) -> None:
    assert facts(judged(num_envs)) == facts(judged(12))


@pytest.mark.parametrize(("first", "episodes"), [(0, 5), (5, 7), (11, 1), (3, 0)])
def test_a_share_of_them_is_a_slice(first: int, episodes: int) -> None:
    assert facts(judged(4, first=first, episodes=episodes)) == facts(judged(12))[first : first + episodes]


def test_they_are_those_of_the_seed() -> None:
    assert facts(judged()) == facts(judged()) != facts(judged(seed=6))


def test_what_an_episode_is() -> None:
    """A return of 1 is a success; one that did not succeed has used all its actions."""
    found = judged()
    assert 0 < sum(found.success) < 12
    for _, success, steps, returned in facts(found):
        assert returned == float(success) and (1 <= steps <= 16 if success else steps == 16)


def test_episodes_are_counted_by_task() -> None:
    found = by_task(judged())
    assert set(found) == {INSTRUCTIONS[n] for n in TOUCH} and sum(count for _, count in found.values()) == 12


def test_nothing_is_explored_and_nothing_is_kept_for_gradients() -> None:
    """The level of the noise does not matter; weights and global generators are left alone."""
    who = policy()
    before, state = vla_runs.weights(who), torch.get_rng_state()
    one, other = (
        evaluate(Acting(who, FlowSteps(noise_level=level)), tables(6), episodes=6, seed=5) for level in (0.1, 2.0)
    )
    assert facts(one) == facts(other) and vla_runs.moved(who, before) == set()
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in who.parameters())


def test_the_frozen_half_of_dppo_does_the_first_steps() -> None:
    sampler, who = Diffusion(20, 5, 2), policy("diffusion")
    with pytest.raises(ValueError, match="are those of the frozen policy"):
        evaluate(Acting(who, sampler), tables(4), episodes=4, seed=5)
    alike = evaluate(Acting(who, sampler, policy("diffusion")), tables(6), episodes=6, seed=5)
    assert facts(alike) == facts(evaluate(Acting(who, Diffusion(20, 5, 5)), tables(6), episodes=6, seed=5))
    broken = policy("diffusion")
    torch.nn.init.normal_(broken.out.weight, std=3.0)
    other = evaluate(Acting(who, sampler, broken), tables(6), episodes=6, seed=5)
    assert other.steps != alike.steps


def test_progress_is_told_in_episodes() -> None:
    told: list[int] = []
    judged(5, advance=told.append)
    assert [count for count in told if count] == [5, 5, 2]  # and a sign of life in between


class TestFilms:
    def test_a_picture_for_every_decision_and_one_of_the_end(self) -> None:
        found = judged(clips=12)
        assert [clip.instruction for clip in found.clips] == found.instruction
        assert [clip.success for clip in found.clips] == found.success
        for clip, steps in zip(found.clips, found.steps, strict=True):
            assert len(clip.frames) == 1 + -(-steps // 4) and clip.frames.dtype == np.uint8
            assert not np.array_equal(clip.frames[0], clip.frames[-1])

    def test_successes_and_failures(self) -> None:
        clips = judged(clips=4).clips
        assert len(clips) == 4 and 1 <= sum(clip.success for clip in clips) <= 3

    def test_as_many_as_were_asked_for_however_few_run_side_by_side(self) -> None:
        assert [len(judged(size, clips=4).clips) for size in (1, 3, 20)] == [4, 4, 4]
        assert judged(clips=0).clips == []

    @given(flags=st.lists(st.booleans(), max_size=20), most=st.integers(0, 8))
    def test_half_of_each_as_far_as_there_are(self, flags: list[bool], most: int) -> None:
        clips = [Clip(np.full((1, 1, 1, 3), n, dtype=np.uint8), "x", flag) for n, flag in enumerate(flags)]
        kept = balanced(clips, most)
        assert len(kept) == min(most, len(clips))
        order = [int(clip.frames[0, 0, 0, 0]) for clip in kept]
        assert order == sorted(set(order))
        good, bad = sum(clip.success for clip in kept), sum(not clip.success for clip in kept)
        left = {True: flags.count(True) - good, False: flags.count(False) - bad}
        if abs(good - bad) > 1:  # only where the fewer are used up
            assert left[good < bad] == 0


class Losing:
    """Tables whose simulator is lost in the second decision of slot 1."""

    def __init__(self, env: Environment) -> None:
        self.env, self.decision = env, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, **how: Any) -> Any:
        self.decision = 0
        return self.env.reset(**how)

    def step(self, actions: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(actions)
        self.decision += 1
        if self.decision == 2:
            truncated = truncated.copy()
            truncated[1] = True
            info = info | {"is_success": info["is_success"] & (np.arange(len(truncated)) != 1)}
        return observation, reward, terminated, truncated, info


def test_an_episode_that_was_lost_is_a_failure() -> None:
    whole = judged(12)
    slow = next(n for n, steps in enumerate(whole.steps) if steps > 8)
    found = evaluate(Acting(policy(), FlowSteps()), Losing(tables(12)), episodes=12, seed=5)  # type: ignore[arg-type]
    assert not found.success[1] and found.steps[1] <= 8
    assert facts(found)[slow] == facts(whole)[slow] or slow == 1
    assert len(found.success) == 12


class TestFigures:
    FOUND = Judged(["b", "a!", "b", "b"], [True, False, False, True], [3, 16, 16, 5], [1.0, 0.0, 0.0, 1.0], [])

    def test_success_and_interval(self) -> None:
        row = success_rates(self.FOUND)
        low, high = wilson(2, 4)
        assert row == {
            "eval/success_mean": 0.5,
            "eval/success_low": low,
            "eval/success_high": high,
            "eval/length_mean": 10.0,
            "eval/return_mean": 0.5,
            "eval/success/a": 0.0,
            "eval/success/b": pytest.approx(2 / 3),
        }
        for key in row:
            document(key)

    def test_by_task(self) -> None:
        assert by_task(self.FOUND) == {"a!": (0.0, 1), "b": (pytest.approx(2 / 3), 3)}

    def test_joined(self) -> None:
        both = self.FOUND.joined(self.FOUND)
        assert both.steps == [3, 16, 16, 5] * 2 and by_task(both)["b"] == (pytest.approx(2 / 3), 6)

    def test_names_of_instructions(self) -> None:
        assert slug("Put the RED disc, in zone 2!") == "put_the_red_disc_in_zone_2"
        assert len({slug(text) for text in INSTRUCTIONS}) == len(INSTRUCTIONS)


class TestInARun:
    def test_when_it_is_due_and_what_it_leaves(self, tmp_path: Path) -> None:
        changes = {"evaluation": {"every": 2, "episodes": 12, "videos": 2}, "iterations": 3}
        run = train(vla_runs.config(tmp_path, **changes))
        rows = {row["step"]: row for row in vla_runs.rows(run)}
        assert {step for step, row in rows.items() if "eval/success_mean" in row} == {0, 2, 3}
        for step in (0, 2, 3):
            assert (run / "samples" / f"step-{step:06d}.png").is_file()
            assert list((run / "videos" / f"step-{step:06d}").iterdir())
        assert sum(key.startswith("eval/success/") for key in rows[0]) == 3

    def test_the_run_that_is_judged_again_gets_the_same_figure(self, tmp_path: Path) -> None:
        from genrl.runtime.progress import Progress

        for sampler in ("flow_sde", "diffusion"):
            changes = {"evaluation": {"every": 1, "episodes": 16}, "iterations": 2, "optimizer": {"lr": 3e-3}}
            config = vla_runs.config(tmp_path, sampler=sampler, output=str(tmp_path / sampler), **changes)
            run = train(config)
            rows = vla_runs.rows(run)
            again = success_rates(judge_policy(config, run, Progress(1, enabled=False)))
            last = {key: value for key, value in rows[-1].items() if key.startswith("eval/")}
            assert again == last and last["eval/length_mean"] != rows[0]["eval/length_mean"]

    def test_evaluating_does_not_change_the_training(self, tmp_path: Path) -> None:
        runs = [
            train(
                vla_runs.config(tmp_path, evaluation={"every": every}, iterations=2, output=str(tmp_path / str(every)))
            )
            for every in (0, 1)
        ]
        ours, theirs = (vla_runs.last_state(run).tensors["weights"] for run in runs)
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
