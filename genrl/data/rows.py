"""One row of a prompt file: bytes in, checked text and columns out.

A prompt file is input from outside. A row that cannot be used raises RowError, which says what is wrong with it; no
value is passed on unchecked. Paths must stay inside the folder of the file.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from mimetypes import guess_type
from numbers import Number
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LINE_END = re.compile(rb"\r\n|\r|\n")
MAX_CHARACTERS = 10_000
NOTHING_SEEN = "\t\n\r\v\f\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad"
"""White space that is no separator of Unicode's, and letters that have no width."""
MAX_LINE_BYTES = 1_000_000
PICTURES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""Ends of the names of picture files."""
PREFERENCE_COLUMNS = ("image_win", "image_lose")
"""Of a preference set (`genrl.data.preferences`). They hold paths, as do columns that end in `image` or `_path`."""


class RowError(Exception):
    """This row cannot be used; the message says why."""


def lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file, ended by LF, CR LF or CR; of one longer than MAX_LINE_BYTES only as much as proves it so."""
    left = b""
    while block := stream.read(MAX_LINE_BYTES):
        left += block
        half = b"\r" if left.endswith(b"\r") else b""  # of an end that the next block may complete
        *complete, last = LINE_END.split(left.removesuffix(half))
        yield from complete
        left = last[: MAX_LINE_BYTES + 1] + half  # a hostile file may be one endless line
    if left:
        yield left.removesuffix(b"\r")


def line_text(raw: bytes) -> str:
    """A line as text without white space around it. Raises RowError where it is too long or not UTF-8."""
    if len(raw) > MAX_LINE_BYTES:
        raise RowError(f"a line of more than {MAX_LINE_BYTES:,} bytes")
    try:
        return raw.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        where = f"byte {raw[error.start]:#04x} at column {error.start + 1}"
        raise RowError(f"{where} is not UTF-8; save the file as UTF-8") from None


def json_object(text: str) -> dict[str, Any]:
    """The JSON object that a line holds. Raises RowError for anything else, a repeated key, NaN and infinity."""
    try:
        # By itself json keeps the last of two equal keys, and reads NaN, which no other program does.
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise RowError("not JSON: nested too deeply") from None
    except ValueError as error:  # an integer of more than 4,300 digits
        raise RowError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RowError(f"a row is an object {{...}}, found {_kind(value)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise RowError(f"the column {key!r} is written twice")
        value[key] = item
    return value


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _no_constant(text)


def _no_constant(name: str) -> Any:
    raise RowError(f"not JSON: {name} is not a number")


def text_and_columns(
    row: Mapping[str, Any], column: str, folder: Path | None, *, chat: bool = False
) -> tuple[str, dict[str, Any]]:
    """The prompt of a row, checked, and its other columns with absolute paths.

    folder: which the paths are relative to and must stay in. None, of a data set: columns of paths are left out.
    chat: the prompt may be a list of messages, which stay among the columns, and a path a list of paths.
    """
    if column not in row:
        raise RowError(f"{no_column(column, row)} (prompts.column names the one that holds the prompts)")
    if chat and isinstance(row[column], list):
        text = checked_text(json.dumps(row[column], ensure_ascii=False))
        return text, {name: _paths(name, value, folder, chat) for name, value in row.items()}
    if not isinstance(row[column], str):
        raise RowError(f"the prompt must be text, found {_kind(row[column])}")
    text = checked_text(row[column])
    columns = {name: value for name, value in row.items() if name != column}
    if folder is None:
        return text, {name: value for name, value in columns.items() if not is_path(name)}
    return text, {name: _paths(name, value, folder, chat) for name, value in columns.items()}


def _paths(name: str, value: Any, folder: Path | None, several: bool) -> Any:
    """A value, made absolute where its column holds paths."""
    if folder is None or not is_path(name):
        return value
    if several and isinstance(value, list):
        return [_inside(name, path, folder) for path in value]
    return _inside(name, value, folder)


def no_column(column: str, columns: Iterable[str]) -> str:
    """Message that a row or a table lacks this column, with the nearest name among those it has."""
    close = get_close_matches(column, [*columns], n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    listed = ", ".join(map(repr, columns))[:200] or "no others"  # the row's own names, so of any length
    return f"no column {column!r}, found {listed}{hint}"


def checked_text(text: str) -> str:
    """The prompt itself. Raises RowError where it is empty, too long, or holds control characters."""
    if all(unicodedata.category(letter)[0] == "Z" or letter in NOTHING_SEEN for letter in text):
        raise RowError("the prompt is empty")
    if len(text) > MAX_CHARACTERS:
        raise RowError(f"the prompt has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}")
    for position, character in enumerate(text, start=1):
        # Half a surrogate pair (Cs) comes of \ud800 in JSON, and fails only when a tokenizer encodes it, hours later.
        category = unicodedata.category(character)
        if category == "Cs" or (category == "Cc" and character not in "\t\n\r"):
            raise RowError(f"character {ord(character):#06x} at position {position} is not text")
    return text


def input_problem(column: str, columns: Mapping[str, Any]) -> str | None:
    """Why a row's column cannot be given to a pipeline as its one picture; whether it can be decoded is not asked."""
    value = columns.get(column)
    if value is None:
        return f"has no {'picture in' if column in columns else 'column'} {column!r}"
    if not isinstance(value, str):
        return f"{column}: is {_kind(value)}; a row gives one picture, by its path, to each argument"
    if is_video(value):
        return f"{column}: {value!r} is a video; a row gives one picture to each argument"
    return None if Path(value).is_file() else f"{column}: no such file {value}"


def is_video(name: str) -> bool:
    """Whether a file is a video, by its name."""
    return (guess_type(name)[0] or "").startswith("video/")


def is_path(name: str) -> bool:
    """Whether a column of this name holds paths."""
    return name.endswith(("_path", "image")) or name in PREFERENCE_COLUMNS


def _inside(name: str, value: Any, folder: Path) -> str | None:
    """A path of the column `name`, absolute. Raises RowError where it leaves the folder or there is no such file."""
    if value is None:
        return None
    if isinstance(value, Mapping) and value.get("bytes") is None:  # as data sets write their pictures
        value = value.get("path")
    if not isinstance(value, str):
        raise RowError(f"{name} must be a path as text, found {_kind(value)}")
    if re.match(r"\w+://|data:", value):
        raise RowError(f"{name}: {value[:60]!r} is an address, which is not fetched; save the picture beside the file")
    # A NUL byte ends a path for the system but not for Python; a backslash is a separator on one system alone.
    if not value or "\0" in value or "\\" in value or len(value) > 1000:
        raise RowError(f"{name}: {value[:60]!r} is not a path")
    path = Path(value)
    if path.is_absolute() and path.suffix.lower() in PICTURES and not name.endswith("_path"):
        if not path.is_file():  # only opened as a picture, so it may lie anywhere
            raise RowError(f"{name}: there is no file {value[-60:]!r}")
        return value
    if path.is_absolute() or ".." in path.parts or value.startswith("~"):
        raise RowError(f"{name}: {value[:60]!r} leaves the folder of the prompt file; write it relative, without ..")
    try:
        resolved = (folder / path).resolve()
    except (OSError, RuntimeError):  # a loop of links, by Python version
        raise RowError(f"{name}: {value[:60]!r} cannot be followed") from None
    if not resolved.is_relative_to(folder):
        raise RowError(f"{name}: {value[:60]!r} is a link that leaves the folder of the prompt file")
    if not resolved.is_file():
        raise RowError(f"{name}: there is no file {value[:60]!r} beside the prompt file")
    return str(resolved)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, Number) else type(value).__name__)


def flag(value: Any, what: str, refused: type[ValueError] = ValueError) -> bool:
    """True or false as programs and files from outside tell it (0.3, NaN and a text are neither), whatever number or
    array of one it stands in. Raises `refused`, naming it, for all else."""
    import numpy as np  # here: `genrl check` starts without

    array = np.asarray(value)
    if array.size != 1:
        raise refused(f"{what} is {value!r:.60}, and it is true or false")
    return bool(flags(array, what, refused).item())


def flags(values: NDArray[Any], what: str, refused: type[ValueError] = ValueError) -> NDArray[np.bool_]:
    """An array of them, as bool. Raises `refused`, naming the first that is neither."""
    odd = [] if values.dtype == bool else [one for one in values.reshape(-1).tolist() if one not in (0, 1)]
    if odd:
        raise refused(f"{what} is {odd[0]!r}, and it is true or false")
    return values.astype(bool)
