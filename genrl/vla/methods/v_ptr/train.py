"""V-PTR: videos teach a picture encoder what is near to what, robot data teach values and a policy (arXiv 2309.13041).

1. Videos of play, pictures alone: an intent-conditioned value function (`icvf`). What is kept of it is its encoder.
2. Robot data with actions and rewards: implicit Q-learning on the features of that encoder (V-PTR: CQL, a ResNet-50 of
   Ego4D, all of it trained on).
3. The policy begins with that encoder and is regressed on the data's actions, with weights that grow with their
   advantage.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from genrl.mdp.noise import derive_seed, seeded
from genrl.runtime.loop.recorded import Recorded
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import World, world_of
from genrl.vla.data.frames import frame_statistics
from genrl.vla.methods.v_ptr.icvf import BATCH, ICVF, LEARNING_RATE, order, train_icvf
from genrl.vla.methods.v_ptr.settings import VPTR
from genrl.vla.offline.critics import Critics
from genrl.vla.offline.imitation import imitate, mean_of_last
from genrl.vla.offline.regression import advantage_of, regress, wayward_data, weighted_cloning
from genrl.vla.offline.regression import new_policy as new_regressed
from genrl.vla.offline.transitions import Store, Transitions, frames_of
from genrl.vla.policies.encoder import LOOKS
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
        found = {"pretraining/loss": mean_of_last(steps)}
    else:
        shown = videos(world, settings.videos, policy.image_size, seed=derive_seed(seed, "videos") % 2**32)
        with seeded(seed, "icvf"):
            icvf = ICVF(other.encoder).to(next(policy.parameters()).device)
        found = {"pretraining/loss": mean_of_last(train_icvf(icvf, shown, steps=count, seed=seed))}
        found["pretraining/order"] = order(icvf, shown)
    learned = {name: value for name, value in other.encoder.state_dict().items() if name.startswith(LOOKS)}
    policy.encoder.load_state_dict(policy.encoder.state_dict() | learned)
    return found


@torch.no_grad()
def with_features(policy: Any, data: Transitions) -> Transitions:
    """The data with what the encoder sees in their pictures, without instruction, as `ENVIRONMENT` in their place."""
    look = ICVF(policy.encoder).features

    def told(observation: Batch) -> Batch:
        kept = {name: observation[name] for name in (STATE, TOKENS)}
        return kept | {ENVIRONMENT: torch.cat([look(part) for part in observation[IMAGE].split(512)]).cpu()}

    return data._replace(observation=told(data.observation), next_observation=told(data.next_observation))


def prepared(run: VLARun, settings: VPTR, data: Transitions) -> dict[str, Any]:
    """The encoder, then critics on its features: the advantage [N] of the data's chunks, and figures."""
    config, loop, policy = run.config, run.loop, run.policy
    loop.phase("looking at videos")
    found = pretrained(world_of(config), policy, data, settings, seed=config.seed)
    seen = with_features(policy, data)
    features = seen.observation[ENVIRONMENT]
    inputs = Inputs(policy.config.inputs.state, policy.config.inputs.vocabulary, environment=features.shape[1])
    stats = policy.stats | frame_statistics({ENVIRONMENT: features})
    with seeded(config.seed, "critics"):
        critics = Critics(inputs, stats, policy.horizon * policy.action_dim)
    critics = critics.to(loop.process.accelerator.device)
    advantage, learned = advantage_of(run, settings, critics, seen, "critic/advantage_gap", batch_size=128)
    return {"advantage": advantage, "figures": found | learned}


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
