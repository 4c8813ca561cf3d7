"""Small charts side by side, as an SVG that stands alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genrl.runtime.show.curves import chart

SEEDS = tuple(f"seed {seed}" for seed in range(10))
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed")


def panels(
    shown: Sequence[tuple[str, Sequence[Any]]],
    width: int,
    height: int,
    columns: int,
    label: str,
    lines: Sequence[str] = SEEDS,
) -> str:
    """A picture of small charts: for each its title, and the points (x, y) of every line. lines: their names."""
    charts = []
    for k, (title, curves) in enumerate(shown):
        series = [*zip(lines, curves, strict=False)]
        inner = chart(series, width=width, height=height - 22).partition(">")[2].removesuffix("</svg>")
        x, y = k % columns * width, k // columns * height
        head = f'<text class="title" x="{width / 2}" y="12" text-anchor="middle">{title}</text>'
        charts.append(f'<g transform="translate({x} {y})">{head}<g transform="translate(0 14)">{inner}</g></g>')
    rows = -(-len(shown) // columns)
    styles = "".join(f".line-{i}{{stroke:{c};fill:none}}.spot.line-{i}{{fill:{c}}}" for i, c in enumerate(COLOURS))
    style = f"svg{{background:#fff;font:10px sans-serif}}text{{fill:#475569}}.title{{font-weight:600}}{styles}"
    return (
        f'<svg viewBox="0 0 {columns * width} {rows * height}" role="img" xmlns="http://www.w3.org/2000/svg" '
        f'aria-label="{label}"><style>'
        f"{style}.grid{{stroke:#e2e8f0}}.axis{{stroke:#94a3b8}}.line{{stroke-width:1.6}}</style>{''.join(charts)}</svg>"
    )
