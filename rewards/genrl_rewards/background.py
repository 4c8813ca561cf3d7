"""Score in a second thread while this one goes on sampling.

By default there is one thread and one queue: calls run in the order in which they were submitted, so the results are
the same with the background on or off.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Submit calls with `submit`, then get their results, in the same order, from `results`.

        with Background(enabled) as background:
            for ...:
                background.submit(lambda: score(...))
            values = background.results()

    With enabled=False every call runs at once, in this thread. threads: how many calls run at a time. If the block is
    left early, calls that have not started are dropped, and the running ones are waited for, since they may hold the
    device.
    """

    def __init__(self, enabled: bool = True, threads: int = 1):
        self._results: list[Future[T]] = []
        self._thread: ThreadPoolExecutor | None = None
        if enabled:
            import torch

            # torch keeps its number of threads per thread; sums in other pieces have other last bits.
            self._thread = ThreadPoolExecutor(threads, "scoring", torch.set_num_threads, (torch.get_num_threads(),))

    def submit(self, call: Callable[[], T]) -> None:
        """Submit a call. What it raises is raised by `results`, or here if the background is off."""
        if self._thread is not None:
            self._results.append(self._thread.submit(call))
            return
        done: Future[T] = Future()
        done.set_result(call())
        self._results.append(done)

    def results(self, each: Callable[[], None] = lambda: None, waiting: Callable[[], None] | None = None) -> list[T]:
        """Wait for all calls; their results in the order of `submit`. Raises what the first failed one raised.

        `each` is called, in this thread, after every call that is done; `waiting`, every second until it is.
        """
        results: list[T] = []
        for future in self._results:
            while waiting is not None and not wait([future], timeout=1.0).done:
                waiting()
            results.append(future.result())
            each()
        self._results.clear()
        return results

    def __enter__(self) -> Background[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
