"""Rewards of answers that are not compared with an expected text alone: what a frozen model makes of the chosen frames,
whether reasoning and answer agree, and what a judge says of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rewards.scorers.judges import templates
from rewards.scorers.judges.judge import parse_score
from rewards.scorers.judges.lm import open_lm
from rewards.scorers.judges.vlm import open_vlm
from rewards.scorers.texts.verifiable import answer_in, exact, numbers_in, tag_format

JUDGED = """A question and an answer to it are between the markers.
<question>
{prompt}
</question>
<answer>
{completion}
</answer>"""
YES_NO = f"{JUDGED}\nIs the answer right? Answer with one word, Yes or No."
SCORE = f"""{JUDGED}
How good is the answer? Give reasons in one sentence. Then end with a line "Score: X", X from 0 (useless) to 10."""
AGREES = f"{JUDGED}\nDoes the reasoning lead to the answer given at the end? Answer with one word, Yes or No."


class Answered:
    """1 where a frozen model answers rightly when it is shown the chosen frames alone: K-frames' downstream reward.

    A completion chooses frames by their numbers, from 1, in its answer. Columns: `frames`, the pictures of the clip;
    `about`, what the frozen model is asked; `truth`, its right answer. 0 where no frame is chosen.

    `model`     hub id or folder of a transformers image-text-to-text model, or the model's name on the server
    `shown`     at most so many of the chosen frames, evenly spread
    `tag`       of the frozen model's answer; "" = the whole of it
    `server`, `dtype`, `max_tokens`  as for the reward `judge`
    """

    def __init__(
        self,
        model: str,
        shown: int = 1,
        tag: str = "answer",
        server: Mapping[str, Any] | None = None,
        dtype: str = "bfloat16",
        max_tokens: int = 16,
        device: str = "cpu",
    ):
        if shown < 1:
            raise ValueError(f"answered: shown is the number of frames to answer from, 1 or more; found {shown}")
        self.shown, self.tag, self.max_tokens = shown, tag, max_tokens
        self.vlm = open_vlm(model, server, dtype, device, "answered")

    def to(self, device: str) -> None:
        """Move the model, if it is here."""
        self.vlm.to(device)

    def __call__(
        self, completions: list[str], frames: list[Sequence[Any]], about: list[str], truth: list[str]
    ) -> list[float]:
        chosen = [chosen_frames(text, len(clip)) for text, clip in zip(completions, frames, strict=True)]
        asked = [k for k, numbers in enumerate(chosen) if numbers]
        questions = [[*(frames[k][n] for n in spread(chosen[k], self.shown)), about[k]] for k in asked]
        answers = self.vlm.answers(questions, self.max_tokens)
        right = exact(answers, [truth[k] for k in asked], tag=self.tag)
        scores = dict(zip(asked, right, strict=True))
        return [scores.get(k) or 0.0 for k in range(len(completions))]


def chosen_frames(completion: str, number: int) -> list[int]:
    """Which of so many frames, from 0, a completion chooses, in ascending order; none where it names another."""
    written = numbers_in(answer_in(completion) or "")
    inside = all(value.is_integer() and 1 <= value <= number for value in written)
    return sorted({int(value) - 1 for value in written}) if inside else []


def spread(values: Sequence[int], most: int) -> list[int]:
    """At most so many of the values, the middles of equal parts."""
    count = min(most, len(values))
    return [values[int((k + 0.5) * len(values) / count)] for k in range(count)]


class Consistent:
    """accuracy (1 + .5 c) + .5 format, c = 1 where reasoning and answer agree, else -1: R1-Reward (arXiv 2505.02835).

    accuracy: the answer is the column `answer`; format: `<think>` and `<answer>`, each once. Without a judge, they
    agree where the reasoning ends in the answer (a rule of ours); a judge is asked by `question`.

    `model`, `server`, `dtype`  of the judge, as for `text_judge`; null = the rule
    """

    def __init__(
        self,
        model: str | None = None,
        question: str = AGREES,
        server: Mapping[str, Any] | None = None,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ):
        self.question = templates.read(question, "consistent", holding="{completion}")
        self.judge = None if model is None else open_lm(model, server, dtype, device, "consistent")

    def to(self, device: str) -> None:
        """Move the judge, if it is here."""
        if self.judge is not None:
            self.judge.to(device)

    def __call__(self, prompts: list[str], completions: list[str], answer: list[str]) -> list[float | None]:
        right, form = exact(completions, answer), tag_format(completions)
        agrees = [ends_in_answer(text) for text in completions]
        if self.judge is not None:
            asked = [[filled(self.question, *row)] for row in zip(prompts, completions, strict=True)]
            agrees = [found.yes > 0.5 for found in self.judge.yes_no(asked)]
        return [
            None if a is None else a * (1 + 0.5 * (1 if c else -1)) + 0.5 * f
            for a, f, c in zip(right, form, agrees, strict=True)
        ]


def ends_in_answer(completion: str) -> bool:
    """Whether the words of the reasoning end with those of the answer, both there and upper and lower case equal."""
    thought, said = ((answer_in(completion, tag) or "").casefold().split() for tag in ("think", "answer"))
    return bool(said) and thought[-len(said) :] == said


class TextJudge:
    """How good a language model says that an answer is, in [0, 1].

    `model`    hub id or folder of a transformers language model, or the model's name on the server
    `mode`     `yes_no`: P(yes) / (P(yes) + P(no)) as the first word; `score`: a number from 0 to 10 after "Score:"
    `question` what is asked, with the places `{prompt}` and `{completion}`: the text, `file.txt`, `file.py:CONSTANT`
    `server`   an OpenAI-compatible server instead of a local model: url, key_env, timeout_s, deadline_s, concurrency

    No score where neither yes nor no is likely, or no number can be read. Pictures of the question are not shown.
    """

    def __init__(
        self,
        model: str,
        mode: str = "yes_no",
        question: str | None = None,
        server: Mapping[str, Any] | None = None,
        dtype: str = "bfloat16",
        max_tokens: int = 256,
        device: str = "cpu",
    ):
        if mode not in ("yes_no", "score"):
            raise ValueError(f"text_judge: unknown mode {mode!r}. Known: yes_no, score")
        self.mode, self.max_tokens = mode, max_tokens
        default = YES_NO if mode == "yes_no" else SCORE
        self.question = templates.read(question or default, "text_judge", holding="{completion}")
        self.lm = open_lm(model, server, dtype, device, "text_judge")

    def to(self, device: str) -> None:
        """Move the model, if it is here."""
        self.lm.to(device)

    def __call__(self, prompts: list[str], completions: list[str]) -> list[float]:
        asked = [[filled(self.question, *row)] for row in zip(prompts, completions, strict=True)]
        if self.mode == "yes_no":
            return [answer.yes for answer in self.lm.yes_no(asked)]
        return [parse_score(answer, "Score", 0, 10) / 10 for answer in self.lm.answers(asked, self.max_tokens)]


def filled(question: str, prompt: str, completion: str) -> str:
    """The question with prompt and completion in their places. A completion is quoted from a model: it cannot bring a
    place or a control token of its own."""
    before, place, after = question.partition("{completion}")
    parts = [templates.put(part, "{prompt}", prompt) for part in (before, after)]
    return f"{parts[0]}{templates.put(place, '{completion}', completion)}{parts[1]}"
