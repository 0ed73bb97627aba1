"""What a case gives, as settings of the reference application; what it does not offer is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from taptwice.core.fingerprint import Rules
from taptwice.core.header import KeySyntax
from taptwice.core.policy import REPLAYED_HEADERS, Policy, seconds

PROBLEMS = {
    "missing": "key-missing",
    "invalid": "key-invalid",
    "reused": "key-reused",
    "in_progress": "in-progress",
    "store": "store-unavailable",
}

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "mode": ("tx",),
    "partition_by": ("none",),
    "replay": ("stored",),
    "store_down": ("closed",),
    "announce_ignored": (False,),
    "echo_key": (False,),
    "read_replica": (False,),
    "completer": (False,),
    "cors": (True, False),
    "gzip_middleware": ("outside",),
}
"""Settings of which only some values are offered."""

_ABSENT = frozenset(
    {"lease", "lease_renew", "provider_timeout", "provider_strategy", "regions", "home", "client"}
)


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
    def auth(self) -> str:
        return str(self._get("auth", "required"))

    @property
    def methods(self) -> frozenset[str]:
        return frozenset(self._get("methods", ("POST", "PATCH")))

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
    def request_decompression(self) -> bool:
        return bool(self._get("request_decompression", False))

    @property
    def gzip(self) -> bool:
        return bool(self._get("gzip_middleware", None) == "outside")

    @property
    def handler_timeout(self) -> float | None:
        limit = self._get("handler_timeout", None)
        return None if limit is None else seconds(limit)

    @property
    def payment_paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("/payments", *self.deployed.get("alias", ()))))

    @property
    def payments_response(self) -> str:
        return str(self.deployed.get("payments_response", "v1"))

    def account_of(self, account: str, user: str, headers: Mapping[str, str]) -> str:
        """What together makes the account, for the cases that add to it."""
        parts = [account]
        for part in self._get("scope", ("account",)):
            if part == "user":
                parts.append(f"user={user}")
            elif part.startswith("header:"):
                parts.append(f"{part}={headers.get(part.removeprefix('header:'), '')}")
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
            replay_header=get("replay_header", "Idempotent-Replayed"),
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
            version=rules.get("version", 1),
        )

    def not_offered(self, store: str, driver: str) -> Iterator[str]:
        """Why a case with these settings cannot be run on a store; nothing when it can."""
        if driver.startswith("psycopg") and "store_timeout" in self.given:
            yield "psycopg has no time limit of its own on a statement"
        for name, value in self.given.items():
            if name in _ABSENT or name.partition(".")[0] in ("client", "node2"):
                yield f"{name} is not built"
            elif name in _ONLY and value not in _ONLY[name]:
                yield f"{name}={value} is not built"
        wanted = str(self.given.get("store", store)).replace("postgresql", "postgres").split("|")
        if store.replace("postgresql", "postgres") not in wanted:
            yield f"for the store {'|'.join(wanted)}"
        if store == "sqlite" and {"store_timeout", "db_isolation"} & self.given.keys():
            yield "SQLite has no such setting: " + ", ".join(
                {"store_timeout", "db_isolation"} & self.given.keys()
            )
        rules = self.given.get("fingerprint", {})
        default = ["method", "path", "query", "media_type", "body"]
        if rules.get("parts", default) != default:
            yield "the parts of the fingerprint cannot be chosen"
        if (
            rules.get("form", "sorted-stable") != "sorted-stable"
            or rules.get("multipart", "parts") != "parts"
        ):
            yield "forms are always read by their meaning"
