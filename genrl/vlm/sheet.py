"""The sheet of a language model's answers: questions with the pictures that the model is shown, what is expected, and
scores; of an agent its episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from genrl.runtime.show.sheet import SHOWN, ContactSheet, Look, score_text
from genrl.vlm.episodes.episodes import Episode
from genrl.vlm.episodes.evaluate import asked
from genrl.vlm.policies.processor import open_image, without_clips
from genrl.vlm.rollout.rollout import text_of
from genrl.vlm.tasks import Row
from genrl_rewards.contract import Reward
from genrl_rewards.rows import read_as


def of_answers(
    opened: Mapping[str, Reward],
    rows: Sequence[Row],
    texts: Sequence[str],
    scores: Mapping[str, Sequence[float] | Tensor],
    images: Sequence[Tensor] = (),
) -> ContactSheet:
    """The sheet of the first of these questions, with an answer and scores of each. images: what was made in place of
    texts, of the first ones."""
    looks = []
    for number, row in enumerate(rows[:SHOWN]):
        facts = {"answer": texts[number]}
        facts |= {f"reward {label}": score_text(float(values[number])) for label, values in scores.items()}
        for label, reward in opened.items():
            if read := read_as(reward, {**row.columns, "prompts": text_of(row)}):
                facts[f"{label} expects"] = read
        facts |= {f"column {name}": f"{value!r:.200}" for name, value in row.columns.items()}
        parts: Any = [part for part in without_clips(row.prompt).parts if not isinstance(part, str)]
        pictures = (
            [("shown to the model", open_image(part, row.name)) for part in parts] if not row.prompt.broken else []
        )
        rendered = [("made, as rewards see it", image) for image in images[number : number + 1]]
        looks.append(Look(f"{row.name}\n{text_of(row)}", facts, [*pictures, *rendered]))
    return ContactSheet(looks)


def of_episodes(episodes: Sequence[Episode]) -> ContactSheet:
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
