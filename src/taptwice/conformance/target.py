"""What a case is played on: our own processes, or somebody else's server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from taptwice.conformance import wire
from taptwice.conformance.judge import Observed
from taptwice.conformance.language import Case


class Server(Protocol):
    """One process that takes requests."""

    @property
    def address(self) -> tuple[str, int]: ...

    async def tell(self, command: str, **words: Any) -> dict[str, Any]:
        """A command of the control interface, and its reply."""

    async def gone(self) -> None:
        """Wait until a process that was killed is gone."""


class Target(Protocol):
    """All that a case can reach."""

    def not_offered(self, case: Case) -> Iterator[str]:
        """Why a case cannot be run here; nothing when it can."""

    def translated(self, case: Case) -> Case:
        """The case as it is asked here."""

    async def ready(self, case: Case) -> None:
        """Make everything as a case finds it."""

    def server(self, spec: Mapping[str, Any]) -> Server:
        """Where a request goes, or the node that a step names."""

    def call(self, server: Server) -> wire.Call:
        """A connection to be made to it."""

    def request(self, spec: Mapping[str, Any]) -> wire.Request:
        """What is sent for the request of a case."""

    async def tell_all(self, command: str, **words: Any) -> None:
        """A command to every process, and to those that take the place of killed ones."""

    async def restart(self, name: str | None) -> None:
        """Start what was killed; else end a process and start it again."""

    async def store(self, state: str) -> None:
        """Stop, slow down or restore the store."""

    async def region(self, changes: Mapping[str, Any]) -> None:
        """Regions that go down or come back, and other routing tables."""

    async def deploy(self, changes: Mapping[str, Any]) -> None:
        """Another release, or other settings."""

    async def seed(self, number: int, age: float) -> None:
        """Insert old records; their age in seconds."""

    async def settle(self) -> set[str]:
        """Wait until nothing is under way; the requests whose fault never happened."""

    async def observe(self, seen: Observed, then: Mapping[str, Any]) -> None:
        """Add what the requests left behind, where it is expected."""
