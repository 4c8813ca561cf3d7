"""RL-VLM-F on offline data: rewards from preferences over pictures, then implicit Q-learning (arXiv 2411.05273).

The data have no rewards. A judge compares pictures of them, an ensemble learns what it prefers,
every transition gets that reward, IQL learns critics, and the policy is regressed on the data's actions with weights
that grow with their advantage.

Rewards for unlabelled offline data from a judge who compares pictures (RL-VLM-F; arXiv 2402.03681, 2411.05273).

A judge looks at two pictures and a goal and says which is nearer to it. An ensemble of reward networks learns from that
(Bradley-Terry on single frames), and gives every transition of the data a reward; any offline method takes it from
there. The judge is a reward of the stack (`genrl_rewards.contract`), here or on a server, pointwise or pairwise: a pair
is a group of two samples, and what counts is which of them scores higher.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import genrl_rewards
from genrl.mdp.noise import derive_seed, generator, seeded
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter
from genrl.vla.config.schema import VLAConfig
from genrl.vla.data.demonstrations import World, world_of
from genrl.vla.methods.rl_vlm_f.settings import RLVLMF, Labels
from genrl.vla.offline.critics import CriticNet, Critics, advantage_of, regress, wayward_data, weighted_cloning
from genrl.vla.offline.critics import new_policy as new_regressed
from genrl.vla.offline.imitation import step_beside
from genrl.vla.offline.transitions import Store, Transitions
from genrl.vla.policies.policy import ENVIRONMENT, STATE, TOKENS, Batch, Inputs, Statistics, rows
from genrl.vla.rollout.sampling import Acting
from genrl_rewards.placing import open_reward
from genrl_rewards.service.remote import Outage

if TYPE_CHECKING:
    from genrl.vla.run import VLARun

CANDIDATES = 10
"""Pairs that are looked at for each that is asked about."""
RIGHT = 0.35
"""Share of the data's episodes in which the player does what it is told."""


def new_policy(config: VLAConfig) -> Any:
    """A policy for the data, with weights by the seed."""
    assert isinstance(config.trainer, RLVLMF)
    return new_regressed(config, config.trainer.episodes, RIGHT, (STATE, ENVIRONMENT, TOKENS))


def learn_rewards(
    world: World,
    ensemble: RewardEnsemble,
    data: Transitions,
    lines: list[str],
    settings: Labels,
    cache: LabelCache,
    *,
    seed: int,
    device: str = "cpu",
    advance: Callable[[int], None] = lambda pairs: None,
) -> dict[str, float]:
    """Rounds of asking and learning; the figures of the last one. device: of a judge that is loaded here."""
    outage = Outage(**settings.outage.model_dump())
    judge = open_reward(settings.judge, settings.args, device=device, remote=settings.remote, outage=outage)
    frames, figures = data.next_observation, Meter()
    labelled, labels = Pairs(*(torch.zeros(0, dtype=torch.int64) for _ in range(2))), torch.zeros(0, dtype=torch.int64)
    try:
        for number in range(settings.rounds):
            num_candidates = settings.pairs if number == 0 else CANDIDATES * settings.pairs
            pairs = draw_pairs(lines, num_candidates, seed=seed, round_number=number)
            if number:  # before the first labels there is nothing to go by
                pairs = choose(ensemble, frames, pairs, settings.pairs)
            answers = label_pairs(
                judge,
                lambda asked: world.pictures(rows(frames, asked), settings.image_size),
                lines,
                pairs,
                cache,
                margin=settings.margin,
                batch_size=settings.batch_size,
                advance=advance,
            )
            labelled = Pairs(*(torch.cat(both) for both in zip(labelled, pairs, strict=True)))
            labels = torch.cat([labels, answers])
            figures, round_seed = Meter(), derive_seed(seed, "round", number)
            for row in train_rewards(ensemble, frames, labelled, labels, steps=settings.steps, seed=round_seed):
                figures.note({f"labels/{name}": value for name, value in row.items()})
    finally:
        genrl_rewards.close(judge)
    shares = {"dropped": labels < 0, "unusable": labels == UNUSABLE}
    label_shares = {f"labels/{name}": float(which.float().mean()) for name, which in shares.items()}
    return figures.result() | label_shares | {"labels/pairs": float(len(labels))}


def train(run: VLARun, settings: RLVLMF) -> None:
    """Labels, rewards and critics once; then iterations of advantage-weighted regression."""
    config, loop, policy = run.config, run.loop, run.policy
    device, world = loop.process.accelerator.device, world_of(config)
    data = wayward_data(config, settings.episodes, RIGHT, policy, policy.horizon)
    with seeded(config.seed, "critics"):
        inputs, stats = policy.config.inputs, policy.stats
        ensemble = RewardEnsemble(inputs, stats).to(device)
        critics = Critics(inputs, stats, policy.horizon * policy.action_dim).to(device)
    store = Store(rewards=ensemble, critics=critics)
    loop.keep("rl_vlm_f", store, changes=False)
    if not store.ready:
        num_labels = settings.labels
        loop.phase("labelling", num_labels.rounds * num_labels.pairs)
        path = loop.process.run.folder / "labels.jsonl" if num_labels.cache is None else Path(num_labels.cache)
        # what answers depend on besides the pictures
        cache = LabelCache(path, f"{num_labels.judge} {sorted(num_labels.args.items())} margin {num_labels.margin}")
        lines = world.instructions(data.next_observation, policy)
        figures: dict[str, Any] = learn_rewards(
            world,
            ensemble,
            data,
            lines,
            num_labels,
            cache,
            seed=config.seed,
            device=str(device),
            advance=loop.advance_or_leave,
        )
        figures["labels/asked"] = float(cache.asked)
        # success is told to the figures alone
        paid = relabel(ensemble, data)
        advantage, learned = advantage_of(run, settings, critics, paid, "data/advantage_gap", batch_size=256)
        store.data = {"advantage": advantage, "figures": figures | learned}
        store.ready = True
    regress(run, settings, loss, data, store.data["advantage"], store.data["figures"])


def loss(settings: RLVLMF, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """Advantage-weighted regression of the policy on chunks of the data, []."""
    return {"loss": weighted_cloning(acting, given)}


UNUSABLE = -2
"""Label of a pair about which the judge gave no answer that can be read."""


class Pairs(NamedTuple):
    """first, second int64 [P]: numbers of two frames that share an instruction."""

    first: Tensor
    second: Tensor


class LabelCache:
    """Answers of a judge by what was shown, in a file of one JSON object per line; None keeps them in memory.

    The key is the hash of both pictures, the instruction and the judge's name; the two orders of a pair are one entry.
    """

    def __init__(self, path: Path | None, judge: str) -> None:
        self.path, self.judge = path, judge
        self.asked = 0
        self._known: dict[str, int] = {}
        if path is not None and path.exists():
            for number, line in enumerate(path.read_text().splitlines(), 1):
                try:
                    entry = json.loads(line)
                    self._known[entry["key"]] = int(entry["label"])
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{path}, line {number} is no label ({error}): delete the line, or the file"
                    ) from error

    def __len__(self) -> int:
        return len(self._known)

    def get(self, first: bytes, second: bytes, instruction: str) -> int | None:
        """1: the first is better, 0: the second, -1: neither, UNUSABLE; None where the judge was not asked."""
        key, swapped = self._key(first, second, instruction)
        label = self._known.get(key)
        return _turned(label) if swapped and label is not None else label

    def put(self, first: bytes, second: bytes, instruction: str, label: int) -> None:
        """Remember an answer, and write it down."""
        key, swapped = self._key(first, second, instruction)
        self._known[key] = _turned(label) if swapped else label
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key, "label": self._known[key]}) + "\n")

    def _key(self, first: bytes, second: bytes, instruction: str) -> tuple[str, bool]:
        # In one order, so that a pair that is asked about the other way round is found again.
        swapped = second < first
        low, high = (second, first) if swapped else (first, second)
        named = json.dumps([self.judge, instruction]).encode()
        return hashlib.blake2b(low + high + named, digest_size=16).hexdigest(), swapped


def image_hash(image: Tensor) -> bytes:
    """16 bytes of a picture, uint8 [S, S, 3]: its shape and pixels."""
    pixels = image.contiguous().cpu().numpy()
    return hashlib.blake2b(str(pixels.shape).encode() + pixels.tobytes(), digest_size=16).digest()


def draw_pairs(instructions: Sequence[str], count: int, *, seed: int, round_number: int) -> Pairs:
    """`count` pairs of different frames with one instruction, uniform over frames: a function of the seeds.

    Raises ValueError where no instruction has two frames.
    """
    number = {line: place for place, line in enumerate(dict.fromkeys(instructions))}
    kind = torch.tensor([number[line] for line in instructions])
    # Frames by their instruction; the partner of a frame is then some places further in its own stretch, around its
    # end.
    order = kind.argsort(stable=True)
    sizes = torch.bincount(kind)
    begins = sizes.cumsum(0) - sizes
    eligible = (sizes[kind] > 1).nonzero()[:, 0]
    if not len(eligible):
        raise ValueError(f"{len(instructions)} frames, and no two with the same instruction: nothing can be compared")
    rng = generator(seed, "pairs", round_number)
    first = eligible[torch.randint(len(eligible), (count,), generator=rng)]
    size, begin = sizes[kind[first]], begins[kind[first]]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    further = 1 + (torch.rand(count, generator=rng) * (size - 1)).long().clamp(max=size - 2)
    second = order[begin + (rank[first] - begin + further) % size]
    return Pairs(first, second)


def label_pairs(
    judge: genrl_rewards.Reward,
    look: Callable[[Tensor], Tensor],
    instructions: Sequence[str],
    pairs: Pairs,
    cache: LabelCache,
    *,
    margin: float = 0.0,
    batch_size: int = 64,
    advance: Callable[[int], None] = lambda pairs: None,
) -> Tensor:
    """What the judge says of each pair, int64 [P]: 1 the first is nearer to its instruction, 0 the second, -1 neither
    (scores within `margin` of each other), UNUSABLE where a score is missing.

    look: numbers of frames, int64 [N] -> their pictures, uint8 [N, S, S, 3]. batch_size: pairs of a call, after which
    their answers are written down and `advance` is told of as many. Pairs that the cache knows are not asked again;
    those of a call that failed will be.
    Raises `genrl_rewards.RewardFailed` as soon as the judge has failed too often.
    """
    numbers, place = torch.cat([pairs.first, pairs.second]).unique(return_inverse=True)
    images = look(numbers)
    hashes = [image_hash(image) for image in images]
    first, second = place.chunk(2)
    open_pairs: dict[tuple[bytes, bytes, str], tuple[int, int]] = {}
    keys = []
    for a, b, frame in zip(first.tolist(), second.tolist(), pairs.first.tolist(), strict=True):
        keys.append((hashes[a], hashes[b], instructions[frame]))
        if cache.get(*keys[-1]) is None:
            open_pairs.setdefault(keys[-1], (a, b))
    waiting = list(open_pairs.items())
    failed = 0
    for begin in range(0, len(waiting), batch_size):
        part = waiting[begin : begin + batch_size]
        order = torch.tensor([row for _, pair in part for row in pair])
        scores = genrl_rewards.score(
            judge,
            images=images[order].movedim(-1, 1).float() / 255.0,
            prompts=[line for (_, _, line), _ in part for _ in range(2)],
            group=[number for number in range(len(part)) for _ in range(2)],
        )
        cache.asked += len(part)
        if scores.failed:
            failed += scores.failed
            genrl_rewards.check_failures(
                cache.judge, failed, 2 * len(waiting), genrl_rewards.first_failure(scores.failures)
            )
        else:
            for (key, _), a, b in zip(part, scores.values[::2], scores.values[1::2], strict=True):
                cache.put(*key, label_of(a, b, margin))
        advance(len(part))
    cached = [cache.get(*key) for key in keys]
    return torch.tensor([UNUSABLE if label is None else label for label in cached], dtype=torch.int64)


def label_of(first: float, second: float, margin: float) -> int:
    """Label of the scores of a pair: as `label_pairs`."""
    if math.isnan(first) or math.isnan(second):
        return UNUSABLE
    return -1 if abs(first - second) <= margin else int(first > second)


class RewardEnsemble(nn.Module):
    """`members` networks of one observation: reward in (-1, 1), each [N]."""

    def __init__(self, inputs: Inputs, stats: Statistics, *, members: int = 3, width: int = 128) -> None:
        super().__init__()
        self.nets = nn.ModuleList(CriticNet(inputs, stats, 0, width) for _ in range(members))

    def forward(self, observation: Batch) -> Tensor:
        """[M, N]."""
        return torch.stack([torch.tanh(net(observation)) for net in self.nets])


def preference_logits(ensemble: RewardEnsemble, frames: Batch, pairs: Pairs) -> Tensor:
    """r(first) - r(second) of each member, [M, P]: the logit of P(first > second) = softmax of both rewards."""
    both = ensemble({name: torch.cat([v[pairs.first], v[pairs.second]]) for name, v in frames.items()})
    first, second = both.chunk(2, 1)
    difference: Tensor = first - second
    return difference


def train_rewards(
    ensemble: RewardEnsemble,
    frames: Batch,
    pairs: Pairs,
    labels: Tensor,
    *,
    steps: int,
    seed: int,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
) -> Iterator[dict[str, float]]:
    """Bradley-Terry: `-log sigma(+-(r_1 - r_0))` on pairs labelled 0 or 1, yielding {"loss", "accuracy"} of each step.

    Those below 0 are dropped. Every member has minibatches of its own. Raises ValueError where no pair is left.
    """
    labelled = (labels >= 0).nonzero()[:, 0]
    if not len(labelled):
        raise ValueError(f"none of the {len(labels)} labels prefers a frame: ask a judge that can tell them apart")
    optimiser = torch.optim.Adam(ensemble.parameters(), lr=learning_rate)
    for step in range(steps):
        losses, hits = [], []
        for member, net in enumerate(ensemble.nets):
            # Another minibatch for each: `choose` goes by where members differ, so they must be able to.
            rng = generator(seed, "reward", step, member)
            chosen = labelled[torch.randint(len(labelled), (batch_size,), generator=rng)]
            both = rows(frames, torch.cat([pairs.first[chosen], pairs.second[chosen]]))
            first, second = torch.tanh(net(both)).chunk(2)
            target = labels[chosen].to(first)
            losses.append(functional.binary_cross_entropy_with_logits(first - second, target))
            hits.append(((first > second) == (target > 0)).float().mean())
        loss = torch.stack(losses).mean()
        yield {"loss": step_beside(optimiser, loss), "accuracy": torch.stack(hits).mean().item()}


@torch.no_grad()
def choose(ensemble: RewardEnsemble, frames: Batch, candidates: Pairs, count: int) -> Pairs:
    """`count` of the candidates to ask about: those on which the members of the ensemble differ most (the std)."""
    # Of probabilities: logits differ most where all members are sure already.
    share = preference_logits(ensemble, frames, candidates).sigmoid()
    best = share.std(0).argsort(descending=True, stable=True)[:count]
    return Pairs(candidates.first[best], candidates.second[best])


@torch.no_grad()
def relabel(ensemble: RewardEnsemble, transitions: Transitions, *, batch_size: int = 4096) -> Transitions:
    """The transitions with learned rewards: `(1 - G) r(s')`, r the ensemble's mean, so that values are in (-1, 1).

    Success flags of the data are not used: whatever ended an episode, its last frame is taken to stay, which is worth
    `r(s')` in all. Costs and the rest are kept.
    """
    following = transitions.next_observation
    parts = torch.arange(len(transitions.reward)).split(batch_size)
    rewards = torch.cat([ensemble(rows(following, part)).mean(0).cpu() for part in parts])
    reward = torch.where(transitions.done, rewards, (1.0 - transitions.discount) * rewards)
    return transitions._replace(reward=reward, terminated=transitions.done)


def _turned(label: int) -> int:
    return label if label < 0 else 1 - label
