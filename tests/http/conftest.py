"""Fixtures of the tests over HTTP."""

from tests.http.fastapi_stacks import _charges_database, charges_postgres, charges_sqlite, stack

__all__ = ["_charges_database", "charges_postgres", "charges_sqlite", "stack"]
