"""For the tests of your service, on its own database, through the test client that you have.

    assert_once(client, "POST", "/charges", json={"cents": 5}, effects=Effects(engine, "charges"))

`assert_once` sends a request twice in turn and several times at once; `assert_crash_safe` lets the process
die at each point of the claim and sends it again; `assert_idempotent` holds a PUT or a DELETE, found by
`promised`, to what its method promises; `twice` doubles what a whole test suite sends. A client that awaits
makes them awaitable: ``await assert_once(...)``. The fixtures of the same names are `taptwice.pytest_plugin`.

`bound_to` lets keyed routes work on the test's own connection, so that a test rolls back and leaves nothing:

    @pytest.fixture
    def connection(engine):
        with engine.connect() as connection:
            transaction = connection.begin()
            with bound_to(once, connection):
                yield connection
            transaction.rollback()

    def test_charge(connection, client):
        assert client.post("/charges", json={"cents": 5}, headers={"Idempotency-Key": "k"}).status_code == 201
        assert connection.execute(text("SELECT count(*) FROM charges")).scalar() == 1

`collect` gives the events, and `memory` a database in memory for tests of the guard.
"""

from taptwice.testing.bound import bound_to, collect, memory
from taptwice.testing.crashes import assert_crash_safe
from taptwice.testing.doubling import twice
from taptwice.testing.effects import Effects
from taptwice.testing.promises import assert_idempotent, promised
from taptwice.testing.repeats import assert_once

__all__ = [
    "Effects",
    "assert_crash_safe",
    "assert_idempotent",
    "assert_once",
    "bound_to",
    "collect",
    "memory",
    "promised",
    "twice",
]
