"""Supervised training: the gradient of flow matching and of noise prediction, shared out or not."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrl.mdp import ddpm
from genrl.mdp.noise import generator
from genrl.playground.minitable import INSTRUCTIONS, State, expert_chunk
from genrl.playground.minitable.world import TableWorld
from genrl.vla.data.demonstrations import frames_of
from genrl.vla.data.frames import ACTION_IS_PAD
from genrl.vla.methods.dagger import train as dagger
from genrl.vla.methods.sft import train as sft
from genrl.vla.methods.v_ptr import train as v_ptr
from genrl.vla.methods.v_ptr.train import draw, icvf_errors
from genrl.vla.offline.critics import wayward_data
from genrl.vla.offline.imitation import imitation_loss, recorded_frames
from genrl.vla.policies.encoder import LOOKS
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, STATE, TOKENS, Batch, rows
from genrl.vla.train import open_policy
from tests.vla import vla_runs
from tests.vla.methods.test_vla_offline_trainers import few_videos, small
from tests.vla.tiny_policies import diffusion, flow, frames

__all__ = ["few_videos"]  # of V-PTR, in all tests here

DIFFUSION: dict[str, Any] = {
    "policy": {"path": None, "new": {"type": "diffusion_mlp", "image_size": 0, "train_steps": 20}},
    "sampler": {"kind": "diffusion", "steps": 20, "ft_denoising_steps": 10},
}


def config(folder: Path, base: dict[str, Any] = vla_runs.SFT, **changes: Any) -> Any:
    trainer = {**base["trainer"], **changes.pop("trainer", {})}
    return vla_runs.config(folder, **{**base, **changes, "trainer": trainer})


@pytest.mark.parametrize("kind", ["flow", "diffusion"])
def test_the_gradient_of_a_step_is_that_of_the_formula(kind: str, tmp_path: Path) -> None:
    run = config(tmp_path, trainer={"steps_per_iteration": 1}, **(DIFFUSION if kind == "diffusion" else {}))
    _, shown = open_policy(run)
    with vla_runs.opened(run) as opened:
        policy = opened.policy
        with torch.no_grad():
            torch.nn.init.normal_(policy.out.weight, std=0.1)  # zero at first: nothing else would have a gradient
        start, result, step = vla_runs.weights(policy), [], opened.loop.optimization.step
        opened.loop.optimization.step = lambda groups: result.append(vla_runs.gradients(opened)) or step(groups)  # type: ignore[method-assign, assignment, func-returns-value]
        opened.frames = shown
        sft.train(opened, run.trainer)

        policy.load_state_dict(start)
        rng = generator(run.seed, "imitation", 0)
        index = torch.randint(len(shown[ACTION]), (16,), generator=rng)
        batch = rows(shown, index)
        actions = policy.normalised(batch[ACTION])
        context = policy.encode({name: batch[name] for name in policy.inputs})
        noise = torch.randn(actions.shape, generator=rng)
        if kind == "flow":
            time = 0.999 * torch.rand(16, generator=rng) ** (1 / 1.5) + 0.001
            x = (1 - time[:, None, None]) * actions + time[:, None, None] * noise
            error = policy.velocity(context, x, time) - (noise - actions)
        else:
            step = torch.randint(20, (16,), generator=rng)
            bars = ddpm.cosine_alpha_bars(20)[step].float()[:, None, None]
            error = policy.noise(context, bars.sqrt() * actions + (1 - bars).sqrt() * noise, step) - noise
        error.square().mean().backward()
        assert vla_runs.assert_gradients(result[0], opened, 1e-3) > {"encoder"}


@pytest.mark.parametrize("policy", [flow(), diffusion()], ids=["flow", "diffusion"])
def test_the_parts_of_the_processes_add_up(policy: Any) -> None:
    shown = dict(frames(8, 0))
    shown[ACTION_IS_PAD] = torch.arange(4) >= 4 - (torch.arange(len(shown[ACTION])) % 3)[:, None]
    index, bars = torch.arange(11), ddpm.cosine_alpha_bars(20)

    def loss(mine: slice) -> float:
        given = recorded_frames(policy, shown, index, generator(0, "x"), bars, mine)
        return float(imitation_loss(policy, given).detach())

    whole = loss(slice(None))
    for processes in (2, 3, 12):  # of twelve, one has nothing
        parts = [loss(slice(rank, None, processes)) for rank in range(processes)]
        assert all(math.isfinite(part) for part in parts)
        assert sum(parts) == pytest.approx(whole, rel=1e-5)


def test_a_loaded_policy_goes_on_with_its_own_words_and_statistics(tmp_path: Path) -> None:
    run = config(tmp_path, policy={"path": str(vla_runs.folder("flow")), "new": None})
    policy, shown = open_policy(run)
    assert policy.config.inputs.vocabulary == vla_runs.WORDS and not policy.critic
    assert int(shown["observation.language.tokens"].max()) <= len(vla_runs.WORDS)
    assert not any(p.requires_grad for p in policy.encoder.parameters())
    assert all(p.requires_grad for p in policy.expert.parameters())


def test_the_frames_and_the_new_policy_are_those_of_the_seed_and_hold_no_points(tmp_path: Path) -> None:
    one, other = (open_policy(config(tmp_path, seed=seed)) for seed in (1, 2))
    again = open_policy(config(tmp_path, seed=1))
    assert not again[0].training
    assert vla_runs.moved(one[0], vla_runs.weights(again[0])) == set()
    assert torch.equal(one[1][ACTION], again[1][ACTION])
    assert vla_runs.moved(one[0], vla_runs.weights(other[0])) and len(one[1][ACTION]) != len(other[1][ACTION])
    points, nowhere = {"path": None, "new": {"image_size": 0, "points": 14}}, {"expert": None, "dataset": str(tmp_path)}
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text("{}")
    with pytest.raises(ValueError, match="data sets hold no clouds of points"):
        open_policy(config(tmp_path, demonstrations=nowhere, policy=points))


# -- DAgger: what is labelled, by whom, who acts, and what is imitated in the end
def table(frames: Batch, instructions: dict[tuple[int, ...], int]) -> State:
    """The tables that the frames were seen on: a gripper that holds a disc is nearest to that one."""
    gripper, discs = frames[STATE][:, :2].numpy(), frames[ENVIRONMENT].reshape(-1, 3, 2).numpy()
    nearest = np.linalg.norm(discs - gripper[:, None], axis=-1).argmin(1)
    instructed = np.array([instructions[tuple(row)] for row in frames[TOKENS].tolist()])
    return State(gripper, discs, np.where(frames[STATE][:, 2].numpy() > 0, nearest, -1), instructed)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_every_state_that_is_visited_gets_the_experts_chunk_from_there(tmp_path: Path, beta: float) -> None:
    with vla_runs.opened(config(tmp_path, vla_runs.DAGGER, environment={"tasks": ["put"]})) as run:
        numbers = {tuple(run.policy.tokenise([text])[0].tolist()): n for n, text in enumerate(INSTRUCTIONS)}
        actual = dagger.visit(run, beta, 0)
        wanted = expert_chunk(table(actual.frames, numbers), 4)
        np.testing.assert_array_equal(actual.frames[ACTION].numpy(), wanted)
        assert len(actual.error) == len(wanted) > 16 and actual.error.min() > 0
        assert 4 * (len(wanted) - len(actual.success)) <= actual.steps <= 4 * len(wanted) and actual.dropped == 0
        again = dagger.visit(run, beta, 0)
        assert all(torch.equal(value, again.frames[name]) for name, value in actual.frames.items())
        other = dagger.visit(run, beta, 1)
        assert not torch.equal(actual.frames[STATE][:8], other.frames[STATE][:8])


def test_who_acts(tmp_path: Path) -> None:
    """The expert alone touches every disc; the policy alone does what it does without being asked."""
    with vla_runs.opened(config(tmp_path, vla_runs.DAGGER, environment={"num_envs": 32})) as run:
        assert all(dagger.visit(run, 1.0, 0).success)
        alone, mixed = (dagger.visit(run, beta, 0) for beta in (0.0, 0.5))
        assert any(alone.success) and not all(alone.success) and not torch.equal(mixed.error, alone.error)


def test_two_processes_collect_what_one_does(tmp_path: Path) -> None:
    parts = []
    for name, slots, first in (("whole", 8, 0), ("left", 4, 0), ("right", 4, 4)):
        settings = config(tmp_path, vla_runs.DAGGER, environment={"num_envs": slots}, output=str(tmp_path / name))
        with vla_runs.opened(settings) as run:
            run.first_slot = first
            parts.append(dagger.visit(run, 0.5, 0))
    whole, joined = dagger.in_order(parts[:1]), dagger.in_order(parts[1:])
    frames, slot, decision, *others = parts[0]
    lost = dagger.Visit({name: value[:0] for name, value in frames.items()}, slot[:0], decision[:0], *others)
    assert len(dagger.in_order([lost])[TOKENS]) == 0  # every episode before its first decision
    assert torch.equal(whole[TOKENS], joined[TOKENS]) and len(whole[TOKENS]) > 12
    for name in (STATE, ENVIRONMENT, ACTION):
        torch.testing.assert_close(whole[name], joined[name], atol=1e-4, rtol=0.0)


def test_the_union_of_demonstrations_and_all_labels_is_imitated(tmp_path: Path, monkeypatch: Any) -> None:
    """What the expert tells is never padding, which a data set's ends may have."""
    unions: list[Batch] = []
    updates = dagger.imitation_updates

    def watched(run: Any, settings: Any, frames: Batch, loss: Any) -> dict[str, float]:
        unions.append(frames)
        return updates(run, settings, frames, loss)

    monkeypatch.setattr(dagger, "imitation_updates", watched)
    settings = config(tmp_path, vla_runs.DAGGER, iterations=2, trainer={"beta": 0.5})
    with vla_runs.opened(settings) as run:
        shown = frames_of(settings, run.policy)[0]
        shown = run.frames = shown | {ACTION_IS_PAD: torch.zeros(shown[ACTION].shape[:2], dtype=torch.bool)}
        shown[ACTION_IS_PAD][:, 3:] = True
        dagger.train(run, settings.trainer)  # type: ignore[arg-type]
        logged = vla_runs.rows(run.process.run.folder)
    first, second = unions
    count = len(shown[ACTION])
    for name in first:
        assert torch.equal(first[name][:count], shown[name]), name
        assert torch.equal(second[name][: len(first[name])], first[name]), name
    labels = [len(union[ACTION]) - count for union in unions]
    assert not second[ACTION_IS_PAD][count:].any()
    assert 8 <= labels[0] < labels[1] and [row["dagger/labels"] for row in logged] == labels
    assert [row["dagger/beta"] for row in logged] == [0.5, 0.25]
    assert logged[1]["rollout/env_steps"] > logged[0]["rollout/env_steps"] and logged[0]["loss"] > 0


def test_one_of_your_own_is_asked_before_anything_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path, vla_runs.DAGGER, evaluation={"every": 1})
    with vla_runs.opened(settings) as run:
        run.frames = frames_of(settings, run.policy)[0]
        monkeypatch.delattr("genrl.playground.minitable.env.TableHost.advise")
        monkeypatch.setattr(run, "judged", lambda iteration: pytest.fail("it was evaluated"))
        with pytest.raises(ValueError, match="TableHost has no expert; minitable, metaworld, .* have one"):
            dagger.train(run, settings.trainer)  # type: ignore[arg-type]


# -- V-PTR: the value function of videos by its formula, what is drawn, what is kept of it, and whole runs
def test_the_errors_are_those_of_the_formula() -> None:
    """Worked by hand: a step towards the intent counts .9, one away from it .1; at a goal the value is 0 and ends."""
    values = torch.tensor([[-2.0, -2.0, -1.0], [-3.0, -3.0, -1.0]], requires_grad=True)
    following = torch.tensor([[-1.0, -1.0, -9.0], [-2.0, -2.0, -9.0]])
    # advantages: -1 + .5 * min(-2, -4) - mean(-4, -6) = 2;  -1 + .5 * -8 - -4 = -1;  at the intent 0 - -1 = 1
    next_intent = torch.tensor([[-2.0, -8.0, -5.0], [-4.0, -6.0, -5.0]])
    intent = torch.tensor([[-4.0, -4.0, -1.0], [-6.0, -4.0, -1.0]])
    there = torch.tensor([False, False, True])
    result = icvf_errors(values, following, intent, next_intent, there, there, discount=0.5, expectile=0.9)
    # targets: -1 + .5 * -1 = -1.5 and -1 + .5 * -2 = -2; at the goal 0
    squares = torch.tensor([0.5**2 + 1.0**2, 0.5**2 + 1.0**2, 1.0 + 1.0])
    torch.testing.assert_close(result, squares * torch.tensor([0.9, 0.1, 0.9]))
    result.sum().backward()
    assert values.grad is not None and values.grad[0].tolist() == pytest.approx([-0.9, -0.1, -1.8])


def test_goals_are_the_frame_itself_a_later_one_or_one_of_another_video() -> None:
    videos, frames, count = 50, 9, 4000
    sampled = draw(videos, frames, count, generator(0, "x"))
    assert torch.equal(sampled.following, sampled.now + 1)
    assert torch.equal(sampled.now // frames, sampled.following // frames), "a step leaves its video"
    assert torch.equal(sampled.now // frames, sampled.later // frames) and bool((sampled.later >= sampled.now).all())
    assert set((sampled.later % frames).tolist()) == set(range(frames))
    own = torch.arange(count)
    for which in (sampled.goal, sampled.intent):
        assert abs(float((which == own).float().mean()) - 0.2) < 0.03
        assert abs(float((which == count + own).float().mean()) - 0.5) < 0.03
        assert int(which.max()) < 2 * count
    same = float((sampled.goal == sampled.intent).float().mean())
    assert abs(same - (0.5 + 0.5 * (0.2**2 + 0.5**2))) < 0.03


@pytest.mark.parametrize("kind", ["video", "imitation", "random"])
def test_only_what_looks_is_taken_over(root: Path, tmp_path: Path, kind: str) -> None:
    settings = small(root, "v_ptr", tmp_path, f"trainer.encoder={kind}")
    policy: Any = v_ptr.new_policy(settings)
    before, data = vla_runs.weights(policy), wayward_data(settings, 12, 0.5, policy, 4)
    result = v_ptr.pretrained(TableWorld(), policy, data, settings.trainer, seed=0)  # type: ignore[arg-type]
    moved = vla_runs.moved(policy, before)
    assert bool(moved) == (kind != "random")
    assert all(name.startswith(tuple(f"encoder.{part}" for part in LOOKS)) for name in moved)
    logged = {"video": {"pretraining/loss", "pretraining/order"}, "imitation": {"pretraining/loss"}, "random": set()}
    assert set(result) == logged[kind]


def test_critics_see_the_features_of_the_encoder_and_videos_are_of_play_alone(root: Path, tmp_path: Path) -> None:
    settings = small(root, "v_ptr", tmp_path)
    policy: Any = v_ptr.new_policy(settings)
    data = wayward_data(settings, 12, 0.5, policy, 4)
    seen = v_ptr.with_features(policy, data)
    assert set(seen.observation) == {STATE, TOKENS, ENVIRONMENT} and seen.observation[ENVIRONMENT].shape[1] == 128
    one = policy.encoder.look(data.next_observation[IMAGE][3:4], torch.zeros(1, 64))
    torch.testing.assert_close(seen.next_observation[ENVIRONMENT][3:4], one.detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(seen.action, data.action) and 0 < float(data.reward.sum()) <= 12
    shown = v_ptr.videos(TableWorld(), 6, 32, seed=1)
    assert shown.shape == (6, 41, 32, 32, 3) and shown.dtype == torch.uint8
    assert all(len(video.flatten(1).unique(dim=0)) > 5 for video in shown), "nobody plays"
