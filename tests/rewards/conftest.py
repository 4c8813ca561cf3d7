"""Golden numbers in JSON, beside those in arrays (tests/conftest.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(os.environ.get("GENRL_GOLDEN", Path(__file__).resolve().parents[3] / "shared" / "golden"))


@pytest.fixture(scope="session")
def golden_json() -> Callable[[str], Any]:
    """`golden_json("rewards_judge")` loads that file; the test is skipped where the folder is absent."""

    def load(name: str) -> Any:
        path = GOLDEN / f"{name}.json"
        if not path.exists():
            pytest.skip(f"golden numbers not found at {path} (set GENRL_GOLDEN to their folder)")
        return json.loads(path.read_text(encoding="utf-8"))

    return load
