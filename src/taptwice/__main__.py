"""``python -m taptwice``: the command line."""

from __future__ import annotations

from taptwice.cli import main

if __name__ == "__main__":
    main(prog_name="taptwice")
