"""What is played, and what it should come to.

Nothing here waits for time to pass: a slow server is one that is held, and goes on when it is told to. So
every run goes the same way.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from taptwice.demo.stage import PATIENCE_S, Reply, Stage

KEYED = "/v1/payments"
UNPROTECTED = "/v1/unprotected/payments"
AMOUNT = 5000
AT_ONCE = 5

Who = Literal["client", "network", "server", "table"]


@dataclass(frozen=True, slots=True)
class Line:
    """Something that one of them saw."""

    who: Who
    text: str
    reply: Reply | None = None


@dataclass(slots=True)
class Play:
    """One run from an empty table, and what became of it."""

    name: str
    title: str
    expected: int
    """How many charges it should come to."""
    meant: int = 1
    """How many the customer wants."""
    lines: list[Line] = field(default_factory=list)
    table: list[tuple[int, int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What was not as it is told here. The demo has failed if there is any."""

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.faults.append(otherwise)

    def as_data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "lines": [asdict(line) for line in self.lines],
            "table": [{"id": number, "amount_cents": amount} for number, amount in self.table],
            "charges": len(self.table),
            "meant_charges": self.meant,
            "expected_charges": self.expected,
            "faults": self.faults,
        }


class Show:
    """Is told everything as it happens. This one says nothing of it."""

    def scene(self, title: str) -> None:
        """A scene begins."""

    def begins(self, play: Play) -> None:
        """A play of it begins."""

    def line(self, line: Line) -> None:
        """Something was seen."""

    def ends(self, play: Play) -> None:
        """A play has ended."""


class Director:
    """Plays all scenes on one stage."""

    def __init__(self, stage: Stage, show: Show) -> None:
        self.stage = stage
        self.show = show
        self.plays: list[Play] = []

    async def all(self) -> list[Play]:
        self.show.scene(f"Scene 1: the customer pays {AMOUNT / 100:.2f}, sees no answer, and taps again")
        await self.reply_lost("unprotected", UNPROTECTED, None, 2)
        await self.check_first()
        await self.reply_lost("keyed", KEYED, str(uuid.uuid4()), 1)
        await self.keyed_while_slow()
        self.show.scene("Scene 2: eight requests with two keys")
        await self.eight_requests()
        return self.plays

    @asynccontextmanager
    async def play(self, name: str, title: str, expected: int, meant: int = 1) -> AsyncIterator[Play]:
        """From an empty table to a look at it."""
        self.stage.database.empty()
        play = Play(name, title, expected, meant)
        self.show.begins(play)
        try:
            yield play
        finally:
            self.stage.server.release()
        play.table = self.stage.database.charges()
        play.check(
            len(play.table) == expected, f"{name}: {len(play.table)} charges in the table, not {expected}"
        )
        self.plays.append(play)
        self.show.ends(play)

    def sees(self, play: Play, who: Who, text: str, reply: Reply | None = None) -> None:
        line = Line(who, text, reply)
        play.lines.append(line)
        self.show.line(line)

    async def answered(self, play: Play, number: int, note: str = "") -> None:
        """Wait until the server has answered this tap of the play, and say what it answered."""
        event = await self.stage.server.told("answered", tap=f"{play.name}-{number}")
        reply = Reply(event["status"], event["body"], event["replayed"])
        self.sees(play, "server", f"tap {number}{note}:", reply)

    async def reply_lost(self, name: str, path: str, key: str | None, expected: int) -> None:
        """The work is done, and the reply does not arrive."""
        how = "No protection" if key is None else "With a key"
        async with self.play(f"{name}, reply lost", f"{how}; the reply is lost on its way", expected) as play:
            self.sees(play, "client", f"tap 1: POST {path}{_shown(key)}")
            lost = self.stage.proxy.lose_next()
            first = await self.stage.post(f"{play.name}-1", path, AMOUNT, key)
            await self.answered(play, 1)
            swallowed = await asyncio.wait_for(lost, PATIENCE_S)
            self.sees(play, "network", f"tap 1: the reply is lost, {swallowed} bytes")
            self.sees(play, "client", "tap 1: no answer")
            play.check(first is None, f"{name}: the first reply was not lost")
            second = await self.stage.post(f"{play.name}-2", path, AMOUNT, key)
            await self.answered(play, 2)
            self.sees(play, "client", "tap 2:", second)
            self.check_second(play, second, key)

    async def check_first(self) -> None:
        """The client asks before it tries again; the first attempt is still running and has no row yet."""
        stage = self.stage
        async with self.play(
            "check first, just slow", "Check first, then retry; the server is just slow", 2
        ) as play:
            await self.given_up(play, UNPROTECTED, None)
            found = await stage.get(f"{play.name}-check", f"{KEYED}?amount_cents={AMOUNT}")
            self.sees(play, "client", f"check: a payment of {AMOUNT}?", found)
            play.check((found.status, found.body) == (200, "[]"), "check first: the check found a payment")
            second = await stage.post(f"{play.name}-2", UNPROTECTED, AMOUNT)
            await self.answered(play, 2)
            self.sees(play, "client", "tap 2:", second)
            stage.server.release()
            await self.answered(play, 1, ", at last")
            self.check_second(play, second, None)

    async def keyed_while_slow(self) -> None:
        """The same slow server, and no check: the retry itself is safe."""
        stage, key = self.stage, str(uuid.uuid4())
        async with self.play("keyed, just slow", "With a key; the server is just slow", 1) as play:
            await self.given_up(play, KEYED, key)
            retry = asyncio.create_task(stage.post(f"{play.name}-2", KEYED, AMOUNT, key))
            try:
                await stage.server.told("received", tap=f"{play.name}-2")
                self.sees(play, "server", "tap 2: arrived, while tap 1 is at work")
                stage.server.release()
                await self.answered(play, 1, ", at last")
                second = await retry
            finally:
                retry.cancel()
            self.sees(play, "client", "tap 2:", second)
            self.check_second(play, second, key)

    async def given_up(self, play: Play, path: str, key: str | None) -> None:
        """A first attempt in the midst of its work, whose client waits no longer."""
        await self.stage.server.hold()
        self.sees(play, "client", f"tap 1: POST {path}{_shown(key)}")
        first = asyncio.create_task(self.stage.post(f"{play.name}-1", path, AMOUNT, key))
        try:
            await self.stage.server.told("working", tap=f"{play.name}-1")
        finally:
            first.cancel()
        await asyncio.wait([first])
        self.sees(play, "server", "tap 1: at work, and slow")
        self.sees(play, "client", "tap 1: no answer, it waits no longer")
        play.check(first.cancelled(), f"{play.name}: the first attempt was not slow")

    def check_second(self, play: Play, second: Reply | None, key: str | None) -> None:
        play.check(
            second is not None and (second.status, second.replayed) == (201, key is not None),
            f"{play.name}: the second tap got {second}",
        )

    async def eight_requests(self) -> None:
        stage = self.stage
        key, new_key = str(uuid.uuid4()), str(uuid.uuid4())
        title = "A payment, a retry, a mistake; then five at once"
        async with self.play("eight requests", title, 2, meant=2) as play:

            async def send(tap: str, text: str, amount: int, which: str) -> None:
                reply = await stage.post(f"{play.name}-{tap}", KEYED, amount, which)
                self.sees(play, "client", text, reply)

            await send("1", f"first attempt, {AMOUNT}", AMOUNT, key)
            await send("2", "again, same key", AMOUNT, key)
            await send("3", "same key, but 6000", 6000, key)
            # At once in earnest: the one that does the work is held until the server has got all of them.
            await stage.server.hold()
            numbers = range(1, AT_ONCE + 1)
            tasks = [
                asyncio.create_task(send(f"x{each}", f"new key, 700, {each} of {AT_ONCE}", 700, new_key))
                for each in numbers
            ]
            try:
                for each in numbers:
                    await stage.server.told("received", tap=f"{play.name}-x{each}")
                stage.server.release()
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            self.check_eight(play)

    def check_eight(self, play: Play) -> None:
        replies = [line.reply for line in play.lines]
        seen = [(each.status, each.body[:15], each.replayed) for each in replies if each]
        told = [
            (201, '{"charge_id":1,', False),
            (201, '{"charge_id":1,', True),
            (422, '{"type":"https:', False),
            (201, '{"charge_id":2,', False),  # one of the five does the work
            *[(201, '{"charge_id":2,', True)] * (AT_ONCE - 1),
        ]
        play.check(seen[:3] + sorted(seen[3:]) == told, f"eight requests: the answers were {replies}")


def _shown(key: str | None) -> str:
    return f", key {key[:8]}…" if key else ""
