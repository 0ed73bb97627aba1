"""How far a run is: a bar on a terminal, if rich is installed; else the lines alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, title: str) -> Iterator[Callable[[str | None], None]]:
    """A function to be called at each step, with the line to print for it, if any."""
    if not sys.stdout.isatty():
        yield _plain
        return
    try:
        from rich.progress import MofNCompleteColumn, Progress
    except ImportError:
        yield _plain
        return
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), transient=True) as bar:
        task = bar.add_task(title, total=total)

        def step(line: str | None) -> None:
            if line is not None:
                bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            bar.advance(task)

        yield step


def _plain(line: str | None) -> None:
    if line is not None:
        print(line, flush=True)
