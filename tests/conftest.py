"""Fixtures for all tests. Those with a server behind them stand in fix_postgres.py."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.fix_postgres"]

# No test asserts how long something takes; of itself Hypothesis does, and on a busy machine fails.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
