"""The most probable answers in held-out episodes, how many of these succeed, and pictures of some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accelerate.utils import gather_object
from PIL import Image

from genrl.mdp.noise import derive_seed
from genrl.runtime.show.intervals import wilson
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
    found = Judged([], [])
    sampling = Sampling(config.generation.max_new_tokens, temperature=0.0)
    # environments in processes cost memory each; those in this one are objects
    together = table.settings.parallel if table.settings.processes else TOGETHER
    for begin in range(0, len(numbers), together):
        some = numbers[begin : begin + together]
        # Without the run's seed: all runs are judged by the same episodes.
        seeds = {slot: derive_seed("held out", number) % SEEDS for slot, number in enumerate(some)}
        filmed = range(max(0, min(len(some), films - begin)))
        shots: dict[int, list[Image.Image]] = {slot: [] for slot in filmed}

        def watch(ended: int, shots: dict[int, list[Image.Image]] = shots) -> None:
            episodes = {slot: table.episodes[slot] for slot in shots}  # a picture of each state, the last one too
            new = [slot for slot, one in episodes.items() if not one.lost and len(shots[slot]) <= len(one.said)]
            for slot, picture in table.draw(new).items():
                shots[slot].append(picture)
            advance(ended)

        play(policy, table, seeds, "eval", sampling, ("held out",), blind=blind, watch=watch)
        ended = [table.episodes[slot] for slot in seeds]
        clips = [(strip(shots[slot] or [Image.new("RGB", (96, 96))]), asked(ended[slot])) for slot in filmed]
        found = found.joined(Judged([measured(one) for one in ended], clips))
    return found


def figures_of(found: Judged) -> dict[str, float]:
    """Metrics of the episodes whose environment was not lost: success with its 95 % interval (Wilson), return, steps,
    and parts of the reward. Raises RuntimeError where all were."""
    kept = [one for one in found.episodes if not one["lost"]]
    if not kept:
        raise RuntimeError(f"the environments of all {len(found.episodes)} episodes of the evaluation hung or died")
    low, high = wilson(int(sum(one["success"] for one in kept)), len(kept))
    row = summary(kept, "eval") | {"eval/success_low": low, "eval/success_high": high}
    row["eval/dropped"] = float(len(found.episodes) - len(kept))
    return row | {"eval/too_long": sum(one["full"] for one in kept)}


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
    sized = [one.resize((round(one.width * height / one.height), height), Image.Resampling.NEAREST) for one in chosen]
    whole = Image.new("RGB", (sum(one.width + 2 for one in sized) - 2, height), (255, 255, 255))
    left = 0
    for one in sized:
        whole.paste(one, (left, 0))
        left += one.width + 2
    return whole


def mean(values: Sequence[float]) -> float:
    """Mean of numbers, at least one."""
    return sum(values) / len(values)


def summary(episodes: Sequence[dict[str, float]], prefix: str) -> dict[str, float]:
    """Means over episodes: success, return, steps, and the parts of the reward, which not all may have."""
    row = {f"{prefix}/success{'' if prefix == 'rollout' else '_mean'}": mean([one["success"] for one in episodes])}
    row |= {f"{prefix}/return_mean": mean([one["total"] for one in episodes])}
    row |= {f"{prefix}/length_mean": mean([one["steps"] for one in episodes])}
    names = dict.fromkeys(name for one in episodes for name in one)
    parts = [name for name in names if name not in ("success", "total", "steps", "lost", "full")]
    where = "reward" if prefix == "rollout" else prefix
    return row | {f"{where}/{name}_mean": mean([one.get(name, 0.0) for one in episodes]) for name in parts}


def acted_figures(
    decisions: Sequence[Decision], ended: Sequence[Episode], before: float, seconds: float
) -> dict[str, float]:
    """Metrics of an iteration's steps and of the episodes that ended in it, of all processes. before: steps that the
    run had made."""
    mine = {
        "tokens": [int(one.mask.sum()) for one in decisions],
        "cut": [one.cut for one in decisions],
        "ended": [measured(one) for one in ended],
        "valid": [one.valid for one in decisions],
    }
    every = gather_object([mine])
    tokens, cut, valid = ([value for one in every for value in one[name]] for name in ("tokens", "cut", "valid"))
    episodes = [value for one in every for value in one["ended"]]
    row = {
        "rollout/tokens_mean": mean(tokens),
        "rollout/cut": mean(cut),
        "rollout/invalid": 1.0 - mean(valid),
        "rollout/env_steps": before + len(tokens),
        "rollout/episodes": float(len(episodes)),
        "rollout/dropped": float(sum(one["lost"] for one in episodes)),
        "rollout/too_long": float(sum(one["full"] for one in episodes)),
        "tokens_per_s": sum(tokens) / max(gather_object([seconds])),
    }
    if episodes:
        row |= summary(episodes, "rollout")
    return row
