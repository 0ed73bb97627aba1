"""What a SQLSTATE of PostgreSQL at a statement of ours means (appendix A of its manual)."""

from __future__ import annotations

from taptwice.errors import (
    ConstraintViolated,
    Contention,
    Misuse,
    StoreUnavailable,
    TaptwiceError,
    Torn,
)

_CONTENTION = {"40001", "40P01", "55P03"}  # serialization failure, deadlock, lock timeout
_TORN = {"3B001", "25P01"}  # no such savepoint, no transaction
_MISSING = {"42P01", "42883", "42703", "3F000"}  # table, function, column, schema
_REFUSED = "TT001"  # what our functions refuse by themselves, in words that name the remedy
_UNAVAILABLE = {"25006", "57014"}  # read-only transaction, statement timeout
_UNAVAILABLE_CLASSES = {"08", "53", "57", "58", "XX", "28", "3D"}


def ours(sqlstate: str | None, text: str) -> TaptwiceError | None:
    """Our error for a failure of a statement of ours; None when the code says nothing to us."""
    if sqlstate is None:
        return StoreUnavailable(f"the connection to PostgreSQL failed: {text}")
    if sqlstate in _CONTENTION:
        return Contention(text)
    if sqlstate == "23505":
        return ConstraintViolated(text)
    if sqlstate in _TORN:
        return Torn()
    if sqlstate == "25P02":
        return Misuse(
            "a database error inside the claim was swallowed, and PostgreSQL takes no further statement: "
            "let the error through, or put what may fail into a nested transaction (a savepoint)"
        )
    if sqlstate == _REFUSED:
        return Misuse(text.partition("\n")[0])  # the lines that follow tell where in the function
    if sqlstate in _MISSING:
        return Misuse(
            f"{text}: run `taptwice init` against this database (or apply the output of `taptwice sql`)"
        )
    if sqlstate == "42501":
        return Misuse(
            f"{text}: grant SELECT, INSERT and DELETE on taptwice_records to the service's role, and with"
            " UPDATE on taptwice_intents to a client's"
        )
    if sqlstate in _UNAVAILABLE or sqlstate[:2] in _UNAVAILABLE_CLASSES:
        return StoreUnavailable(f"PostgreSQL: {text}")
    return None


def at_commit(sqlstate: str | None, text: str) -> TaptwiceError | None:
    """Our error for a COMMIT that PostgreSQL refused; None when the user's work is at fault."""
    return ours(sqlstate, text) if sqlstate in ("40001", "40P01") else None
