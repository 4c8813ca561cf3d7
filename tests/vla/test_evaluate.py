"""Evaluation: the same episodes however many run side by side, counts by task, films of both kinds; and which policy is
judged, with what before it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from genrl.playground.minitable import INSTRUCTIONS
from genrl.runtime.folder.metrics import document
from genrl.runtime.loop.progress import Progress
from genrl.runtime.show.compare.statistics import wilson
from genrl.vla import train
from genrl.vla.evaluate import Judged, by_task, evaluate, slug, success_rates
from genrl.vla.methods.diwa.settings import DiWA
from genrl.vla.policies.folder import load_first_steps, load_policy
from genrl.vla.policies.policy import ACTION
from genrl.vla.rollout.sampling import Acting, FlowSteps, Frozen
from genrl.vla.run import VLARun
from genrl.vla.setup import export, load_trained, sampler_of
from genrl.vla.simulators.contract import Environment, Simulation
from genrl.vla.simulators.tables import open_environment
from tests.vla import vla_runs
from tests.vla.frail import FINE, RAISE
from tests.vla.simulators.test_vla_workers import Walker, opened
from tests.vla.tiny_policies import frames


def tables(num_envs: int, **changes: Any) -> Environment:
    how: dict[str, Any] = {"chunk": 4, "tasks": ("touch",), "max_steps": 16} | changes
    return open_environment(Simulation("minitable", num_envs=num_envs, **how))


def policy(kind: str = "flow") -> Any:
    return load_policy(vla_runs.folder(kind))


def judged(num_envs: int = 12, **changes: Any) -> Judged:
    how: dict[str, Any] = {"episodes": 12, "seed": 5} | changes
    return evaluate(Acting(policy(), FlowSteps()), tables(num_envs), **how)


def facts(result: Judged) -> list[tuple[str, bool, int, float]]:
    return list(zip(result.instruction, result.success, result.steps, result.returns, strict=True))


def test_the_episodes_are_those_of_the_seed_however_many_run_side_by_side() -> None:
    whole = facts(judged(12))
    assert all(facts(judged(num_envs)) == whole for num_envs in (1, 5, 20))
    for first, episodes in ((0, 5), (5, 7), (11, 1), (3, 0)):
        assert facts(judged(4, first=first, episodes=episodes)) == whole[first : first + episodes]
    assert facts(judged(seed=6)) != whole
    # A round of slow simulators may take longer than a watchdog waits.
    counts: list[int] = []
    evaluate(Acting(policy(), FlowSteps()), tables(3, max_steps=4), episodes=5, seed=1, advance=counts.append)
    assert counts == [0, 3, 0, 2]


def test_nothing_is_explored_and_nothing_is_kept_for_gradients() -> None:
    who = policy()
    before, state = vla_runs.weights(who), torch.get_rng_state()
    acting = [Acting(who, FlowSteps(noise_level=level)) for level in (0.1, 2.0)]
    one, other = (evaluate(each, tables(6), episodes=6, seed=5) for each in acting)
    assert facts(one) == facts(other) and vla_runs.moved(who, before) == set()
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in who.parameters())


def test_films_have_a_picture_for_every_decision_and_one_of_the_end() -> None:
    """As many as were asked for, however few run side by side."""
    result = judged(clips=12)
    assert [(clip.instruction, clip.success) for clip in result.clips] == [fact[:2] for fact in facts(result)]
    for clip, steps in zip(result.clips, result.steps, strict=True):
        assert len(clip.frames) == 1 + -(-steps // 4) and clip.frames.dtype == np.uint8
        assert not np.array_equal(clip.frames[0], clip.frames[-1])
    several = [judged(size, clips=4).clips for size in (1, 12, 20)]
    assert [len(clips) for clips in several] == [4, 4, 4] and judged(clips=0).clips == []
    assert 1 <= sum(clip.success for clip in several[1]) <= 3


def test_figures_names_of_instructions_and_a_policy_that_does_not_act_alone(tmp_path: Path) -> None:
    result = Judged(["b", "a!", "b", "b"], [True, False, False, True], [3, 16, 16, 5], [1.0, 0.0, 0.0, 1.0], [])
    (low, high), row = wilson(2, 4), {"length_mean": 10.0, "return_mean": 0.5, "lost": 0.0}
    row |= {"success_mean": 0.5, "success_low": low, "success_high": high}
    row |= {"success/a": 0.0, "success/b": pytest.approx(2 / 3)}
    assert success_rates(result) == {f"eval/{name}": value for name, value in row.items()}
    assert all(document(key) for key in success_rates(result))
    both = result.joined(result)
    assert both.steps == [3, 16, 16, 5] * 2
    assert by_task(both) == {"a!": (0.0, 2), "b": (pytest.approx(2 / 3), 6)}
    assert slug("Put the RED disc, in zone 2!") == "put_the_red_disc_in_zone_2"
    assert len({slug(text) for text in INSTRUCTIONS}) == len(INSTRUCTIONS)
    lone = vla_runs.config(tmp_path).model_copy(update={"trainer": DiWA()})
    with Progress(1, enabled=False) as progress, pytest.raises(ValueError, match="its world model.*metrics.jsonl"):
        train.judge_policy(lone, tmp_path / "none", progress)


def test_when_a_run_is_evaluated_and_what_that_leaves(tmp_path: Path) -> None:
    """The training is that of a run without; whoever judges the run again gets the same figure."""
    changes = {"iterations": 3, "optimizer": {"lr": 3e-3}}
    config = vla_runs.config(tmp_path, evaluation={"every": 2, "num_envs": 12, "episodes": 12, "videos": 2}, **changes)
    run = train.train(config)
    rows = {row["step"]: row for row in vla_runs.rows(run)}
    assert {step for step, row in rows.items() if "eval/success_mean" in row} == {0, 2, 3}
    for step in (0, 2, 3):
        assert (run / "samples" / f"step-{step:06d}.png").is_file()
        assert list((run / "videos" / f"step-{step:06d}").iterdir())
    assert sum(key.startswith("eval/success/") for key in rows[0]) == 3
    again = success_rates(train.judge_policy(config, run, Progress(1, enabled=False)))
    assert again == {key: value for key, value in rows[3].items() if key.startswith("eval/") and "best" not in key}
    assert again["eval/length_mean"] != rows[0]["eval/length_mean"]
    without = train.train(vla_runs.config(tmp_path, output=str(tmp_path / "without"), **changes))
    ours, theirs = (vla_runs.last_state(folder).tensors["weights"] for folder in (run, without))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_an_exported_dppo_run_acts_as_it_did(tmp_path: Path) -> None:
    evaluation = {"every": 1, "episodes": 6, "num_envs": 3}
    config = vla_runs.config(tmp_path, sampler="diffusion", evaluation=evaluation, optimizer={"lr": 1e-2})
    run = train.train(config)
    out = export(run, tmp_path / "out", None)
    lone = config.model_copy(update={"policy": config.policy.model_copy(update={"path": str(tmp_path / "gone")})})
    last = vla_runs.rows(run)[-1]
    with Progress(1, enabled=False) as progress:
        for model in (run, out):
            for name, value in success_rates(train.judge_policy(lone, model, progress)).items():
                assert value == last[name], name
    base, trained, exported = load_policy(vla_runs.policy_of("diffusion")), load_trained(run), load_policy(out)
    first = load_first_steps(out, 5, 2)
    observation = {name: value[:5] for name, value in frames(image=0).items() if name != ACTION}
    noise, sampler = torch.randn(5, 4, 3), sampler_of(config, base)
    with torch.no_grad():
        acted = [
            sampler.act(who, who.encode(observation), noise, frozen=Frozen(before, before.encode(observation)))
            for who, before in ((trained, base), (exported, first), (exported, exported))
        ]
    assert torch.equal(acted[0], acted[1]) and not torch.equal(acted[0], acted[2])

    on = config.model_copy(update={"policy": config.policy.model_copy(update={"path": str(out)})})
    frozen = train.frozen_of(on, exported)
    assert vla_runs.moved(frozen, {**frozen.state_dict(), **base.state_dict()}) == set()
    other = on.model_copy(update={"sampler": config.sampler.model_copy(update={"ft_denoising_steps": 2})})
    with pytest.raises(ValueError, match="does the last 3 of 5 denoising steps.*found 5 and 2"):
        train.train(other.model_copy(update={"output": str(tmp_path / "other")}))
    assert not (tmp_path / "other" / "config.yaml").exists()  # before anything is written
    with torch.no_grad():
        next(exported.encoder.parameters()).add_(1.0)
    one = SimpleNamespace(config=on, policy=exported, frozen=frozen)
    assert not VLARun.keeps_features.func(one), "what first steps see is not what the others do"
    one.frozen = base
    one.policy = base
    assert VLARun.keeps_features.func(one)


def test_a_lost_episode_is_no_failure() -> None:
    """It leaves the others as they are, and nobody saw it end. All walks succeed but that one's."""
    result = []
    for modes in ([], [(FINE, RAISE, FINE, FINE)]):
        with opened() as env:
            result.append(evaluate(Acting(Walker(modes, move=0.35), FlowSteps()), env, episodes=4, seed=5))
    whole, less = (facts(each) for each in result)
    rates = success_rates(result[1])
    assert less == whole[:1] + whole[2:] and all(result[0].success)
    assert (rates["eval/success_mean"], rates["eval/lost"]) == (1.0, 1.0)
    with pytest.raises(RuntimeError, match="all 8 episodes .* were lost"):
        success_rates(Judged([], [], [], [], [], 8))


def test_without_a_key_success_is_not_measured() -> None:
    result = Judged(["a"], [False], [3], [0.5], []).of(None)
    assert success_rates(result) == {"eval/length_mean": 3.0, "eval/return_mean": 0.5, "eval/lost": 0.0}
    assert Judged(["a"], [False], [3], [0.5], []).of("is_success").measured
