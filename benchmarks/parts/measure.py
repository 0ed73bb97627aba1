"""Things measured in turn: round after round, every variant once in each, so that all meet one machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Variant = Callable[[int], object]
"""Does the thing that many times."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the report. `met` is None where there is no goal."""

    group: str
    what: str
    goal: str
    measured: str
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Rounds:
    """Operations a second, one number a round; the rounds of all variants were run in turn."""

    rates: Mapping[str, Sequence[float]] = field(repr=False)
    cpu: Mapping[str, Sequence[float]] = field(repr=False, default_factory=dict)
    """Seconds of this process's processor an operation: what is left of a figure on a busy machine."""

    def median(self, name: str) -> float:
        return statistics.median(self.rates[name])

    def best(self, name: str) -> float:
        return max(self.rates[name])

    def ratio(self, name: str, base: str) -> float:
        """The median of the ratios within each round: what slows a whole round down does not count."""
        return statistics.median(a / b for a, b in zip(self.rates[name], self.rates[base], strict=True))

    def best_ratio(self, name: str, base: str) -> float:
        """The ratio of the best rounds: what the machine was doing besides does not count."""
        return self.best(name) / self.best(base)

    def shown(self, name: str, base: str) -> str:
        ratio, best = self.ratio(name, base), self.best_ratio(name, base)
        cpu = f"; {1e6 * min(self.cpu[name]):.0f} µs of CPU" if name in self.cpu else ""
        return f"{ratio:.2f} ({best:.2f} of best rounds; {self.median(name):,.0f}/s{cpu})"


def in_turn(variants: Mapping[str, Variant], rounds: int, seconds: float) -> Rounds:
    """Each variant for about `seconds` a round. Which comes first changes from round to round."""
    number = {}
    for name, variant in variants.items():
        variant(20)
        number[name] = max(20, int(seconds * _rate(variant, 50)))
    rates: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begun = time.process_time()
            rates[name].append(_rate(variants[name], number[name]))
            cpu[name].append((time.process_time() - begun) / number[name])
    return Rounds(rates, cpu)


def _rate(variant: Variant, number: int) -> float:
    begun = time.perf_counter()
    variant(number)
    return number / (time.perf_counter() - begun)


def judged(group: str, what: str, rounds: Rounds, name: str, base: str, goal: float | None) -> Result:
    """A ratio beside its goal."""
    met = None if goal is None else rounds.ratio(name, base) >= goal
    return Result(group, what, "" if goal is None else f"≥ {goal:.2f}", rounds.shown(name, base), met)
