"""Answers for supervised fine-tuning from a model itself: rejection sampling.

Of k answers to each training question those are kept whose rewards reach a threshold, at most n of a question. They are
written as a data set: a .jsonl file with pictures beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from genrl.mdp.noise import generator
from genrl.runtime.folder.run import write_atomic
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.policy import Policy
from genrl.vlm.policies.processor import open_image
from genrl.vlm.policies.videos import Clip
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import Answers, check_failed, draw, failures_of, open_rewards, totals
from genrl.vlm.tasks import Row
from genrl_rewards.failures import Failure

TOGETHER = 64
"""Answers drawn side by side."""
FILE, PICTURES = "train.jsonl", "pictures"
PLACE = "<image>"


class Counts(NamedTuple):
    """Questions asked, those with an answer that was kept, answers drawn, those that reached the threshold (cut ones do
    not), and those that were kept."""

    questions: int
    answered: int
    samples: int
    passed: int
    kept: int


@dataclass(frozen=True)
class Rule:
    """samples: answers to a question, k. keep: at most so many of them, n, different texts. threshold: least weighted
    sum of the rewards. choose: the shortest of those that reach it, in tokens, or any."""

    samples: int
    keep: int
    threshold: float
    choose: Literal["shortest", "random"]


def collect(
    policy: Policy,
    config: VLMConfig,
    out: Path,
    rule: Rule,
    *,
    begin: Callable[[int], None] = lambda answers: None,
    advance: Callable[[int], None] = lambda answers: None,
) -> Counts:
    """Write the questions with the answers that were kept into `out`: train.jsonl with the columns prompt, image (null
    without pictures), response, reward, and those of the question. begin: told how many answers will be drawn;
    advance: how many more there are.

    An answer is a function of the weights, the seed and its question. Raises ValueError where the file is there
    already, nothing was kept, and for a question that such a file cannot hold; RewardFailed as `check_failed`.
    """
    if (out / FILE).exists():
        raise ValueError(f"{out / FILE} is there already: delete it, or choose another folder")
    generation = config.generation.model_copy(update={"group_size": rule.samples, "batch_size": None})
    config, opened = config.model_copy(update={"generation": generation}), open_rewards(config)
    questions = Questions(config, "train")
    begin(len(questions) * rule.samples)
    lines: list[str] = []
    answered, passed, failures = 0, 0, dict[str, tuple[Failure, ...]]()
    together = max(1, TOGETHER // rule.samples)
    for start in range(0, len(questions), together):
        rows = [questions[number] for number in range(start, min(start + together, len(questions)))]
        answers = draw(policy, config, opened, rows, (config.seed, "collect"), advance=advance)
        failures = failures_of([failures, answers.failures])
        # 1e-9: a weighted sum of .3 and .7 is not exactly 1. A cut answer would teach to break off.
        reached = (totals(config, answers.scores) >= rule.threshold - 1e-9) & ~answers.cut
        passed += int(reached.sum())
        for place, row in enumerate(rows):
            places = range(place * rule.samples, (place + 1) * rule.samples)
            selected = _chosen(answers, [k for k in places if reached[k]], rule, (config.seed, "collect", row.name))
            answered += bool(selected)
            question = _asked(row, out, start + place) if selected else {}
            for k in selected:
                reward = float(totals(config, answers.scores)[k])
                line = {**question, "response": answers.texts[k], "reward": reward}
                lines.append(json.dumps(line, ensure_ascii=False))
    check_failed(config, failures, len(questions) * rule.samples)
    counts = Counts(len(questions), answered, len(questions) * rule.samples, passed, len(lines))
    if not lines:
        raise ValueError(f"none of {counts.samples} answers reaches {rule.threshold:g}: lower it, or draw more")
    # Before the data: where the data file is, the folder is complete.
    write_atomic(out / "counts.json", json.dumps(counts._asdict() | vars(rule), indent=1) + "\n")
    write_atomic(out / FILE, "\n".join(lines) + "\n")
    return counts


def _chosen(answers: Answers, reached: list[int], rule: Rule, key: tuple[int | str, ...]) -> list[int]:
    """At most `keep` of the answers of these numbers, no text twice and no empty one."""
    # Reversed twice, so that of equal texts the first is the one that stays, in the order of sampling.
    different = list({answers.texts[k]: k for k in reversed(reached) if answers.texts[k].strip()}.values())[::-1]
    if rule.choose == "shortest":
        different.sort(key=lambda k: int(answers.mask[k].sum()))
    else:
        shuffled = torch.randperm(len(different), generator=generator(*key)).tolist()
        different = [different[place] for place in shuffled]
    return different[: rule.keep]


def _asked(row: Row, out: Path, number: int) -> dict[str, Any]:
    """A question as a row of the file, its pictures saved beside it. Where they do not stand before one text, the text
    says their places."""
    parts = row.prompt.parts
    if row.prompt.before or row.prompt.begun:
        raise ValueError(f"{row.name}: a conversation cannot be collected, only single questions")
    if any(isinstance(part, Clip) for part in parts):
        raise ValueError(f"{row.name}: a clip cannot be collected, only pictures: its frames would lose their times")
    pictures = [part for part in parts if not isinstance(part, str | Clip)]
    files = [f"{PICTURES}/{number:06d}-{place}.png" for place in range(len(pictures))]
    (out / PICTURES).mkdir(parents=True, exist_ok=True)
    for picture, file in zip(pictures, files, strict=True):
        open_image(picture, row.name).save(out / file)
    first = parts[: len(pictures)] == tuple(pictures) and len(parts) == len(pictures) + 1
    text = parts[-1] if first else "".join(part if isinstance(part, str) else PLACE for part in parts)
    plain = {name: value for name, value in row.columns.items() if _is_json(value)}
    return {**plain, "prompt": text, "image": files[0] if len(files) == 1 else files or None}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
