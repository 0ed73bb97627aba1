"""Problem documents (RFC 9457) for the errors of this package.

The type of a problem is a URI whose last segment is the error's ``problem``. Clients tell a key that is
still in progress from any other 409 by that URI (draft-ietf-httpapi-idempotency-key-header-07 leaves the
status shared), so it stays the same for ever; the words beside it are for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from taptwice.errors import TaptwiceError

__all__ = ["PROBLEMS", "Problem", "problem"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What a problem type means, in words for the caller."""

    title: str
    """Short, and the same for every occurrence."""
    meaning: str
    """What happened, in particular whether anything was done."""
    remedy: str
    """What the caller should do."""


PROBLEMS: Final[Mapping[str, Problem]] = MappingProxyType(
    {
        "error": Problem(
            "Internal error",
            "The service failed while it was handling an idempotency key.",
            "Send the same request with the same key again later; tell the service if it goes on.",
        ),
        "bad-request": Problem(
            "Bad request",
            "The request cannot be handled as it was sent; nothing was done.",
            "Correct the request, then send it again.",
        ),
        "key-missing": Problem(
            "Idempotency key missing",
            "This operation demands an idempotency key and the request carried none; nothing was done.",
            "Make one key for each intent, a UUID for instance, and send it with every attempt.",
        ),
        "key-invalid": Problem(
            "Idempotency key invalid",
            "The idempotency key is malformed, too long or sent twice; nothing was done.",
            "Correct the key as the detail says. Then it is a new key, and the request a first attempt.",
        ),
        "key-expired": Problem(
            "Idempotency key expired",
            "The key is older than the time for which keys are remembered; nothing was done now, "
            "and whether an earlier attempt was carried out is no longer known here.",
            "Look up the outcome of the earlier attempt before using a new key.",
        ),
        "key-reused": Problem(
            "Idempotency key reused",
            "The key was first used with another request; nothing was done now, "
            "and the first request's answer is untouched.",
            "Send the first request unchanged to get its answer, or use a new key for a new intent.",
        ),
        "account-missing": Problem(
            "Account missing",
            "Keys belong to accounts and nobody is logged in; nothing was done.",
            "Send credentials, and the same key.",
        ),
        "request-too-large": Problem(
            "Request too large",
            "The body is larger than this operation accepts; nothing was done.",
            "Send a smaller body.",
        ),
        "request-incomplete": Problem(
            "Request incomplete",
            "The body ended before its announced length; nothing was done.",
            "Send the whole request again with the same key.",
        ),
        "in-progress": Problem(
            "Request in progress",
            "An earlier attempt with this key is still running.",
            "Send the same request with the same key again, after the time in Retry-After.",
        ),
        "store-unavailable": Problem(
            "Idempotency store unavailable",
            "Keys cannot be checked at the moment, so nothing was done.",
            "Send the same request with the same key again, after the time in Retry-After.",
        ),
        "commit-unknown": Problem(
            "Outcome unknown",
            "The connection to the database broke while the work was being committed: "
            "it is either done completely or not at all.",
            "Send the same request with the same key again: that finds out, and repeats nothing.",
        ),
        "contention": Problem(
            "Too much contention",
            "The work met concurrent work on the same data and was undone; nothing was done.",
            "Send the same request with the same key again.",
        ),
        "misuse": Problem(
            "Internal error",
            "The service uses idempotency keys in a way that cannot be safe, and refused to go on.",
            "Tell the service; its log names the cause.",
        ),
    }
)
"""Every problem type: the last segment of its URI, and its words."""


def problem(
    error: TaptwiceError,
    *,
    base: str = "https://taptwice.dev/problems/",
    status: int | None = None,
    extra: Mapping[str, object] = {},
) -> tuple[int, tuple[tuple[str, str], ...], bytes]:
    """Status, header fields and body of the answer to ``error`` (RFC 9457 section 3).

    ``base`` is the URI, slash included, to which the problem's name is added. ``status`` replaces the
    status of the error's class, for services that answer otherwise. ``extra`` are extension members,
    JSON-able; they cannot replace a member that is made here.

    The detail of an error of ours (5xx) stays in the log: it names tables, settings and hosts. Its caller
    reads what the type means and what to do.
    """
    words = PROBLEMS.get(error.problem, PROBLEMS["error"])
    status = error.status if status is None else status
    members: dict[str, object] = {
        "type": base + error.problem,
        "title": words.title,
        "status": status,
        "detail": error.detail if error.status < 500 else f"{words.meaning} {words.remedy}",
    }
    body = json.dumps({**members, **extra, **members}, separators=(",", ":"))
    return status, (("Content-Type", "application/problem+json"),), body.encode("ascii")
