"""Rewards: a vision-language model as a judge, by the probability of "yes", by a score that it writes, or by which of
two pictures it finds nearer to a goal.

The text of a judge's question is written in the configuration, or read from a text file or a Python constant. Some
reward models were trained with one fixed instruction, which belongs to their authors and is not part of this package.
It is read from the authors' own file, whose code is parsed and not run.

Pairs are judged in two stages (RL-VLM-F; Wang et al. 2024, arXiv 2402.03681): the model first describes both pictures
and compares them with respect to the goal; then it answers with one number, 0, 1 or -1. The wording is ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from PIL.Image import Image

from genrl_rewards.contract import Scored, check_choice, nearest
from genrl_rewards.declared import constants, parse
from genrl_rewards.scorers.judges.vlm import VLM, Endpoint, Question, open_vlm


def read(given: str, reward: str, *, holding: str = "") -> str:
    """The text that `given` means: `file.txt`, `file.py:CONSTANT`, or the text itself.

    `holding` is a placeholder that the text must have. Raises ValueError for a missing file, a constant that is missing
    or is not a plain string, and a text without the placeholder.
    """
    path, colon, name = given.rpartition(":")
    if colon and path.endswith(".py") and "\n" not in given:
        text = _constant(_read(path, reward), path, name, reward)
    elif given.endswith(".txt") and "\n" not in given:
        text = _read(given, reward)
    else:
        text = given
    if holding not in text:
        raise ValueError(f"{reward}: the text {given[:60]!r} has no placeholder {holding}")
    return text


def put(text: str, place: str, prompt: str) -> str:
    """The text with the prompt in its place, as `plain` text."""
    return text.replace(place, plain(prompt))


def plain(text: str) -> str:
    """What may be a control token of some model in it (`<|im_end|>`, `</s>`, `<image>`, `[INST]`) is split behind its
    bracket, so that it is read as text. The tags of an answer, `<think>` and `<answer>`, stay."""
    return CONTROL.sub(r"\g<0> ", text)


def _read(path: str, reward: str) -> str:
    file = Path(path)
    if not file.is_file():
        raise ValueError(
            f"{reward}: there is no file {path!r} with the text of the question (looked from {Path.cwd()})"
        )
    return file.read_text(encoding="utf-8")


def _constant(source: str, path: str, name: str, reward: str) -> str:
    assigned = constants(parse(source, path, f"{reward}:").body)
    texts = {name: value for name, value in assigned.items() if isinstance(value, str)}
    if name not in texts:
        held = ", ".join(texts) or "none"
        raise ValueError(f"{reward}: {path} has no string constant {name!r}.{nearest(name, texts)} It has {held}")
    return texts[name]


CONTROL = re.compile(r"<(?=[|｜]|(?!/?(?:think|answer)>)/?[\w.-]+>)|\[(?=/?\w*[A-Z]{2}\w*\])")
MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
MODES = ("yes_no", "score")
NUMBER = r"(-?\d+(?:\.\d+)?)"

YES_NO = """Look at the picture. Does it show everything that the text between the markers asks for?
<text>
{prompt}
</text>
Answer with one word, Yes or No."""
SCORE = """Look at the picture. How well does it show what the text between the markers asks for? How well is it made?
<text>
{prompt}
</text>
Give reasons in one sentence. Then end with a line "Score: X", where X is a number from 0 (not at all) to 10 (fully)."""
EDIT_FOLLOWING = """The first picture was edited, and the second is the result. This was the instruction:
<text>
{prompt}
</text>
Rate from 0 to 10. Following: how fully was the instruction carried out? Keeping: how well was all else left as it was?
End with two lines, "Following: X" and "Keeping: Y"."""
EDIT_QUALITY = """Rate this edited picture from 0 to 10, whatever it shows. Natural: does it look like one real picture?
Clean: is it free of artefacts, such as distorted or torn parts? End with two lines, "Natural: X" and "Clean: Y"."""


def parse_score(answer: str, label: str, low: float, high: float) -> float:
    """The last number after `label` and a colon in an answer; NaN if there is none or it is not in [low, high].

    The last, because a judge may quote the question, or a prompt that names a score, before it gives its own.
    """
    words = r"\s+".join(map(re.escape, label.split()))  # a line may break anywhere
    # Stars: models like to write the label in bold.
    numbers = re.findall(rf"{words}[\s*]*:[\s*]*{NUMBER}", answer, re.IGNORECASE)
    value = float(numbers[-1]) if numbers else math.nan
    return value if low <= value <= high else math.nan


def edit_score(following: Sequence[float], quality: Sequence[float], high: float = 10) -> float:
    """sqrt(min(following) min(quality)) / high, in [0, 1]: the worst of each kind counts.

    VIEScore's overall score (Ku et al. 2023, arXiv 2312.14867, section 3), as EditScore has it. NaN if a number is NaN.
    """
    if any(math.isnan(value) for value in (*following, *quality)):
        return math.nan
    return math.sqrt(min(following) * min(quality)) / high


def judged(vlm: VLM, questions: Sequence[Question], mode: str = "yes_no", max_tokens: int = 256) -> Scored:
    """What a model says to N questions, by one of `MODES`, in [0, 1]; with the part `mass` for `yes_no`."""
    if mode == "score":
        return [parse_score(answer, "Score", 0, 10) / 10 for answer in vlm.answers(questions, max_tokens)], {}
    answers = vlm.yes_no(questions)
    return [answer.yes for answer in answers], {"mass": [answer.mass for answer in answers]}


@dataclass(kw_only=True, eq=False)
class AsksVLM:
    """What rewards share that ask a vision-language model, local or on a server; `Judge` explains the fields."""

    reward: ClassVar[str]
    """Its name, in messages."""

    model: str = MODEL
    server: Endpoint = None
    dtype: str = "bfloat16"
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Open the model: last, since it takes longest."""
        self.vlm = open_vlm(self.model, self.server, self.dtype, self.device, self.reward)
        self.to = self.vlm.to


@dataclass(kw_only=True, eq=False)
class Judge(AsksVLM):
    """A vision-language model's yes to picture and prompt, or the score that it writes; local or on a server.

    `model`    hub id or folder of a transformers image-text-to-text model, or the model's name on the server
    `mode`     `yes_no` (default): P(yes) / (P(yes) + P(no)) as the first word of the answer; `score`: a number from 0
               to 10 after "Score:" in the answer, over 10
    `question` what is asked, with a placeholder `{prompt}`: the text itself, `file.txt` or `file.py:CONSTANT`
    `server`   an OpenAI-compatible server instead of a local model: url, key_env, timeout_s, deadline_s, concurrency
    `dtype`    of a local model: `bfloat16` (default), `float32`, `float16`
    `max_tokens` of a written answer

    In [0, 1]. No score if neither yes nor no is likely, or if no number can be read. The part `mass` is P(yes) + P(no):
    a small one means that the question was not understood as one of yes and no. A video is shown as all its frames.
    """

    differentiable = False
    reward = "judge"

    mode: str = "yes_no"
    question: str | None = None
    max_tokens: int = 256

    def __post_init__(self) -> None:
        check_choice("judge: unknown mode", self.mode, MODES)
        self.asked = read(self.question or (YES_NO if self.mode == "yes_no" else SCORE), "judge")
        super().__post_init__()

    def __call__(self, pil_images: list[Any], prompts: list[str]) -> Scored:
        return judged(self.vlm, about(self.asked, pil_images, prompts), self.mode, self.max_tokens)


@dataclass(kw_only=True, eq=False)
class EditJudge(AsksVLM):
    """A vision-language model's four scores of an edit, of which the worst count, in [0, 1] (`edit_score`).

    `following`, `quality` what is asked with both pictures and with the result alone, as `question` of `judge`; answers
    end with "Following: X", "Keeping: Y", and "Natural: X", "Clean: Y", each from 0 to 10. Others as in `judge`.
    The source picture is the file in the column `source_image`; the prompt is the instruction.
    """

    differentiable = False
    reward = "edit_judge"

    following: str = EDIT_FOLLOWING
    quality: str = EDIT_QUALITY
    max_tokens: int = 256

    def __post_init__(self) -> None:
        self.following = read(self.following, "edit_judge", holding="{prompt}")
        self.quality = read(self.quality, "edit_judge")
        super().__post_init__()

    def __call__(self, pil_images: list[Image], prompts: list[str], source_images: list[Image]) -> Scored:
        rows = zip(source_images, pil_images, prompts, strict=True)
        both: list[Question] = [[a, b, put(self.following, "{prompt}", prompt)] for a, b, prompt in rows]
        alone: list[Question] = [[picture, self.quality] for picture in pil_images]
        answers = self.vlm.answers([*both, *alone], self.max_tokens)
        places = {"Following": 0, "Keeping": 0, "Natural": len(both), "Clean": len(both)}  # label -> first answer
        parts = {
            label.lower(): [parse_score(answer, label, 0, 10) for answer in answers[start : start + len(both)]]
            for label, start in places.items()
        }
        return [edit_score((f, k), (n, c)) for f, k, n, c in zip(*parts.values(), strict=True)], parts


def about(text: str, pil_images: Sequence[Any], prompts: Sequence[str]) -> list[Question]:
    """A question for each sample: its picture, or its frames in order, and the text with its prompt."""
    rows = zip(pil_images, prompts, strict=True)
    return [[*shown(pictures), put(text, "{prompt}", prompt)] for pictures, prompt in rows]


def shown(pictures: Image | list[Image]) -> list[Image]:
    """A picture, or the frames of a video, as a list."""
    return list(pictures) if isinstance(pictures, list) else [pictures]


ANALYSIS = "{analysis}"

COMPARE = """These are two pictures of the same scene at two moments, picture 0 and then picture 1. The goal is:
<text>
{prompt}
</text>
What does picture 0 show, and what does picture 1? What of it matters for the goal? In which of the two is the goal
nearer to being achieved?"""
ANSWER = """Somebody compared two pictures, picture 0 and picture 1, with this goal:
<text>
{prompt}
</text>
This is the comparison:
<text>
{analysis}
</text>
Is the goal nearer to being achieved in picture 0 or in picture 1? Answer with one number and nothing else: 0, 1, or -1
if there is no difference or it cannot be told."""
ANSWERS = {"0": 1.0, "1": 0.0, "-1": 0.5}


@dataclass(kw_only=True, eq=False)
class PreferenceJudge(AsksVLM):
    """Is a goal nearer in one picture than in the other? A vision-language model's answer in two stages: 1, 0 or .5.

    Pairwise: every ordered pair of a group is asked about. .5 is no preference (the model's -1); there is no score for
    any other answer than one of the three numbers. `compare` is asked with
    both pictures, `answer` about the answer to that, with the placeholders `{prompt}` and `{analysis}`; `model`,
    `server`, `dtype`, `max_tokens` (of the comparison) as in `judge`.
    """

    differentiable = False
    reward = "preference_judge"

    compare: str = COMPARE
    answer: str = ANSWER
    max_tokens: int = 256

    def __post_init__(self) -> None:
        self.compare = read(self.compare, "preference_judge", holding="{prompt}")
        self.answer = read(self.answer, "preference_judge", holding=ANALYSIS)
        super().__post_init__()

    def __call__(self, pil_images: list[Any], prompts: list[str], pairs: list[tuple[int, int]]) -> list[float]:
        both = [[*shown(pil_images[i]), *shown(pil_images[j])] for i, j in pairs]
        goals = [prompts[i] for i, _ in pairs]
        first: list[Question] = [
            [*pictures, put(self.compare, "{prompt}", goal)] for pictures, goal in zip(both, goals, strict=True)
        ]
        analyses = self.vlm.answers(first, self.max_tokens)
        second: list[Question] = [
            [*pictures, put(put(self.answer, "{prompt}", goal), ANALYSIS, analysis)]
            for pictures, goal, analysis in zip(both, goals, analyses, strict=True)
        ]
        return [preference(answer) for answer in self.vlm.answers(second, 8)]


def preference(answer: str) -> float:
    """1.0 for an answer that prefers picture 0, 0.0 for picture 1, 0.5 for neither; NaN if it is no such number alone.

    Marks around the number ("0.", "**1**", "'-1'") are no part of it.
    """
    match = re.fullmatch(r"[\s\"'`*]*(-1|0|1)[\s\"'`*.]*", answer)
    return ANSWERS[match[1]] if match else math.nan
