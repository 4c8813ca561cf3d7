"""V-PTR: videos teach a picture encoder what is near to what, robot data teach values and a policy (arXiv 2309.13041).

1. Videos of play, pictures alone: an intent-conditioned value function (`ICVF`). What is kept of it is its encoder.
2. Robot data with actions and rewards: implicit Q-learning on the features of that encoder (V-PTR: CQL, a ResNet-50 of
   Ego4D, all of it trained on).
3. The policy begins with that encoder and is regressed on the data's actions, with weights that grow with their
   advantage.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from genrl.mdp.noise import derive_seed, generator, seeded
from genrl.runtime.loop.recorded import Recorded
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import World, world_of
from genrl.vla.data.frames import frame_statistics
from genrl.vla.methods.v_ptr.settings import VPTR
from genrl.vla.offline.critics import Critics, advantage_of, regress, wayward_data, weighted_cloning
from genrl.vla.offline.critics import new_policy as new_regressed
from genrl.vla.offline.imitation import imitate, mean_of_last, step_beside
from genrl.vla.offline.transitions import Store, Transitions, frames_of
from genrl.vla.policies.encoder import LANGUAGE, LOOKS, PICTURE, ObservationEncoder
from genrl.vla.policies.policy import ENVIRONMENT, IMAGE, STATE, TOKENS, Batch, Inputs
from genrl.vla.rollout.sampling import Acting

if TYPE_CHECKING:
    from genrl.vla.run import VLARun


RIGHT = 0.5
"""Share of the data's episodes in which the player does what it is told."""
LENGTH = 40
"""Actions between the first and the last frame of a video."""


def new_policy(config: VLAConfig) -> Any:
    """A policy for the data, with weights by the seed."""
    assert isinstance(config.trainer, VPTR)
    return new_regressed(config, config.trainer.episodes, RIGHT, (IMAGE, STATE, TOKENS))


def videos(world: World, count: int, size: int, *, seed: int) -> Tensor:
    """Somebody who plays, seen from above: uint8 [count, T, size, size, 3], and nothing else."""
    numbers = world.play(count, LENGTH, seed=seed).observations
    pictures = torch.from_numpy(world.draw(numbers.reshape(-1, numbers.shape[2]), size))
    return pictures.view(*numbers.shape[:2], *pictures.shape[1:])


def pretrained(world: World, policy: Any, data: Transitions, settings: VPTR, *, seed: int) -> dict[str, float]:
    """Teach the policy's encoder to look, as `settings.encoder` says; the rest of the policy stays as it is."""
    count = settings.pretraining_steps
    if settings.encoder == "random":
        return {}
    other = copy.deepcopy(policy)
    if settings.encoder == "imitation":
        steps = imitate(other, frames_of(data), steps=count, batch_size=BATCH, learning_rate=LEARNING_RATE, seed=seed)
        figures = {"pretraining/loss": mean_of_last(steps)}
    else:
        recordings = videos(world, settings.videos, policy.image_size, seed=derive_seed(seed, "videos") % 2**32)
        with seeded(seed, "icvf"):
            icvf = ICVF(other.encoder).to(next(policy.parameters()).device)
        figures = {"pretraining/loss": mean_of_last(train_icvf(icvf, recordings, steps=count, seed=seed))}
        figures["pretraining/order"] = order(icvf, recordings)
    # Of the copy only what looks: the videos say nothing of words and states.
    learned = {name: value for name, value in other.encoder.state_dict().items() if name.startswith(LOOKS)}
    policy.encoder.load_state_dict(policy.encoder.state_dict() | learned)
    return figures


@torch.no_grad()
def with_features(policy: Any, data: Transitions) -> Transitions:
    """The data with what the encoder sees in their pictures, without instruction, as `ENVIRONMENT` in their place."""
    look = ICVF(policy.encoder).features

    def encoded(observation: Batch) -> Batch:
        numeric = {name: observation[name] for name in (STATE, TOKENS)}
        return numeric | {ENVIRONMENT: torch.cat([look(part) for part in observation[IMAGE].split(512)]).cpu()}

    return data._replace(observation=encoded(data.observation), next_observation=encoded(data.next_observation))


def prepared(run: VLARun, settings: VPTR, data: Transitions) -> dict[str, Any]:
    """The encoder, then critics on its features: the advantage [N] of the data's chunks, and figures."""
    config, loop, policy = run.config, run.loop, run.policy
    loop.phase("looking at videos")
    figures = pretrained(world_of(config), policy, data, settings, seed=config.seed)
    with_seen = with_features(policy, data)
    features = with_seen.observation[ENVIRONMENT]
    inputs = Inputs(policy.config.inputs.state, policy.config.inputs.vocabulary, environment=features.shape[1])
    stats = policy.stats | frame_statistics({ENVIRONMENT: features})
    with seeded(config.seed, "critics"):
        critics = Critics(inputs, stats, policy.horizon * policy.action_dim)
    critics = critics.to(loop.process.accelerator.device)
    advantage, learned = advantage_of(run, settings, critics, with_seen, "critic/advantage_gap", batch_size=128)
    return {"advantage": advantage, "figures": figures | learned}


def train(run: VLARun, settings: VPTR) -> None:
    """Encoder and critics once; then iterations of advantage-weighted regression."""
    loop, data = run.loop, wayward_data(run.config, settings.episodes, RIGHT, run.policy, run.policy.horizon)
    store = Store()
    loop.keep("v_ptr", store, changes=False)
    if not store.ready:
        store.data = prepared(run, settings, data)
        store.ready = True
    regress(run, settings, loss, data, store.data["advantage"], store.data["figures"])


def loss(settings: VPTR, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """Advantage-weighted regression of the policy on chunks of the data, []."""
    return {"loss": weighted_cloning(acting, given)}


# Intent-conditioned value functions: what passive data say of reaching outcomes, and how they learn it (ICVF, arXiv
# 2304.04782).


def icvf_errors(
    values: Tensor,
    next_values: Tensor,
    intent_values: Tensor,
    next_intent_values: Tensor,
    at_goal: Tensor,
    at_intent: Tensor,
    *,
    discount: float,
    expectile: float,
) -> Tensor:
    """`|expectile - 1[A < 0]| (r(s, g) + G V'(s', g, z) - V(s, g, z))^2`, summed over the copies of V, [B].

    A = r(s, z) + G V'(s', z, z) - V'(s, z, z) says whether s -> s' is what somebody would do who wants z: the value of
    an outcome g is that under such a one (section 4.2). values [K, B] of (s, g, z), with gradients; of the slow copies
    V', without: next_values of (s', g, z), intent_values of (s, z, z), next_intent_values of (s', z, z). at_goal,
    at_intent bool [B]: s is g, or z. As released: r is 0 there and ends, -1 elsewhere; A takes the least V' of s' and
    the mean of s.
    """

    def target(there: Tensor, following: Tensor) -> Tensor:
        away = (~there).float()
        return away * (discount * following - 1.0)

    advantage = target(at_intent, next_intent_values.amin(0)) - intent_values.mean(0)
    weight = expectile + (1.0 - 2.0 * expectile) * (advantage < 0).float()
    return (weight * (target(at_goal, next_values).detach() - values) ** 2).sum(0)


CURRENT, FUTURE = 0.2, 0.5
"""Shares of goals (and of intents) that are the frame itself, and a later one of its video; the others are of another
video (as released)."""
SAME = 0.5
"""Share of goals that are the intent (as released)."""
BATCH, LEARNING_RATE = 48, 1e-3
"""Pairs of neighbouring frames per step (frames, of the imitation), and the learning rate."""
DISCOUNT, EXPECTILE = 0.9, 0.9
"""Discount of an action (ICVF: 0.99), and the weight of steps towards the intent; that of others is what is missing to
1 (ICVF: 0.9)."""
RATE = 0.02
"""How fast the slow copy follows in a step (ICVF: 0.005, for a hundred times the steps)."""


class Multilinear(nn.Module):
    """`V(s, g, z) = phi(s)^T T(z) psi(g)` (section 5.1), T(z) = diag(t) A^T B diag(t) with t a function of psi(z), as
    released; divided by the root of the width, without which the first steps at a high rate overshoot."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.phi, self.psi = _mlp(PICTURE, width), _mlp(PICTURE, width)
        self.intent = _mlp(width, width)
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, s: Tensor, g: Tensor, z: Tensor) -> Tensor:
        """[B] of features [B, PICTURE]."""
        intent = self.intent(self.psi(z))
        product = self.a(intent * self.phi(s)) * self.b(intent * self.psi(g))
        value: Tensor = product.sum(1) / product.shape[1] ** 0.5
        return value


class ICVF(nn.Module):
    """A picture encoder, without instruction, and two values on its features."""

    def __init__(self, encoder: ObservationEncoder, width: int = 128) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleList(Multilinear(width) for _ in range(2))

    def features(self, pictures: Tensor) -> Tensor:
        """[B, PICTURE] of uint8 [B, S, S, 3]."""
        device = self.encoder.words.weight.device
        return self.encoder.look(pictures.to(device), torch.zeros(len(pictures), LANGUAGE, device=device))

    def values(self, s: Tensor, g: Tensor, z: Tensor) -> Tensor:
        """[2, B] of features."""
        return torch.stack([head(s, g, z) for head in self.heads])


class VideoSteps(NamedTuple):
    """B steps of videos, as numbers of frames int64 [B]: s, the next one, a later one. goal, intent int64 [B]: which of
    the 2 B frames (s, then later) they are."""

    now: Tensor
    following: Tensor
    later: Tensor
    goal: Tensor
    intent: Tensor


def draw(videos: int, frames: int, count: int, rng: torch.Generator) -> VideoSteps:
    """Steps uniform over all videos of so many frames each; the later frame uniform from s to the end of its video.

    Goals and intents are s, its later frame, or the later frame of another step: one encoding serves them all.
    """
    video = torch.randint(videos, (count,), generator=rng)
    place = torch.randint(frames - 1, (count,), generator=rng)
    ahead = (torch.rand(count, generator=rng) * (frames - place)).long()
    rows = torch.arange(count)

    def choose() -> Tensor:
        kind, other = torch.rand(count, generator=rng), torch.randperm(count, generator=rng)
        elsewhere = torch.where(kind < CURRENT + FUTURE, count + rows, count + other)
        return torch.where(kind < CURRENT, rows, elsewhere)

    intent, goal = choose(), choose()
    goal = torch.where(torch.rand(count, generator=rng) < SAME, intent, goal)
    first = video * frames
    return VideoSteps(first + place, first + place + 1, first + place + ahead, goal, intent)


def train_icvf(icvf: ICVF, videos: Tensor, *, steps: int, seed: int) -> Iterator[float]:
    """Train on pictures uint8 [N, T, S, S, 3] alone, yielding the loss of every step: functions of (seed, step)."""
    slow = copy.deepcopy(icvf).requires_grad_(False)
    optimiser = torch.optim.Adam(icvf.parameters(), lr=LEARNING_RATE)
    pictures = videos.flatten(0, 1)
    for step in range(steps):
        batch = draw(len(videos), videos.shape[1], BATCH, generator(seed, "icvf", step))
        frames = torch.cat([batch.now, batch.later])
        images = pictures[frames]
        features, fixed = icvf.features(images), slow.features(images)
        following, count = slow.features(pictures[batch.following]), BATCH
        goal, intent = fixed[batch.goal], fixed[batch.intent]
        errors = icvf_errors(
            icvf.values(features[:count], features[batch.goal], features[batch.intent]),
            slow.values(following, goal, intent),
            slow.values(fixed[:count], intent, intent),
            slow.values(following, intent, intent),
            (frames[batch.goal] == batch.now).to(features.device),
            (frames[batch.intent] == batch.now).to(features.device),
            discount=DISCOUNT,
            expectile=EXPECTILE,
        )
        loss = step_beside(optimiser, errors.mean())
        with torch.no_grad():
            for behind, ahead in zip(slow.parameters(), icvf.parameters(), strict=True):
                behind.lerp_(ahead, RATE)
        yield loss


@torch.no_grad()
def order(icvf: ICVF, videos: Tensor) -> float:
    """Share of videos in whose middle their end is worth more than at their beginning: V(s, g, g), g the end."""
    start, middle, end = (icvf.features(videos[:, t]) for t in (0, videos.shape[1] // 2, -1))
    nearer = icvf.values(middle, end, end).mean(0) > icvf.values(start, end, end).mean(0)
    return float(nearer.float().mean())


def _mlp(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.GELU(), nn.LayerNorm(width)),
        *(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)),
    )
