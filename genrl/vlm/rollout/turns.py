"""A question as data sets hold it, as a `Prompt`: a text, or chat messages, with places for pictures and clips.

`<image>` and `<video>` in a text, and the parts `{type: image}` and `{type: video}` of a message, are such places. They
are filled in order. Where a text names no places, its pictures and clips come before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from genrl.vlm.policies.processor import Prompt, Turn
from genrl.vlm.policies.videos import Clip
from genrl_rewards.extras import install

PLACE = re.compile(r"(<image>|<video>)")
KINDS = ("image", "video")
ROLES = ("system", "user", "assistant")
SHARE_GPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"}
"""Roles of rows of the form `conversations: [{from, value}]`."""


class Place(NamedTuple):
    """Where a picture or a clip goes. held: itself, as a message may have it; None: the next of its column."""

    kind: str
    held: Any = None


Said = tuple[str, list[str | Place]]
"""The role of a message, and its texts and places."""


def prompt_of(
    asked: str | Sequence[Mapping[str, Any]],
    shown: Mapping[str, Sequence[Any]],
    opened: Mapping[str, Callable[[Any], tuple[Any, ...]]],
    system: str | None,
    where: str,
) -> tuple[Prompt, str | None]:
    """(the prompt, the text of a last message that is the assistant's, else None).

    shown: the values of the columns of pictures and clips, by kind. opened: what one value of a kind becomes.
    system: of a question without a system message. Raises ValueError, naming the row, for messages of another form, and
    where places and pictures differ in number.
    """
    if not isinstance(asked, str | list):
        raise ValueError(f"{where}: a question is a text or a list of messages, found {type(asked).__name__}")
    messages = (
        [("user", _parts(asked, where))] if isinstance(asked, str) else [_message(message, where) for message in asked]
    )
    if messages and messages[0][0] == "system":
        system = "".join(part for part in messages.pop(0)[1] if isinstance(part, str))
    answer = "".join(map(str, messages.pop()[1])) if messages and messages[-1][0] == "assistant" else None
    wrong = [
        role for (role, _), due in zip(messages, ("user", "assistant") * len(messages), strict=False) if role != due
    ]
    if wrong or not messages or messages[-1][0] != "user":
        raise ValueError(f"{where}: messages are by user and assistant in turn, after a system message if there is one")
    turns = [
        Turn("user" if role == "user" else "assistant", parts)
        for role, parts in _filled(messages, shown, opened, where)
    ]
    return Prompt(turns[-1].parts, system=system, where=where, before=tuple(turns[:-1])), answer


def _parts(text: str, where: str) -> list[str | Place]:
    if not text.strip():
        raise ValueError(f"{where}: the question or a message is empty")
    return [Place(part[1:-1]) if PLACE.fullmatch(part) else part for part in PLACE.split(text) if part]


def _message(message: Any, where: str) -> Said:
    role, content = None, None
    if isinstance(message, Mapping):
        role = message.get("role", SHARE_GPT.get(str(message.get("from")), message.get("from")))
        content = message.get("content", message.get("value"))
    if role == "system" and isinstance(content, str) and not content.strip():
        return role, []  # the row asks for none, whatever the chat template's own is
    if role not in ROLES or not isinstance(content, str | list):
        raise ValueError(
            f"{where}: a message is {{role: {' | '.join(ROLES)}, content: text or parts}} or {{from, value}}, "
            f"found {message!r:.80}"
        )
    if isinstance(content, str):
        return role, _parts(content, where)
    parts: list[str | Place] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts += _parts(part["text"], where)
        elif kind in KINDS:
            parts.append(Place(kind, part.get(kind)))
        else:
            raise ValueError(f"{where}: a part is {{type: text | image | video, ...}}, found {part!r:.80}")
    return role, parts


def _filled(
    said: Sequence[Said],
    shown: Mapping[str, Sequence[Any]],
    opened: Mapping[str, Callable[[Any], tuple[Any, ...]]],
    where: str,
) -> list[tuple[str, tuple[Any, ...]]]:
    """Roles and parts, with pictures in their places."""
    first = said[0][1]
    # Reversed, since each is put in front: pictures come before clips then.
    for kind in reversed(KINDS):
        places = sum(isinstance(part, Place) and part == Place(kind) for _, parts in said for part in parts)
        num_shown = len(shown.get(kind, ()))
        if not any(isinstance(part, Place) and part.kind == kind for _, parts in said for part in parts):
            first[:0] = [Place(kind)] * num_shown
        elif places != num_shown:
            raise ValueError(
                f"{where}: the question has {places} places <{kind}>, and the row {num_shown}; they must agree"
            )
    left = {kind: iter(shown.get(kind, ())) for kind in KINDS}

    def filled(part: str | Place) -> tuple[Any, ...]:
        if isinstance(part, str):
            return (part,)
        return opened[part.kind](next(left[part.kind]) if part.held is None else part.held)

    return [(role, tuple(content for part in parts for content in filled(part))) for role, parts in said]


def spread(number: int, wanted: int) -> list[int]:
    """Numbers of `wanted` of `number` frames, evenly from the first to the last; all where there are no more."""
    if number <= wanted:
        return list(range(number))
    return [round(k * (number - 1) / max(1, wanted - 1)) for k in range(wanted)]


def clip_of(clip: Path | Sequence[Any], fps: float, most: int, where: str) -> Clip:
    """Frames of a video file, `fps` a second and `most` at most, evenly over it; of a list of frames, `fps` a
    second, `most` of them.

    Raises ValueError, naming the row, for a file that is missing or no video, and where PyAV is not installed.
    """
    if not isinstance(clip, Path):
        numbers = spread(len(clip), most)
        return Clip(tuple(clip[number] for number in numbers), tuple(numbers), len(clip), fps)
    try:
        import av
    except ImportError as error:
        raise ValueError(f"{where}: video files are read by PyAV: {install('av')}") from error
    try:
        container: Any
        with av.open(str(clip)) as container:
            stream = container.streams.video[0]
            # counted by decoding: what a file says of its own length is often wrong
            times = [float(frame.time or 0.0) for frame in container.decode(stream)]
            step = times[-1] / max(1, len(times) - 1)
            chosen = spread(len(times), min(most, max(1, round(len(times) * step * fps))))
            container.seek(0)
            frames: list[Image.Image] = [
                frame.to_image() for number, frame in enumerate(container.decode(stream)) if number in set(chosen)
            ]
    except (OSError, IndexError, ValueError) as error:  # av's errors are these, too
        raise ValueError(f"{where}: the video {clip} cannot be read: {error}") from error
    return Clip(tuple(frames), tuple(chosen), len(times), 1 / step if step > 0 else fps)
