"""The retrying client: one intent, one key, one deadline.

    Client, AsyncClient             httpx2 with keys and retries that are safe
    retry                           the same around any function
    RetryPolicy                     when to try again, and when
    report, Report, Outcome, StopReason     how a call went
    inherit                         what a request that came in says of its caller's retries and limit
    RetryBudget, CircuitBreaker     against retries that make an outage worse
    DeadlineExceeded, KeyReused, KeyRejected, CircuitOpen       beside the library's own exceptions

Beneath what one has already: `taptwice.client.httpx2`, `.httpx`, `.requests` and `.aiohttp`. For tests,
`taptwice.client.testing` has a server that misbehaves by a script. No library is loaded unasked.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False

if TYPE_CHECKING:
    from taptwice.client.errors import DeadlineExceeded, KeyRejected, KeyReused
    from taptwice.client.function import retry
    from taptwice.client.http import AsyncClient, Client
    from taptwice.client.outcome import Outcome
    from taptwice.client.plan import StopReason
    from taptwice.client.policy import RetryPolicy
    from taptwice.client.reports import Attempted, Ended, Report, report
    from taptwice.client.shell import inherit
    from taptwice.client.world import World
    from taptwice.core.breaker import CircuitBreaker
    from taptwice.core.budget import RetryBudget
    from taptwice.errors import CircuitOpen

_HOMES = {
    "client.errors": ("DeadlineExceeded", "KeyRejected", "KeyReused"),
    "client.function": ("retry",),
    "client.http": ("AsyncClient", "Client"),
    "client.outcome": ("Outcome",),
    "client.plan": ("StopReason",),
    "client.policy": ("RetryPolicy",),
    "client.reports": ("Attempted", "Ended", "Report", "report"),
    "client.shell": ("inherit",),
    "client.world": ("World",),
    "core.breaker": ("CircuitBreaker",),
    "core.budget": ("RetryBudget",),
    "errors": ("CircuitOpen",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncClient",
    "Attempted",
    "CircuitBreaker",
    "CircuitOpen",
    "Client",
    "DeadlineExceeded",
    "Ended",
    "KeyRejected",
    "KeyReused",
    "Outcome",
    "Report",
    "RetryBudget",
    "RetryPolicy",
    "StopReason",
    "World",
    "inherit",
    "report",
    "retry",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"taptwice.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
