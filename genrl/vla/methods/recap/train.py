"""RECAP, reinforcement with experience and corrections via advantage-conditioned policies (pi*0.6, arXiv 2511.14759).

1. Every step of the data costs 1, a failure more: a critic learns the distribution of what is left of an episode, from
   what has happened alone, without temporal differences.
2. A step is positive where its advantage over some steps ahead is among the best of the data.
3. The policy imitates all of the data, and is told beside the instruction what a step is. It acts as for positive ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from genrl.mdp.noise import generator
from genrl.runtime.loop.recorded import Recorded
from genrl.vla import setup
from genrl.vla.data.demonstrations import dataset_episodes, read_by, world_of
from genrl.vla.data.frames import check_spread, episode_frames
from genrl.vla.data.lerobot_dataset import Episode
from genrl.vla.methods.recap.settings import RECAP
from genrl.vla.offline.critics import wayward_data
from genrl.vla.offline.imitation import followed, imitation_loss, imitation_updates, step_beside
from genrl.vla.offline.transitions import Store, frames_of, successful, take
from genrl.vla.policies.folder import critic_of
from genrl.vla.policies.policy import ACTION, TOKENS, Batch, rows, tokenise, vocabulary
from genrl.vla.rollout.sampling import Acting

if TYPE_CHECKING:
    from genrl.vla.config.schema import VLAConfig
    from genrl.vla.run import VLARun

CLAUSES = ("", " Advantage: negative", " Advantage: unknown")
"""What an instruction is followed by. The best steps have the bare one, so that the policy does its best wherever it is
told what it always was, and a folder of it needs nothing beside; the paper writes "Advantage: positive" there."""
RIGHT = 0.5
"""Share of the table's episodes in which the player does what it is told."""


class ClauseReader:
    """A reader of instructions with each of the clauses, int64 [B, 3, L]."""

    def __init__(self, tell: Callable[[Sequence[str]], Tensor], inputs: tuple[str, ...]) -> None:
        self.tell, self.inputs = tell, inputs

    def tokenise(self, instructions: Sequence[str]) -> Tensor:
        """See `ClauseReader`."""
        said = self.tell([line + clause for line in instructions for clause in CLAUSES])
        return said.view(len(instructions), len(CLAUSES), -1)


class Mixed(NamedTuple):
    """Data, episode by episode: frames [N, ...] with the instructions of `ClauseReader`, int64 [N, 3, L]; of the
    episodes their lengths int64 [E] and which succeeded, bool [E]."""

    frames: Batch
    lengths: Tensor
    success: Tensor

    def shown(self, which: Tensor) -> Batch:
        """The frames with the clauses of these numbers, int64 [N]."""
        said = self.frames[TOKENS]
        return self.frames | {TOKENS: said[torch.arange(len(said)), which]}


def mixed(config: VLAConfig, settings: RECAP, policy: Any) -> tuple[Mixed, tuple[str, ...]]:
    """The data for the policy, or for the new one that is to be made, and the words in them. Raises ValueError for a
    data set of successes or failures alone."""
    reader: Any = config.policy.new if policy is None else policy
    inputs = read_by(config.policy.new) if policy is None else policy.inputs
    folder = None if config.demonstrations is None else config.demonstrations.dataset
    shown = None if folder is None else dataset_episodes(config, folder, inputs, [settings.outcome])
    texts = world_of(config).lines if shown is None else shown.texts
    words = vocabulary([text + clause for text in texts for clause in CLAUSES])
    clauses = ClauseReader(partial(tokenise, words=words) if policy is None else policy.tokenise, inputs)
    if shown is None:
        data = wayward_data(config, settings.episodes, RIGHT, clauses, reader.horizon)
        data = take(data, data.episode.argsort(stable=True))  # tables are played side by side
        _, number, lengths = data.episode.unique(return_inverse=True, return_counts=True)
        won = torch.zeros(len(lengths), dtype=torch.bool)
        won[number[successful(data)]] = True
        return Mixed(frames_of(data), lengths, won), words
    ends: list[tuple[int, bool]] = []

    def noted(episodes: Iterable[Episode]) -> Iterator[Episode]:
        for episode in episodes:
            ends.append((len(episode.instructions), bool((episode.columns[settings.outcome] > 0).any())))
            yield episode

    frames = episode_frames(noted(shown.episodes), clauses.tokenise, inputs=inputs, horizon=reader.horizon)
    lengths, won = (torch.tensor(column) for column in zip(*ends, strict=True))
    if bool(won.all()) or not bool(won.any()):
        what = "successes" if bool(won.all()) else "failures"
        text = f"all {len(won)} episodes are {what} by {settings.outcome}"
        raise ValueError(f"demonstrations.dataset: {text}: there is nothing to compare; take sft, or collect others")
    return Mixed(frames, lengths, won), words


def new_policy(config: VLAConfig) -> Any:
    """A policy for the data, with weights by the seed."""
    assert isinstance(config.trainer, RECAP)
    data, words = mixed(config, config.trainer, None)
    return setup.new_policy(config, data.frames, words)


def returns(lengths: Tensor, success: Tensor, fail: float) -> Tensor:
    """What is left of every step's episode, [N]: -1 for each step to come, and `-fail` at the end of a failure.

    lengths int64 [E], success bool [E].
    """
    left = torch.cat([torch.arange(int(length) - 1, -1, -1) for length in lengths])
    lost = (~success).float().repeat_interleave(lengths)
    return -left.float() - fail * lost


def advantages(left: Tensor, values: Tensor, lengths: Tensor, horizon: int) -> Tensor:
    """`sum of `horizon` rewards / (greatest - least return) + V(o after them) - V(o)`, [N]; beyond an end V is 0.

    left [N] as `returns`, values [N] on [-1, 0]. RLinf scales sums by the affine map of returns, which adds a constant
    where no episode succeeded.
    """
    surplus = left / (left.max() - left.min()) - values
    last = lengths.cumsum(0).repeat_interleave(lengths) - 1
    ahead = torch.arange(len(left)) + horizon
    # The clamp only keeps the index legal; what it reads there is not taken.
    following = torch.where(ahead <= last, surplus[ahead.clamp(max=len(left) - 1)], 0.0)
    return surplus - following


def normalised(left: Tensor) -> Tensor:
    """Returns on [-1, 0], over all data."""
    return (left - left.min()) / (left.max() - left.min()) - 1.0


def value_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy [B] of logits [B, K] over K values on [-1, 0] and a target [B] split between its two neighbours."""
    place = (target.clamp(-1.0, 0.0) + 1.0) * (logits.shape[1] - 1)
    # A target of exactly 0 lies on the last value, which has no neighbour above.
    low = place.floor().clamp(max=logits.shape[1] - 2)
    log_p = functional.log_softmax(logits.float(), 1)
    below, above = (log_p.gather(1, (low.long() + k)[:, None])[:, 0] for k in (0, 1))
    share = (place - low).to(log_p.dtype)
    return -((1.0 - share) * below + share * above)


def expected(logits: Tensor) -> Tensor:
    """The mean [B] of distributions [B, K] over K values on [-1, 0]."""
    atoms = torch.linspace(-1.0, 0.0, logits.shape[1], device=logits.device)
    return logits.float().softmax(1) @ atoms


def clause_numbers(positive: Tensor, uniform: Tensor, drop: float) -> Tensor:
    """Which of `CLAUSES` each step has, int64 [N]: what it is, or, where uniform [N] is at most `drop`, nothing."""
    # So that the policy can act without being told, too, as with classifier-free guidance.
    return torch.where(uniform <= drop, 2, (~positive).long())


def learned_values(run: VLARun, settings: RECAP, shown: Batch, target: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Train the policy's critic on what is left of the episodes, target [N]: its values [N] of all steps, and figures.

    What the critic reads is not trained by it.
    """
    policy, seed, device = run.policy, run.config.seed, run.loop.process.accelerator.device
    # Without the chunks: the critic judges what is seen, not what was done then.
    seen = {name: value for name, value in shown.items() if name in policy.inputs}
    optimiser = torch.optim.Adam(critic_of(policy).parameters(), lr=run.config.optimizer.critic_lr)

    def logits(index: Tensor) -> Tensor:
        with torch.no_grad():
            context = policy.encode(rows(seen, index))
        bin_logits: Tensor = policy.value(context)
        return bin_logits

    def steps() -> Iterator[dict[str, float]]:
        for step in range(settings.critic_steps):
            rng = generator(seed, "values", step)
            index = torch.randint(len(target), (settings.batch_size,), generator=rng)
            yield {"step_loss": step_beside(optimiser, value_loss(logits(index), target[index].to(device)).mean())}

    followed(run, "learning values", settings.critic_steps, steps(), "value")
    optimiser.zero_grad(set_to_none=True)  # the policy's optimiser has the critic, too, and must not move it
    with torch.no_grad():
        parts = [logits(index).cpu() for index in torch.arange(len(target)).split(settings.batch_size)]
    every = torch.cat(parts)
    values, width = expected(every), 1.0 / (settings.bins - 1)
    near = ((values - target).abs() <= width).float()
    return values, {"value/loss": float(value_loss(every, target).mean()), "value/accuracy": float(near.mean())}


def judged(run: VLARun, settings: RECAP, data: Mixed) -> tuple[Tensor, dict[str, float]]:
    """Which steps of the data are positive, bool [N], and figures."""
    plain = torch.zeros(len(data.frames[ACTION]), dtype=torch.int64)
    left = returns(data.lengths, data.success, settings.fail or int(data.lengths.max()))
    values, figures = learned_values(run, settings, data.shown(plain), normalised(left))
    advantage = advantages(left, values, data.lengths, settings.horizon)
    positive = advantage >= threshold(advantage, settings.positive)
    won = data.success.repeat_interleave(data.lengths)
    figures["data/success_mean"] = float(data.success.float().mean())
    figures["data/positive"] = float(positive.float().mean())
    figures["data/positive_gap"] = float(positive[won].float().mean() - positive[~won].float().mean())
    return positive, figures


def threshold(advantage: Tensor, share: float) -> Tensor:
    """The advantage [] that a share of all steps reaches."""
    order = advantage.double().sort().values
    place = (1.0 - share) * (len(order) - 1)  # torch.quantile takes no more than 16 million numbers
    low = int(place)
    return torch.lerp(order[low], order[min(low + 1, len(order) - 1)], place - low).to(advantage.dtype)


def train(run: VLARun, settings: RECAP) -> None:
    """Values and labels once; then iterations of imitation that is told them."""
    loop, policy = run.loop, run.policy
    data, _ = mixed(run.config, settings, policy)
    if run.config.policy.path is not None:
        check_spread(policy, data.frames)
    store = Store()
    loop.keep("recap", store, changes=False)
    if not store.ready:
        positive, figures = judged(run, settings, data)
        store.data, store.ready = {"positive": positive, "figures": figures}, True
    positive = store.data["positive"]
    for iteration in loop.iterations():
        uniform = torch.rand(len(positive), generator=generator(run.config.seed, "told", iteration))
        which = clause_numbers(positive, uniform, settings.drop)
        update_figures = imitation_updates(run, settings, data.shown(which), loss)
        loop.finish(store.data["figures"] | update_figures | {"lr": loop.lr})


def loss(settings: RECAP, acting: Acting, given: Recorded) -> dict[str, Tensor]:
    """The part [] that these frames have in the mean loss of a batch."""
    return {"loss": imitation_loss(acting.policy, given)}
