"""Reference pictures: for every prompt one or more that samples are to be like. Input from outside.

Three layouts:

- a folder of pictures (.png, .jpg, .jpeg, .webp; in it or below it), each beside a text file of the same name that
  holds its prompt: `0001.png`, `0001.txt`
- a `.jsonl` file with the columns `prompt` and `image`, a path relative to it
- a data set `id:split` (a hub id or a folder) with the columns `prompt` and `image`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genrl.data.prompts import Prompt, PromptError, is_data_set, nearest_beside, open_picture_table
from genrl.data.prompts import load as load_prompts
from genrl.data.rows import MAX_LINE_BYTES, no_column
from genrl_rewards.pictures import check_picture, open_picture

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
COLUMN = "image"


@dataclass(frozen=True)
class References:
    """Where the pictures of each prompt are."""

    source: str
    places: Mapping[str, Sequence[Any]]
    """Prompt -> files, or rows of the data set."""
    table: Any = field(default=None, repr=False)
    """The data set."""

    def count(self, prompt: str) -> int:
        """How many pictures this prompt has."""
        return len(self.places.get(prompt, ()))

    def picture(self, prompt: str, k: int) -> Image:
        """The k-th picture of a prompt, RGB. Raises PromptError naming it where it cannot be read."""
        place = self.places[prompt][k]
        with self._named(prompt, k):
            return open_picture(place if self.table is None else self.table[place][COLUMN])

    def check(self, prompts: Iterable[str]) -> None:
        """Raise PromptError naming the first picture of these prompts that cannot be read (`check_picture`)."""
        for prompt in dict.fromkeys(prompts):
            for k, place in enumerate(self.places[prompt]):
                with self._named(prompt, k):
                    check_picture(place if self.table is None else self.table[place][COLUMN])

    @contextmanager
    def _named(self, prompt: str, k: int) -> Iterator[None]:
        """Errors of reading say which picture it was."""
        place = self.places[prompt][k]
        where = place if self.table is None else f"row {place + 1}"
        try:
            yield
        except ValueError as error:
            raise PromptError(f"{self.source}: reference {k + 1} of the prompt {prompt!r}, {where}: {error}") from error

    def require(self, prompts: Sequence[Prompt], source: str) -> None:
        """Raise PromptError where some of these prompts of `source` have no picture."""
        without = [row for row in prompts if not self.count(row.text)]
        if not without:
            return
        first = without[0]
        close = get_close_matches(first.text, list(self.places), n=1, cutoff=0.8)
        hint = f" (the nearest that has one: {close[0]!r})" if close else ""
        others = f" and {len(without) - 1} other prompts" if len(without) > 1 else ""
        raise PromptError(
            f"{self.source} has no picture for the prompt {first.text!r}{hint} of {source}:{first.line}{others}; every "
            "prompt that is trained on needs one or more of these references"
        )


def read(source: str) -> References:
    """The reference pictures of a source. Raises PromptError where there is none, or a picture has no prompt."""
    path = Path(source)
    if is_data_set(source):
        return _of_data_set(source)
    if path.suffix == ".jsonl":
        return _of_rows(source)
    if path.is_dir():
        return _of_folder(path)
    problem = "is a file" if path.exists() else "does not exist"
    hint = "" if path.exists() else nearest_beside(path)
    raise PromptError(
        f"{source} {problem}; references are a folder of pictures with their prompts in .txt files, a .jsonl file with "
        f"the columns prompt and {COLUMN}, or a data set id:split with these columns{hint}"
    )


def _of_folder(folder: Path) -> References:
    places: dict[str, list[Path]] = {}
    for file in sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES):
        beside = file.with_suffix(".txt")
        if not beside.is_file():
            raise PromptError(f"{file}: its prompt is missing; write it into {beside.name} beside it")
        if beside.stat().st_size > MAX_LINE_BYTES:
            raise PromptError(f"{beside}: more than {MAX_LINE_BYTES:,} bytes are no prompt")
        try:
            prompt = beside.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise PromptError(f"{beside}: byte {error.start + 1} is not UTF-8") from error
        places.setdefault(prompt, []).append(file)
    if not places:
        raise PromptError(f"{folder} holds no pictures ({', '.join(PICTURES)})")
    return References(str(folder), places)


def _of_rows(source: str) -> References:
    places: dict[str, list[str]] = {}
    for row in load_prompts(source):
        if row.columns.get(COLUMN) is None:
            raise PromptError(f"{source}:{row.line}: {no_column(COLUMN, row.columns)}")
        places.setdefault(row.text, []).append(row.columns[COLUMN])
    return References(source, places)


def _of_data_set(source: str) -> References:
    rows, table = load_prompts(source, pictures=False), open_picture_table(source, COLUMN)
    places: dict[str, list[int]] = {}
    for row in rows:
        places.setdefault(row.text, []).append(row.line - 1)
    return References(source, places, table)
