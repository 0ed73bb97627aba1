"""Somebody else's server, reached by HTTP alone, and by the control interface where it offers that."""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any, Self
from urllib.parse import urlsplit

from taptwice.conformance import language, wire
from taptwice.conformance.clients.words import for_clients
from taptwice.conformance.database import Proxy
from taptwice.conformance.judge import Observed
from taptwice.conformance.language import Case
from taptwice.conformance.routes import Routes
from taptwice.conformance.settings import Settings
from taptwice.conformance.words import STEPS
from taptwice.errors import Misuse

_BY_HTTP = frozenset(
    [
        "send",
        "start",
        "start_n",
        "parallel",
        "await",
        "await_prefix",
        "disconnect",
        "disconnect_prefix",
        "duplicate_all",
        "sleep",
    ]
)
_COMMANDS = {
    "reached": "arm",
    "release": "arm",
    "advance": "clock",
    "set_clock": "clock",
    "clock_skew": "clock",
    "deploy": "configure",
    "seed_keys": "seed",
}
"""The command that a step needs, where it is not called like the step."""


_LIMITS = frozenset({"store", "wait_max", "pool_size"})
"""Settings that need not be the same: the first is looked at by itself, the others only bound a time."""


REACH = 10
"""Seconds that the first connection may take."""


class Foreign:
    """A server with an address. Entered with ``async with``."""

    def __init__(
        self, url: str, routes: Routes, callers: Iterable[str] = (), cases: Iterable[Case] = ()
    ) -> None:
        """`callers`: as of ``--as``; `cases`: that may name others than the language."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Misuse(f"not the URL of a server: {url!r}; write https://host/base")
        self._host = parts.netloc.rpartition("@")[2]
        self._base = parts.path.rstrip("/")
        self._routes = routes
        self._callers = dict(map(_caller, callers))
        self._url = url
        sent = {each["as"]: None for case in cases for each in case.requests() if each.get("as") is not None}
        known = {**dict.fromkeys(language.language()["callers"]), **sent}.keys() - {"null"}
        for caller in self._callers.keys() - known:
            raise Misuse(f"--as {caller}: no case has this caller; there are {', '.join(sorted(known))}")
        self._run = secrets.token_hex(8)
        self._given: Mapping[str, Any] = {}
        self._deployed: dict[str, Any] = {}
        self.commands: frozenset[str] = frozenset()
        """The commands of the control interface that the server offers."""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self.address = (parts.hostname, port)
        self._tls = Proxy(*self.address, ssl.create_default_context()) if parts.scheme == "https" else None

    async def __aenter__(self) -> Self:
        await self._reach()
        if self._tls is not None:
            await self._tls.start()
            self.address = ("127.0.0.1", self._tls.port)
        try:
            self.commands = frozenset((await self.tell("hello"))["commands"])
        except (RuntimeError, TypeError, KeyError):
            return self
        if self._tls is not None:
            self.commands -= {"arm"}  # the server does not see the ports that we connect from
        return self

    async def _reach(self) -> None:
        """Connect once, so that an address where nobody listens is no failure of each case."""
        context = ssl.create_default_context() if self._tls is not None else None
        try:
            async with asyncio.timeout(REACH):
                _, writer = await asyncio.open_connection(*self.address, ssl=context)
        except TimeoutError as error:
            raise Misuse(f"cannot reach {self._url}: no connection within {REACH} s") from error
        except OSError as error:
            raise Misuse(f"cannot reach {self._url}: {error}") from error
        writer.close()

    async def __aexit__(self, *_: object) -> None:
        if self._tls is not None:
            await self._tls.stop()

    # --- which cases ---------------------------------------------------------------------------

    def not_offered(self, case: Case) -> Iterator[str]:
        """See `Target`."""
        if for_clients(case):
            yield "about a client, not about a server"
            return
        yield from dict.fromkeys((*self._settings(case), *self._steps(case), *self._then(case.then)))

    def _settings(self, case: Case) -> Iterator[str]:
        own = self._routes.settings
        if "store" in case.given and str(own.get("store")) not in str(case.given["store"]).split("|"):
            yield f"for the store {case.given['store']}; the map's settings say {own.get('store')}"
        if "configure" in self.commands:
            return
        defaults = {**language.language()["defaults"]}
        defaults["in_flight"] = "conflict" if own.get("mode") == "lease" else "wait"
        for name in sorted((case.given.keys() | own.keys()) - _LIMITS):
            wanted, here = (each.get(name, defaults.get(name)) for each in (case.given, own))
            if wanted != here:
                yield f"needs {name}={wanted}; the map's settings say {here}"

    def _steps(self, case: Case) -> Iterator[str]:
        for step in case.steps():
            name = next((word for word in step if word in STEPS), "")
            command = _COMMANDS.get(name, name)
            if name == "restart":
                yield "the runner cannot restart this server"
            elif name not in _BY_HTTP and command not in self.commands:
                yield f"needs the command {command} of the control interface"
        for request in case.requests():
            if {"hold_at", "fault"} & request.keys() and "arm" not in self.commands:
                yield "needs the command arm of the control interface"
            if request.get("fault", {}).get("do") == "crash":
                yield "the runner cannot restart this server"
            if {"node", "region"} & request.keys() or str(request.get("via", "")).startswith("node"):
                yield "several processes cannot be told apart"
            caller = request.get("as", "acct_a")
            if caller not in (None, "invalid_token", *self._callers) and (
                self._callers or caller != "acct_a"
            ):
                yield f"no --as for {caller}"
        yield from self._routes.missing(case, fresh=not self._empties)

    def _then(self, then: Mapping[str, Any]) -> Iterator[str]:
        for word in then.keys() - {"responses", "group", "groups", "effects", "keys", "balances"}:
            if word != "logs" or "logs" not in self.commands:
                yield f"{word} cannot be seen by HTTP alone"
        if not {"responses", "group", "groups"} & then.keys() and not self._counts:
            yield "nothing of it can be seen by HTTP alone"

    @property
    def _empties(self) -> bool:
        return "empty" in self.commands

    @property
    def _counts(self) -> bool:
        return self._empties and "count" in self.commands

    def translated(self, case: Case) -> Case:
        """See `Target`: its routes, and keys of this run alone."""
        salt = "" if self._empties else sha256(f"{self._run} {case.id}".encode()).hexdigest()[:8]
        return self._routes.translated(case, salt)

    # --- as a target ---------------------------------------------------------------------------

    async def tell(self, command: str, **words: Any) -> dict[str, Any]:
        """See `Server`."""
        return await wire.ask(self.call(self), {"do": command, **words}, self._base + wire.CONTROL)

    async def gone(self) -> None:
        """See `Server`."""

    async def ready(self, case: Case) -> None:
        """See `Target`."""
        self._given, self._deployed = case.given, {}
        for command, words in (
            ("configure", {"given": {**self._routes.settings, **case.given}, "deployed": {}}),
            ("reset", {}),
            ("empty", {}),
        ):
            if command in self.commands:
                await self.tell(command, **words)

    def server(self, spec: Mapping[str, Any]) -> Foreign:
        """See `Target`."""
        return self

    def call(self, server: Any) -> wire.Call:
        """See `Target`."""
        return wire.Call(self.address, self._host)

    def request(self, spec: Mapping[str, Any]) -> wire.Request:
        """See `Target`."""
        settings = Settings({**self._routes.settings, **self._given})
        path = self._base + str(spec.get("path", "/payments"))
        return wire.request_of({**spec, "path": path}, settings.names[0], self._login)

    def _login(self, caller: str | None) -> list[wire.Line]:
        if caller == "invalid_token" and caller not in self._callers:
            return wire.login(caller)
        return [self._callers[caller]] if caller in self._callers else []

    async def tell_all(self, command: str, **words: Any) -> None:
        """See `Target`."""
        await self.tell(command, **words)

    async def restart(self, name: str | None) -> None:
        """See `Target`; no case comes here."""

    async def region(self, changes: Mapping[str, Any]) -> None:
        """See `Target`; no case comes here."""

    async def store(self, state: str) -> None:
        """See `Target`."""
        await self.tell("store", state=state)

    async def deploy(self, changes: Mapping[str, Any]) -> None:
        """See `Target`."""
        self._deployed.update(changes)
        given = {**self._routes.settings, **self._given}
        await self.tell("configure", given=given, deployed=self._deployed)

    async def seed(self, number: int, age: float) -> None:
        """See `Target`."""
        await self.tell("seed", number=number, age=age)

    async def settle(self) -> set[str]:
        """See `Target`."""
        if "settle" not in self.commands:
            return set()
        return set((await self.tell("settle")).get("unstruck", ()))

    async def observe(self, seen: Observed, then: Mapping[str, Any]) -> None:
        """See `Target`."""
        seen.uncounted = not self._counts
        if self._counts:
            found = await self.tell("count")
            seen.keys, seen.effects, seen.balances = found["keys"], found["effects"], found["balances"]
        if "logs" in then:
            seen.logs = (await self.tell("logs"))["lines"]


def _caller(text: str) -> tuple[str, wire.Line]:
    """``acct_a=Authorization: Bearer …`` as the caller and his header line. Raises `Misuse`."""
    caller, equals, line = text.partition("=")
    name, colon, value = line.partition(":")
    if not (equals and colon):
        raise Misuse("--as takes CALLER=HEADER: VALUE, for example acct_a='Authorization: Bearer …'")
    return caller.strip(), (name.strip().encode("latin-1"), value.strip().encode("latin-1"))


def writes(cases: Iterable[Case]) -> int:
    """How many requests that write the cases send."""
    return sum(_writes(step) for case in cases for step in case.when)


def _writes(step: Mapping[str, Any]) -> int:
    number = 0
    for name, value in step.items():
        if name in ("send", "start"):
            number += _is_write(value) * (2 if value.get("via") == "duplicating_proxy" else 1)
        elif name in ("parallel", "start_n") and "list" in value:
            number += sum(map(_writes, value["list"]))
        elif name in ("parallel", "start_n"):
            number += value["n"] * _is_write(value["req"])
        elif name == "duplicate_all":
            number += sum(2 * _is_write(each) for each in value["reqs"])
    return number


def _is_write(request: Mapping[str, Any]) -> bool:
    return request.get("method", "POST") not in ("GET", "HEAD", "OPTIONS")
