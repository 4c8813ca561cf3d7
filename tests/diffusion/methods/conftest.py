"""Runs of methods are not about saving: `tests/runtime/test_replay.py` has each method's adapter loaded again."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _unproven(unproven: None) -> None: ...
