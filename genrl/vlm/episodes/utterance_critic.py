"""The critic of whole utterances, and the memory of turns that it learns from (ArCHer)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from genrl.vlm.episodes.critic import ValueHead
from genrl.vlm.episodes.episodes import Walk
from genrl.vlm.policies.processor import Parts, Prompt
from genrl.vlm.policies.processor import Turn as Spoken


class UtteranceCritic(nn.Module):
    """Two critics, each a Q of a state and an utterance and a V of a state, and their slow copies, which begin equal.

    A state is the language model's last one of the prompt, an utterance its last one of the answer, [B, H] each; the
    model is not trained through them.
    """

    def __init__(self, width: int, hidden: tuple[int, ...], seed: int) -> None:
        super().__init__()
        self.q = nn.ModuleList([ValueHead(2 * width, hidden, seed + k) for k in range(2)])
        self.v = nn.ModuleList([ValueHead(width, hidden, seed + 2 + k) for k in range(2)])
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

    def drawn(self, number: int, source: torch.Generator) -> list[Turn]:
        """So many, each equally likely, with repetition."""
        return [self.held[k] for k in torch.randint(len(self.held), (number,), generator=source).tolist()]

    def state_dict(self) -> dict[str, Any]:
        places: dict[bytes, int] = {}  # turns that follow each other share most of their pictures
        pictures: list[Tensor] = []

        def place(picture: Image.Image) -> int:
            pixels = np.array(picture.convert("RGB"))
            found = places.setdefault(repr(pixels.shape).encode() + pixels.tobytes(), len(pictures))
            if found == len(pictures):
                pictures.append(torch.from_numpy(pixels))
            return found

        def parts(of: Parts) -> list[Any]:
            return [place(part) if isinstance(part, Image.Image) else part for part in of]

        def tree(prompt: Prompt) -> dict[str, Any]:
            before = [[turn.role, parts(turn.parts)] for turn in prompt.before]
            rest = {name: getattr(prompt, name) for name in ("system", "where", "begun")}
            return {"before": before, "parts": parts(prompt.parts), **rest}

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
            before = tuple(Spoken(role, parts(said)) for role, said in tree["before"])
            return Prompt(parts(tree["parts"]), tree["system"], tree["where"], before, tree["begun"])

        self.held = [
            Turn(
                prompt(one["prompt"]),
                one["tokens"],
                one["reward"],
                None if one["after"] is None else prompt(one["after"]),
            )
            for one in state["turns"]
        ]


def turns_of_walk(done: Walk) -> list[Turn]:
    """The turns of a walk whose environment was not lost. An episode that was cut goes on, for a critic."""
    found = []
    for k, step in enumerate(done.decisions):
        for place, one in enumerate(step):
            after = None if one.terminated else done.following.get((k, place))
            if after is None and not one.terminated and k + 1 < len(done.decisions):
                after = done.decisions[k + 1][place].prompt
            if not one.lost:
                asked, following = one.prompt.source, None if after is None else after.source
                assert asked is not None, "a prompt that was just made knows what of"
                found.append(Turn(asked, one.tokens[one.mask], one.reward, following))
    return found
