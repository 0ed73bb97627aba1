"""The pytest plugin: the assertions of `taptwice.testing` as fixtures, and a test suite with all sent twice.

    def test_charge(assert_once):                # sends through your fixture `client`, counts by your
        assert_once("POST", "/charges", json={"cents": 5})                     # fixture `effects`

    pytest --taptwice-twice=client               # what any test sends through the fixture `client`, twice

pytest loads this with every run: nothing else of taptwice is imported before it is used.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

FIXTURE = "taptwice_twice"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("taptwice")
    group.addoption(
        "--taptwice-twice",
        metavar="FIXTURE",
        help="send each POST, PUT, PATCH and DELETE of the client in this fixture twice, every third at once",
    )
    group.addoption(
        "--taptwice-seed", metavar="SEED", help="which of them are sent at once; shown in the header of a run"
    )
    parser.addini(
        "taptwice_skip", "requests that take no key, one 'METHOD /path' a line, with * and ?", type="linelist"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The marker; and the doubling, where it is asked for."""
    config.addinivalue_line("markers", "sent_once: with --taptwice-twice, this test's requests are sent once")
    if fixture := config.getoption("--taptwice-twice"):
        seed = config.getoption("--taptwice-seed") or str(random.randrange(10**6))
        config.option.taptwice_seed = seed  # xdist's workers draw none of their own
        config.pluginmanager.register(_Twice(fixture, seed, config.getini("taptwice_skip")), FIXTURE)


class _Twice:
    """The hooks that double what goes through a fixture."""

    def __init__(self, fixture: str, seed: str, skip: list[str]) -> None:
        from taptwice.core.policy import Policy
        from taptwice.testing.doubling import Doubling

        self._fixture = fixture
        self._seed = seed
        self._doubling = Doubling(random.Random(seed), Policy(), skip)
        self._used = False
        self._ran = 0

    def pytest_report_header(self) -> str:
        return f"taptwice: `{self._fixture}` sends twice, --taptwice-seed={self._seed}"

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._ran += 1
        self._doubling.random.seed(f"{self._seed} {item.nodeid}")  # whatever ran before this test
        self._doubling.active = item.get_closest_marker("sent_once") is None

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        value = yield
        if fixturedef.argname == self._fixture:
            from taptwice.testing.doubling import double

            self._used = True
            fixturedef.addfinalizer(double(value, self._doubling))
        return value

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:  # one of xdist's workers
            output[FIXTURE] = (self._doubling.sent_twice, self._doubling.at_once, self._used, self._ran)
        elif self._is_unused and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    @property
    def _is_unused(self) -> bool:
        """Whether tests ran, and none of them had the fixture: such a run proves nothing."""
        return self._ran > 0 and not self._used

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        sent_twice, at_once, used, ran = getattr(node, "workeroutput", {}).get(FIXTURE, (0, 0, False, 0))
        self._doubling.sent_twice += sent_twice
        self._doubling.at_once += at_once
        self._used = self._used or used
        self._ran += ran

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        done = self._doubling
        terminalreporter.write_line(
            f"taptwice: {done.sent_twice} requests were sent twice, {done.at_once} of them at once "
            f"(--taptwice-seed={self._seed})",
            yellow=not done.sent_twice,
        )
        if self._is_unused:
            terminalreporter.write_line(
                f"ERROR: --taptwice-twice={self._fixture}: no test used a fixture `{self._fixture}`; "
                "name the one that gives your tests their client",
                red=True,
            )


def _bound(request: pytest.FixtureRequest, name: str) -> Iterator[Callable[..., Any]]:
    """The assertion, on the test's fixtures `client` and `effects`."""
    from taptwice import testing

    made: list[Any] = []
    function = getattr(testing, name)
    # Now, and not when it is called: what awaits cannot be made inside a test that awaits.
    client = request.getfixturevalue("client")
    try:
        usual = {"effects": request.getfixturevalue("effects")}
    except pytest.FixtureLookupError:
        usual = {}  # the test says it each time

    @functools.wraps(function)
    def assertion(*arguments: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        result = function(client, *arguments, **{**usual, **options})
        made.append(result)
        return result

    yield assertion
    for result in made:
        if inspect.iscoroutine(result) and inspect.getcoroutinestate(result) == inspect.CORO_CREATED:
            result.close()
            pytest.fail(f"this client awaits: await {name}(…)", pytrace=False)


@pytest.fixture
def assert_once(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`taptwice.testing.assert_once` on your fixtures `client` and `effects`."""
    yield from _bound(request, "assert_once")


@pytest.fixture
def assert_crash_safe(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`taptwice.testing.assert_crash_safe` on your fixtures `client` and `effects`."""
    yield from _bound(request, "assert_crash_safe")


@pytest.fixture
def assert_idempotent(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`taptwice.testing.assert_idempotent` on your fixtures `client` and `effects`."""
    yield from _bound(request, "assert_idempotent")
