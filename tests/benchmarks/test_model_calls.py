"""The counter against the closed form."""

from __future__ import annotations

import pytest

from benchmarks import model_calls


@pytest.mark.parametrize(
    ("row", "sampling", "training"),
    [
        ("chain, all steps", 8.0, 7.0),
        ("chain, guidance, KL", 16.0, 28.0),
        ("window, guidance, none in training", 16.0, 6.0),  # the old log-probabilities anew, once
        ("diffusion_nft", 8.0, 2.0),
    ],
)
def test_formulas_by_hand(row: str, sampling: float, training: float) -> None:
    config = model_calls.small(row)
    found = model_calls.expected(config)
    assert [calls / config.sampling.images_per_iteration for calls in found] == [sampling, training]


@pytest.mark.slow
def test_counted_and_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    row = model_calls.measure("window, graphs kept")
    assert row["sampling"] == {"counted": 8.0, "formula": 8.0}
    assert row["training"] == {"counted": 0.0, "formula": 0.0}
    monkeypatch.setattr(model_calls, "expected", lambda config: (191.0, 0.0))
    with pytest.raises(AssertionError, match="192.0 model calls in sampling, 191.0 by the formula"):
        model_calls.measure("window, graphs kept")
