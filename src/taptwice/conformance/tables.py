"""The tables of the reference application, and the counts that the cases expect of them."""

from __future__ import annotations

from taptwice.sql import Dialect

TABLES = (
    "payments",
    "payments_inserted",
    "transfers",
    "ledger",
    "wallets",
    "effects",
    "uploads",
    "unkeyed",
)
RECORDS = "taptwice_records"
COUNTED = (*TABLES, RECORDS)

_TABLES = """
CREATE TABLE payments (
    id text PRIMARY KEY, amount_cents bigint NOT NULL, currency text NOT NULL,
    made_at double precision NOT NULL DEFAULT ({now}));
CREATE TABLE replica (lag double precision NOT NULL);
CREATE VIEW payments_replica AS
    SELECT id, amount_cents, currency FROM payments WHERE made_at <= ({now}) - (SELECT lag FROM replica);
CREATE TABLE payments_inserted (id text NOT NULL);
CREATE TABLE transfers (
    id text PRIMARY KEY, source text NOT NULL, target text NOT NULL, amount_cents bigint NOT NULL);
CREATE TABLE ledger (transfer text NOT NULL, wallet text NOT NULL, amount_cents bigint NOT NULL);
CREATE TABLE wallets (id text PRIMARY KEY, balance_cents bigint NOT NULL);
CREATE TABLE effects (id text PRIMARY KEY);
CREATE TABLE uploads (id text PRIMARY KEY, note text NOT NULL, filename text NOT NULL, size bigint NOT NULL);
CREATE TABLE unkeyed (id text PRIMARY KEY);
"""

_NOW = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM clock_timestamp())",
}
_FRESH = "INSERT INTO wallets (id, balance_cents) VALUES ('w1', 10000), ('w2', 0)"

SEED = {
    "sqlite": """
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {n})
        INSERT INTO taptwice_records
               (id, created_at, expires_at, fingerprint_version, status, fingerprint, account, key,
                headers, body)
        SELECT CAST(printf('seed%012d', i) AS BLOB), unixepoch() - {age}, unixepoch() - {age} + 86400,
               1, 201, x'00', '', '', x'', x''
          FROM n""",
    "postgresql": """
        INSERT INTO taptwice_records
               (id, created_at, expires_at, fingerprint_version, status, fingerprint, account, key,
                headers, body)
        SELECT gen_random_uuid(), now() - interval '{age} s', now() - interval '{age} s' + interval '24 h',
               1, 201, '\\x00', '', '', '', '' FROM generate_series(1, {n})""",
}
"""Insert n records of an age in seconds, as if they had been made by requests."""


_EVER = {
    "sqlite": """
        CREATE TRIGGER counted AFTER INSERT ON payments
        BEGIN INSERT INTO payments_inserted (id) VALUES (NEW.id); END""",
    "postgresql": """
        CREATE RULE counted AS ON INSERT TO payments
        DO ALSO INSERT INTO payments_inserted (id) VALUES (NEW.id)""",
}
"""Inserts ever, whatever is deleted later."""


def making(dialect: Dialect) -> list[str]:
    """The statements that make them."""
    text = _TABLES.replace("{now}", _NOW[dialect])
    return [*(part for each in text.split(";") if (part := each.strip())), _EVER[dialect]]


def emptying() -> list[str]:
    """The statements after which every table is as at the beginning of a case."""
    return [*(f"DELETE FROM {table}" for table in COUNTED), _FRESH, *lagging(0)]  # noqa: S608


def lagging(seconds: float) -> list[str]:
    """The statements after which the replica, a view of what is older, is so far behind."""
    return ["DELETE FROM replica", f"INSERT INTO replica (lag) VALUES ({float(seconds)})"]  # noqa: S608


def counting() -> list[str]:
    """The statements that count the rows of each table, in the order of `COUNTED`, and the wallets."""
    counts = [f"SELECT count(*) FROM {table}" for table in COUNTED]  # noqa: S608
    return [*counts, "SELECT id, balance_cents FROM wallets"]
