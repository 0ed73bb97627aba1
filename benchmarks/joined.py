"""The joined guarantee, measured: `./dev bench joined [--quick] [--save] [--only PART]`.

Every ratio is of two things that ran in turn on one machine in one run. `--quick` takes a minute and its
figures are good for nothing but seeing that it runs; `--save` writes docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import sys
import time
from collections.abc import Callable

from benchmarks.parts import counts, driver, http, machine, size
from benchmarks.parts.measure import Result

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
INTRODUCTION = """\
A ratio compares two things that ran in turn, round after round, in this one run: first the median of the
ratios within each round, then the ratio of the best rounds, then the median rate. Rates are this machine's;
the ratios are what carries over, and they too move with what a commit costs.

**Bare** is the work alone: BEGIN, one INSERT, COMMIT. The **textbook** inserts the key, does the work and
updates the key. **By hand** is the SQL of this library, written out in the program with what its driver
offers. **Ours** is without the savepoint (`savepoint=False`) unless it says so; **+ savepoint** is the
default. Commits are those that the server counts: asyncpg's second is the look behind COMMIT, in the same
message, a transaction that writes nothing and waits for no disk."""
PARTS = ("driver", "http", "counts", "size", "import")


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench joined", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and short rounds")
    parser.add_argument("--save", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be given again")
    options = parser.parse_args()
    quick, wanted = options.quick, options.only or PARTS
    if options.save and (quick or options.only):
        parser.error("--save wants the whole run, without --quick and --only")

    begun = time.monotonic()
    results: list[Result] = []
    with machine.database() as url:
        facts = machine.facts(url)
        print(*facts, "", sep="\n", flush=True)
        sections: dict[str, Callable[[], list[Result]]] = {
            "driver": lambda: driver.section(url, 3 if quick else 7, 0.1 if quick else 0.4),
            "http": lambda: http.section(url, quick),
            "counts": lambda: counts.section(url),
            "size": lambda: size.bytes_a_key(url, 2_000 if quick else 20_000),
            "import": lambda: size.import_ms(3 if quick else 20),
        }
        for name in PARTS:
            if name in wanted:
                found = sections[name]()
                results += found
                print(_plain(found), flush=True)
    minutes = (time.monotonic() - begun) / 60
    judged = [result for result in results if result.met is not None]
    print(f"{sum(result.met is True for result in judged)} of {len(judged)} goals met, {minutes:.0f} minutes")
    if options.save:
        PAGE.write_text(_page(facts, results, minutes))
        print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")
    return 0


def _verdict(result: Result) -> str:
    return "" if result.met is None else "met" if result.met else "missed"


def _plain(results: list[Result]) -> str:
    lines, group = [], ""
    for result in results:
        if result.group != group:
            group = result.group
            lines += ["", group]
        goal = f"[{result.goal}: {_verdict(result)}]" if result.goal else ""
        lines.append(f"  {result.what:<44} {result.measured}  {goal}".rstrip())
    return "\n".join(lines)


def _page(facts: list[str], results: list[Result], minutes: float) -> str:
    today = datetime.datetime.now(datetime.UTC)
    lines = [
        "# Benchmarks",
        "",
        f"Written by `./dev bench joined --save` on {today:%d %B %Y}, in {minutes:.0f} minutes.",
        "",
        INTRODUCTION,
        "",
        *(f"- {fact}" for fact in facts),
    ]
    group = ""
    for result in results:
        if result.group != group:
            group = result.group
            lines += ["", f"## {group}", "", "| | goal | measured | |", "|---|---|---|---|"]
        lines.append(f"| {result.what} | {result.goal} | {result.measured} | {_verdict(result)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
