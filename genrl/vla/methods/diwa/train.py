"""DiWA: a diffusion policy fine-tuned inside a frozen world model (arXiv 2508.03645).

Once: a world model of play, the demonstrations as it sees them, a classifier that says when an instruction is
fulfilled, and a policy that imitates in latents. Then DPPO in dreams, as in the world. The real table is for evaluation
only, where the policy acts on what the world model makes of each observation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from genrl.mdp.noise import derive_seed, seeded
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data import demonstrations
from genrl.vla.data.frames import frame_statistics
from genrl.vla.methods.diwa.classifier import (
    Encoded,
    RewardClassifier,
    calibration,
    encode_demonstrations,
    encode_play,
    train_classifier,
)
from genrl.vla.methods.diwa.rssm import Dream, Latent, Starts, WorldModel, latent_inputs, world_step
from genrl.vla.methods.diwa.settings import DiWA, World
from genrl.vla.methods.ppo.train import estimated_decisions, learn
from genrl.vla.methods.ppo.train import loss as ppo_loss
from genrl.vla.offline.imitation import followed, imitate
from genrl.vla.offline.transitions import Store
from genrl.vla.policies.embedded import DiffusionMLP, DiffusionMLPConfig
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, STATE, Statistics, rows, vocabulary
from genrl.vla.policies.robot import statistics
from genrl.vla.rollout.sampling import Acting
from genrl.vla.setup import side_by_side

if TYPE_CHECKING:
    from genrl.vla.run import VLARun

HELD_OUT = 300
"""Tables of play that ask whether dreams pay for the right thing."""
LENGTH = 64
"""Actions of an episode of play."""
WORLD_RATE = 1e-3
"""Learning rate of the world model, falling linearly to a twentieth."""
STILL = 3
"""Steps after the success of a demonstration that count as fulfilled, too."""


def new_policy(config: VLAConfig) -> DiffusionMLP:
    """A diffusion policy that reads latents and instructions; its statistics are put in once there are latents."""
    new = config.policy.new
    assert new is not None
    words = vocabulary(demonstrations.world_of(config).lines)
    bounds = torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])
    stats: Statistics = {ACTION: statistics(bounds)}
    with seeded(config.seed, "policy"):
        model = WorldModel(torch.zeros(2, 9), torch.zeros(2, 3))
        for name, width in ((STATE, model.deterministic), (ENVIRONMENT, model.stochastic)):
            stats[name] = statistics(torch.tensor([[-1.0], [1.0]]).expand(2, width))
        inputs = latent_inputs(model, words)
        return DiffusionMLP(DiffusionMLPConfig(inputs, 3, new.horizon, train_steps=new.train_steps), stats)


def train(run: VLARun, settings: DiWA) -> None:
    """Make the world (or take it from the checkpoint), then iterations of DPPO in it."""
    config, loop, policy = run.config, run.loop, run.policy
    table = demonstrations.world_of(config)
    with seeded(config.seed, "world"):
        toys = table.play(settings.world.tables, LENGTH, seed=derive_seed(config.seed, "play") % 2**32)
        observations, actions = torch.from_numpy(toys.observations), torch.from_numpy(toys.actions)
        world = WorldModel(observations, actions)
        placeholder = {STATE: torch.zeros(2, world.deterministic), ENVIRONMENT: torch.zeros(2, world.stochastic)}
        judge = RewardClassifier(world, placeholder, policy.config.inputs.vocabulary)
    store = Store(world=world, judge=judge, frozen=run.frozen)
    loop.keep("diwa", store, changes=False)
    if not store.ready:
        store.data = {"figures": train_world(run, settings.world, world, observations, actions)}
    world.requires_grad_(False)
    assert config.demonstrations is not None and config.demonstrations.expert is not None
    count = config.demonstrations.expert
    walked = table.walk(count, seed=config.seed, horizon=policy.horizon, still=STILL)
    encoded = encode_demonstrations(world, walked, policy.config.inputs.vocabulary)
    # Statistics are no weights, and no checkpoint has them: a resumed run makes them again here.
    put_statistics(encoded, policy.stats, judge.encoder.stats, run.frozen.stats)
    if not store.ready:
        store.data["figures"] |= teach(
            run, settings, world, judge, encoded, encode_play(world, observations[:500], actions[:500])
        )
        held_out = table.play(HELD_OUT, table.max_steps, seed=derive_seed(config.seed, "held-out play") % 2**32)
        store.data["figures"] |= calibration(world, judge, held_out, table, table.max_steps, config.seed)
        run.frozen.load_state_dict(policy.state_dict())
        store.ready = True
    judge.requires_grad_(False)
    # The real table, which the run was opened with: from here on the policy acts in dreams.
    run.env.close()
    run.env = dream(config, table, world, judge, encoded)
    count = side_by_side(config, config.evaluation.episodes)
    # the judge of the run, with the real table as the policy's world model sees it
    run.table = table.seen_by(world, count, run.env.chunk)
    run.preparation = dict(store.data["figures"])
    for iteration in run.loop.iterations():
        rollout = run.collect(settings)._replace(shared=recorded_statistics(policy.stats))
        chosen, explained = estimated_decisions(run, rollout, settings)
        figures, trains_policy = Meter(), iteration >= settings.critic_warmup
        learn(run, rollout, chosen, settings, figures, loss, policy=trains_policy, critic=True)
        run.finish(rollout, figures.result() | explained)


def loss(settings: DiWA, acting: Acting, given: Recorded) -> dict[str, torch.Tensor]:
    """DPPO's (`ppo_loss`), on latents normalised as they were: a policy opened anew has no statistics of them yet."""
    for feature, numbers in acting.policy.stats.items():
        numbers.update({key: given[f"statistics/{feature}/{key}"] for key in numbers})
    return ppo_loss(settings, acting, given)


def recorded_statistics(stats: Statistics) -> dict[str, torch.Tensor]:
    """Statistics of a policy, as its loss reads them."""
    return {f"statistics/{feature}/{key}": value for feature, stat in stats.items() for key, value in stat.items()}


def train_world(
    run: VLARun, how: World, world: WorldModel, observations: torch.Tensor, actions: torch.Tensor
) -> dict[str, float]:
    """The world model from play; its figures over the last tenth of the updates."""
    figures, seed = Meter(), run.config.seed
    optimiser = torch.optim.Adam(world.parameters(), lr=WORLD_RATE)
    run.loop.phase("learning the world", how.steps)
    for step in range(how.steps):
        optimiser.param_groups[0]["lr"] = WORLD_RATE * max(0.05, 1.0 - step / how.steps)
        losses = world_step(world, optimiser, observations, actions, length=how.window, seed=seed, step=step)
        if step >= 0.9 * how.steps:
            figures.note({"world/reconstruction": float(losses.reconstruction), "world/kl": float(losses.kl)})
        run.loop.advance(1)
    return figures.result()


def teach(
    run: VLARun, settings: DiWA, world: WorldModel, judge: RewardClassifier, shown: Encoded, background: Latent
) -> dict[str, float]:
    """The classifier and the imitating policy, from demonstrations in latents."""
    policy, seed, steps, count = run.policy, run.config.seed, settings.classifier.steps, settings.imitation_steps
    learned = train_classifier(judge, world, shown, background, steps=steps, seed=seed)
    figures = followed(run, "learning the reward", steps, learned, "classifier")
    frames, levels = rows(shown.observation | {ACTION: shown.action}, ~shown.done), policy.config.train_steps
    errors = imitate(policy, frames, steps=count, batch_size=128, learning_rate=1e-3, seed=seed, train_steps=levels)
    return figures | followed(run, "imitating", count, ({"imitation": error} for error in errors), "loss")


def dream(
    config: VLAConfig, table: demonstrations.World, world: WorldModel, judge: RewardClassifier, shown: Encoded
) -> Dream:
    """Dream as many episodes as the configuration has environments, from the beginnings of the demonstrations."""
    env, new = config.environment, config.policy.new
    assert new is not None
    starts = Latent(shown.observation[STATE][shown.first], shown.observation[ENVIRONMENT][shown.first])
    lines = [line for line, first in zip(shown.lines, shown.first.tolist(), strict=True) if first]
    return Dream(
        world,
        judge,
        Starts(starts, lines),
        num_envs=env.num_envs,
        chunk=env.chunk or new.horizon,
        max_steps=table.max_steps,
        group_size=env.group_size,
        draw=table.draw,
    )


def put_statistics(shown: Encoded, *several: Statistics) -> None:
    """Normalise latents by those of the demonstrations, in place: the policies' and the classifier's."""
    statistics = frame_statistics({name: shown.observation[name] for name in (STATE, ENVIRONMENT)})
    for stats in several:
        for name, numbers in statistics.items():
            stats[name].update(numbers)
