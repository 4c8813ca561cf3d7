"""What happens when a reward raises: the failure is recorded and counted, and too many of them stop the run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

FAILED_LIMIT = 0.2
"""The largest share of an iteration's samples for which a reward may raise."""


class RewardFailed(RuntimeError):
    """The run cannot go on: too many samples could not be scored, or the reward asked to stop by raising this."""


class Failure(NamedTuple):
    """A call of a reward that raised: how many samples have no score because of it, and why."""

    samples: int
    error: str
    traceback: str
    fatal: bool = False
    """Whether the reward asked to stop the run (it raised RewardFailed)."""
    rows: tuple[int, ...] = ()
    """Which samples of the call; () = all of them."""


def catch(call: Callable[[], T], samples: int) -> T | Failure:
    """The result of a reward's call for `samples` samples, or the failure if it raised.

    torch.OutOfMemoryError is not caught, since the next call would have no more memory; nor is KeyboardInterrupt.
    """
    import torch

    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's code; recorded, counted and reported, not hidden
        fatal = isinstance(error, RewardFailed)
        text = str(error) if fatal else f"{type(error).__name__}: {error}"
        return Failure(samples, text, traceback.format_exc(), fatal)


def check_failures(name: str, failed: int, total: int, first: Failure | None, *, limit: float = FAILED_LIMIT) -> None:
    """Raise RewardFailed, with the first traceback, if a reward raised for more than `limit` of the samples.

    Call this once per reward and iteration with counts summed over all processes, so that all of them stop together.
    Only calls that raised count: a reward that *returns* NaN says that it does not apply to the sample (a prompt
    without quotes has no text to read). A reward that raised RewardFailed stops the run whatever the share; `first`
    must then be that failure (see `first_failure`).
    """
    if first is not None and first.fatal:
        raise RewardFailed(f"reward {name!r}: {first.error}")
    if total == 0 or failed <= limit * total:
        return
    where = first.traceback if first is not None else "The first failure is in the log of another process."
    raise RewardFailed(
        f"reward {name!r} raised for {failed} of {total} samples of this iteration "
        f"({failed / total:.0%}, at most {limit:.0%} may fail). The first failure:\n{where}"
    )


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """The failure to report: the first that asked to stop the run, otherwise the first of all."""
    return next((f for f in failures if f.fatal), failures[0] if failures else None)
