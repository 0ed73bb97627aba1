"""The demo as its user runs it: a process of its own, its output, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psycopg
import pytest
import sqlalchemy

from taptwice.demo import databases

COMMAND = [sys.executable, "-m", "taptwice.demo"]
LIMIT_S = 60


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest) -> list[str]:
    """The arguments for each of the databases."""
    if request.param == "sqlite":
        return []
    url: str = request.getfixturevalue("fresh_postgres")
    return ["--database", url]


@pytest.fixture(autouse=True)
def temporary(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the demo puts its files. Whatever the test did to it, nothing may be there afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("NO_COLOR", "")
    # As on many a machine in a company; the demo talks to itself and must not go that way.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    yield
    assert list(folder.iterdir()) == []


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    read = ""
    assert process.stdout is not None
    for line in process.stdout:
        read += line
        if text in line:
            return read
    raise AssertionError(f"{text!r} never came: {read}{process.stderr.read() if process.stderr else ''}")


def address_in(output: str) -> str:
    found = re.search(r"up at (http://127\.0\.0\.1:\d+)", output)
    assert found is not None, output
    return found[1]


def refuses(address: str) -> bool:
    try:
        httpx2.get(address, trust_env=False)
    except httpx2.ConnectError:
        return True
    except httpx2.TransportError:  # it is just ending
        return False
    return False


def schemas(url: str) -> list[Any]:
    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'taptwice%'"
        ).fetchall()


def plays_in(output: str) -> list[list[str]]:
    """The blocks of the transcript, each a play: its title, and what was seen."""
    blocks = [block.strip().splitlines() for block in output.split("\n\n")]
    return [[re.sub(r"\s+", " ", line.strip()) for line in block] for block in blocks if len(block) > 3]


CHARGED_1 = '201 {"charge_id":1,"amount_cents":5000}'
CHARGED_2 = '201 {"charge_id":2,"amount_cents":5000}'
REPLAYED_1 = f"{CHARGED_1} Idempotent-Replayed: true"


# --- what is told -------------------------------------------------------------------------------------------


def test_transcript(place: list[str]) -> None:
    output = run(*place).stdout
    assert "\x1b" not in output
    assert ("on PostgreSQL 1" if place else "on SQLite 3.") in output
    unprotected, check_first, keyed, slow, eight = plays_in(output)

    assert unprotected == [
        "No protection; the reply is lost on its way",
        "client tap 1: POST /v1/unprotected/payments",
        f"server tap 1: {CHARGED_1}",
        unprotected[3],
        "client tap 1: no answer",
        f"server tap 2: {CHARGED_2}",
        f"client tap 2: {CHARGED_2}",
        "table #1 5000, #2 5000",
        "charged TWICE",
    ]
    assert re.fullmatch(r"network tap 1: the reply is lost, [1-9]\d+ bytes", unprotected[3])

    assert check_first == [
        "Check first, then retry; the server is just slow",
        "client tap 1: POST /v1/unprotected/payments",
        "server tap 1: at work, and slow",
        "client tap 1: no answer, it waits no longer",
        "client check: a payment of 5000? 200 []",
        f"server tap 2: {CHARGED_1}",
        f"client tap 2: {CHARGED_1}",
        f"server tap 1, at last: {CHARGED_2}",
        "table #1 5000, #2 5000",
        "charged TWICE",
    ]

    assert keyed[2:] == [
        f"server tap 1: {CHARGED_1}",
        keyed[3],
        "client tap 1: no answer",
        f"server tap 2: {REPLAYED_1}",
        f"client tap 2: {REPLAYED_1}",
        "table #1 5000",
        "charged once",
    ]
    assert re.fullmatch(r"client tap 1: POST /v1/payments, key [0-9a-f]{8}…", keyed[1])

    assert slow[2:] == [
        "server tap 1: at work, and slow",
        "client tap 1: no answer, it waits no longer",
        "server tap 2: arrived, while tap 1 is at work",
        f"server tap 1, at last: {CHARGED_1}",
        f"client tap 2: {REPLAYED_1}",
        "table #1 5000",
        "charged once",
    ]

    assert eight[1:4] == [
        f"client first attempt, 5000 {CHARGED_1}",
        f"client again, same key {REPLAYED_1}",
        "client same key, but 6000 422 key-reused: Idempotency key reused",
    ]
    five = sorted(re.sub(r"700, \d of 5", "700,", line) for line in eight[4:9])
    work = 'client new key, 700, 201 {"charge_id":2,"amount_cents":700}'
    assert five == [work, *[f"{work} Idempotent-Replayed: true"] * 4]
    assert eight[9:] == ["table #1 5000, #2 700", "charges in the table: 2 (answers: 7 × 201, 1 × 422)"]
    assert refuses(address_in(output))


def test_json(place: list[str]) -> None:
    data = json.loads(run("--json", *place).stdout)
    assert data["as_told"] is True
    assert {play["name"]: play["charges"] for play in data["plays"]} == {
        "unprotected, reply lost": 2,
        "check first, just slow": 2,
        "keyed, reply lost": 1,
        "keyed, just slow": 1,
        "eight requests": 2,
    }
    eight = [line["reply"] for line in data["plays"][-1]["lines"]]
    assert sorted(reply["status"] for reply in eight) == [201] * 7 + [422]
    assert sum(reply["replayed"] for reply in eight) == 5
    assert all(play["faults"] == [] for play in data["plays"])


def test_says_so_when_it_does_not_come_as_told() -> None:
    """A service without protection in the place of the keyed one: the demo is no mere recital."""
    script = (
        "import sys, taptwice.demo.play as play\n"
        "from taptwice.demo.__main__ import main\n"
        "play.KEYED = play.UNPROTECTED\n"
        "sys.exit(main([]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "not as told: keyed, reply lost: 2 charges in the table, not 1" in done.stderr
    assert "not as told: eight requests: 8 charges in the table, not 2" in done.stderr
    assert "All as told" not in done.stdout


# --- what is touched, and what is left ----------------------------------------------------------------------


def test_leaves_what_is_there_on_postgresql(fresh_postgres: str) -> None:
    with psycopg.connect(fresh_postgres) as connection:
        connection.execute("CREATE TABLE charges (id int)")
        connection.execute("CREATE TABLE taptwice_records (id int)")
        connection.execute("INSERT INTO charges VALUES (1), (2), (3)")
    output = run("--database", fresh_postgres).stdout
    assert re.search(r"schema taptwice_demo_[0-9a-f]{8} in database 'taptwice_test_", output)
    with psycopg.connect(fresh_postgres) as connection:
        tables = connection.execute(
            "SELECT relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace"
            " WHERE relkind = 'r' AND nspname NOT IN ('pg_catalog', 'information_schema') ORDER BY relname"
        ).fetchall()
        assert tables == [("charges",), ("taptwice_records",)]
        assert connection.execute("SELECT count(*) FROM charges").fetchone() == (3,)
    assert schemas(fresh_postgres) == []


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["up at", "the reply is lost, ", "charged once", "first attempt"])
def test_stopped_while_it_plays(place: list[str], moment: str, signal_: signal.Signals) -> None:
    with running(*place) as process:
        output = read_until(process, moment)
        process.send_signal(signal_)
        rest, errors = process.communicate(timeout=LIMIT_S)
    if process.returncode == 0:  # the signal came in its last moment
        assert "All as told" in rest
    else:
        assert (process.returncode, errors) == (130, "\ndemo: stopped; everything is removed\n")
    assert refuses(address_in(output))
    if place:
        assert schemas(place[1]) == []


def test_reader_that_goes_away() -> None:
    with running() as process:
        read_until(process, "up at")
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(LIMIT_S) == 1
        assert process.stderr is not None
        assert process.stderr.read() == ""


# --- the service that is left up ----------------------------------------------------------------------------


def curl(line: str) -> httpx2.Response:
    """What this command line of curl does."""
    program, *words = shlex.split(line)
    assert program == "curl"
    url, headers, content = "", {}, None
    rest = iter(words)
    for word in rest:
        if word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name] = value
        elif word == "-d":
            content = next(rest)
        elif word != "-i":
            url = word
    method = "GET" if content is None else "POST"
    return httpx2.request(method, url, headers=headers, content=content, trust_env=False)


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_serve(place: list[str], signal_: signal.Signals) -> None:
    with running("--serve", *place) as process:
        output = read_until(process, "Ctrl-C ends it")
        pay, other_amount, no_key, charged = re.findall(r"^ +(curl .*)$", output, re.MULTILINE)
        first, again = curl(pay), curl(pay)
        assert (first.status_code, first.text) == (201, '{"charge_id":1,"amount_cents":5000}')
        assert (again.status_code, again.content) == (201, first.content)
        assert again.headers["idempotent-replayed"] == "true"
        assert curl(other_amount).status_code == 422
        assert curl(no_key).status_code == 400
        assert curl(charged).json() == [first.json()]
        seen = read_until(process, "GET /v1/payments")
        assert seen.count("POST /v1/payments") == 4
        process.send_signal(signal_)
        rest, errors = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, errors) == (0, "")
        assert "everything it made is removed" in rest
    assert refuses(address_in(output))
    if place:
        assert schemas(place[1]) == []


def children(of: int) -> list[int]:
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == of:
                found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="finds the server through /proc")
def test_server_that_dies() -> None:
    with running("--serve") as process:
        read_until(process, "Ctrl-C ends it")
        [server] = children(process.pid)
        os.kill(server, signal.SIGKILL)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3
    assert errors.startswith("demo: the server ended by itself\n")


@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="finds the server through /proc")
def test_server_does_not_outlive_a_demo_that_is_killed(tmp_path: pathlib.Path) -> None:
    with running("--serve") as process:
        address = address_in(read_until(process, "Ctrl-C ends it"))
        process.kill()
        process.wait(LIMIT_S)
        for _ in range(200):
            if refuses(address):
                break
            signal.sigtimedwait([], 0.05)
        assert refuses(address)
    for left in (tmp_path / "temporary").glob("*/*"):  # nobody was there any more to remove it
        left.unlink()
    for left in (tmp_path / "temporary").iterdir():
        left.rmdir()


# --- what can be wrong --------------------------------------------------------------------------------------


def test_help_has_examples() -> None:
    output = run("--help").stdout
    for option in ("--database URL", "--serve", "--json"):
        assert option in output
    assert output.count("./dev demo") >= 4


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--database", "mysql://localhost/shop"], 2, "--database takes a URL postgresql://…"),
        (["--database", "postgresql://me:s3cret@[/shop"], 2, "cannot read the database URL"),
        (["--database", "postgresql://me:s3cret@127.0.0.1:9/shop"], 3, "database 'shop' on 127.0.0.1: "),
        (["--json", "--serve"], 2, "not allowed with argument"),
    ],
)
def test_wrong_arguments(arguments: list[str], code: int, message: str) -> None:
    done = run(*arguments, code=code)
    assert message in done.stderr
    assert "s3cret" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me@db.example/shop",
        "postgresql://me:p%40ss%20w@db.example:6543/shop?sslmode=require",
        "postgresql://me@[::1]:6543/shop",
        "postgresql:///shop?host=/var/run/postgresql&port=6543",
        "postgresql://%2Fvar%2Frun%2Fpostgresql/shop?options=-c%20work_mem%3D64MB",
        "postgresql://a.example:1,b.example:2/shop",
        "postgresql:///shop?service=payments",
        "postgresql://",
    ],
)
def test_server_connects_where_the_demo_does(url: str) -> None:
    """psycopg reads the URL as libpq does, SQLAlchemy in a way of its own."""
    database = databases.PostgresSchema(url)
    parsed = sqlalchemy.make_url(database.url)
    positional, named = parsed.get_dialect()().create_connect_args(parsed)
    assert positional == []
    ours = dict(database.given)
    assert {name: str(value) for name, value in named.items() if name != "context"} == ours
    assert f"-c search_path={database.schema}" in ours["options"]


def test_role_that_may_not_create(fresh_postgres: str) -> None:
    role = "taptwice_nobody_" + urlsplit(fresh_postgres).path[-12:]
    with psycopg.connect(fresh_postgres, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role}")
        admin.execute(f"GRANT {role} TO CURRENT_USER")
        try:
            separator = "&" if "?" in fresh_postgres else "?"
            url = f"{fresh_postgres}{separator}options=-c%20role%3D{role}"
            done = run("--database", url, code=3)
        finally:
            admin.execute(f"DROP ROLE {role}")
    assert "permission denied for database" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("module", "extra", "arguments"),
    [("httpx2", "demo", []), ("psycopg", "postgres", ["--database", "postgresql://127.0.0.1:9/shop"])],
)
def test_names_the_extra_that_is_missing(module: str, extra: str, arguments: list[str]) -> None:
    script = (
        f"import sys; sys.modules[{module!r}] = None\n"
        f"from taptwice.demo.__main__ import main; sys.exit(main({arguments!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"demo: not installed: {module}. They come with: pip install 'taptwice[{extra}]'\n"
