"""Tap twice, pay once: claim, work and saved answer commit in one transaction of your own database.

    Guard, AsyncGuard               claim in your own transaction, or in one that the block commits
    Claim, Answer                   what the block gets, and what every later attempt gets
    Fingerprint, fingerprint_of     what makes two requests the same
    Policy, profile, KeySyntax, Rules     the settings of a keyed route
    NotSaved                        raised by a handler: send this, save nothing, undo the work
    Event, Outcome, Listener, KeyHashFilter     what happened to a key, for metrics and logs
    TaptwiceError and its kinds     in `taptwice.errors`, drawn as a tree

The frameworks have a module each: `taptwice.http.fastapi`, `.starlette`, `.asgi`, `.flask`; and
`taptwice.testing` is for the tests of your service. Nothing is loaded before it is asked for: to import
this package costs nothing, and no driver and no framework ever comes along unasked.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # without `typing`, which would be most of the cost

__version__ = "0.1.0"

if TYPE_CHECKING:
    from taptwice.core.fingerprint import Fingerprint, Rules
    from taptwice.core.header import KeySyntax
    from taptwice.core.model import Answer
    from taptwice.core.policy import Policy, profile
    from taptwice.errors import (
        CommitUnknown,
        Contention,
        InFlight,
        KeyExpired,
        KeyInvalid,
        KeyMissing,
        KeyReused,
        Misuse,
        RequestError,
        StoreUnavailable,
        TaptwiceError,
        Torn,
        Unfinished,
    )
    from taptwice.events import Event, Listener, Outcome
    from taptwice.flows.current import KeyHashFilter
    from taptwice.flows.guard import AsyncGuard, Claim, Guard, fingerprint_of
    from taptwice.http.request import NotSaved

__all__ = [
    "Answer",
    "AsyncGuard",
    "Claim",
    "CommitUnknown",
    "Contention",
    "Event",
    "Fingerprint",
    "Guard",
    "InFlight",
    "KeyExpired",
    "KeyHashFilter",
    "KeyInvalid",
    "KeyMissing",
    "KeyReused",
    "KeySyntax",
    "Listener",
    "Misuse",
    "NotSaved",
    "Outcome",
    "Policy",
    "RequestError",
    "Rules",
    "StoreUnavailable",
    "TaptwiceError",
    "Torn",
    "Unfinished",
    "__version__",
    "fingerprint_of",
    "profile",
]

_HOMES = {
    "core.fingerprint": ("Fingerprint", "Rules"),
    "core.header": ("KeySyntax",),
    "core.model": ("Answer",),
    "core.policy": ("Policy", "profile"),
    "events": ("Event", "Listener", "Outcome"),
    "flows.current": ("KeyHashFilter",),
    "flows.guard": ("AsyncGuard", "Claim", "Guard", "fingerprint_of"),
    "http.request": ("NotSaved",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = found  # so that this function is not asked again
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
