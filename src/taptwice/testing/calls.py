"""A request as a test's client takes it, and the answer that came back, whatever the client."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from taptwice.core.header import OMITTED
from taptwice.core.model import Headers
from taptwice.core.policy import Policy
from taptwice.errors import Misuse


@dataclass(frozen=True)
class Call:
    """A request as its client takes it."""

    method: str
    url: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method} {self.url}"

    def keyed(self, policy: Policy, key: str) -> Call:
        """The same request under this key, where the policy wants it; a key that it had is replaced."""
        if policy.key_pointer is not None:
            return self._with(json=_placed(self.options.get("json"), policy.key_pointer.split("/")[1:], key))
        name = policy.key.names[0]
        ours = {each.lower() for each in policy.key.names}
        lines = [line for line in _lines(self.options.get("headers")) if str(line[0]).lower() not in ours]
        return self._with(headers=dict(lines) | {name: f'"{key}"' if policy.key.strict else key})

    def has_key(self, policy: Policy) -> bool:
        """Whether the test gave it a key itself."""
        if policy.key_pointer is not None:
            steps = policy.key_pointer.split("/")[1:]
            found = self.options.get("json")
            for step in steps:
                found = found.get(step) if isinstance(found, Mapping) else None
            return found is not None
        ours = {each.lower() for each in policy.key.names}
        return any(str(name).lower() in ours for name, _ in _lines(self.options.get("headers")))

    def changed(self, changes: Mapping[str, Any] | None) -> Call:
        """Another request to the same place: `changes` of its options, or one that we think of."""
        if changes is not None:
            return self._with(**changes)
        for name in ("json", "data", "form", "params", "query_string"):
            value = self.options.get(name)
            if isinstance(value, Mapping):
                return self._with(**{name: _other(value)})
        if any(
            self.options.get(name) for name in ("json", "data", "content", "files", "params", "query_string")
        ):
            raise Misuse(
                f"{self}: say what another request would be, with options of the client: changed={{…}}"
            )
        return replace(self, url=f"{self.url}{'&' if '?' in self.url else '?'}taptwice=changed")

    def _with(self, **options: Any) -> Call:
        return replace(self, options={**self.options, **options})


def _lines(headers: Any) -> list[tuple[str, str]]:
    if headers is None:
        return []
    return list(headers.items() if hasattr(headers, "items") else headers)


def _placed(body: Any, steps: Sequence[str], key: str) -> Any:
    if not isinstance(body, Mapping):
        raise Misuse("the key stands in the JSON body (key_pointer): give the request json={…}")
    step, *below = steps
    return {**body, step: _placed(body.get(step, {}), below, key) if below else key}


def _other(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same members with another number; where there is none, with one more member."""
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {**values, name: value + 1}
    return {**values, "taptwice": "changed"}


def new_key() -> str:
    """An idempotency key that nobody has used."""
    return str(uuid.uuid4())


@dataclass(frozen=True)
class Answer:
    """What came back. `response` is the client's own; where redirects were followed, the last of them."""

    status: int
    headers: Headers
    body: bytes
    response: Any

    def header(self, name: str) -> str | None:
        return next((value for known, value in self.headers if known.lower() == name.lower()), None)

    def replayed(self, policy: Policy) -> bool:
        """Whether it carries the replay marker."""
        return (self.header(policy.replay_header) or "").lower() == "true"

    @property
    def problem(self) -> str | None:
        """The last segment of the type of a problem document (RFC 9457)."""
        if not (self.header("content-type") or "").startswith("application/problem+json"):
            return None
        try:
            return str(json.loads(self.body)["type"]).rpartition("/")[2]
        except (ValueError, KeyError, TypeError):
            return None

    def __str__(self) -> str:
        return f"{self.status} {short(self.body)}"


Outcome = Answer | BaseException
"""What became of a request: an answer, or what the client raised."""


def answered(outcome: Outcome) -> Answer:
    """The answer; what the client raised is raised."""
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def short(body: bytes) -> str:
    """A body for a message."""
    return repr(body if len(body) <= 120 else body[:120] + b"...")


def answer_of(response: Any) -> Answer:
    """The answer in a response of the client's; of several that were redirects, the first."""
    history = getattr(response, "history", None)
    first = history[0] if history else response
    body = first.get_data() if hasattr(first, "get_data") else first.content
    return Answer(
        first.status_code, tuple((str(n), str(v)) for n, v in first.headers.items()), body, response
    )


def differences(first: Answer, again: Answer, policy: Policy) -> Iterator[str]:
    """Where an answer differs from the first one: status, body, saved headers."""
    if again.status != first.status:
        yield f"status: expected {first.status}, found {again}"
        return
    omitted = again.header(OMITTED[0]) is not None  # a stream, or too large: remembered without its body
    if again.body != (b"" if omitted else first.body):
        yield f"body: expected {short(first.body)}, found {short(again.body)}"
    found = policy.kept_headers(again.headers)
    for name, value in policy.kept_headers(first.headers):
        if (name, value) not in found and not (omitted and name == "content-type"):
            yield f"{name}: expected {value!r}, found {again.header(name)!r}"
