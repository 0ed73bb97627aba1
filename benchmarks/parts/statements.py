"""The SQL of those who are measured beside the library: bare work, the textbook, ours by hand."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable
from typing import Literal

Dialect = Literal["postgresql", "sqlite"]

ACCOUNT = "acct_42"
REQUEST = {"cents": 1250, "currency": "eur", "source": "card_1FzX2Y"}
REQUEST_BYTES = b'{"cents":1250,"currency":"eur","source":"card_1FzX2Y"}'
WINDOW = 86_400.0
HEADERS = b"content-type:application/json"

COLUMNS = "id, created_at, expires_at, fingerprint_version, status, fingerprint, account, key, headers, body"
POSTGRESQL = {
    "charge": "INSERT INTO charges (account, cents) VALUES (:account, :cents) RETURNING id",
    "read": "SELECT id, account, cents FROM charges WHERE id = :charge",
    # The textbook: the key first, its answer later, by an update.
    "begin_key": "INSERT INTO textbook_keys (account, key, fingerprint) "
    "VALUES (:account, :key, :fingerprint) ON CONFLICT (account, key) DO NOTHING RETURNING 1",
    "finish_key": "UPDATE textbook_keys SET status = :status, headers = :headers, body = :body "
    "WHERE account = :account AND key = :key",
    # Ours: lock and look, work, insert.
    "claim": "SELECT locked, read_only, fingerprint_version, fingerprint, status, headers, body "
    "FROM taptwice_claim(:lock, :id, 0)",
    "save": f"INSERT INTO taptwice_records ({COLUMNS}) VALUES (:id, transaction_timestamp(), "
    "transaction_timestamp() + make_interval(secs => :window), 1, :status, :fingerprint, :account, :key, "
    ":headers, :body)",
}
SQLITE = {
    **POSTGRESQL,
    "claim": "SELECT fingerprint_version, fingerprint, status, headers, body "
    "FROM taptwice_records WHERE id = :id",
    "save": f"INSERT INTO taptwice_records ({COLUMNS}) VALUES (:id, :now, :now + :window, 1, :status, "
    ":fingerprint, :account, :key, :headers, :body)",
}
TABLES = {
    "postgresql": (
        "CREATE TABLE charges (id bigserial PRIMARY KEY, account text NOT NULL, cents integer NOT NULL)",
        "CREATE TABLE textbook_keys (account text NOT NULL, key text NOT NULL, fingerprint bytea NOT NULL, "
        "created_at timestamptz NOT NULL DEFAULT now(), status smallint, headers bytea, body bytea, "
        "PRIMARY KEY (account, key))",
    ),
    "sqlite": (
        "CREATE TABLE charges (id INTEGER PRIMARY KEY, account text NOT NULL, cents integer NOT NULL)",
        "CREATE TABLE textbook_keys (account text NOT NULL, key text NOT NULL, fingerprint blob NOT NULL, "
        "created_at real NOT NULL DEFAULT (julianday('now')), status integer, headers blob, body blob, "
        "PRIMARY KEY (account, key))",
    ),
}


def placed(text: str, placeholder: Callable[[str, int], str]) -> str:
    """With each ``:name`` written by ``placeholder(name, position of its first appearance)``."""
    names: list[str] = []

    def place(found: re.Match[str]) -> str:
        if found[1] not in names:
            names.append(found[1])
        return placeholder(found[1], names.index(found[1]) + 1)

    return re.sub(r"(?<![:\w]):([a-z]+)", place, text)


DOLLARS = {name: placed(text, lambda _, position: f"${position}") for name, text in POSTGRESQL.items()}
PERCENTS = {name: placed(text, lambda name, _: f"%({name})s") for name, text in POSTGRESQL.items()}


class Keys:
    """New keys without end."""

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex[:16]
        self._number = 0

    def __call__(self) -> str:
        self._number += 1
        return f"{self._run}-{self._number:019d}"


def identity(account: str, key: str) -> bytes:
    """The id of a key, as one would make it by hand."""
    return hashlib.sha256(f"{len(account)}:{account}{key}".encode()).digest()[:16]


def lock_of(identity: bytes) -> int:
    return int.from_bytes(identity[:8], "big", signed=True)


def fingerprint(body: bytes) -> bytes:
    """By hand: of the bytes as they came."""
    return hashlib.sha256(body).digest()


def body_of(charge: int) -> bytes:
    return b'{"charge_id":%d}' % charge
