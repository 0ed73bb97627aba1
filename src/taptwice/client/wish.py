"""One intent, one key, also when the process dies: what that means, without a database or a network.

The store is a memory and no lock. One write before the first byte binds the intent's name to its key and to
the request; one after keeps the answer. Nobody holds a lease: two processes that carry out one intent at the
same time send the same key, and the server lets one of them work. What comes of an attempt at an intent:

    dropped   the request   the answer      its age           so
    -------   -----------   -------------   ---------------   ------------------------------------------------
    yes                                                       IntentDropped
    no        differs                                         IntentChanged
    no        is the same   kept                              STORED  that answer, and nothing is sent
    no        is the same   none            in the window     SEND    under the key that it has
    no        is the same   not its body    in the window     SEND    too: the server replays the answer
    no        is the same   either of both  beyond            IntentTooOld: to send might do it a second time

The age counts from the first write before a byte, which comes before the server's own window begins; and the
last moment at which this attempt may still be sent must lie in the window too.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

from taptwice.client.outcome import Outcome
from taptwice.client.plan import StopReason
from taptwice.client.reports import Report, attach
from taptwice.core.fingerprint import Rules, of_request
from taptwice.core.model import Answer, is_account
from taptwice.core.plan import Command, Plan, ask
from taptwice.core.policy import NEVER_SAVED
from taptwice.errors import IntentChanged, IntentDropped, IntentRefused, IntentTooOld, Misuse
from taptwice.stores.intents import Intent

Response = TypeVar("Response")

Keep = Literal["answer", "key"]
"""What is remembered of an answer: all, or its status alone."""

LARGEST_BODY = 65_536
"""Bytes. A larger answer is remembered without its body."""

KEPT_HEADERS = ("content-type", "location")

NOT_FINAL = NEVER_SAVED | {403}
"""Statuses after which the same intent may still be carried out: log in, or wait, and send it again."""


@dataclass(frozen=True, slots=True)
class Wish:
    """An attempt at an intent. `key` is taken where the intent has none yet."""

    name: str
    request: bytes = field(repr=False)
    """What `fingerprint_of` makes of it."""
    key: str = field(default_factory=lambda: str(uuid.uuid4()), repr=False)
    lasts: float = 0.0
    """Seconds that sending may take, waits and retries included."""

    def __post_init__(self) -> None:
        _ = checked(self.name)


@dataclass(frozen=True, slots=True)
class Sent(Generic[Response]):
    """What came of sending: the response for the caller, and what it says of the intent."""

    response: Response
    answer: Answer | None
    """The whole answer, its body decoded; None while the outcome is unknown, refused or in progress. A body
    of None (a stream, which the caller reads) is remembered as an answer without its body."""


def checked(name: str) -> str:
    """A name as it may stand in the table."""
    if not is_account(name):
        raise Misuse(f"intent={name!r}: give it a name, text that is not empty, such as 'order-17'")
    return name


def fingerprint_of(method: str, url: str, body: bytes, content_type: str = "") -> bytes:
    """32 bytes that tell one request from another, by the rules of `taptwice.core.fingerprint`.

    Method, URL (without login and fragment), media type and body count; JSON, forms and multipart by their
    meaning, so that neither a new release nor a new multipart boundary makes another request of it. No
    header counts but `content_type`: with a token that was renewed it is the same request.
    """
    parts = urlsplit(url)
    place = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    headers = [(b"content-type", content_type.encode("latin-1", "replace"))]
    return of_request(method, place, parts.query.encode(), headers, body, RULES).digest()


RULES = Rules(version=1)
"""Pinned: another version would make other requests of those that are under way."""


# --- the plan -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remember(Command[Intent | None]):
    """The one write before the first byte. An intent that was dropped comes back as it is, unbound; None: it
    was forgotten while one asked."""

    wish: Wish


@dataclass(frozen=True, slots=True)
class Send(Command[Sent[Any]]):
    """Send the request under this key, with all its retries."""

    key: str


@dataclass(frozen=True, slots=True)
class Settle(Command[None]):
    """The one write after. It never fails: where it did not happen, the next attempt asks the server."""

    name: str
    key: str
    answer: Answer


def with_intent(wish: Wish, window: float, keep: Keep = "answer") -> Plan[Sent[Any] | Intent]:
    """Carry a wish out around whatever `Send` does. The intent comes back where its answer was remembered."""
    if wish.lasts > window:  # found out before it is bound: nothing of it is sent, ever
        raise _refused(
            None,
            IntentTooOld,
            f"intent {wish.name!r} was not sent now: the call may last {wish.lasts:g} s, and the server"
            f" remembers its key for {window:g} s; give the call a shorter deadline",
        )
    intent = yield from ask(Remember(wish))
    if intent is None or intent.state == "dropped" or intent.fingerprint is None:
        raise _refused(
            intent,
            IntentDropped,
            f"intent {wish.name!r} was given up{_sent(intent)}; nothing was sent now. The same wish: find"
            " out at the server what became of it, then renew it; another wish: give it a new name",
        )
    if judge(wish, intent, window):
        return intent
    sent = yield from ask(Send(intent.key))
    if sent.answer is not None and sent.answer.status not in NOT_FINAL:
        yield from ask(Settle(wish.name, intent.key, kept(sent.answer, keep)))
    return sent


def judge(wish: Wish, intent: Intent, window: float) -> bool:
    """The table above, for an intent that was not dropped. True: give its answer. False: send it."""
    if intent.fingerprint != wish.request:
        known = "may have been done" if intent.answer is None else f"was answered {intent.answer.status}"
        raise _refused(
            intent,
            IntentChanged,
            f"intent {wish.name!r} stands for another request (its method, URL or body differ), which"
            f" {known}{_sent(intent)}; nothing was sent now. The same wish: send it as it was, or find out"
            " at the server what became of it, then drop or renew it; another wish: give it a new name",
        )
    if intent.answer is not None and intent.answer.body is not None:
        return True
    if intent.age + wish.lasts > window:
        if intent.answer is not None:
            raise _refused(
                intent,
                IntentTooOld,
                f"intent {wish.name!r} is done: its answer was {intent.answer.status}. The body was not kept,"
                f" and the server remembers it for {window:.0f} s{_sent(intent)}",
            )
        raise _refused(
            intent,
            IntentTooOld,
            f"intent {wish.name!r} was first sent {intent.age:.0f} s ago{_sent(intent)}; the server remembers"
            f" its key for {window:.0f} s, and this call may last {wish.lasts:.0f} s: it might be done twice."
            " Nothing was sent now; find out at the server what became of it, then drop or renew it",
        )
    return False


def _sent(intent: Intent | None) -> str:
    """What finds a request again in the server's books."""
    if intent is None or intent.sent_at is None:
        return ""
    moment = datetime.fromtimestamp(intent.sent_at, UTC).isoformat(timespec="seconds")
    return f" (sent at {moment}, key {intent.key})"


def _refused(intent: Intent | None, kind: type[IntentRefused], detail: str) -> IntentRefused:
    """The error, with the report of a call that sent nothing. What is not known is `unknown`."""
    error, outcome = kind(detail), Outcome.UNKNOWN
    if intent is not None and intent.answer is not None:
        outcome = Outcome.PROCESSED
    elif intent is not None and intent.sent_at is None:
        outcome = Outcome.NOT_SENT
    key = None if intent is None else intent.key
    attach(error, Report((), StopReason.INTENT_REFUSED, outcome, key, None))
    return error


def kept(answer: Answer, keep: Keep) -> Answer:
    """What of a final answer is remembered."""
    if keep == "key" or "no-store" in (answer.header("cache-control") or "").lower():
        return Answer(answer.status, (), None)
    headers = tuple((name, value) for name, value in answer.headers if name.lower() in KEPT_HEADERS)
    fits = answer.body is not None and len(answer.body) <= LARGEST_BODY
    return Answer(answer.status, headers, answer.body if fits else None)
