"""Episodes of a policy: what it is shown, what it says, and what that is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from genrl.data.rows import flag
from genrl.vlm.config.sections import Environment as Settings
from genrl.vlm.engines.generation import Sampling, generate
from genrl.vlm.environments.contract import Message, Observation, Question, Split
from genrl.vlm.environments.discrete import Misuse
from genrl.vlm.environments.hosts import Begin, Draw, Host, Outcome, Say, Work, open_environment
from genrl.vlm.policies.pictures import black, with_pictures
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.policies.processor import Prompt, Turn, placeholder_tokens


@dataclass
class Episode:
    """One that runs or has ended. seen, said: observations and answers (without their given beginning) in turn; said is
    one shorter until the last answer. message: what follows the last answer as the environment told it. heard: for each
    answer, what sub-agents said of what follows it. What cuts it beside a limit of steps: lost: its environment hung or
    died; full: the model has no positions left for a further answer. encoded: the next prompt, once it was needed."""

    seed: int
    split: Split
    seen: list[Observation]
    said: list[str] = field(default_factory=list)
    message: Message = ()
    heard: list[list[str]] = field(default_factory=list)
    total: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    lost: bool = False
    full: bool = False
    encoded: Encoded | None = None
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated

    @property
    def questions(self) -> list[Question]:
        """What sub-agents are asked after the last answer: nothing where no prompt follows it."""
        return [] if self.terminated or self.lost else [part for part in self.message if isinstance(part, Question)]


@dataclass(frozen=True)
class Decision:
    """One answer: prompt, tokens int64 [T], mask bool [T], log_prob [T] of the sampler, and what came of it.

    cut: ended by `max_new_tokens`. valid: it said what to do. lost: nothing came of it, its environment hung or died.
    matched: it is what an expert did, where the environment knows.
    """

    slot: int
    prompt: Encoded
    tokens: Tensor
    mask: Tensor
    log_prob: Tensor
    cut: bool
    reward: float
    terminated: bool
    truncated: bool
    valid: bool
    lost: bool
    matched: bool = True


class Table:
    """Slots in which episodes run. A slot's number is that over all processes; its environment is begun when needed."""

    def __init__(self, settings: Settings, host: Host) -> None:
        """Raises Misuse as `open_environment`."""
        self.settings, self.host = settings, host
        rules = open_environment(settings)
        self.layout, self.help, self.begun = rules.layout, rules.help, rules.begun
        rules.close()
        self.episodes: dict[int, Episode] = {}

    def begin(self, seeds: Mapping[int, int], split: Split) -> None:
        """An episode in each of these slots."""
        work: dict[int, Work] = {slot: Begin(seed, split) for slot, seed in seeds.items()}
        while work:  # a slot whose environment is lost begins again; the host says when it is too often
            outcomes = self.host.do(work)
            for slot, outcome in outcomes.items():
                if not outcome.lost:
                    observation = _without_questions(outcome.observation)
                    if len(observation) < len(outcome.observation):
                        name = self.settings.name
                        raise Misuse(f"{name} has a question for a sub-agent in a first observation, before any answer")
                    self.episodes[slot] = Episode(seeds[slot], split, [observation])
            work = {slot: piece for slot, piece in work.items() if outcomes[slot].lost}

    def say(self, texts: Mapping[int, str]) -> dict[int, Outcome]:
        """A step in each of these slots."""
        outcomes = self.host.do({slot: Say(self.begun + text) for slot, text in texts.items()})
        for slot, outcome in outcomes.items():
            episode = self.episodes[slot]
            episode.said.append(texts[slot])
            episode.heard.append([])
            episode.encoded, episode.message = None, outcome.observation
            if outcome.lost:
                # As many observations as answers, or prompts of later steps would be put together wrongly.
                episode.seen.append(episode.seen[-1])
                episode.truncated = episode.lost = True
                continue
            episode.seen.append(_without_questions(outcome.observation))
            past = len(episode.seen) - 1 - self.settings.images
            if self.layout == "steps" and past >= 0:  # its pictures are shown no more
                episode.seen[past] = tuple(part for part in episode.seen[past] if isinstance(part, str))
            episode.total += outcome.reward
            episode.terminated, episode.truncated = outcome.terminated, outcome.truncated
            said = flag(outcome.info.get("success", False), f"{self.settings.name}: info['success']")
            episode.success = episode.success or said
            episode.parts = dict(outcome.info.get("parts", {}))
        return outcomes

    def hear(self, slot: int, answers: Sequence[str]) -> None:
        """What sub-agents say to the questions of the last step, in their order."""
        episode, left = self.episodes[slot], iter(answers)
        episode.heard[-1] = list(answers)
        episode.seen[-1] = tuple(next(left) if isinstance(part, Question) else part for part in episode.message)

    def draw(self, slots: Sequence[int]) -> dict[int, Image.Image]:
        """Pictures of the scenes. An episode whose environment hangs or dies over it is lost, and has none."""
        outcomes = self.host.do({slot: Draw() for slot in slots})
        for slot, outcome in outcomes.items():
            if outcome.lost:
                self.episodes[slot].truncated = self.episodes[slot].lost = True
        return {
            slot: Image.fromarray(outcome.picture) for slot, outcome in outcomes.items() if outcome.picture is not None
        }

    def prompt(self, slot: int) -> Prompt:
        """What the model is shown: "steps": the last pictures, then the newest text and the help; "conversation": all
        turns, the help behind the first text."""
        episode = self.episodes[slot]
        where = f"{self.settings.name}, the episode of seed {episode.seed}, step {len(episode.said) + 1}"
        if self.layout == "steps":
            recent = episode.seen[-self.settings.images :]
            pictures = [part for observation in recent for part in observation if not isinstance(part, str)]
            texts = [part for part in episode.seen[-1] if isinstance(part, str)]
            return Prompt((*pictures, "\n".join([*texts, self.help])), where=where, begun=self.begun)
        turns = [Turn("user", (*episode.seen[0], "\n" + self.help))]
        for answer, observation in zip(episode.said, episode.seen[1:], strict=True):
            turns += [Turn("assistant", (self.begun + answer,)), Turn("user", observation)]
        return Prompt(turns[-1].parts, where=where, before=tuple(turns[:-1]), begun=self.begun)

    def state(self) -> list[list[Any]]:
        """Slot, seed, split, answers and sub-agents' answers of each episode: what `restore` plays again; a copy."""
        return [
            [slot, episode.seed, episode.split, list(episode.said), [list(heard) for heard in episode.heard]]
            for slot, episode in self.episodes.items()
        ]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Begin these episodes, none of which has ended, and no others, and give the same answers. Raises RuntimeError
        where an environment is lost over it, or is no function of its seed and the answers."""
        self.episodes.clear()
        for slot, seed, split, texts, *further in state:
            self.begin({slot: seed}, split)
            heard = further[0] if further else [[] for _ in texts]  # checkpoints from before sub-agents have none
            for text, answers in zip(texts, heard, strict=True):
                lost = self.say({slot: text})[slot].lost
                if lost:
                    raise RuntimeError(
                        f"{self.settings.name}: the environment of the episode of seed {seed} {lost}, when the episode "
                        "was played again to go on inside it. Resume once more, or allow more time"
                    )
                if self.episodes[slot].ended or len(self.episodes[slot].questions) != len(answers):
                    what = "ended earlier" if self.episodes[slot].ended else "asked otherwise"
                    raise RuntimeError(
                        f"{self.settings.name}: the episode of seed {seed} {what} when it was played again: the "
                        "environment is no function of its seed and the actions, so a run cannot go on inside it"
                    )
                self.hear(slot, answers)


def act(
    policy: Policy,
    table: Table,
    slots: Sequence[int],
    sampling: Sampling,
    keys: Sequence[int | str],
    *,
    blind: bool = False,
) -> list[Decision]:
    """One answer in each of these slots. A sample's key is (*keys, slot, the episode's seed, the number of its step).

    blind: the model is shown black pictures. An episode whose next prompt and answer the model has no positions for is
    cut. Raises ValueError where that is the first prompt.
    """
    encoded = [_encoded(policy, table, slot, blind=blind) for slot in slots]
    episodes = [table.episodes[slot] for slot in slots]
    sample_keys = [
        (*keys, slot, episode.seed, len(episode.said)) for slot, episode in zip(slots, episodes, strict=True)
    ]
    completions = generate(policy, encoded, 1, sampling, sample_keys)
    outcomes = table.say({slot: _plain(text, policy) for slot, text in zip(slots, completions.texts, strict=True)})
    _ask(policy, table, dict(zip(slots, sample_keys, strict=True)), sampling, blind=blind)
    for slot, episode in zip(slots, episodes, strict=True):
        # Seen now, not at the next step: the cut belongs to this decision, whose value is bootstrapped.
        if not episode.ended and not policy.fits(_encoded(policy, table, slot, blind=blind), sampling.max_new_tokens):
            episode.truncated = episode.full = True
    return [
        Decision(
            slot,
            encoded[k],
            completions.tokens[k].cpu(),
            completions.mask[k].cpu(),
            completions.log_prob[k].cpu(),
            completions.finish[k] == "length",
            outcomes[slot].reward,
            episodes[k].terminated,
            episodes[k].truncated,
            bool(outcomes[slot].info.get("valid", True)),
            bool(outcomes[slot].lost),
            bool(outcomes[slot].info.get("matched", True)),
        )
        for k, slot in enumerate(slots)
    ]


def _ask(
    policy: Policy, table: Table, keys: Mapping[int, Sequence[int | str]], sampling: Sampling, *, blind: bool
) -> None:
    """Let sub-agents answer what the last steps of these slots ask, all of them side by side (ParaVT).

    A sub-agent is the policy, drawn alike; its tokens are in no row of the loss (ParaVT's code, as it is run). The key
    of its sample is that of the answer that made it, with its number. Raises ValueError where a question and an answer
    do not fit into the model.
    """
    questions = [
        (slot, k, question_part) for slot in keys for k, question_part in enumerate(table.episodes[slot].questions)
    ]
    if not questions:
        return
    prompts = []
    for slot, k, question in questions:
        episode = table.episodes[slot]
        where = f"{table.settings.name}, question {k + 1} for a sub-agent after step {len(episode.said)}"
        prompt = Prompt(question.parts, where=f"{where} of the episode of seed {episode.seed}")
        prompts.append(_encode(policy, prompt, blind=blind))
    completions = generate(policy, prompts, 1, sampling, [(*keys[slot], "sub-agent", k) for slot, k, _ in questions])
    answers: dict[int, list[str]] = {slot: [] for slot, _, _ in questions}
    for (slot, _, _), text in zip(questions, completions.texts, strict=True):
        answers[slot].append(_plain(text, policy))
    for slot, texts in answers.items():
        table.hear(slot, texts)


def _encoded(policy: Policy, table: Table, slot: int, *, blind: bool = False) -> Encoded:
    """The next prompt of a slot, made once."""
    episode = table.episodes[slot]
    if episode.encoded is None:
        episode.encoded = _encode(policy, table.prompt(slot), blind=blind)
    return episode.encoded


def _encode(policy: Policy, prompt: Prompt, *, blind: bool) -> Encoded:
    """blind: with black pictures."""
    return policy.encode(with_pictures(prompt, black, np.random.default_rng(0)) if blind else prompt)


def _without_questions(message: Message) -> Observation:
    return tuple(part for part in message if not isinstance(part, Question))


def _plain(text: str, policy: Policy) -> str:
    """An answer in which nothing stands for a picture: spelt by other tokens, a placeholder would be one when the
    conversation is read again."""
    for token in placeholder_tokens(policy.processor):
        text = text.replace(token, f"{token[:1]} {token[1:]}")
    return text


def play(
    policy: Policy,
    table: Table,
    seeds: Mapping[int, int],
    split: Split,
    sampling: Sampling,
    keys: Sequence[int | str],
    *,
    blind: bool = False,
    watch: Callable[[int], None] = lambda ended: None,
) -> list[list[Decision]]:
    """Whole episodes, one in each of these slots (slot -> seed); their decisions, in the order of the slots.

    watch: called before the first and after every step, with the number of episodes that ended in it.
    """
    table.begin(seeds, split)
    watch(0)
    decisions: dict[int, list[Decision]] = {slot: [] for slot in seeds}
    while running := [slot for slot in seeds if not table.episodes[slot].ended]:
        for decision in act(policy, table, running, sampling, keys, blind=blind):
            decisions[decision.slot].append(decision)
        watch(sum(table.episodes[slot].ended for slot in running))
    return list(decisions.values())


@dataclass(frozen=True)
class Walk:
    """K steps in each of E slots. decisions: K lists of E. following: (k, slot's place) -> the prompt after that step,
    where the episode was cut in it, or goes on after the last; where that is too long for the model, the last that was
    not. A step that was lost has none. ended: episodes that came to their end."""

    decisions: list[list[Decision]]
    following: dict[tuple[int, int], Encoded]
    ended: list[Episode]


def walk(
    policy: Policy,
    table: Table,
    slots: Sequence[int],
    steps: int,
    next_seed: Callable[[int], int],
    sampling: Sampling,
    keys: Sequence[int | str],
    *,
    watch: Callable[[int], None] = lambda steps: None,
) -> Walk:
    """Steps of episodes that go on where they are; where one ends, the next begins at once, from `next_seed(slot)`."""
    walked = Walk([], {}, [])
    table.begin({slot: next_seed(slot) for slot in slots if slot not in table.episodes}, "train")
    for k in range(steps):
        walked.decisions.append(act(policy, table, slots, sampling, keys))
        for place, slot in enumerate(slots):
            episode = table.episodes[slot]
            if episode.full:
                walked.following[k, place] = walked.decisions[k][place].prompt
            elif not (episode.lost or episode.terminated) and (episode.truncated or k == steps - 1):
                walked.following[k, place] = _encoded(policy, table, slot)
            if episode.ended:
                walked.ended.append(episode)
        # At once: with a critic every slot makes the same number of steps, which is what makes rows of equal weight.
        table.begin({slot: next_seed(slot) for slot in slots if table.episodes[slot].ended}, "train")
        watch(len(slots))
    return walked


def stacked(decisions: Sequence[Decision], name: str) -> Tensor:
    """A tensor per decision as [N, T], padded with zeros on the right."""
    rows: list[Tensor] = [getattr(decision, name) for decision in decisions]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
