"""What one attempt has shown, and above all what it proves about the server.

    not_sent      no byte of the request left this machine
    refused       the server answered, and certainly did nothing: 408, 425, 429, 503 by a problem type of ours
    in_progress   an earlier attempt with this key is still running there
    processed     it answered, whatever the answer says; or its answer got lost on the way
    unknown       anything may have happened

*Not sent* and *refused* need proof; where there is none the outcome is unknown. Proof is, in this order: a
complete head of an answer; a byte that was written; a connection that was begun and nothing written. Only
where nobody watched the socket does the exception's kind decide, by the names of classes, so that no
library has to be imported here.
"""

from __future__ import annotations

import errno
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final, NamedTuple

from taptwice.client.policy import RetryPolicy
from taptwice.core.header import REPLAYED, parse_retry_after

__all__ = ["Outcome", "Seen", "of_answer", "of_error"]


class Outcome(StrEnum):
    """What an attempt proves; the module's docstring is the definition."""

    NOT_SENT = "not_sent"
    REFUSED = "refused"
    IN_PROGRESS = "in_progress"
    PROCESSED = "processed"
    UNKNOWN = "unknown"


class Seen(NamedTuple):
    """One attempt, as the retry plan sees it. Either `answer` or `error` is there."""

    outcome: Outcome
    status: int | None = None
    answer: Any = None
    """What the library calls a response, or what the function returned."""
    error: Exception | None = None
    retry_after: float | None = None
    """Seconds, as the server asked; never less than this is waited."""
    hint: bool | None = None
    """``x-should-retry``, where the server sent it."""
    permanent: bool = False
    """The error lies in the request or the set-up: no attempt will ever go better."""
    problem: str | None = None
    """The last segment of a problem type of ours."""
    open: bool = False
    """The answer is handed over unread: until its body's first piece has come the attempt can still fail."""

    @property
    def final(self) -> bool:
        """An answer to take as it is; the shell asks before there is any plan."""
        return self.outcome is Outcome.PROCESSED and self.error is None and self.hint is None


_TYPED: Final = frozenset({400, 409, 422, 503})
"""Statuses whose meaning may depend on a problem type."""
_MARK: Final = REPLAYED.lower()
_NOTHING_DONE: Final = frozenset({"store-unavailable", "contention"})
_HINTS: Final = {"true": True, "false": False}


def of_answer(
    policy: RetryPolicy,
    answer: Any,
    status: int,
    header: Callable[[str], str | None],
    body: Callable[[], bytes],
) -> Seen:
    """Judge an answer. `header` is asked by lower-case names; `body`, decoded, is asked for if it matters."""
    if status < 400:
        return Seen(Outcome.PROCESSED, status, answer)
    problem, in_progress = None, False
    if status in _TYPED and "json" in (header("content-type") or ""):
        problem, in_progress = _read(policy, body())
    if status == 409 and (in_progress or problem == "in-progress"):
        outcome = Outcome.IN_PROGRESS
    elif status in policy.refused or (status == 503 and problem in _NOTHING_DONE):
        outcome = Outcome.REFUSED
    elif status in policy.unknown and header(_MARK) != "true":
        outcome = Outcome.UNKNOWN
    else:  # a saved 500 that is replayed will be the same next time
        outcome = Outcome.PROCESSED
    hint = _HINTS.get((header("x-should-retry") or "").lower())
    if hint and not policy.obey_should_retry:
        hint = None
    after = header("retry-after")
    seconds = None if after is None else _seconds(after, header("date"))
    return Seen(outcome, status, answer, None, seconds, hint, False, problem)


def _read(policy: RetryPolicy, body: bytes) -> tuple[str | None, bool]:
    """The problem's name, if it is one of ours, and whether a sign of the policy says in progress."""
    try:
        document = json.loads(body)
    except ValueError:
        return None, False
    kind = document.get("type") if isinstance(document, dict) else None
    ours = isinstance(kind, str) and kind.startswith(policy.problems)
    name = kind.removeprefix(policy.problems) if ours and isinstance(kind, str) else None
    return name, any(_member(document, path) == value for path, value in policy.in_progress)


def _member(document: object, path: str) -> object:
    for name in path.split("."):
        if not isinstance(document, dict):
            return None
        document = document.get(name)
    return document


def _seconds(value: str, date: str | None) -> float | None:
    # RFC 9110 knows whole seconds only, but a fraction means what it says; to round it down would be early.
    if re.fullmatch(r"[0-9]+\.[0-9]+", value.strip()):
        return float(value)
    return parse_retry_after(value, date, time.time())


_NOT_SENT: Final = frozenset(
    {
        "ClientConnectorDNSError",
        "ConnectTimeout",
        "ConnectTimeoutError",
        "ConnectionTimeoutError",
        "EmptyPoolError",
        "NameResolutionError",
        "PoolTimeout",
    }
)
_ANSWER_CUT: Final = frozenset({"ChunkedEncodingError", "ClientPayloadError", "IncompleteRead"})
_PERMANENT: Final = frozenset(
    {
        "ClientConnectorCertificateError",
        "InvalidHeader",
        "InvalidSchema",
        "InvalidURL",
        "LocalProtocolError",
        "MissingSchema",
        "NonHttpUrlClientError",
        "UnsupportedProtocol",
    }
)
_UNREACHABLE: Final = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH})


def of_error(error: Exception, head: bool = False, wrote: bool | None = None) -> Seen:
    """Judge an exception.

    `head`: a complete head had arrived. `wrote`: what the socket's watcher saw: True, a byte of the request
    was written; False, a connection was begun and nothing written; None, nobody watched, or it saw nothing.
    """
    names: set[str] = set()
    permanent = unreached = False
    for each in _chain(error):
        names.update(kind.__name__ for kind in type(each).__mro__)
        permanent = permanent or isinstance(each, ssl.SSLCertVerificationError)
        unreached = unreached or isinstance(each, ConnectionRefusedError | socket.gaierror)
        unreached = unreached or (isinstance(each, OSError) and each.errno in _UNREACHABLE)
    permanent = permanent or not names.isdisjoint(_PERMANENT)
    if head:
        outcome = Outcome.PROCESSED
    elif wrote:
        outcome = Outcome.UNKNOWN
    elif wrote is False or unreached or permanent or not names.isdisjoint(_NOT_SENT):
        outcome = Outcome.NOT_SENT
    elif not names.isdisjoint(_ANSWER_CUT):
        outcome = Outcome.PROCESSED
    else:
        outcome = Outcome.UNKNOWN
    return Seen(outcome, error=error, permanent=permanent)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and all that it carries: causes, contexts, and what the libraries wrap theirs in."""
    found: list[BaseException] = [error]
    known = set()
    while found:
        each = found.pop()
        if id(each) in known:
            continue
        known.add(id(each))
        yield each
        context = None if each.__suppress_context__ else each.__context__
        inner = (each.__cause__, context, getattr(each, "reason", None), getattr(each, "os_error", None))
        found.extend(one for one in (*inner, *each.args) if isinstance(one, BaseException))
