"""What DiWA learns from demonstrations as its world model sees them: when an instruction is fulfilled; and whether
dreams pay for the right thing, asked before a policy is trained in them.

For that, play that nobody trained on is dreamed once more: from its first observations, with its own actions, without
looking. Where the table fulfils an instruction the dream should pay for it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from genrl.mdp.noise import generator
from genrl.vla.data.demonstrations import World
from genrl.vla.data.frames import STD_FLOOR
from genrl.vla.methods.diwa.rssm import Latent, WorldModel, as_observation, latent_inputs
from genrl.vla.offline.imitation import step_beside
from genrl.vla.policies.encoder import ObservationEncoder
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, Batch, Statistics, tokenise
from genrl.vla.policies.robot import statistics

CONTRAST, TEMPERATURE = 0.5, 0.5
"""Weight of the classifier's contrastive loss, and its temperature."""

LEARNING_RATE = 1e-3
"""Learning rate of the classifier (DiWA: 1e-6)."""


class Encoded(NamedTuple):
    """Demonstrations in latents, frames by frames: observation (h, z, instruction) [F, ..]; action [F, H, 3], the
    expert's chunk from there; done bool [F]: the instruction is fulfilled; first bool [F]: a beginning; lines [F]."""

    observation: Batch
    action: Tensor
    done: Tensor
    first: Tensor
    lines: list[str]


def encode_demonstrations(model: WorldModel, shown: Any, words: Sequence[str]) -> Encoded:
    """The expert's episodes (`World.walk`) as the world model sees them."""
    observations, chunks = torch.from_numpy(shown.observations), torch.from_numpy(shown.chunks)
    latents = [model.first(observations[:, 0])]
    for t in range(1, chunks.shape[1]):
        latents.append(model.look(latents[-1], chunks[:, t - 1, 0], observations[:, t]))
    h, z = (torch.stack(column, 1) for column in zip(*latents, strict=True))
    counted, done = torch.from_numpy(shown.counted), torch.from_numpy(shown.done)
    episode, first = counted.nonzero()[:, 0], torch.zeros_like(counted)
    first[:, 0] = True
    observation = as_observation(Latent(h[counted], z[counted]), tokenise(shown.lines, words)[episode])
    lines = [shown.lines[number] for number in episode.tolist()]
    return Encoded(observation, chunks[counted], done[counted], first[counted], lines)


class RewardClassifier(nn.Module):
    """Latent and instruction -> is it fulfilled: two classes on an embedding, the reward is the likelier one."""

    def __init__(self, world: WorldModel, observation: Batch, words: tuple[str, ...], *, width: int = 128) -> None:
        super().__init__()
        stats: Statistics = {name: statistics(observation[name]) for name in (STATE, ENVIRONMENT)}
        for stat in stats.values():
            stat["std"] = stat["std"].clamp(min=STD_FLOOR)
        self.words = words
        self.encoder = ObservationEncoder(latent_inputs(world, words), stats)
        self.embed = nn.Sequential(
            nn.Linear(self.encoder.size, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64)
        )
        self.classes = nn.Sequential(nn.SiLU(), nn.Linear(64, 2))

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        return tokenise(instructions, self.words)

    def forward(self, observation: Batch) -> tuple[Tensor, Tensor]:
        """Embedding of length 1 [B, 64] and logits [B, 2]."""
        features = self.embed(self.encoder(observation))
        return functional.normalize(features, dim=1), self.classes(features)

    @torch.no_grad()
    def fulfilled(self, observation: Batch) -> Tensor:
        """bool [B]."""
        logits: Tensor = self(observation)[1]
        return logits.argmax(1) == 1


def train_classifier(
    judge: RewardClassifier,
    world: WorldModel,
    encoded: Encoded,
    background: Latent,
    *,
    steps: int,
    seed: int,
    batch_size: int = 256,
) -> Iterator[dict[str, float]]:
    """Cross-entropy and `CONTRAST` times the contrastive loss; yields {"loss", "accuracy"} of each step.

    A quarter of a batch are fulfilled frames of demonstrations. The others are not: an eighth each frames before it
    and ends of demonstrations of something else, and half latents of play (`background`) under any instruction, a few
    of which do fulfil it, unknown to anybody. Without play a policy finds latents that no demonstration has shown, and
    that pay. z is drawn anew from the prior in every second frame: dreams show no other.
    """
    optimiser = torch.optim.Adam(judge.parameters(), lr=LEARNING_RATE)
    observation, eighth = encoded.observation, max(1, batch_size // 8)
    tokens = observation[TOKENS]
    yes, no = encoded.done.nonzero()[:, 0], (~encoded.done).nonzero()[:, 0]
    for step in range(steps):
        rng = generator(seed, "classifier", step)

        def some(numbers: Tensor, count: int, rng: torch.Generator = rng) -> Tensor:
            return numbers[torch.randint(len(numbers), (count,), generator=rng)]

        good, before, swapped, lent = some(yes, 2 * eighth), some(no, eighth), some(yes, eighth), some(yes, eighth)
        # Two ends that were lent each other's instruction and have the same one do fulfil it.
        differ = (tokens[swapped] != tokens[lent]).any(1)
        swapped, lent = swapped[differ], lent[differ]
        play = torch.randint(len(background.h), (4 * eighth,), generator=rng)
        states = torch.cat([good, before, swapped])
        h = torch.cat([observation[STATE][states], background.h[play]])
        z = torch.cat([observation[ENVIRONMENT][states], background.z[play]])
        instructions = torch.cat([tokens[good], tokens[before], tokens[lent], tokens[some(no, 4 * eighth)]])
        with torch.no_grad():
            prior = world.expected(h)
        noise, redrawn = torch.randn(z.shape, generator=rng), torch.rand(len(z), 1, generator=rng) < 0.5
        z = torch.where(redrawn, prior.mean + prior.stddev * noise, z)
        label = (torch.arange(len(h)) < len(good)).long()
        embedding, logits = judge(as_observation(Latent(h, z), instructions))
        cross = functional.cross_entropy(logits, label)
        loss = cross + CONTRAST * supervised_contrastive(embedding, label, TEMPERATURE)
        yield {"loss": step_beside(optimiser, loss), "accuracy": (logits.argmax(1) == label).float().mean().item()}


@torch.no_grad()
def encode_play(world: WorldModel, observations: Tensor, actions: Tensor) -> Latent:
    """Play as the world model sees it: observations [E, T + 1, O], actions [E, T, A] -> E (T + 1) latents."""
    latent = world.first(observations[:, 0])
    latents = [latent]
    for t in range(actions.shape[1]):
        latent = world.look(latent, actions[:, t], observations[:, t + 1])
        latents.append(latent)
    return Latent(torch.cat([latent_of.h for latent_of in latents]), torch.cat([latent_of.z for latent_of in latents]))


@torch.no_grad()
def calibration(
    model: WorldModel, judge: RewardClassifier, held_out: Any, world: World, steps: int, seed: int
) -> dict[str, float]:
    """Precision and recall of the reward over the frames of play (`World.play`) and the world's instructions: of what
    the model sees (`calibration/seen_...`), and of what it dreams in so many steps (`calibration/dreamed_...`)."""
    observations, actions = torch.from_numpy(held_out.observations), torch.from_numpy(held_out.actions)
    looked = dreamed = model.first(observations[:, 0])
    states: dict[str, list[Tensor]] = {"seen": [], "dreamed": []}
    truth = []
    rng = generator(seed, "calibration")
    for t in range(steps):
        noise = torch.randn(dreamed.z.shape, generator=rng)
        looked = model.look(looked, actions[:, t], observations[:, t + 1])
        dreamed = model.imagine(dreamed, actions[:, t], noise)
        truth.append(world.fulfilled(held_out.observations[:, t + 1]))
        states["seen"].append(_paid(judge, looked, world.lines))
        states["dreamed"].append(_paid(judge, dreamed, world.lines))
    true, row = torch.stack(truth), {}
    for name, paid in states.items():
        rewards = torch.stack(paid)
        both = float((rewards & true).sum())
        row[f"calibration/{name}_precision"] = both / max(1.0, float(rewards.sum()))
        row[f"calibration/{name}_recall"] = both / max(1.0, float(true.sum()))
    return row


def _paid(judge: RewardClassifier, latent: Latent, lines: Sequence[str]) -> Tensor:
    """bool [B, lines]."""
    count = len(latent.h)
    instructions = [judge.tokenise([line]).expand(count, -1) for line in lines]
    return torch.stack([judge.fulfilled(as_observation(latent, tokens)) for tokens in instructions], 1)


# Contrastive losses of embeddings.


def supervised_contrastive(embedding: Tensor, label: Tensor, temperature: float) -> Tensor:
    """Mean over anchors of `-mean_p log softmax(e_i e_p / t)`, p the others of its class: [] (arXiv 2004.11362, eq. 2).

    embedding [B, E] of length 1, label int64 [B]. Anchors without another of their class do not count; 0 if none does.
    """
    alike = embedding @ embedding.T / temperature
    itself = torch.eye(len(label), dtype=torch.bool, device=label.device)
    # An anchor is no rival of itself: the largest similarity of all, 1, would drown the others.
    log_share = alike - alike.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    same = (label[:, None] == label[None]) & ~itself
    anchors = same.any(1)
    each = -(log_share.masked_fill(~same, 0.0)).sum(1) / same.sum(1).clamp(min=1)
    return each[anchors].sum() / anchors.sum().clamp(min=1)
