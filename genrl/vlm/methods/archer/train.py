"""ArCHer (arXiv 2402.19446, section 3): act, remember the turns, fit the critic of utterances, move the policy.

    critic   (Q(o, a) - r - gamma V'(o'))^2  +  (V(o) - Q'(o, u))^2         o, a, r, o' of the memory, u ~ pi(. | o)
    policy   - A(o, u) sum_t log pi(u_t | o, u_<t),   A = min Q(o, u) - min V(o)     o of the memory, u ~ pi(. | o)

Two critics; Q' and V' are slow copies. The utterances u are sampled by the policy as it is, before every step. The
critic reads the states of the policy's own language model (the paper: a smaller one that is trained with it).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor, nn

from genrl.mdp.noise import generator
from genrl.objectives.token_credit import critic_losses, utterance_advantages, utterance_loss
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Meter, Results, descend, summed
from genrl.vlm.engines.generation import Sampling, generate
from genrl.vlm.episodes.critic import ValueHead
from genrl.vlm.episodes.episodes import Walk
from genrl.vlm.episodes.run import Actor, EpisodesRun
from genrl.vlm.methods.archer.settings import ArCHer
from genrl.vlm.methods.updates import NORMS, Asked, check_on_policy
from genrl.vlm.policies.policy import Encoded, Policy, dtype_of
from genrl.vlm.policies.processor import Parts, Prompt
from genrl.vlm.policies.processor import Turn as Spoken

LOSSES = ("loss/q", "loss/v", "loss/policy")


class UtteranceCritic(nn.Module):
    """Two critics, each a Q of a state and an utterance and a V of a state, and their slow copies, which begin equal.

    A state is the language model's last one of the prompt, an utterance its last one of the answer, [B, H] each; the
    model is not trained through them.
    """

    def __init__(self, width: int, hidden: tuple[int, ...], seed: int) -> None:
        super().__init__()
        self.q = nn.ModuleList([ValueHead(2 * width, hidden, seed + k) for k in range(2)])
        self.v = nn.ModuleList([ValueHead(width, hidden, seed + 2 + k) for k in range(2)])
        # Targets from copies that follow slowly: a critic that chases its own newest values runs away.
        self.slow_q = copy.deepcopy(self.q).requires_grad_(False)
        self.slow_v = copy.deepcopy(self.v).requires_grad_(False)

    def quality(self, states: Tensor, utterances: Tensor, *, slow: bool = False) -> Tensor:
        """Q, [2, B]; slow: of the copies."""
        both = torch.cat([states, utterances], -1)
        return torch.stack([head(both) for head in (self.slow_q if slow else self.q)])

    def value(self, states: Tensor, *, slow: bool = False) -> Tensor:
        """V, [2, B]; slow: of the copies."""
        return torch.stack([head(states) for head in (self.slow_v if slow else self.v)])

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """The copies come nearer by this share."""
        for slow, heads in ((self.slow_q, self.q), (self.slow_v, self.v)):
            for old, new in zip(slow.parameters(), heads.parameters(), strict=True):
                old.lerp_(new, rate)


@dataclass(frozen=True)
class Turn:
    """One that was acted. tokens int64 [T]: the utterance; reward of its step; after: the next prompt, None where the
    episode was terminated. Prompts are kept as they were asked, with their pictures: as a model takes them, pixels are
    several times as large, and are made again where a turn is drawn."""

    prompt: Prompt
    tokens: Tensor
    reward: float
    after: Prompt | None


class Turns:
    """The last `room` turns."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: list[Turn] = []

    def add(self, turns: Sequence[Turn]) -> None:
        """Take these in; the oldest leave where there is no room."""
        self.held = [*self.held, *turns][-self.room :]

    def sample(self, number: int, rng: torch.Generator) -> list[Turn]:
        """So many, each equally likely, with repetition."""
        return [self.held[k] for k in torch.randint(len(self.held), (number,), generator=rng).tolist()]

    def state_dict(self) -> dict[str, Any]:
        places: dict[bytes, int] = {}  # turns that follow each other share most of their pictures
        pictures: list[Tensor] = []

        def place(picture: Image.Image) -> int:
            pixels = np.array(picture.convert("RGB"))
            number = places.setdefault(repr(pixels.shape).encode() + pixels.tobytes(), len(pictures))
            if number == len(pictures):
                pictures.append(torch.from_numpy(pixels))
            return number

        def parts(of: Parts) -> list[Any]:
            return [place(part) if isinstance(part, Image.Image) else part for part in of]

        def tree(prompt: Prompt) -> dict[str, Any]:
            before = [[turn.role, parts(turn.parts)] for turn in prompt.before]
            fields = {name: getattr(prompt, name) for name in ("system", "where", "begun")}
            return {"before": before, "parts": parts(prompt.parts), **fields}

        turns = [
            {
                "prompt": tree(one.prompt),
                "tokens": one.tokens,
                "reward": one.reward,
                "after": None if one.after is None else tree(one.after),
            }
            for one in self.held
        ]
        return {"turns": turns, "pictures": pictures}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pictures = [Image.fromarray(pixels.numpy()) for pixels in state["pictures"]]

        def parts(of: list[Any]) -> Parts:
            return tuple(part if isinstance(part, str) else pictures[part] for part in of)

        def prompt(tree: dict[str, Any]) -> Prompt:
            before = tuple(Spoken(role, parts(message)) for role, message in tree["before"])
            return Prompt(parts(tree["parts"]), tree["system"], tree["where"], before, tree["begun"])

        self.held = [
            Turn(
                prompt(turn["prompt"]),
                turn["tokens"],
                turn["reward"],
                None if turn["after"] is None else prompt(turn["after"]),
            )
            for turn in state["turns"]
        ]


def turns_of_walk(done: Walk) -> list[Turn]:
    """The turns of a walk whose environment was not lost. An episode that was cut goes on, for a critic."""
    turns = []
    for k, step in enumerate(done.decisions):
        for place, decision in enumerate(step):
            # Nothing is worth anything after a termination; after a cut the episode would have gone on.
            after = None if decision.terminated else done.following.get((k, place))
            if after is None and not decision.terminated and k + 1 < len(done.decisions):
                after = done.decisions[k + 1][place].prompt
            if not decision.lost:
                source, following = decision.prompt.source, None if after is None else after.source
                assert source is not None, "a prompt that was just made knows what of"
                turns.append(Turn(source, decision.tokens[decision.mask], decision.reward, following))
    return turns


def train(run: EpisodesRun, settings: ArCHer) -> None:
    """All iterations that are left."""
    memory = Turns(settings.memory)
    run.loop.keep("turns", memory)
    for _ in run.loop.iterations():
        acted, row = run.act()
        assert acted.walk is not None
        # All processes hold the same turns, so that a draw by the same key is the same in all of them.
        memory.add([turns for every in gather_object([turns_of_walk(acted.walk)]) for turns in every])
        row |= learn(run, settings, memory)
        row["critic/turns"] = float(len(memory.held))
        run.remember(row)
        run.finish(row)


def learn(run: EpisodesRun, settings: ArCHer, memory: Turns) -> dict[str, float]:
    """The optimiser steps of an iteration; means of what they measured."""
    loop, critic, meter = run.loop, utterance_critic(run.actor), Meter()
    # A critic that knows nothing yet would only shake the policy.
    moved = loop.iteration >= settings.critic.warmup
    kinds = ["critic"] * settings.critic.updates + ["policy"] * settings.updates * moved
    loop.phase("training", len(kinds), len(kinds))
    with loop.timed("train"):
        for number, kind in enumerate(kinds):
            turns = memory.sample(settings.batch_size, generator(run.config.seed, "turns", loop.iteration, number))
            meter.note(step(run, settings, turns, number, kind))
            if kind == "critic":
                critic.follow(settings.critic.follow)
    return meter.result()


def step(run: EpisodesRun, settings: ArCHer, turns: list[Turn], number: int, kind: str) -> dict[str, float]:
    """One optimiser step of the critic or the policy, on some turns; what it measured."""
    sums: dict[str, float] = {}

    def measure(kind: str, results: Results, given: Recorded) -> None:
        sums.update({name: float(results[name].detach()) for name in LOSSES if name in results})
        if kind == "policy":
            error = (results["log_prob"].detach() - given["old_log_prob"])[given["mask"]].abs().max()
            check_on_policy(float(error), dtype_of(run.config))
            size = float(given["advantages"].abs().mean())
            sums["advantage/abs_mean"] = size / run.process.accelerator.num_processes

    prepare = partial(recorded, run, settings, turns, number)
    norms = descend(run.loop, settings, run.actor, [kind], prepare, loss, groups=[kind], measure=measure)
    return summed(sums) | {NORMS[kind]: norms[kind]}


@torch.no_grad()
def recorded(run: EpisodesRun, settings: ArCHer, turns: list[Turn], number: int, kind: str) -> Recorded:
    """This process's share of some turns, with what the policy says there now, as the loss of a step reads it."""
    accelerator, config, policy = run.loop.process.accelerator, run.config, run.policy
    rank, processes = accelerator.process_index, accelerator.num_processes
    places = range(rank, len(turns), processes)
    sampled_turns, share = [turns[k] for k in places], torch.tensor(len(places) / len(turns))
    prompts, temperature = [policy.encode(turn.prompt) for turn in sampled_turns], config.generation.temperature
    keys = [(config.seed, "says", run.loop.iteration, number, k) for k in places]
    sampling = Sampling(config.generation.max_new_tokens, temperature)
    # What the policy says now, not what it said then: V is of the present policy.
    now = generate(policy, prompts, 1, sampling, keys)
    tokens, mask = now.tokens.cpu(), now.mask.cpu()
    critic, fresh = utterance_critic(run.actor), states_of(policy, prompts, tokens, mask, temperature)
    if kind == "policy":
        advantages = utterance_advantages(critic.quality(fresh.state, fresh.utterance), critic.value(fresh.state))
        batch = Asked(prompts, torch.arange(len(sampled_turns)), temperature)
        tensors = {"answers": tokens, "mask": mask, "advantages": advantages.cpu(), "old_log_prob": fresh.log_prob}
        return Recorded(batch, tensors | {"share": share})
    stored = torch.nn.utils.rnn.pad_sequence([turn.tokens for turn in sampled_turns], batch_first=True)
    lengths = torch.tensor([len(turn.tokens) for turn in sampled_turns])
    states = states_of(policy, prompts, stored, torch.arange(stored.shape[1]) < lengths[:, None], temperature)
    ended = torch.tensor([turn.after is None for turn in sampled_turns])
    after = [policy.encode(turn.after) for turn in sampled_turns if turn.after is not None]
    # 0 where the episode ended; the others are filled in.
    following = torch.zeros_like(critic.value(fresh.state))
    if after:
        following[:, ~ended] = critic.value(policy.prefix(after)[1], slow=True)
    tensors = {
        "state": fresh.state,
        "utterance": states.utterance,
        "target_q": critic.quality(fresh.state, fresh.utterance, slow=True),
        "target_v": following,
        "rewards": torch.tensor([turn.reward for turn in sampled_turns], device=following.device),
        "terminated": ended.to(following.device),
    }
    return Recorded(None, tensors | {"share": share})


def loss(settings: ArCHer, actor: Actor, given: Recorded) -> dict[str, Tensor]:
    """This process's share of a step's loss, [], and its parts: the critic's, or the policy's with its log-probs."""
    share = float(given["share"])
    if given.batch is None:
        critic = utterance_critic(actor)
        fit = critic_losses(
            critic.quality(given["state"], given["utterance"]),
            critic.value(given["state"]),
            given["target_q"],
            given["target_v"],
            given["rewards"],
            given["terminated"],
            gamma=settings.gamma,
        )
        return {"loss": share * (fit.q + fit.v), "loss/q": share * fit.q, "loss/v": share * fit.v}
    batch: Asked = given.batch
    replay = actor.policy.log_probs(
        batch.prompts,
        given["answers"],
        given["mask"],
        group=batch.group,
        temperature=batch.temperature,
        # Each turn has a prompt of its own, so there is nothing to share.
        share_prefix=False,
    )
    log_prob = replay.log_prob.cpu()
    utterance_part = share * utterance_loss(log_prob, given["mask"], given["advantages"])
    return {"loss": utterance_part, "loss/policy": utterance_part, "log_prob": log_prob}


class States(NamedTuple):
    """state and utterance [B, H]: the last states of prompts and of answers; log_prob [B, T]."""

    state: Tensor
    utterance: Tensor
    log_prob: Tensor


def states_of(policy: Policy, prompts: list[Encoded], tokens: Tensor, mask: Tensor, temperature: float) -> States:
    """States of answers tokens, mask [B, T], one to each prompt. An answer's last state has read all but its last
    token, which ends it."""
    group = torch.arange(len(prompts))
    replay = policy.log_probs(prompts, tokens, mask, group=group, temperature=temperature, share_prefix=False)
    last = mask.sum(1) - 1
    return States(replay.states[:, 0], replay.states[group, last], replay.log_prob.cpu())


def utterance_critic(actor: Actor) -> UtteranceCritic:
    """The critic that this method is opened with."""
    critic: Any = actor.critic
    assert isinstance(critic, UtteranceCritic)
    return critic
