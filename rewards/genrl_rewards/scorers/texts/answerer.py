"""Rewards of written answers that need more than a comparison with an expected text: what a frozen model answers from
the chosen frames, whether reasoning and answer agree, and what a judge says about a text.

Ask a language model about texts: a local transformers model, or any OpenAI-compatible server, as
`genrl_rewards.scorers.judges.vlm` does about pictures.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from genrl_rewards.contract import check_choice
from genrl_rewards.models.checkpoints import model_type, pretrained, tokenizer_of, torch_dtype, transformers
from genrl_rewards.scorers.judges import judge
from genrl_rewards.scorers.judges.judge import MODES, judged
from genrl_rewards.scorers.judges.vlm import VLM, Endpoint, Inputs, LocalModel, Question, open_vlm, sees
from genrl_rewards.scorers.texts.expected import numbers_in
from genrl_rewards.scorers.texts.verifiable import answer_in, exact, tag_format

logger = logging.getLogger(__name__)


def open_lm(model: str, server: Endpoint, dtype: str, device: str, reward: str) -> VLM:
    """The model of that name on a server, or else the local model of that hub id or folder, which may be one for
    pictures, too. Questions are pieces of text."""
    if server is not None or sees(model_type(model, reward)):
        return open_vlm(model, server, dtype, device, reward)
    return LocalLM(model, dtype, device, reward)


class LocalLM(LocalModel):
    """A transformers causal language model with a chat template.

    Raises ValueError for a checkpoint of another kind, with missing weights, or without a chat template.
    """

    def __init__(self, model: str, dtype: str = "bfloat16", device: str = "cpu", reward: str = "lm"):
        kind = model_type(model, reward)
        if kind not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(f"{reward}: {model!r} is a {kind!r} model, which answers no questions")
        architecture, precision = transformers.AutoModelForCausalLM, torch_dtype(dtype, reward)
        loaded = pretrained(architecture, model, types=(), reward=reward, dtype=precision).to(device)
        # On the left, so that the last position of every row is the one that the answer begins at.
        tokenizer: Any = tokenizer_of(model, reward, padding_side="left")
        if tokenizer.chat_template is None:
            raise ValueError(f"{reward}: {model!r} has no chat template to ask questions with")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token

        def prepare(questions: Sequence[Question]) -> Inputs:
            chats = [[{"role": "user", "content": "\n".join(map(str, question))}] for question in questions]
            texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
            # The chat template has written the beginning of the text already.
            return dict(tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt"))

        super().__init__(loaded, tokenizer, prepare)
        logger.info("LM %s (%s, %s)", model, kind, dtype)


JUDGED = """A question and an answer to it are between the markers.
<question>
{prompt}
</question>
<reply>
{completion}
</reply>"""  # not <answer>, which completions write: one could end what is judged and go on in the judge's name
YES_NO = f"{JUDGED}\nIs the answer right? Answer with one word, Yes or No."
SCORE = f"""{JUDGED}
How good is the answer? Give reasons in one sentence. Then end with a line "Score: X", X from 0 (useless) to 10."""
MEETS = f"{JUDGED}\nDoes the answer meet this criterion? {{criterion}}\nAnswer with one word, Yes or No."
AGREES = f"{JUDGED}\nDoes the reasoning lead to the answer given at the end? Answer with one word, Yes or No."


class Answered:
    """Does a frozen vision-language model answer correctly from the chosen frames alone (K-frames)? 1 or 0.

    A completion chooses frames by their numbers, from 1, in its answer. Columns: `frames`, the pictures of the clip;
    `about`, what the frozen model is asked; `truth`, the right answer. 0 if no frame is chosen.

    `model`     hub id or folder of a transformers image-text-to-text model, or the model's name on the server
    `shown`     the most chosen frames that are shown, evenly spread
    `tag`       of the frozen model's answer; "" = the whole of it
    `server`, `dtype`, `max_tokens`  as in `judge`
    """

    def __init__(
        self,
        model: str,
        shown: int = 1,
        tag: str = "answer",
        server: Endpoint = None,
        dtype: str = "bfloat16",
        max_tokens: int = 16,
        device: str = "cpu",
    ):
        if shown < 1:
            raise ValueError(f"answered: shown is the number of frames to answer from, at least 1, not {shown}")
        self.shown, self.tag, self.max_tokens = shown, tag, max_tokens
        self.vlm = open_vlm(model, server, dtype, device, "answered")
        self.to = self.vlm.to

    def __call__(
        self, completions: list[str], frames: list[Sequence[Any]], about: list[str], truth: list[str]
    ) -> list[float]:
        chosen = [chosen_frames(text, len(clip)) for text, clip in zip(completions, frames, strict=True)]
        with_numbers = [k for k, numbers in enumerate(chosen) if numbers]
        questions: list[Question] = [
            [*(frames[k][n] for n in spread(chosen[k], self.shown)), judge.plain(about[k])] for k in with_numbers
        ]
        answers = self.vlm.answers(questions, self.max_tokens)
        right = exact(answers, [truth[k] for k in with_numbers], tag=self.tag)
        scores = dict(zip(with_numbers, right, strict=True))
        return [scores.get(k) or 0.0 for k in range(len(completions))]


def chosen_frames(completion: str, number: int) -> list[int]:
    """Which of `number` frames, from 0, a completion chooses, in ascending order; none if it names any other."""
    written = numbers_in(answer_in(completion) or "")
    inside = all(value.is_integer() and 1 <= value <= number for value in written)
    return sorted({int(value) - 1 for value in written}) if inside else []


def spread(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of the values: the middles of equal parts."""
    count = min(most, len(values))
    return [values[int((k + 0.5) * len(values) / count)] for k in range(count)]


class Consistent:
    """R1-Reward's accuracy (1 + .5 c) + .5 format, c = 1 if reasoning and answer agree, otherwise -1; 0 to 2.

    (arXiv 2505.02835.) accuracy: the answer is the column `answer`; format: `<think>` and `<answer>`, each once.
    Without a judge, the two agree if the reasoning ends with the answer (a rule of ours); a judge is asked `question`.

    `model`, `server`, `dtype`  of the judge, as in `text_judge`; null: the rule
    """

    def __init__(
        self,
        model: str | None = None,
        question: str = AGREES,
        server: Endpoint = None,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ):
        self.question = judge.read(question, "consistent", holding="{completion}")
        self.judge = None if model is None else open_lm(model, server, dtype, device, "consistent")

    def to(self, device: str) -> None:
        """Move the judge, if there is one and it runs here."""
        if self.judge is not None:
            self.judge.to(device)

    def __call__(self, prompts: list[str], completions: list[str], answer: list[str]) -> list[float | None]:
        right, form = exact(completions, answer), tag_format(completions)
        agrees = [ends_in_answer(text) for text in completions]
        if self.judge is not None:
            yes, _ = judged(self.judge, asked(self.question, prompts, completions))
            agrees = [probability > 0.5 for probability in yes]
        return [
            None if a is None else a * (1 + 0.5 * (1 if c else -1)) + 0.5 * f
            for a, f, c in zip(right, form, agrees, strict=True)
        ]


def ends_in_answer(completion: str) -> bool:
    """Whether the words of the reasoning end with those of the answer, in any case; neither may be missing."""
    thought, answer = ((answer_in(completion, tag) or "").casefold().split() for tag in ("think", "answer"))
    return bool(answer) and thought[-len(answer) :] == answer


class TextJudge:
    """A language model's yes to a written answer, or the score that it writes, in [0, 1]; local or on a server.

    `model`    hub id or folder of a transformers language model, or the model's name on the server
    `mode`     `yes_no`: P(yes) / (P(yes) + P(no)) as the first word; `score`: a number from 0 to 10 after "Score:"
    `question` what is asked, with placeholders `{prompt}` and `{completion}`: the text, `file.txt`, `file.py:CONSTANT`
    `server`   an OpenAI-compatible server instead of a local model: url, key_env, timeout_s, deadline_s, concurrency

    No score if neither yes nor no is likely, or if no number can be read. Pictures of the question are not shown.
    """

    def __init__(
        self,
        model: str,
        mode: str = "yes_no",
        question: str | None = None,
        server: Endpoint = None,
        dtype: str = "bfloat16",
        max_tokens: int = 256,
        device: str = "cpu",
    ):
        check_choice("text_judge: unknown mode", mode, MODES)
        self.mode, self.max_tokens = mode, max_tokens
        default = YES_NO if mode == "yes_no" else SCORE
        self.question = judge.read(question or default, "text_judge", holding="{completion}")
        self.lm = open_lm(model, server, dtype, device, "text_judge")
        self.to = self.lm.to

    def __call__(self, prompts: list[str], completions: list[str]) -> list[float]:
        return judged(self.lm, asked(self.question, prompts, completions), self.mode, self.max_tokens)[0]


class Rubric:
    """Points of the criteria that a written answer meets, over all positive points (Rubrics as Rewards, 2507.17746).

    Column `rubric`: a list of `{criterion, points}`; negative points are taken off, so a score may be below 0. A judge
    is asked about each criterion by itself, and what it does not answer with yes is not met.

    `model`, `server`, `dtype`  of the judge, as in `text_judge`
    `question` what is asked, with placeholders `{prompt}`, `{criterion}` and `{completion}`
    """

    def __init__(
        self,
        model: str,
        question: str = MEETS,
        server: Endpoint = None,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ):
        self.question = judge.read(question, "rubric", holding="{criterion}")
        self.lm = open_lm(model, server, dtype, device, "rubric")
        self.to = self.lm.to

    def __call__(
        self, prompts: list[str], completions: list[str], rubric: list[Sequence[Mapping[str, Any]]]
    ) -> list[float]:
        points = [points_of(rows) for rows in rubric]
        questions = [
            [filled(judge.put(self.question, "{criterion}", str(one["criterion"])), prompt, completion)]
            for prompt, completion, rows in zip(prompts, completions, rubric, strict=True)
            for one in rows
        ]
        yes = iter(judged(self.lm, questions)[0])
        met = [math.fsum(worth for worth in row if next(yes) > 0.5) for row in points]
        return [got / math.fsum(worth for worth in row if worth > 0) for got, row in zip(met, points, strict=True)]


def points_of(rubric: Sequence[Mapping[str, Any]]) -> list[float]:
    """Points of the criteria of a row. Raises ValueError where none is positive, or something is no criterion."""
    if not all(isinstance(one, Mapping) and {"criterion", "points"} <= one.keys() for one in rubric):
        raise ValueError(f"rubric: a criterion is {{criterion: text, points: number}}, found {rubric!r:.80}")
    points = [float(one["points"]) for one in rubric]
    if not any(worth > 0 for worth in points):
        raise ValueError("rubric: at least one criterion must have positive points")
    return points


def asked(question: str, prompts: Sequence[str], completions: Sequence[str]) -> list[Question]:
    """The question about each completion."""
    return [[filled(question, *row)] for row in zip(prompts, completions, strict=True)]


def filled(question: str, prompt: str, completion: str) -> str:
    """The question with prompt and completion in their places. A completion quotes a model: it cannot add a placeholder
    or a control token of its own."""
    before, place, after = question.partition("{completion}")
    parts = [judge.put(part, "{prompt}", prompt) for part in (before, after)]
    return f"{parts[0]}{judge.put(place, '{completion}', completion)}{parts[1]}"
