"""Diffusion Policy: the published layout, LeRobot's own chains, diffusers' schedule, replay, what is refused."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from genrl.mdp import ddpm
from genrl.mdp.noise import keyed_noise
from genrl.vla.offline.imitation import matching_error
from genrl.vla.policies import diffusion_policy
from genrl.vla.policies.folder import load_policy
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import STATE
from genrl.vla.rollout.sampling import ChunkNoise, Diffusion, Frozen
from tests.vla.published import DIFFUSION_REAL, diffusion_folder, diffusion_shapes
from tests.vla.published import diffusion_observation as observation

LEROBOT = Path(__file__).parents[2] / "fixtures" / "lerobot"
CAMERA = "observation.images.camera0"
TIMES = torch.tensor([99, 40, 0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("diffusion")
    diffusion_folder(path)
    return path


def chunk(batch: int = 3) -> Tensor:
    return keyed_noise((batch, 8, 3), 0)


def test_the_layout_is_the_published_one(folder) -> None:
    """LeRobot counts 262,709,026 parameters in diffusion_pusht: two observations of one camera and two numbers."""
    published = diffusion_shapes(DIFFUSION_REAL)
    assert sum(math.prod(shape) for key, shape in published.items() if "pos_grid" not in key) == 262_709_026
    robot = load_policy(folder).robot
    robot.widths, robot.action_dim = {STATE: 2}, 2
    real = diffusion_policy.DiffusionPolicy(diffusion_policy.DiffusionPolicyConfig(), robot, (96, 96))
    assert {name: tuple(value.shape) for name, value in real.state_dict().items()} == published


def test_a_policy_that_predicts_actions_predicts_their_noise(folder, tmp_path) -> None:
    diffusion_folder(tmp_path, prediction_type="sample")
    policy, told = load_policy(tmp_path), load_policy(folder)
    context = policy.encode(observation())
    noise, action = policy.noise(context, chunk(), TIMES), told.noise(context, chunk(), TIMES)
    bar = ddpm.cosine_alpha_bars(100)[TIMES].float()[:, None, None]
    torch.testing.assert_close(bar.sqrt() * action + (1 - bar).sqrt() * noise, chunk(), rtol=1e-4, atol=1e-4)


def of_lerobot() -> dict[str, Tensor]:
    """What LeRobot 0.6.1 did with the same folder (tests/fixtures/lerobot_reference.py)."""
    with np.load(LEROBOT / "diffusion.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def test_the_whole_chain_is_lerobots_own(folder) -> None:
    """100 steps of DDPM with LeRobot's noise, its pictures and states prepared by its own processors; the chain of
    LeRobot begins one action earlier, and it returns the four that it executes."""
    policy, given = load_policy(folder), of_lerobot()
    noise = given["noise"].float().roll(-1, 2).transpose(0, 1)
    sampler = Diffusion(100, 100, 100, floor=1e-12, noise_clip=1e9)
    with torch.no_grad():
        context = policy.encode(observation())
        taken = sampler.sample(policy, context, ChunkNoise(noise, torch.ones(3, 100, dtype=torch.bool)))
    assert given["chunk"].std() > 0.3 and (given["chunk"].abs() < 0.99).float().mean() > 0.5
    torch.testing.assert_close(taken.chunk[:, :4], given["chunk"], rtol=0, atol=5e-5)
    torch.testing.assert_close(policy.actions(taken.chunk)[:, :4], given["acts"], rtol=0, atol=1e-4)


def test_a_ddim_chain_is_lerobots_but_for_the_noise_of_a_clipped_action(folder) -> None:
    """LeRobot goes on with the noise that was predicted, DPPO (and `act`) with that of the action after its clip."""
    policy, given = load_policy(folder), of_lerobot()
    start, grid = given["noise"][0].float().roll(-1, 1), ddpm.ddim_grid(ddpm.cosine_alpha_bars(100), 10)
    with torch.no_grad():
        context, x = policy.encode(observation()), start
        for k in range(10):
            noise = policy.noise(context, x, grid.timesteps[k].expand(3))
            bar, following = grid.alpha_bar[k].float(), grid.alpha_bar_next[k].float()
            action = ((x - (1 - bar).sqrt() * noise) / bar.sqrt()).clamp(-1, 1)
            x = following.sqrt() * action + (1 - following).sqrt() * noise
        own = Diffusion(100, 10, 10).act(policy, context, start)
    torch.testing.assert_close(x[:, :4], given["ddim_chunk"], rtol=0, atol=5e-5)
    assert (own[:, :4] - given["ddim_chunk"]).abs().max() > 0.1  # random weights clip at nearly every step


def test_pictures_are_resized_as_pillow_does(tmp_path) -> None:
    diffusion_folder(tmp_path, resize_shape=[40, 37])
    policy = load_policy(tmp_path)
    policy.robot.modes[CAMERA] = "IDENTITY"
    seen = torch.randint(0, 256, (1, 60, 90, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    ours = policy._framed(policy.robot.picture({CAMERA: seen}, CAMERA, torch.device("cpu")))
    red = Image.fromarray(seen[0, :, :, 0].float().numpy() / 255.0).resize((37, 40), Image.Resampling.BILINEAR)
    torch.testing.assert_close(ours[0, 0], torch.from_numpy(np.array(red))[3:37, 0:36], rtol=1e-4, atol=1e-4)


def test_one_observation_stands_for_the_history(folder) -> None:
    policy, one = load_policy(folder), observation(history=None)
    twice = {name: torch.stack([value, value], 1) for name, value in one.items()}
    assert torch.equal(policy.encode(one)["features"], policy.encode(twice)["features"])
    moved = {name: value.clone() for name, value in twice.items()}
    moved[STATE][:, 0] += 1.0
    assert not torch.equal(policy.encode(one)["features"], policy.encode(moved)["features"])
    with pytest.raises(ValueError, match="reads 2 observations"):
        policy.encode({name: value[:, :1] for name, value in twice.items()})


def test_replay_is_the_sample_and_the_loss_moves_everything(folder) -> None:
    policy, before = load_policy(folder), load_policy(folder)
    seen = observation()
    with torch.no_grad():
        context = policy.encode(seen)
    sampler = Diffusion(train_steps=policy.train_steps, steps=5, ft_denoising_steps=3)
    drawn = sampler.noise(policy, [torch.Generator().manual_seed(n) for n in range(3)])
    taken = sampler.sample(policy, context, drawn, frozen=Frozen(before, context))
    again = sampler.replay(policy, policy.encode(seen), taken.states, taken.next_states, taken.step_index)
    assert torch.equal((again.log_prob - taken.log_prob).exp(), torch.ones_like(taken.log_prob))
    chosen = sampler.act(policy, context, drawn.noise[:, 0], frozen=Frozen(before, context))
    assert policy.actions(chosen).shape == (3, 8, 3) and chosen.abs().max() <= 1
    actions = policy.normalised(policy.actions(chosen))
    torch.testing.assert_close(actions, chosen, rtol=1e-4, atol=1e-5)
    policy.with_heads(critic=1, noise_head="none", seed=0)
    bars = ddpm.cosine_alpha_bars(100)
    context = policy.encode(seen)
    matching_error(policy, context, actions, chunk(), TIMES, bars).square().mean().backward()
    assert all(p.grad is None for p in policy.value_head.parameters())
    assert all(p.grad is not None and p.grad.any() for p in policy.diffusion.parameters())
    policy.zero_grad()
    policy.value(policy.encode(seen)).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.diffusion.parameters())


def test_what_does_not_fit_is_refused(folder) -> None:
    with pytest.raises(ValueError, match="noise"):
        load_policy(folder).with_heads(critic=0, noise_head="expert", seed=0)
    with pytest.raises(ValueError, match="has no critic"):
        load_policy(folder).value({})
    with pytest.raises(ValueError, match="takes no Adapt|rename names"):
        load_policy(folder, adapt=Adapt(rename={"observation.image": "observation.images.wrong"}))
