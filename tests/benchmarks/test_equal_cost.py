"""docs/methods.md: current, and made of measured curves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import equal_cost, methods


def test_the_page_is_current(root: Path) -> None:
    assert (root / "docs" / "methods.md").read_text() == equal_cost.page(), (
        "run `python -m benchmarks.equal_cost > docs/methods.md`"
    )


def test_values_between_evaluations() -> None:
    curve = [(0.0, 1.0), (10.0, 3.0), (20.0, 2.0)]
    assert [equal_cost.at(curve, cost) for cost in (0, 5, 10, 15, 20, 21)] == [1, 2, 3, 2.5, 2, None]


def test_a_run_that_ends_before_is_refused() -> None:
    shown = {"short": ("Short", [[(0.0, 1.0), (10.0, 3.0)], [(0.0, 1.0), (4.0, 3.0)]], "never")}
    assert "| Short | 1.000 | **2.400** ± 0.849 | 2 | never |" in equal_cost.rows(shown, 4, "steps", "reward")
    with pytest.raises(ValueError, match="short: 2 runs, of which 1 reach 8 steps; lower the cost"):
        equal_cost.rows(shown, 8, "steps", "reward")


def test_every_measured_pipeline_method_is_on_the_page() -> None:
    assert set(methods.METHODS) == {*equal_cost.SHAPES, *equal_cost.JPEG, *equal_cost.APART}
