"""Line charts as inline SVG: axes, ticks, and a value under the pointer without any script, from pages/chart.html."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from genrl.runtime.show.pages import render

Point = tuple[float, float | None]  # (step, value); None breaks the line

_MOST_POINTS = 160
_SMOOTHED_FROM = 24  # a curve with at least so many points gets a running mean
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 10, 26


def chart(series: Sequence[tuple[str, Sequence[Point]]], *, width: int = 380, height: int = 190) -> str:
    """One `<svg>` with a line per series, drawn in the page's colours `--line-0`, `--line-1`, ...

    series: (name, points by rising step); one without points keeps its colour free. Where a curve is dense its points
    are means over neighbours, and a running mean is drawn over the pale raw line. The caller gives the title; names
    show under the pointer.
    """
    # Thousands of spots with titles would make a page of megabytes.
    thinned = [(name, thin(points)) for name, points in series]
    values = [value for _, points in thinned for _, value in points if value is not None]
    steps = [step for _, points in thinned for step, _ in points]
    if not values:
        return render("chart.html", {"lines": []})
    x_ticks, y_ticks = ticks(min(steps), max(steps), 5, whole=True), ticks(min(values), max(values), 4)
    x_low, x_high = min(steps), max(max(steps), min(steps) + 1)
    y_low, y_high = min(y_ticks[0], min(values)), max(y_ticks[-1], max(values))

    def across(step: float) -> float:
        return _LEFT + (step - x_low) / (x_high - x_low) * (width - _LEFT - _RIGHT)

    def up(value: float) -> float:
        return height - _BOTTOM - (value - y_low) / (y_high - y_low) * (height - _TOP - _BOTTOM)

    return render(
        "chart.html",
        {
            "label": ", ".join(name for name, points in series if points),
            "frame": {"width": width, "height": height, "left": _LEFT, "right": width - _RIGHT,
                      "bottom": height - _BOTTOM},
            "rows": [(up(tick), text) for tick, text in zip(y_ticks, labels(y_ticks), strict=True)],
            "columns": [(across(tick), text) for tick, text in zip(x_ticks, labels(x_ticks), strict=True)],
            "lines": [_line(i, name, points, across, up) for i, (name, points) in enumerate(thinned) if points],
        },
    )  # fmt: skip


def _line(
    index: int, name: str, points: Sequence[Point], across: Callable[[float], float], up: Callable[[float], float]
) -> dict[str, Any]:
    """What the template draws of one series: paths, and a spot per point, invisible on dense curves, whose title the
    browser shows under the pointer."""
    xy = [(across(step), None if value is None else up(value)) for step, value in points]
    dense = sum(value is not None for _, value in points) >= _SMOOTHED_FROM
    smooth = zip((x for x, _ in xy), _running_mean([y for _, y in xy]), strict=True) if dense else ()
    return {
        "index": index,
        "name": name,
        "path": _path(xy),
        "smooth": _path(list(smooth)),
        "dense": dense,
        "spots": [
            (x, y, f"{step:g}", f"{value:.6g}")
            for (step, value), (x, y) in zip(points, xy, strict=True)
            if value is not None and y is not None
        ],
    }


def is_constant(values: Sequence[float]) -> bool:
    """Equal up to rounding: there is nothing to draw between them."""
    return max(values) - min(values) <= 1e-9 * max(map(abs, values))


def thin(points: Sequence[Point]) -> list[Point]:
    """At most 160 points: each the mean over an equal number of neighbours, at their middle step."""
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return list(points)
    thinned: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [value for _, value in part if value is not None]
        thinned.append((part[len(part) // 2][0], math.fsum(values) / len(values) if values else None))
    return thinned


def ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    """About so many round numbers from at most `low` to at least `high` (inside them if `whole`, for steps)."""
    if is_constant([low, high]):
        if whole:
            return [low]
        span = abs(low) or 1.0
        low, high = low - span / 2, high + span / 2
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / about))
    unit = min((factor * power for factor in (1, 2, 5, 10)), key=lambda unit: abs(span / unit - about))
    if whole:
        unit = max(1.0, unit)
        return [k * unit for k in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
    # The 1e-9: 0.3 / 0.1 is a little below 3, which must not add a tick of its own.
    return [k * unit for k in range(math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9) + 1)]


def labels(values: Sequence[float]) -> list[str]:
    """Labels with as few digits as tell the ticks apart."""
    gap = min((b - a for a, b in zip(values, values[1:], strict=False)), default=1.0)
    largest = max(map(abs, values))
    digits = max(0, -math.floor(math.log10(gap) + 1e-9))
    if digits > 6 or largest >= 1e7:
        return [f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e") if value else "0" for value in values]
    # + 0.0 makes 0 of -0.
    return [f"{value + 0.0:.{digits}f}" for value in values]


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    commands, pen_down = [], False
    for x, y in points:
        if y is not None:
            commands.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        pen_down = y is not None
    return "".join(commands)


def _running_mean(values: Sequence[float | None]) -> list[float | None]:
    """Over a window of about a tenth of the curve, centred; at the ends over what there is of it."""
    reach = max(2, len(values) // 20)
    means: list[float | None] = []
    for i, value in enumerate(values):
        near = [v for v in values[max(0, i - reach) : i + reach + 1] if v is not None]
        means.append(None if value is None else math.fsum(near) / len(near))
    return means
