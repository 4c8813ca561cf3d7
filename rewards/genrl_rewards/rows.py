"""One pass over all rows before a run: as what each reward reads what it compares with, and which rows it cannot read.

A reward says so by `read_row(**columns)`, which gets its columns of a row by name and `prompts`, the row's prompt; it
returns the kind (`number`, `formula`, `nothing` where there is nothing to compare with) or raises ValueError.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from genrl_rewards.contract import Reward
from genrl_rewards.failures import FAILED_LIMIT

NOTHING = "nothing"
NAMED = 10
"""How many rows of a kind of fault are named."""


@dataclass
class Survey:
    """What one reward reads: rows by kind, the names of those with nothing, and why others are refused."""

    label: str
    kinds: Counter[str] = field(default_factory=Counter)
    nothing: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """How many rows were read or refused."""
        return self.kinds.total() + len(self.refused)

    def lines(self) -> list[str]:
        """What to tell the user."""
        counts = ", ".join(f"{number} {kind}" for kind, number in self.kinds.most_common())
        text_lines = [f"reward {self.label!r}: {self.rows} rows to compare with: {counts or 'none read'}"]
        if self.nothing:
            text_lines.append(
                f"reward {self.label!r}: {len(self.nothing)} rows have no score: {_some(self.nothing, ', ')}"
            )
        if self.refused:
            text_lines.append(
                f"reward {self.label!r}: {len(self.refused)} rows cannot be read: {_some(self.refused, '; ')}"
            )
        return text_lines

    def tell(self, logger: logging.Logger, limit: float = FAILED_LIMIT) -> None:
        """Log the lines, as a warning where a row has no score. Raises ValueError where more than this share of the
        rows is refused: such a run would end by it."""
        if not self.rows:
            return
        logger.log(logging.WARNING if self.nothing or self.refused else logging.INFO, "%s", "\n".join(self.lines()))
        if len(self.refused) > limit * self.rows:
            raise ValueError(self.lines()[-1])


def _some(names: list[str], between: str) -> str:
    return between.join(names[:NAMED]) + (f"{between}..." if len(names) > NAMED else "")


def survey(label: str, reward: Reward, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Survey | None:
    """The pass over rows, each a name and its columns; None for a reward that does not say what it reads. A row without
    the columns is left out."""
    read_row: Callable[..., str] | None = getattr(_itself(reward), "read_row", None)
    if read_row is None:
        return None
    survey_of = Survey(label)
    for name, columns in rows:
        try:
            kind = read_row(**columns)
        # Rows of another reward's data in the same file; a column that every row must have is checked elsewhere.
        except KeyError:
            continue
        except ValueError as error:
            survey_of.refused.append(f"{name}: {error}")
            continue
        survey_of.kinds[kind] += 1
        if kind == NOTHING:
            survey_of.nothing.append(name)
    return survey_of


def read_as(reward: Reward, columns: Mapping[str, Any]) -> str:
    """What a reward compares an answer to this row with, and as what it reads it, for a person; "" where it does not
    say."""
    itself = _itself(reward)
    if not hasattr(itself, "read_row"):
        return ""
    try:
        value, kind = itself.read_value(**columns), itself.read_row(**columns)
    except KeyError as error:
        return f"the row has no column {error}"
    except ValueError as error:
        return f"refused: {error}"
    value = value[0] if isinstance(value, tuple) and len(value) == 1 else getattr(value, "formula", value)
    return f"{value!r:.200}, read as {kind}"


def _itself(reward: Any) -> Any:
    while isinstance(reward, functools.partial):
        reward = reward.func
    return reward
