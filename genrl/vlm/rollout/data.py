"""Questions of a run: a generated task, a .jsonl file with pictures beside it, or a data set; and the answers that
their columns teach, as the tokens that the model would have to sample."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from genrl.config.plugins import find
from genrl.data.prompts import DATA_SET, PromptError, is_data_set, open_data_set
from genrl.data.prompts import Prompt as Asked
from genrl.data.prompts import read as read_prompts
from genrl.data.rows import PICTURES, is_video
from genrl.mdp.noise import generator
from genrl.vlm.config.names import FORMATS, OUTPUTS
from genrl.vlm.config.schema import PLACE, VLMConfig
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.policies.processor import Prompt, answer_ids, named_error, open_image
from genrl.vlm.rollout.rollout import order
from genrl.vlm.rollout.turns import clip_of, prompt_of
from genrl.vlm.tasks import Generated, Row, Split
from genrl_rewards.given import given, is_given

MEDIA = re.compile(r"(?:image|img|pic|picture|photo|video|clip)s?(?:_(?:path|file|name)s?)?", re.IGNORECASE)
"""Names that columns of pictures and clips have."""
Opener = Callable[[str, Any], tuple[Any, ...]]
"""What the model is shown of one picture or clip of a row, whose name comes first."""


class Questions:
    """Rows by number: `questions[k]`, drawn or read when they are asked for; `len(questions)` of them.

    kept: numbers of those that training asks, all unless `augment.leave_out` left some out.
    """

    def __init__(self, config: VLMConfig, split: Split, *, counted: bool = False) -> None:
        """counted: the places for pictures of every row were counted before, by `check_questions`. Raises ValueError
        for data that cannot be read, or lacks a column."""
        task = config.task
        self.config, self.split, self.source = config, split, task.train if split == "train" else task.eval
        self.rows: Any = None
        self.sees: bool = find(config.vlm.output, OUTPUTS).sees
        self.format: Any = None if task.format is None else find(task.format, FORMATS)
        self._easiest: list[int] | None = None
        if task.name is not None:
            self.generated = Generated(task.name, split)
            self.number = self.generated.number(task.rows if split == "train" else config.evaluation.questions)
            self.kept: Sequence[int] = range(self.number)
            return
        assert self.source is not None, "vlm_rules asks for it"
        if is_given(self.source):
            self.rows = given(self.source)
        elif Path(self.source).suffix in (".jsonl", ".txt"):
            try:
                self.rows = read_prompts(self.source, task.prompt, chat=True).rows
            except PromptError as error:
                raise ValueError(f"task.{split}: {error}") from error
        elif self.format is not None:
            self.rows = open_data_set(self.source)
        else:
            self.rows = _data_set(self.source, task.prompt, task.image)
        self.number = len(self.rows) if split == "train" else min(len(self.rows), config.evaluation.questions)
        self.kept = range(self.number)
        if (
            isinstance(self.rows, list) and self.format is None and not counted
        ):  # places are counted before anything is trained
            for number in range(self.number):
                self._row(number, {"image": _unopened, "video": _unopened})

    def __len__(self) -> int:
        return self.number

    def asked(self, iteration: int, first: int, count: int) -> list[int]:
        """Numbers of questions first, first + 1 ... of a run; with a curriculum of the share of easy ones that the
        iteration takes its questions from, each of them equally often."""
        plan, seed = self.config.task.curriculum, self.config.seed
        if plan is None:
            return [self.kept[place] for place in order(len(self.kept), seed, first, count)]
        if self._easiest is None:
            # When it is first asked for: sorting reads the column of every row.
            self._easiest = sorted(self.kept, key=self._difficulty)
        share = min(1.0, plan.start + (1 - plan.start) * iteration / plan.over)
        # At least as many as are asked, or a question would come twice in one iteration.
        pool = self._easiest[: max(count, math.ceil(share * len(self.kept)))]
        chosen = torch.randperm(len(pool), generator=generator(seed, "curriculum", first))[:count]
        return [pool[place] for place in chosen.tolist()]

    def columns(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names and columns of all rows of data that can be read, without their pictures; none of a generated task."""
        task, rows = self.config.task, self.rows
        if rows is None:
            return
        if self.format is None and hasattr(rows, "select_columns"):
            names = [name for name in rows.column_names if name not in (task.prompt, task.image, task.video)]
            for number, columns in enumerate(rows.select_columns(names)):
                yield f"{self.source}:{number + 1}", dict(columns)
            return
        for number in range(len(rows)):
            try:
                row = self._row(number, {"image": _unopened, "video": _unopened})
            except Exception:  # noqa: BLE001 counted as that row's failure, with its name, when it is asked
                continue
            yield row.name, row.columns

    def _difficulty(self, number: int) -> float:
        assert self.config.task.curriculum is not None
        row, column = self[number], self.config.task.curriculum.column
        value = row.columns.get(column)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            have = ", ".join(row.columns)
            raise ValueError(
                f"{row.name}: the column {column!r} is to say how hard the question is (task.curriculum.column), and "
                f"holds {value!r}; it must be a number. Columns: {have}"
            )
        return float(value)

    def __getitem__(self, number: int) -> Row:
        """Raises ValueError naming file and row where a picture, a clip or the question is of no use."""
        task = self.config.task
        if task.name is not None:
            generated = self.generated[number]
            prompt = Prompt(generated.prompt.parts, system=task.system, where=generated.name)
            return Row(generated.name, prompt, generated.columns)
        return self._row(number, {"image": self._picture, "video": self._clip})

    def row(self, number: int) -> Row:
        """A question of a row that cannot be made one, with what is `broken`, and the columns that it has."""
        try:
            return self[number]
        except Exception as error:  # noqa: BLE001 a data set, a decoder or a user's format may raise anything
            where, columns = f"{self.source}:{number + 1}", dict[str, Any]()
            if isinstance(self.rows, list):
                stored = self.rows[number]
                where, columns = (self._name(number), dict(stored.columns if isinstance(stored, Asked) else stored))
            return Row(where, Prompt(("?",), where=where, broken=named_error(where, error)), columns)

    def _name(self, number: int) -> str:
        row = self.rows[number] if isinstance(self.rows, list) else None
        return f"{self.source}:{row.line if isinstance(row, Asked) else number + 1}"

    def _row(self, number: int, opened: dict[str, Opener]) -> Row:
        """The row of data of this number. opened: what becomes of its pictures and clips."""
        task, where = self.config.task, self._name(number)
        try:
            stored = self.rows[number]
        except Exception as error:  # a data set decodes its pictures itself
            raise ValueError(named_error(where, error)) from error
        if isinstance(stored, Asked):
            columns = {task.prompt: stored.text, **stored.columns}
        else:  # of a data set or a script
            columns = dict(stored)
        if self.format is not None:
            columns = self._formatted(columns, where)
        question = columns.pop(task.prompt)
        if self.sees and task.image is not None and columns.keys().isdisjoint({task.image, task.video}):
            _require_none_unnamed(columns, task.image, where)
        media = {"image": self._cells(columns, task.image, where), "video": self._cells(columns, task.video, where)}
        if not self.sees and (held := [kind for kind, cells in media.items() if cells]):
            text = f"a model of vlm.output: {self.config.vlm.output} looks at nothing, and the row has a {held[0]}"
            raise ValueError(f"{where}: {text}: write task.{held[0]}: null to ask without")
        named = {kind: partial(open_one, where) for kind, open_one in opened.items()}
        prompt, answer = prompt_of(question, media, named, task.system, where)
        if answer is not None:
            columns.setdefault("answer", answer)
        return Row(where, prompt, columns)

    def _formatted(self, columns: dict[str, Any], where: str) -> dict[str, Any]:
        try:
            formatted = dict(self.format(columns))
        except Exception as error:  # a user's code, or a data set with other columns
            text = f"{type(error).__name__}: {error}; its columns: {', '.join(columns)}"
            raise ValueError(f"{where}: task.format {self.config.task.format} cannot read this row: {text}") from error
        if self.config.task.prompt not in formatted:
            raise ValueError(
                f"{where}: task.format {self.config.task.format} gives no column {self.config.task.prompt!r}"
            )
        return formatted

    def _cells(self, columns: dict[str, Any], column: str | None, where: str) -> list[Any]:
        """The pictures or clips of a row, which leave its columns."""
        cell = None if column is None else columns.pop(column, None)
        clip = column is not None and column == self.config.task.video
        several = cell if isinstance(cell, list) and not (clip and _are_frames(cell)) else [cell]
        if cell is not None and any(item is None for item in several):
            raise ValueError(f"{where}: there is no {'clip' if clip else 'picture'} in the column {column!r}")
        return [] if cell is None else several

    def _clip(self, where: str, clip: Any) -> tuple[Any, ...]:
        task = self.config.task
        several = isinstance(clip, list)
        held: Any = [self._picture(where, frame)[0] for frame in clip] if several else self._picture(where, clip)[0]
        return (clip_of(held, task.fps, task.frames, where),)

    def _picture(self, where: str, picture: Any) -> tuple[Image.Image | Path]:
        # How `datasets` hands on a picture that it was told not to decode: its file's path.
        if isinstance(picture, Mapping) and picture.get("bytes") is None and isinstance(picture.get("path"), str):
            picture = picture["path"]
        if isinstance(picture, str) and "://" not in picture[:10] and not picture.startswith("data:"):
            return (self._file(where, picture),)
        # Made by a program, so it has nothing to convert and no file that could be broken.
        if isinstance(picture, Image.Image) and picture.mode == "RGB" and picture.format is None:
            return (picture,)
        return (open_image(picture, where),)

    def _file(self, where: str, name: str) -> Path:
        """A file that a row names: beside a .jsonl file, in the folder of a data set, then beside that."""
        if Path(name).is_absolute():
            return Path(name)
        if is_given(self.source or "") or not is_data_set(str(self.source)):
            return Path(str(self.source)).parent / name
        named = DATA_SET.fullmatch(str(self.source))
        folder = Path(named["name"] if named else "").expanduser()
        if named is None or not folder.is_dir():
            raise ValueError(f"{where}: the picture {name!r} is a relative path, and the data set is no folder here")
        inside, beside = folder / name, folder.parent / name
        return beside if beside.is_file() and not inside.is_file() else inside


def _require_none_unnamed(columns: Mapping[str, Any], image: str, where: str) -> None:
    """Raise ValueError for a row whose pictures are in a column of another name: it would be asked without them."""
    for name, cell in columns.items():
        first = cell[0] if isinstance(cell, list) and cell else cell
        held = isinstance(first, bytes | Mapping | Image.Image)
        if isinstance(first, str):
            held = Path(first).suffix.lower() in PICTURES or is_video(first)
        if held and MEDIA.fullmatch(name):
            key = "video" if name.lower().startswith(("video", "clip")) else "image"
            raise ValueError(
                f"{where}: there is no column {image!r}, and {name!r} holds what the model is not shown: write "
                f"task.{key}: {name}, or task.image: null to ask without"
            )


def _unopened(where: str, held: Any) -> tuple[Any]:
    return (held,)


def _are_frames(cell: list[Any]) -> bool:
    """Whether a list in the column of clips is one clip, not several: of pictures, or of their files."""
    return all(
        hasattr(frame, "size") or (isinstance(frame, str) and Path(frame).suffix.lower() in PICTURES) for frame in cell
    )


def _data_set(source: str, prompt: str, image: str | None) -> Any:
    """A data set (`open_data_set`). Raises ValueError where it cannot be loaded, or lacks a column."""
    rows = open_data_set(source)
    missing = [column for column in (prompt, image) if column is not None and column not in rows.column_names]
    if missing:
        raise ValueError(
            f"{source}: no column {missing[0]!r}; it has {', '.join(rows.column_names)}. Name them by task.prompt and "
            "task.image"
        )
    return rows


TOGETHER = 16
"""Questions of an evaluation in one pass."""


class Examples(NamedTuple):
    """Questions with their answers: tokens int64 [B, T], mask bool [B, T], padded on the right. With several answers to
    each of n questions, those of the first kind come first, B = k n."""

    prompts: list[Encoded]
    tokens: Tensor
    mask: Tensor

    @property
    def positions(self) -> int:
        """Positions that a model reads to score the answers, without padding: nobody reads an answer's last token."""
        each = len(self.mask) // max(1, len(self.prompts))
        return each * sum(prompt.length for prompt in self.prompts) + int(self.mask.sum()) - each * len(self.prompts)


def target_of(row: Row, target: str) -> str:
    """The answer that a row teaches: a column, or a text with columns in braces. Raises ValueError for a column that is
    not there, or holds nothing."""

    def column(name: str) -> str:
        value = row.columns.get(name)
        if isinstance(value, list) and value and isinstance(value[-1], Mapping):  # messages: what the last one says
            value = value[-1].get("content")
        if value is None or isinstance(value, list | Mapping) or not str(value).strip():
            have = ", ".join(row.columns) or "none"
            text = f"the column {name!r} is to be the answer (trainer.target), and holds {value!r}"
            raise ValueError(f"{row.name}: {text}; columns: {have}")
        return str(value)

    return PLACE.sub(lambda place: column(place[1]), target) if "{" in target else column(target)


def tell(policy: Policy, rows: Sequence[Row], *targets: str) -> Examples:
    """Rows as a loss takes them, with the answers of each target in turn. Raises ValueError naming the row whose answer
    cannot be taught: no text, the token of a place for an image in it, or more tokens than the model has positions."""
    prompts, answers = [policy.encode(row.prompt) for row in rows], []
    for target in targets:
        for row, prompt in zip(rows, prompts, strict=True):
            ids = answer_ids(row.prompt, target_of(row, target), policy.processor, policy.stop_ids)
            policy.check_room([prompt], len(ids))
            # The model would look for a picture behind it, and shift all positions after it.
            if held := sorted(set(ids.tolist()) & set(policy.forbidden.tolist())):
                words = policy.tokenizer.convert_ids_to_tokens(held)
                raise ValueError(f"{row.name}: the answer holds {words[0]!r}, which stands for an image")
            answers.append(ids)
    if not answers:
        return Examples([], torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.bool))
    mask = pad_sequence([torch.ones_like(ids) for ids in answers], batch_first=True).bool()
    return Examples(prompts, pad_sequence(answers, batch_first=True), mask)


@torch.no_grad()
def held_out_loss(
    policy: Policy, questions: Questions, numbers: Sequence[int], target: str, advance: Callable[[int], None]
) -> tuple[float, float, int]:
    """Sum of the negative log-probabilities of the tokens of these questions' answers, that of their squares, and how
    many tokens."""
    total, squares, tokens = 0.0, 0.0, 0
    for start in range(0, len(numbers), TOGETHER):
        batch = tell(policy, [questions[number] for number in numbers[start : start + TOGETHER]], target)
        each = torch.arange(len(batch.prompts))
        # Each question has one answer: there is no prompt that several could share.
        log_prob = policy.log_probs(*batch, group=each, share_prefix=False).log_prob.double()
        total, squares = total - float(log_prob.sum()), squares + float(log_prob.square().sum())
        tokens += int(batch.mask.sum())
        advance(len(batch.prompts))
    return total, squares, tokens
