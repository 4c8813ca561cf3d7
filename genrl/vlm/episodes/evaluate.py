"""The most probable answers in held-out episodes, how many of these succeed, and pictures of some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object
from PIL import Image

from genrl.mdp.noise import derive_seed
from genrl.runtime.show.compare.statistics import wilson
from genrl.runtime.show.sheet import SHOWN, ContactSheet, Look, score_text
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.engines.generation import Sampling
from genrl.vlm.episodes.episodes import Decision, Episode, Table, play
from genrl.vlm.policies.policy import Policy

TOGETHER = 64
"""Episodes side by side."""
FILMED = 6
"""Episodes whose pictures are kept."""
LONGEST = 10
"""Pictures of one of them, evenly spaced."""

SEEDS = 2**31  # that environments take


@dataclass
class Judged:
    """Episodes: figures of each, and of the first ones a strip of pictures and what was to be done."""

    episodes: list[dict[str, float]]
    films: list[tuple[Image.Image, str]]

    def joined(self, other: Judged) -> Judged:
        """Both, one after the other."""
        return Judged(self.episodes + other.episodes, self.films + other.films)


def judge(
    policy: Policy,
    config: VLMConfig,
    table: Table,
    numbers: Sequence[int],
    *,
    blind: bool = False,
    films: int = FILMED,
    advance: Callable[[int], None] = lambda ended: None,
) -> Judged:
    """Act in the held-out episodes of these numbers, greedily. blind: with black pictures."""
    judged = Judged([], [])
    sampling = Sampling(config.generation.max_new_tokens, temperature=0.0)
    # environments in processes cost memory each; those in this one are objects
    together = table.settings.parallel if table.settings.timeout_s is not None else TOGETHER
    for begin in range(0, len(numbers), together):
        some = numbers[begin : begin + together]
        # Without the run's seed: all runs are judged by the same episodes.
        seeds = {slot: derive_seed("held out", number) % SEEDS for slot, number in enumerate(some)}
        filmed = range(max(0, min(len(some), films - begin)))
        shots: dict[int, list[Image.Image]] = {slot: [] for slot in filmed}

        def watch(ended: int, shots: dict[int, list[Image.Image]] = shots) -> None:
            episodes = {slot: table.episodes[slot] for slot in shots}  # a picture of each state, the last one too
            new = [
                slot for slot, episode in episodes.items() if not episode.lost and len(shots[slot]) <= len(episode.said)
            ]
            for slot, picture in table.draw(new).items():
                shots[slot].append(picture)
            advance(ended)

        play(policy, table, seeds, "eval", sampling, ("held out",), blind=blind, watch=watch)
        ended = [table.episodes[slot] for slot in seeds]
        clips = [(strip(shots[slot] or [Image.new("RGB", (96, 96))]), asked(ended[slot])) for slot in filmed]
        judged = judged.joined(Judged([measured(episode) for episode in ended], clips))
    return judged


def figures_of(judged: Judged) -> dict[str, float]:
    """Metrics of the episodes whose environment was not lost: success with its 95 % interval (Wilson), return, steps,
    and parts of the reward. Raises RuntimeError where all were."""
    complete = [episode for episode in judged.episodes if not episode["lost"]]
    if not complete:
        raise RuntimeError(f"the environments of all {len(judged.episodes)} episodes of the evaluation hung or died")
    low, high = wilson(int(sum(episode["success"] for episode in complete)), len(complete))
    row = summary(complete, "eval") | {"eval/success_low": low, "eval/success_high": high}
    row["eval/dropped"] = float(len(judged.episodes) - len(complete))
    return row | {"eval/too_long": sum(episode["full"] for episode in complete)}


def measured(episode: Episode) -> dict[str, float]:
    """Figures of one."""
    how = {name: float(getattr(episode, name)) for name in ("success", "total", "lost", "full")}
    return how | {"steps": float(len(episode.said))} | episode.parts


def asked(episode: Episode) -> str:
    """The first text that was shown."""
    return next((part for part in episode.seen[0] if isinstance(part, str)), "")


def strip(pictures: Sequence[Image.Image], height: int = 96) -> Image.Image:
    """At most `LONGEST` of the pictures side by side, evenly spaced from the first to the last."""
    number = min(LONGEST, len(pictures))
    chosen = [pictures[round(k * (len(pictures) - 1) / max(number - 1, 1))] for k in range(number)]
    sized = [
        picture.resize((round(picture.width * height / picture.height), height), Image.Resampling.NEAREST)
        for picture in chosen
    ]
    canvas = Image.new("RGB", (sum(picture.width + 2 for picture in sized) - 2, height), (255, 255, 255))
    left = 0
    for picture in sized:
        canvas.paste(picture, (left, 0))
        left += picture.width + 2
    return canvas


def mean(values: Sequence[float]) -> float:
    """Mean of numbers, at least one."""
    return sum(values) / len(values)


def summary(episodes: Sequence[dict[str, float]], prefix: str) -> dict[str, float]:
    """Means over episodes: success, return, steps, and the parts of the reward, which not all may have."""
    row = {
        f"{prefix}/success{'' if prefix == 'rollout' else '_mean'}": mean([episode["success"] for episode in episodes])
    }
    row |= {f"{prefix}/return_mean": mean([episode["total"] for episode in episodes])}
    row |= {f"{prefix}/length_mean": mean([episode["steps"] for episode in episodes])}
    names = dict.fromkeys(name for episode in episodes for name in episode)
    parts = [name for name in names if name not in ("success", "total", "steps", "lost", "full")]
    where = "reward" if prefix == "rollout" else prefix
    return row | {f"{where}/{name}_mean": mean([episode.get(name, 0.0) for episode in episodes]) for name in parts}


def acted_figures(
    decisions: Sequence[Decision], ended: Sequence[Episode], before: float, seconds: float
) -> dict[str, float]:
    """Metrics of an iteration's steps and of the episodes that ended in it, of all processes. before: steps that the
    run had made."""
    local = {
        "tokens": [int(row_of.mask.sum()) for row_of in decisions],
        "cut": [row_of.cut for row_of in decisions],
        "ended": [measured(row_of) for row_of in ended],
        "valid": [row_of.valid for row_of in decisions],
    }
    every = gather_object([local])
    tokens, cut, valid = ([value for row_of in every for value in row_of[name]] for name in ("tokens", "cut", "valid"))
    episodes = [value for row_of in every for value in row_of["ended"]]
    row = {
        "rollout/tokens_mean": mean(tokens),
        "rollout/cut": mean(cut),
        "rollout/invalid": 1.0 - mean(valid),
        "rollout/env_steps": before + len(tokens),
        "rollout/episodes": float(len(episodes)),
        "rollout/dropped": float(sum(row_of["lost"] for row_of in episodes)),
        "rollout/too_long": float(sum(row_of["full"] for row_of in episodes)),
        "tokens_per_s": sum(tokens) / max(gather_object([seconds])),
    }
    if episodes:
        row |= summary(episodes, "rollout")
    return row


def sheet_of(episodes: Sequence[Episode]) -> ContactSheet:
    """The sheet of the first episodes: what was said in the first steps, and the pictures that are still remembered."""
    looks = []
    for episode in episodes[:SHOWN]:
        facts = {f"said, step {k + 1}": text for k, text in enumerate(episode.said[:SHOWN])}
        facts |= {"steps": str(len(episode.said)), "success": str(episode.success), "return": score_text(episode.total)}
        observations = enumerate(episode.seen)
        pictures: Any = [
            (f"shown, step {k + 1}", part) for k, parts in observations for part in parts if not isinstance(part, str)
        ]
        looks.append(Look(asked(episode), facts, pictures[-SHOWN:]))
    return ContactSheet(looks)
