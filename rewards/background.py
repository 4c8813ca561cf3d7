"""Score in one other thread while this one goes on drawing samples.

One thread and one queue: calls are made in the order in which they were handed in, so the results are those of making
them on the spot, with the background on or off.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Calls handed in by `submit` and their results, in that order, by `results`.

        with Background(enabled) as background:
            for ...:
                background.submit(lambda: score(...))
            found = background.results()

    enabled=False makes every call at once, in this thread. Where the block is left early, calls that have not begun are
    dropped, and the running one is waited for: it may hold the device.
    """

    def __init__(self, enabled: bool = True):
        self._results: list[Future[T]] = []
        self._thread: ThreadPoolExecutor | None = None
        if enabled:
            import torch

            # torch keeps the number of threads per thread; sums over other pieces have other last bits.
            threads = torch.get_num_threads()
            self._thread = ThreadPoolExecutor(1, "scoring", torch.set_num_threads, (threads,))

    def submit(self, call: Callable[[], T]) -> None:
        """Hand in a call. What it raises is raised by `results`, or here where the background is off."""
        if self._thread is not None:
            self._results.append(self._thread.submit(call))
            return
        done: Future[T] = Future()
        done.set_result(call())
        self._results.append(done)

    def results(self, each: Callable[[], None] = lambda: None) -> list[T]:
        """Wait for all calls; their results in the order of `submit`. Raises what the first failed one raised.

        `each` is called, in this thread, after every call that is done.
        """
        found: list[T] = []
        for future in self._results:
            found.append(future.result())
            each()
        self._results.clear()
        return found

    def __enter__(self) -> Background[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
