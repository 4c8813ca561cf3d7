"""Parts of a model card in Markdown that all kinds of runs share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from genrl import __version__
from genrl.config import RunConfig
from genrl.runtime.folder.run import write_atomic

THIS_FOLDER = "THIS_FOLDER"
"""Where the code of a card names the folder that it lies in; in the place of the hub's repository, once it is there."""


def as_code(text: str) -> str:
    """Write text as code in Markdown, which shows it as it is: HTML, links and backticks too."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{' '.join(text.split())}{space}{fence}"


def table(rows: Sequence[Mapping[str, float | None]]) -> str:
    """The last evaluation, beside that of step 0 where there is one. rows: evaluations, by step."""
    last = rows[-1] if rows else {}
    first = rows[0] if len(rows) > 1 and rows[0].get("step") == 0 else None
    titles = ["held-out metric", *([] if first is None else ["before"]), "value" if first is None else "after"]
    lines = [titles, ["---"] * len(titles)]
    for name, value in sorted(last.items()):
        if name.startswith("eval/") and value is not None:
            numbers = [value] if first is None else [first.get(name), value]
            cells = ["-" if number is None else f"{number:.4g}" for number in numbers]
            lines.append([as_code(name).replace("|", "\\|"), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_plain(folder: Path, config: RunConfig, base: str | None, rows: Sequence[Mapping[str, float | None]]) -> None:
    """README.md of an exported policy or vision-language model. base: what it was trained from, None = from nothing."""
    base_model = "" if base is None else f"base_model: {json.dumps(base, ensure_ascii=False)}\n"
    what = "A model" if base is None else as_code(base)
    text = f"""---
{base_model}library_name: {config.library}
tags: [reinforcement-learning, genrl, {json.dumps(config.trainer.algorithm)}]
---

# {what} trained by {as_code(config.trainer.algorithm)}

Trained by reinforcement learning with genrl {__version__}, {config.iterations} iterations.

{table(rows)}
"""
    write_atomic(folder / "README.md", text)
