"""`genrl compare` of models that answer with pictures, shapes or sounds: the same held-out questions and noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from genrl.config import load
from genrl.runtime.show.compare.media import Media, encode
from genrl.runtime.show.compare.page import Page, Pair, check_pairs, check_size
from genrl.runtime.weights.devices import default_device
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.evaluate import Shown, judge
from genrl.vlm.policies.folder import load_trained, open_policy
from genrl.vlm.rollout.data import Questions
from genrl.vlm.rollout.rollout import open_rewards, text_of

Made = tuple[list[Media], dict[str, list[float]]]


def run_of(name: str) -> VLMConfig | None:
    """The configuration of the run of a model that answers; None for anything else."""
    file = Path(name) / "config.yaml"
    config = load(file) if file.is_file() else None
    return config if isinstance(config, VLMConfig) else None


def compare(
    a: str,
    b: str,
    page: Page,
    *,
    number: int | None = None,
    column: str | None = None,
    scores: bool = True,
    steps: Mapping[str, int] = MappingProxyType({}),
    begin: Callable[[int], None] = lambda samples: None,
    advance: Callable[[int], None] = lambda samples: None,
) -> None:
    """Put a pair for every held-out question of the run into the page, `number` at most.

    a, b: run folders, one of them may be a model's folder. column: of the category of a question. scores: by the run's
    rewards. steps: of a run by its name, the checkpoint; without, the newest. begin: told the number of samples;
    advance: how many more there are. Raises ValueError for models whose answers are text, for runs of different tasks,
    and where the page would be too large.
    """
    first, second = run_of(a), run_of(b)
    config = second or first
    assert config is not None, "one of them is a run"
    if config.environment is not None or config.vlm.output in ("text", "masked_text"):
        raise ValueError(f"{b if second else a}: its answers are text or actions; a page shows pictures and sounds")
    if first is not None and second is not None and (first.task, first.vlm.output) != (second.task, second.vlm.output):
        raise ValueError(f"{a} and {b} are of different tasks: compare runs whose task and vlm.output are the same")
    if Path(a).resolve() == Path(b).resolve():
        raise ValueError(f"A and B are the same model, {a}: give another run, or the model that it began with")
    if number is not None:
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"questions": number})})
    if not scores:
        config = config.model_copy(update={"rewards": ()})
    questions = Questions(config, "eval")
    check_pairs(len(questions))
    begin(2 * len(questions))
    before = _made(a, first, config, questions, advance, steps.get(a))
    check_size(before[0][0], len(questions), beside=page.beside)
    after = _made(b, second, config, questions, advance, steps.get(b))
    for k in range(len(questions)):
        row = questions[k]
        category = None if column is None else row.columns.get(column)
        token = page.add(Pair(text_of(row), before[0][k], after[0][k], None if category is None else str(category)))
        for label in before[1] if token is not None else ():
            values = [made[1][label][k] for made in (before, after)]
            page.add_scores(str(token), label, *(None if math.isnan(value) else value for value in values))


def _made(
    name: str,
    run: VLMConfig | None,
    config: VLMConfig,
    questions: Questions,
    advance: Callable[[int], None],
    step: int | None,
) -> Made:
    """A sample for every question, from a noise that depends on the question alone, and its scores by reward."""
    device = default_device()
    policy = open_policy(config, device, name) if run is None else load_trained(run, Path(name), step, device)
    shown, opened = Shown(len(questions)), open_rewards(config)
    found = judge(policy, config, opened, questions, range(len(questions)), shown=shown, advance=advance)
    media = [Media("audio", sound) for sound in shown.sounds.values()] or [encode(image) for image in shown.images]
    if len(media) != len(questions):
        raise ValueError(f"{name}: its answers are neither pictures nor sounds, so a page cannot show them")
    return media, found.scores
