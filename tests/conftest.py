"""Fixtures for all tests. Those with a server behind them stand in fix_postgres.py."""

from __future__ import annotations

pytest_plugins = ["tests.fix_postgres"]
