"""The servers of the tests themselves: what start, stop, kill, restart and the guard promise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

import services
from services import PrivatePgBouncer, PrivatePostgres

pytestmark = pytest.mark.crash


def ask(url: str, statement: str) -> object:
    with psycopg.connect(url, connect_timeout=5) as connection:
        row = connection.execute(statement).fetchone()
        assert row is not None
        return row[0]


def test_a_private_server_keeps_data_and_url_when_it_is_killed(own_postgres: PrivatePostgres) -> None:
    url = own_postgres.start().url
    with psycopg.connect(url) as connection:
        connection.execute("create table kept (n int)")
        connection.execute("insert into kept values (7)")

    busy = psycopg.connect(url, autocommit=True)
    busy.execute("begin")
    own_postgres.kill()
    assert not own_postgres.running
    with pytest.raises(psycopg.OperationalError):
        ask(url, "select 1")
    with pytest.raises(psycopg.OperationalError):
        busy.execute("select 1")
    busy.close()

    assert own_postgres.start().url == url
    assert ask(url, "select n from kept") == 7


def test_stop_and_start_again(own_postgres: PrivatePostgres) -> None:
    own_postgres.start()
    own_postgres.stop()
    with pytest.raises(psycopg.OperationalError):
        ask(own_postgres.url, "select 1")
    own_postgres.stop()  # a second time does nothing
    own_postgres.start()
    assert ask(own_postgres.url, "select 1") == 1


def test_restart_overrides_a_setting_and_takes_it_back(own_postgres: PrivatePostgres) -> None:
    own_postgres.start()
    own_postgres.restart({"default_transaction_read_only": "on", "fsync": "on"})
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        ask(own_postgres.url, "create table refused (n int)")
    assert ask(own_postgres.url, "show fsync") == "on"
    own_postgres.restart({"default_transaction_read_only": None, "fsync": None})
    assert ask(own_postgres.url, "show default_transaction_read_only") == "off"
    assert ask(own_postgres.url, "show fsync") == "off"


def test_a_frozen_server_does_not_answer_until_it_is_thawed(own_postgres: PrivatePostgres) -> None:
    own_postgres.start()
    own_postgres.freeze()
    try:
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(own_postgres.url, connect_timeout=2)
    finally:
        own_postgres.thaw()
    assert ask(own_postgres.url, "select 1") == 1


def test_the_guard_cleans_up_after_a_process_that_is_killed() -> None:
    if "postgres" in os.environ.get(services.SKIPPED, "").split(","):
        pytest.skip("skipped by --skip postgres")
    if services.postgres_binaries() is None:
        pytest.skip("no PostgreSQL binaries")
    program = (
        "import services, time\n"
        "s = services.PrivatePostgres().start()\n"
        "print(s.pid, s.folder, flush=True)\n"
        "time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(services.__file__).parent)}
    runner = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert runner.stdout is not None
    with runner.stdout:
        pid, folder = runner.stdout.readline().split(maxsplit=1)
    runner.send_signal(signal.SIGKILL)
    runner.wait()

    end = time.monotonic() + 20
    while time.monotonic() < end and Path(folder.strip()).exists():
        time.sleep(0.05)
    assert not Path(folder.strip()).exists()
    assert (
        not Path(f"/proc/{pid}/cmdline").exists()
        or b"postgres" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def test_each_test_has_a_database_of_its_own(postgres_url: str, fresh_postgres: str) -> None:
    assert ask(postgres_url, "select current_database()") != ask(fresh_postgres, "select current_database()")
    assert (
        ask(fresh_postgres, "select count(*) from pg_class where relnamespace = 'public'::regnamespace") == 0
    )


def test_pgbouncer_shares_one_server_connection_between_transactions(
    pgbouncer_url: str, fresh_postgres: str
) -> None:
    assert ask(pgbouncer_url, "select current_database()") == ask(fresh_postgres, "select current_database()")
    with PrivatePgBouncer(fresh_postgres, pool_size=1) as bouncer:
        with (
            psycopg.connect(bouncer.url, autocommit=True, prepare_threshold=None) as one,
            psycopg.connect(bouncer.url, autocommit=True, prepare_threshold=None) as two,
        ):
            pids = {c.execute("select pg_backend_pid()").fetchone() for c in (one, two, one)}
        assert len(pids) == 1
