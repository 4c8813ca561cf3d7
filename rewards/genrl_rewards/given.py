"""Objects that a script hands over, by the name that a configuration has for them: `python:NAME`.

A configuration is text, and a function of a notebook or a pipeline in memory has no place in it. Whoever has the object
lends it out under a name; whoever is asked for that name finds it here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PREFIX = "python:"
_LENT: dict[str, Any] = {}
_TAKEN: set[str] = set()


def is_given(name: object) -> bool:
    """Whether a name stands for an object of a script."""
    return isinstance(name, str) and name.startswith(PREFIX)


@contextmanager
def lending(objects: Mapping[str, Any]) -> Iterator[None]:
    """Within the block each name, which begins with `python:`, stands for its object, in all threads."""
    before, taken = dict(_LENT), set(_TAKEN)
    _LENT.update(objects)
    _TAKEN.clear()
    try:
        yield
    finally:
        _LENT.clear()
        _TAKEN.clear()
        _LENT.update(before)
        _TAKEN.update(taken)


def given(name: str) -> Any:
    """The object. Raises ValueError where no script lends it."""
    if name not in _LENT:
        lent = f"; it hands over {', '.join(_LENT)}" if _LENT else ""
        raise ValueError(
            f"{name} was an object of a Python script, which only a script has{lent}. Hand it over again by "
            f"genrl.resume(RUN, ...), or write in its place what can be loaded: a path, a hub id, file.py:name"
        )
    return _LENT[name]


def take(name: str) -> Any:
    """A model to be changed: the object itself the first time, afterwards a copy of it as it is then.

    Raises ValueError as `given`.
    """
    thing = given(name)
    # Training changes a pipeline in place; the second one who asks (evaluation, a replay) needs one that nobody trains.
    if name in _TAKEN:
        return copy.deepcopy(thing)
    _TAKEN.add(name)
    return thing
