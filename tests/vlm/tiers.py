"""Which cases of a test are enough in the fast tier."""

from collections.abc import Iterable
from typing import Any

import pytest


def fast_first(cases: Iterable[str], fast: Iterable[str]) -> list[Any]:
    """All of these cases as parameters; those that are not `fast` are slow ones."""
    return [one if one in fast else pytest.param(one, marks=pytest.mark.slow) for one in cases]
