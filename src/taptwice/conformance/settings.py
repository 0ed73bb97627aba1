"""What a case gives, as settings of the reference application; what it does not offer is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from taptwice.core.fingerprint import PARTS, Rules
from taptwice.core.header import KeySyntax
from taptwice.core.policy import REPLAYED_HEADERS, Policy, seconds

PROBLEMS = {
    "missing": "key-missing",
    "invalid": "key-invalid",
    "reused": "key-reused",
    "in_progress": "in-progress",
    "store": "store-unavailable",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the application, as the cases spell them, with the cases' defaults."""

    given: Mapping[str, Any] = field(default_factory=dict)
    deployed: Mapping[str, Any] = field(default_factory=dict)
    """What a later release of the application changes."""

    def _get(self, name: str, default: Any) -> Any:
        return self.deployed.get(name, self.given.get(name, default))

    @property
    def names(self) -> tuple[str, ...]:
        names = self._get("header", "Idempotency-Key")
        return (names,) if isinstance(names, str) else tuple(names)

    @property
    def replay_header(self) -> str:
        return str(self._get("replay_header", "Idempotent-Replayed"))

    @property
    def auth(self) -> str:
        return str(self._get("auth", "required"))

    @property
    def methods(self) -> frozenset[str]:
        return frozenset(self._get("methods", ("POST", "PATCH")))

    @property
    def by_day(self) -> bool:
        """Whether the records are partitioned."""
        return bool(self._get("partition_by", "none") == "day")

    @property
    def pool_size(self) -> int:
        return int(self._get("pool_size", 10))

    @property
    def store_timeout(self) -> float | None:
        limit = self._get("store_timeout", None)
        return None if limit is None else seconds(limit)

    @property
    def isolation(self) -> str | None:
        found: str | None = self._get("db_isolation", None)
        return found

    @property
    def read_before_claim(self) -> bool:
        return bool(self._get("read_before_claim", False))

    @property
    def read_from(self) -> str:
        """The table that is read where it need not be the newest: a replica may lag behind."""
        return "payments_replica" if self._get("read_replica", False) else "payments"

    @property
    def request_decompression(self) -> bool:
        return bool(self._get("request_decompression", False))

    @property
    def echo_key(self) -> bool:
        return bool(self._get("echo_key", False))

    @property
    def announce_ignored(self) -> bool:
        return bool(self._get("announce_ignored", False))

    @property
    def rebuild(self) -> bool:
        return bool(self._get("replay", "stored") == "rebuild")

    @property
    def gzip(self) -> bool:
        return bool(self._get("gzip_middleware", None) == "outside")

    @property
    def handler_timeout(self) -> float | None:
        limit = self._get("handler_timeout", None)
        return None if limit is None else seconds(limit)

    @property
    def payment_paths(self) -> tuple[str, ...]:
        alias = self.deployed.get("alias", ())
        return tuple(dict.fromkeys(("/payments", *([alias] if isinstance(alias, str) else alias))))

    @property
    def payments_response(self) -> str:
        return str(self.deployed.get("payments_response", "v1"))

    def account_of(self, account: str, user: str, header: Callable[[str], str | None]) -> str:
        """What together makes the account, for the cases that add to it."""
        parts = [account]
        for part in self._get("scope", ("account",)):
            if part == "user":
                parts.append(f"user={user}")
            elif part.startswith("header:"):
                parts.append(f"{part}={header(part.removeprefix('header:')) or ''}")
        return "\n".join(parts)

    def policy(self) -> Policy:
        """The policy of every keyed route."""
        get = self._get
        source = get("key_source", "header")
        in_flight = get("in_flight", "wait")
        allow = tuple(get("replay_allow", REPLAYED_HEADERS)) + tuple(get("replay_allow_extra", ()))
        # "tenant:" and tokens are the application's affair; the route is the product's.
        return Policy(
            required=get("key_required", True),
            methods=self.methods,
            key=KeySyntax(
                self.names,
                strict=get("key_syntax", "lenient") == "strict",
                max_length=get("key_max_len", 255),
                uuid=get("key_format", None) == "uuid",
                guard=get("key_guard", False),
            ),
            key_pointer=source.removeprefix("json:") if source.startswith("json:") else None,
            fingerprint=self._rules(),
            scope="route" if "route" in get("scope", ()) else "account",
            anonymous=get("anonymous", "reject"),
            window=get("window", "24h"),
            uuid7_guard=get("uuid7_guard", False),
            wait=0 if in_flight == "conflict" else get("wait_max", "5s"),
            retry_after=get("retry_after", 1),
            save=get("save", "final"),
            save_max_body=get("save_max_body", 1_048_576),
            request_max_body=get("request_max_body", 10_485_760),
            streams=get("streams", "pass"),
            replay_header=self.replay_header,
            replay_allow=allow,
            status={PROBLEMS[name]: status for name, status in get("status_map", {}).items()},
        )

    def _rules(self) -> Rules:
        rules = {**self.given.get("fingerprint", {}), **self.deployed.get("fingerprint", {})}
        return Rules(
            json=rules.get("json", "canonical"),
            exclude=tuple(rules.get("exclude", ())),
            only=tuple(rules.get("only", ())),
            headers=tuple(rules.get("headers", ())),
            parts=tuple(rules.get("parts", PARTS)),
            version=rules.get("version", 1),
        )


def interval(duration: str) -> float:
    """Seconds of a duration that may have several parts, such as 23h59m59s."""
    return sum(seconds(part) for part in re.findall(r"\d+(?:\.\d+)?(?:ms|s|m|h|d)", duration))
