"""The text of a judge's question: written in the configuration, or read from a text file or a Python constant.

Some reward models were trained with one fixed instruction, which belongs to their authors and is not part of this
package. It is read from the authors' own file, whose code is parsed and not run.
"""

from __future__ import annotations

from pathlib import Path

from genrl_rewards.contract import nearest
from genrl_rewards.declared import constants, parse


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
    """The text with the prompt in its place; `<|` in the prompt is split, so that it cannot add a control token."""
    return text.replace(place, prompt.replace("<|", "< |"))


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
