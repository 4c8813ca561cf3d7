"""Runs of methods are not about saving: `tests/runtime/loop/test_replay.py` has each method's adapter loaded again."""

import pytest


@pytest.fixture(autouse=True)
def _unproven(unproven: None) -> None: ...
