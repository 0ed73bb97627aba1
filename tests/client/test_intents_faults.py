"""The process dies, or the store's connection breaks, at each command of an attempt: still one effect."""

from __future__ import annotations

import pathlib
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from taptwice import drivers
from taptwice.client import intents, wish
from taptwice.client.intents import AsyncIntentStore, Intent, IntentStore, Sent, Wish, fingerprint_of
from taptwice.core.model import Answer
from taptwice.core.plan import Plan, ask
from taptwice.drivers import sqlite as sqlite_driver
from taptwice.errors import TaptwiceError
from taptwice.faults import Crash, every
from taptwice.faults.commands import Faulty

REQUEST = fingerprint_of("POST", "https://shop/charges", b'{"cents": 700}')
DEATHS = (None, "before", "after")
"""Where the process dies in its first sending: nowhere, before the server has worked, or after that."""


class Doubled(BaseException):
    """There are two effects, or two keys, or an answer was lost. Nothing on the way catches it."""


class Shop:
    """A server that remembers keys, a client's file, and attempts at one intent."""

    def __init__(self, folder: pathlib.Path, dies: str | None) -> None:
        template, self.path = folder / "template.db", folder / "shop.db"
        if not template.exists():
            _ = IntentStore(template)
        shutil.copy(template, self.path)
        self.effects: list[str] = []
        self.sendings = 0
        self.dies = dies

        def connect() -> sqlite3.Connection:
            connection = sqlite3.connect(self.path, check_same_thread=False)
            connection.execute("PRAGMA synchronous = off")
            return connection

        self.source: drivers.Source = sqlite_driver.connecting(connect)

    def send(self, key: str) -> Sent[str]:
        self.sendings += 1
        dies, self.dies = self.dies, None
        with closing(sqlite3.connect(self.path)) as reader:
            rows = reader.execute("SELECT key FROM taptwice_intents WHERE sent_at IS NOT NULL").fetchall()
        if rows != [(key,)]:
            raise Doubled("a byte leaves before the key is kept")
        if dies == "before":
            raise Crash
        if key not in self.effects:
            self.effects.append(key)
        if dies == "after":
            raise Crash
        return Sent("response", Answer(201, (("content-type", "text/plain"),), b"paid"))

    def attempt(self, faulty: Faulty) -> Any:
        return IntentStore(faulty(self.source)).fulfil(Wish("order-17", REQUEST), self.send)

    def check(self, retried: Any) -> None:
        found = IntentStore(self.source).get("order-17")
        if len(self.effects) != 1 or found is None or found.key != self.effects[0]:
            raise Doubled(f"{len(self.effects)} effects")
        answer = retried.answer
        if (answer.status, answer.body, found.state) != (201, b"paid", "done"):
            raise Doubled("the answer was lost")
        sendings = self.sendings
        if not isinstance(self.attempt(lambda target: target), Intent) or self.sendings != sendings:
            raise Doubled("what is done was sent again")


def explore(folder: pathlib.Path, in_a_row: int = 2) -> int:
    """Every schedule; how many there were."""
    schedules = 0
    for dies in DEATHS:

        def start(dies: str | None = dies) -> Callable[[Faulty], Any]:
            return Shop(folder, dies).attempt

        for trial in every(start, in_a_row=in_a_row):
            schedules += 1
            shop: Shop = trial.attempt.__self__  # type: ignore[attr-defined]
            for outcome in trial.outcomes:
                known = isinstance(outcome, Sent | Intent | TaptwiceError | Crash)
                assert known, (str(trial), outcome)
            done = "paid" if any(isinstance(each, Sent | Intent) for each in trial.outcomes) else ""
            assert not done or len(shop.effects) == 1, str(trial)
            shop.dies = None
            shop.check(trial.retry())
    return schedules


@pytest.mark.slow
def test_one_effect_whatever_breaks(tmp_path: pathlib.Path) -> None:
    assert explore(tmp_path) > 1000


def new_key_each_time(one: Wish, window: float, keep: Any = "answer") -> Plan[Any]:
    """The key is made for the attempt, and not kept."""
    intent = yield from ask(wish.Remember(one))
    assert intent is not None
    if wish.judge(one, intent, window):
        return intent
    sent = yield from ask(wish.Send(one.key))
    assert sent.answer is not None
    yield from ask(wish.Settle(one.name, intent.key, wish.kept(sent.answer, keep)))
    return sent


def first_sent_then_kept(one: Wish, window: float, keep: Any = "answer") -> Plan[Any]:
    sent = yield from ask(wish.Send(one.key))
    intent = yield from ask(wish.Remember(one))
    assert intent is not None
    assert sent.answer is not None
    yield from ask(wish.Settle(one.name, intent.key, wish.kept(sent.answer, keep)))
    return sent


def never_settled(one: Wish, window: float, keep: Any = "answer") -> Plan[Any]:
    intent = yield from ask(wish.Remember(one))
    assert intent is not None
    return (yield from ask(wish.Send(intent.key)))


@pytest.mark.parametrize("mutant", [new_key_each_time, first_sent_then_kept, never_settled])
def test_a_mutant_is_caught(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    monkeypatch.setattr(intents, "with_intent", mutant)
    with pytest.raises(Doubled):
        explore(tmp_path, in_a_row=1)


# --- what fails after the answer ----------------------------------------------------------------------------


def without_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Any, command: Any) -> Any:
        raise OSError("the disk is full")

    monkeypatch.setattr("taptwice.client.intents._Intents._settle", lost)


def test_an_answer_that_cannot_be_kept_is_given_all_the_same(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(tmp_path, None)
    with monkeypatch.context() as patch:
        without_settling(patch)
        assert shop.attempt(lambda target: target).response == "response"
    assert "order-17" in caplog.text
    shop.check(shop.attempt(lambda target: target))
    assert shop.sendings == 2


async def test_awaiting_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(tmp_path, None)

    async def send(key: str) -> Sent[str]:
        return shop.send(key)

    with monkeypatch.context() as patch:
        without_settling(patch)
        sent = await AsyncIntentStore(shop.source).fulfil(Wish("order-17", REQUEST), send)
        assert isinstance(sent, Sent)
    assert "order-17" in caplog.text
    shop.check(shop.attempt(lambda target: target))
