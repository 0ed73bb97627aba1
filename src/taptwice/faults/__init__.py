"""Faults at every command: how to prove that a retry is safe, for our plans and for functions of yours.

    crash_at(n, target)    the process dies at the n-th command that is sent through `target`
    every(start)           loops: each kind of fault at each command, once or several times in a row
    interleavings(start)   loops: the commands of several workers, in each order
    point(name)            a named place, where a test stops a request, makes it fail or loses its reply

A *target* of the loops is what a claim is given: a connection, a pool, an engine, an executor. All counting
is done at the executor, so that these work on functions as well as on plans:

    def start():
        database = new_database()
        return lambda faulty: pay(faulty(database.pool), key="k-1")     # one attempt

    for trial in every(start, in_a_row=2):
        answer = trial.retry()                                          # no fault this time
        assert charges(...) == 1, trial

A function that awaits is called through ``asyncio.run`` in that lambda. Only commands are seen (the
claim, the savepoint, the answer, the commit), not the statements of your own; a crash between two of
yours leaves the same database as a crash before our next command. Whoever wants finer places names them:

    async def charge(...):
        await connection.execute("INSERT INTO charges …")
        await apoint("between_effects")                                 # does nothing in production

    with Stall("between_effects") as stall:                             # the next request stops there
        first = threads.submit(client.post, "/charges", …)
        stall.reached()
        assert client.post("/charges", …).status_code == 409
        stall.release()

`Fail` raises there, `Kill` kills the process. The transaction has points of its own where the application's
origin is `watched`; `Lose` breaks the connection at one of them: ``Lose("commit")`` loses the reply.
"""

from taptwice.faults.commands import Crash, Fault, Kind, Trial, crash_at, driving, every
from taptwice.faults.interleaving import Interleaving, interleavings
from taptwice.faults.points import Fail, Injected, Kill, Lose, Lost, Stall, apoint, point, watched

__all__ = [
    "Crash",
    "Fail",
    "Fault",
    "Injected",
    "Interleaving",
    "Kill",
    "Kind",
    "Lose",
    "Lost",
    "Stall",
    "Trial",
    "apoint",
    "crash_at",
    "driving",
    "every",
    "interleavings",
    "point",
    "watched",
]
