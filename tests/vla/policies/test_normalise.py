"""LeRobot's normalisation modes and their inverses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrl.mdp.noise import generator
from genrl.vla.policies.normalise import normalise, statistics, unnormalise

MODES = ["MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY"]


def demonstrations(seed: int = 0) -> torch.Tensor:
    """200 actions of four numbers of very different scales, the last constant."""
    scale = torch.tensor([1.0, 0.01, 300.0, 0.0])
    return torch.randn(200, 4, generator=generator(seed)) * scale + torch.tensor([0.0, 5.0, -40.0, 0.7])


@settings(max_examples=20)
@given(st.sampled_from(MODES), st.integers(0, 100))
def test_the_inverse_brings_actions_back(mode, seed: int) -> None:
    values = demonstrations(seed)
    stats = statistics(values)
    back = unnormalise(normalise(values.double(), stats, mode), stats, mode)
    torch.testing.assert_close(back, values.double(), rtol=1e-9, atol=1e-9)


def test_what_a_mode_promises() -> None:
    values = demonstrations()
    stats = statistics(values)
    moving = values[:, :3]
    centred = normalise(values, stats, "MEAN_STD")
    assert centred.mean(0).abs().max() < 1e-3
    torch.testing.assert_close(centred[:, :3].std(0, correction=0), torch.ones(3), rtol=1e-3, atol=1e-3)
    bounded = normalise(values, stats, "MIN_MAX")[:, :3]
    torch.testing.assert_close(bounded.amin(0), -torch.ones(3))
    torch.testing.assert_close(bounded.amax(0), torch.ones(3))
    for mode, share in (("QUANTILES", 0.98), ("QUANTILE10", 0.8)):
        inside = normalise(moving, {k: v[:3] for k, v in stats.items() if k != "count"}, mode).abs() <= 1 + 1e-4
        assert inside.float().mean(0).sub(share).abs().max() < 0.02


def test_a_number_that_never_moved_stays_finite() -> None:
    values = demonstrations()
    stats = statistics(values)
    for mode in MODES:
        assert normalise(values, stats, mode).isfinite().all()


def test_statistics_by_hand() -> None:
    values = torch.arange(101.0)[:, None].repeat(1, 2).view(101, 1, 2)
    stats = statistics(values)
    assert stats["count"].item() == 101 and stats["mean"].tolist() == [50.0, 50.0]
    assert [stats[name][0].item() for name in ("min", "q01", "q10", "q50", "q90", "q99", "max")] == pytest.approx(
        [0, 1, 10, 50, 90, 99, 100]
    )


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not finite: \[1\]"):
        statistics(torch.tensor([[1.0], [torch.nan]]))
    with pytest.raises(KeyError, match="q01"):
        normalise(torch.ones(1), {"mean": torch.ones(1)}, "QUANTILES")
    with pytest.raises(ValueError, match="mode must be"):
        normalise(torch.ones(1), {}, "ZSCORE")  # type: ignore[arg-type]
