"""Two threads in what a lock is to keep apart: the second comes while the first is in the middle of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

Result = TypeVar("Result")


class Meeting:
    """Is itself the lock; `middle` is to be called by what it guards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first = threading.Event()
        self._second = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._second.set()
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def middle(self) -> None:
        """The first to come here waits until the second stands at the lock; or here, where there is none."""
        if self._first.is_set():
            self._second.set()
        else:
            self._first.set()
            assert self._second.wait(30), "the second never came"

    def of(self, call: Callable[[], Result]) -> tuple[Result, Result]:
        """What two calls give that meet."""
        with ThreadPoolExecutor(2) as threads:
            one = threads.submit(call)
            assert self._first.wait(30)
            other = threads.submit(call)
            return one.result(), other.result()
