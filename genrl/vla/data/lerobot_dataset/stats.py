"""Statistics as `meta/stats.json` has them: exact, of numbers and of pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from genrl.vla.data.lerobot_dataset import layout


def numeric_stats(values: NDArray[Any]) -> dict[str, list[Any]]:
    """min, max, mean, std (population), count and quantiles over the rows of [N, D], as `meta/stats.json` has them."""
    numbers = values.astype(np.float64)
    found = {
        "min": numbers.min(0),
        "max": numbers.max(0),
        "mean": numbers.mean(0),
        "std": numbers.std(0),
        "count": np.array([len(numbers)]),
    }
    found |= {name: np.quantile(numbers, share, axis=0) for name, share in layout.QUANTILES.items()}
    return {name: value.tolist() for name, value in found.items()}


def picture_stats(histogram: NDArray[np.int64], count: int) -> dict[str, list[Any]]:
    """Exact statistics per channel of pictures in [0, 1], [3, 1, 1], from how often each value occurs [3, 256].

    count: number of pictures.
    """
    levels, total, below = np.arange(256) / 255.0, histogram[0].sum(), histogram.cumsum(1)

    def ranked(rank: int) -> NDArray[np.float64]:
        return np.array([levels[np.searchsorted(row, rank, side="right")] for row in below])

    mean = histogram @ levels / total
    found = {
        "min": ranked(0),
        "max": ranked(total - 1),
        "mean": mean,
        "std": np.sqrt((histogram * (levels - mean[:, None]) ** 2).sum(1) / total),
    }
    for name, share in layout.QUANTILES.items():
        place = share * (total - 1)
        low = int(place)
        found[name] = ranked(low) + (place - low) * (ranked(min(low + 1, total - 1)) - ranked(low))
    return {name: value[:, None, None].tolist() for name, value in found.items()} | {"count": [count]}
