"""Whose turn it is, within this process, to write to a file of SQLite: first come, first served.

A file has one writer. Those who wait for it in SQLite try again and again, in no order, and of many some
starve. So those of one process stand in line here, one line a file, each in the thread of its connection.
That only delays, and never for longer than asked: SQLite's own lock decides who may write.

No turn is lost. The first in line has it, and whoever leaves, from wherever he stands, calls whoever is then
the first. A writer that is collected leaves by that; one that is gone, as when its event loop is closed, is
taken off by the next who comes or goes. A forked process begins with no lines.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Protocol

from taptwice.drivers import system


class Writer(Protocol):
    """Who stands in line: an executor."""

    @property
    def is_gone(self) -> bool:
        """Whether it will never begin, or its transaction was ended and nobody has told it so."""


class Line:
    """Those who want to write to one file, in the order in which they came.

    Each step is one operation of the deque, and there is no lock: a writer may be collected, and leave, in
    the midst of any of this.
    """

    def __init__(self) -> None:
        self._places: deque[Place] = deque()

    @property
    def first(self) -> Place | None:
        """Whose turn it is."""
        try:
            return self._places[0]
        except IndexError:
            return None

    def enter(self, place: Place) -> None:
        """Come to stand last."""
        self._places.append(place)
        if self.first is not place:
            self._call()

    def leave(self, place: Place) -> None:
        """Leave, from wherever."""
        self._take_off(place)
        self._call()

    def _call(self) -> None:
        while (first := self.first) is not None and not first.call():
            self._take_off(first)

    def _take_off(self, place: Place) -> None:
        with suppress(ValueError):
            self._places.remove(place)


class Place:
    """A writer's place in a line, and the turn when it is the first.

    `leave` gives it up, from any thread; a second time it does nothing. When the writer is collected, that
    does it.
    """

    def __init__(self, line: Line, writer: Writer) -> None:
        self._line = line
        self._bell = threading.Lock()  # not an Event, which cannot be rung while it is being rung
        _ = self._bell.acquire()
        self.leave = weakref.finalize(writer, line.leave, self)
        line.enter(self)

    @property
    def is_first(self) -> bool:
        """Whether it has the turn."""
        return self._line.first is self

    def call(self) -> bool:
        """Tell the writer that its turn has come, perhaps once more. False: it will never use it."""
        standing = self.leave.peek()
        self.ring()
        return standing is not None and not standing[0].is_gone

    def ring(self) -> None:
        """End the waiting."""
        with suppress(RuntimeError):  # it has been rung
            self._bell.release()

    def wait(self, seconds: float) -> float:
        """Wait for the turn; the seconds that are left. The place is given up if it does not come in time."""
        end = system.now() + seconds
        try:
            came = self._bell.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
        except BaseException:
            _ = self.leave()
            raise
        if not came:
            _ = self.leave()
        return max(0.0, end - system.now())


_lines: weakref.WeakValueDictionary[str, Line] = weakref.WeakValueDictionary()
"""By the file's path. Who stands in a line keeps it."""

_making = threading.Lock()


def line_of(file: str) -> Line:
    """The line of a file, by its resolved path."""
    with _making:
        line = _lines.get(file)
        if line is None:
            line = _lines[file] = Line()
        return line


def _forget() -> None:
    global _lines, _making
    _lines, _making = weakref.WeakValueDictionary(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
