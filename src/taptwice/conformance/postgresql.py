"""A PostgreSQL server of the runner's own, from binaries of this machine; gone when the run is over."""

from __future__ import annotations

import asyncio
import glob
import os
import pwd
import shutil
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any, Self

from taptwice.errors import Misuse

_FOLDERS = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql*/bin")
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "max_connections": "200",
}


class OwnServer:
    """Entered with ``async with``; `url` is that of its database ``postgres``."""

    def __init__(self) -> None:
        self._folder = Path()
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    async def __aenter__(self) -> Self:
        binaries = _binaries()
        self._folder = Path(tempfile.mkdtemp(prefix="taptwice-postgresql-"))
        if owner := _owner():
            os.chown(self._folder, owner["user"], owner["group"])
        data = self._folder / "data"
        initdb = [
            binaries / "initdb",
            "-D",
            data,
            "-U",
            "postgres",
            "-A",
            "trust",
            "--no-sync",
            "-E",
            "UTF8",
            "--locale=C",
        ]
        made = await self._start(*initdb)
        if await made.wait():
            raise Misuse("initdb failed; name a server instead: --server postgresql://…")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        self._process = await self._start(binaries / "postgres", "-D", data, "-p", str(self._port), *settings)
        await self._ready(data)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)  # ends what is connected
            await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self, *command: Any) -> asyncio.subprocess.Process:
        nowhere = asyncio.subprocess.DEVNULL
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return await asyncio.create_subprocess_exec(
            *map(str, command), stdin=nowhere, stdout=nowhere, stderr=nowhere, env=environment,
            cwd=self._folder, **_owner(),
        )  # fmt: skip

    async def _ready(self, data: Path) -> None:
        """The server writes its state into a file, as pg_ctl reads it."""
        status = data / "postmaster.pid"
        async with asyncio.timeout(30):
            while True:
                lines = status.read_text().split("\n") if status.exists() else []
                if len(lines) > 7 and lines[7].strip() == "ready":
                    return
                if self._process is None or self._process.returncode is not None:
                    raise Misuse("PostgreSQL did not start; name a server instead: --server postgresql://…")
                await asyncio.sleep(0.05)


def _binaries() -> Path:
    found = shutil.which("postgres")
    places = [os.path.dirname(found)] if found else []
    places += sorted((place for pattern in _FOLDERS for place in glob.glob(pattern)), key=_version)[::-1]
    for place in places:
        if os.access(f"{place}/initdb", os.X_OK) and os.access(f"{place}/postgres", os.X_OK):
            return Path(place)
    raise Misuse(
        "no PostgreSQL here to be started: install it (apt-get install postgresql), or name a server "
        "on which a database may be made: --server postgresql://…"
    )


def _version(place: str) -> list[int]:
    return [int(part) for part in "".join(c if c.isdigit() else " " for c in place).split()]


def _owner() -> dict[str, Any]:
    """PostgreSQL does not run as root: as root it runs as its own user, or as nobody."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    raise Misuse("PostgreSQL does not run as root, and there is no user postgres or nobody")
