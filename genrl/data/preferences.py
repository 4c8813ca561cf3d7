"""Prompts with pictures to train on: two, one preferred to the other (a preference set), one, the target, or some that
samples are to be like (references). Input from outside.

A set is a source of prompts (`genrl.data.prompts`) with the columns `image_win` and `image_lose`, or `target_image`: a
.jsonl file, where these are paths relative to it, or a data set `id:split` with images in these columns. References
have the columns `prompt` and `image`; or they are a folder of pictures (.png, .jpg, .jpeg, .webp; in it or below it),
each beside a text file of the same name that holds its prompt: `0001.png`, `0001.txt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from genrl.config.folders import nearest_beside
from genrl.data.prompts import FILES, Prompt, PromptError, is_data_set, open_picture_table
from genrl.data.prompts import load as load_prompts
from genrl.data.rows import MAX_LINE_BYTES, PICTURES, PREFERENCE_COLUMNS, no_column
from genrl_rewards.pictures import check_picture, open_picture, picture_size

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


TARGET_COLUMNS = ("target_image",)
"""Of a set of targets. It holds paths, as it ends in `image`."""

Size = tuple[int | None, int | None]
"""Height and width, None where it is the pipeline's own."""
UNLIKE = 1.02
"""Ratio of two pictures' width over height above which they are cut differently: a column of pixels in fifty."""
Reader = Callable[[Prompt], "tuple[Image, ...]"]
"""The images of a row: the preferred one and the other, or the target."""

T = TypeVar("T")


def open_set(source: str, rows: Sequence[Prompt], columns: Sequence[str] = PREFERENCE_COLUMNS) -> Reader:
    """What reads the images of these rows of `source`. Raises PromptError where a column is missing."""
    cells = _cells(source, rows, columns)
    return lambda row: tuple(_of_each(open_picture, row, source, cells(row), columns))


def check_set(
    source: str,
    rows: Sequence[Prompt],
    columns: Sequence[str] = PREFERENCE_COLUMNS,
    *,
    beside: str | None = None,
    size: Size = (None, None),
) -> None:
    """Raise PromptError, naming its row, where a column is missing, or an image cannot be read (`check_picture`) or is
    unlike in shape to the picture that the pipeline is given `beside` it, or to the size that is sampled: images are
    cut to that size (`as_tensor`), the picture beside them is not.

    beside: column of the rows; size: height and width, None where the pipeline's own is taken, which is not known here.
    """
    cells = _cells(source, rows, columns)
    for row in rows:
        shapes = dict(zip(columns, _of_each(check_picture, row, source, cells(row), columns), strict=True))
        if beside is not None:
            shapes[beside] = _of_each(picture_size, row, source, row.columns, [beside])[0]
            if size[0] is not None and size[1] is not None:
                shapes["the size that is sampled"] = (size[1], size[0])
            _check_alike(shapes, f"{source}:{row.line}", beside)


def _check_alike(shapes: Mapping[str, tuple[int, int]], where: str, beside: str) -> None:
    ratios = [width / height for width, height in shapes.values()]
    # Not equal: sizes are rounded to multiples of the model's patches, so that two of one shape differ by some pixels.
    if max(ratios) > UNLIKE * min(ratios):
        sizes = ", ".join(f"{name} {width} x {height}" for name, (width, height) in shapes.items())
        why = f"images are cut to the size that is sampled, {beside} is not, so they would not fit"
        raise PromptError(f"{where}: unlike shapes ({sizes}): {why}; cut them to one shape first")


def missing_images(source: str, rows: Sequence[Prompt], columns: Sequence[str] = PREFERENCE_COLUMNS) -> str | None:
    """What is wrong with the first row of a .jsonl file that lacks one of its images; None where all have them."""
    for row in rows:
        for column in columns:
            if row.columns.get(column) is None:
                needed = f"(needed: {' and '.join(columns)})"
                return f"{source}:{row.line}: {no_column(column, row.columns)} {needed}"
    return None


def set_problem(source: str, rows: Sequence[Prompt] | None, columns: Sequence[str] = PREFERENCE_COLUMNS) -> str | None:
    """What is wrong with a file of prompts with images, before any is opened; rows: None where it could not be read."""
    if Path(source).suffix == ".txt":
        return f"{source} has prompts only; a set with {' and '.join(columns)} is .jsonl or a data set id:split"
    return None if rows is None else missing_images(source, rows, columns)


def as_tensor(image: Image, height: int, width: int) -> Tensor:
    """float32 [3, height, width] in [0, 1]: scaled to cover that size, cut around the centre."""
    import torch
    from PIL.Image import Resampling
    from PIL.ImageOps import fit

    fitted = fit(open_picture(image), (width, height), Resampling.BICUBIC)
    flat = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return flat.view(height, width, 3).permute(2, 0, 1).float() / 255


def _cells(source: str, rows: Sequence[Prompt], columns: Sequence[str]) -> Callable[[Prompt], Mapping[str, Any]]:
    """What gives the cells of a row by column."""
    if Path(source).suffix in FILES:
        if problem := missing_images(source, rows, columns):
            raise PromptError(problem)
        return lambda row: row.columns
    table = open_picture_table(source, *columns)
    return lambda row: table[row.line - 1]


def _of_each(
    use: Callable[[Any], T], row: Prompt, source: str, cells: Mapping[str, Any], columns: Sequence[str]
) -> list[T]:
    """What `use` makes of each image of a row."""
    datasets = []
    for column in columns:
        try:
            datasets.append(use(cells[column]))
        except ValueError as error:
            raise PromptError(f"{source}:{row.line}: {column} cannot be read as an image: {error}") from error
    return datasets


REFERENCE_COLUMN = "image"


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
            return open_picture(place if self.table is None else self.table[place][REFERENCE_COLUMN])

    def check(self, prompts: Iterable[str]) -> None:
        """Raise PromptError naming the first picture of these prompts that cannot be read (`check_picture`)."""
        for prompt in dict.fromkeys(prompts):
            for k, place in enumerate(self.places[prompt]):
                with self._named(prompt, k):
                    check_picture(place if self.table is None else self.table[place][REFERENCE_COLUMN])

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


def read_references(source: str) -> References:
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
        f"the columns prompt and {REFERENCE_COLUMN}, or a data set id:split with these columns{hint}"
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
        if row.columns.get(REFERENCE_COLUMN) is None:
            raise PromptError(f"{source}:{row.line}: {no_column(REFERENCE_COLUMN, row.columns)}")
        places.setdefault(row.text, []).append(row.columns[REFERENCE_COLUMN])
    return References(source, places)


def _of_data_set(source: str) -> References:
    rows, table = load_prompts(source, pictures=False), open_picture_table(source, REFERENCE_COLUMN)
    places: dict[str, list[int]] = {}
    for row in rows:
        places.setdefault(row.text, []).append(row.line - 1)
    return References(source, places, table)
