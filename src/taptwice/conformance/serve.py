"""One process of the suite: ``python -m taptwice.conformance.serve``, told what to do by its environment.

It prints ``ready PORT`` when it listens, or in one line why it cannot, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import socket
import sys
import threading

import uvicorn

from taptwice.conformance.control import Control

VARIABLE = "TAPTWICE_CONFORMANCE"


def _end_with_the_runner() -> None:
    sys.stdin.read()
    os._exit(0)


async def main() -> None:
    """Serve what the environment names."""
    asked = json.loads(os.environ[VARIABLE])
    name, _, damage = asked["app"].partition(":")
    create = importlib.import_module(f"taptwice.conformance.apps.{name}").create_app
    if damage:
        create = functools.partial(create, damage)
    control = Control(create, asked["driver"], asked["dsn"])
    await control.do_configure(asked["given"], asked["deployed"])
    try:
        listening = socket.create_server(("127.0.0.1", asked["port"]), backlog=512)
    except OSError as error:
        print(f"cannot listen on port {asked['port']} ({error.strerror}): name another with --port")
        return
    config = uvicorn.Config(
        control,
        lifespan="off",
        log_config=None,
        access_log=False,
        date_header=False,
        timeout_keep_alive=60,
        http="h11",
        h11_max_incomplete_event_size=65_536,
    )
    print(f"ready {listening.getsockname()[1]}", flush=True)
    await uvicorn.Server(config).serve(sockets=[listening])


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_runner, daemon=True).start()
    asyncio.run(main())
