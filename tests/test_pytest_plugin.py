"""The pytest plugin in whole runs of pytest, on services with real databases."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from tests.test_exports import HEAVY, loaded_by

pytest_plugins = ["pytester"]

ROOT = pathlib.Path(__file__).resolve().parents[1]

FLASK = """
import pathlib

import pytest

from taptwice.testing import Effects
from tests.testing.shops import check_then_insert, flask_shop


@pytest.fixture
def shop(tmp_path):
    return flask_shop(tmp_path)


@pytest.fixture
def client(shop):
    with shop.app.test_client() as client:
        yield client


@pytest.fixture
def effects(shop):
    return Effects(shop.connect, "charges", "wallets")
"""

FASTAPI = """
import httpx2
import pytest

from taptwice.testing import Effects
from tests.testing.shops import fastapi_shop


@pytest.fixture
def shop(tmp_path):
    return fastapi_shop(tmp_path)


@pytest.fixture
async def client(shop):
    transport = httpx2.ASGITransport(shop.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://shop/v1") as client:
        yield client


@pytest.fixture
def effects(shop):
    return Effects(shop.connect, "charges", "wallets", "notes")
"""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    settings = ("asyncio_mode=auto", "asyncio_default_fixture_loop_scope=function")
    options = [word for setting in settings for word in ("-o", setting)]
    return pytester.runpytest("-p", "no:randomly", *options, *arguments)


def lines(result: pytest.RunResult) -> str:
    return "\n".join(result.outlines)


# --- what is loaded ---------------------------------------------------------------------------------------


def test_a_run_that_does_not_use_it_loads_nothing(tmp_path: pathlib.Path) -> None:
    """pytest loads the plugin with every run of every project in the environment."""
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n\ndef test_nothing(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('taptwice')\n"
        "    ours = {name for name in sys.modules if name.split('.')[0] == 'taptwice'}\n"
        "    assert ours == {'taptwice', 'taptwice.pytest_plugin'}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_plugin_is_light_and_the_functions_need_no_pytest() -> None:
    added = loaded_by("import pytest, taptwice.pytest_plugin") - loaded_by("import pytest")
    assert added == {"taptwice", "taptwice.pytest_plugin"}
    assert not loaded_by("import taptwice.testing") & {"pytest", "_pytest", *HEAVY} - {"http_sf"}


# --- the fixtures -----------------------------------------------------------------------------------------


def test_flask(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(FLASK)
    pytester.makepyfile(
        """
        def test_once(assert_once):
            assert assert_once("POST", "/charges", json={"cents": 5}).status_code == 201

        def test_crashes(assert_crash_safe, shop):
            assert_crash_safe("POST", "/charges", once=shop.once, json={"cents": 5})

        def test_promise(assert_idempotent):
            assert_idempotent("PUT", "/wallets/bea", json={"cents": 5})

        def test_mail(assert_crash_safe, shop):
            assert_crash_safe("POST", "/mails", once=shop.once, effects=lambda: len(shop.mails))
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * AssertionError: POST /mails does not survive:",
            "E * command * (commit), crash before: effect: *",
        ]
    )


def test_a_check_before_the_insert(pytester: pytest.Pytester) -> None:
    """In turn it passes, which is why suites that send in turn pass on services that charge twice."""
    pytester.makeconftest(FLASK.replace("flask_shop(tmp_path)", "check_then_insert(tmp_path, at_once=5)"))
    pytester.makepyfile(
        """
        def test_in_turn(assert_once):
            assert_once("POST", "/charges", json={"cents": 5}, at_once=1)

        def test_at_once(assert_once):
            assert_once("POST", "/charges", json={"cents": 5})
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_at_once*",
            "E * AssertionError: POST /charges does not happen once:",
            "E * 5 at once: answers without Idempotent-Replayed: expected 1, found 5",
            "E * 5 at once: effect: expected charges: 1 row added, found charges: 5 rows added",
        ]
    )
    assert "test_in_turn _" not in lines(result)


def test_a_client_that_awaits(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(FASTAPI)
    pytester.makepyfile(
        """
        import pytest
        from taptwice.testing import promised
        from tests.testing.shops import fastapi_shop

        async def test_once(assert_once):
            assert (await assert_once("POST", "/charges", json={"cents": 5})).status_code == 201

        async def test_crashes(assert_crash_safe, shop):
            await assert_crash_safe("POST", "/charges", once=shop.once, json={"cents": 5})

        async def test_promise(assert_idempotent):
            await assert_idempotent("PUT", "/notes/2", params={"text": "x"})

        async def test_forgotten(assert_once):
            assert_once("POST", "/charges", json={"cents": 5})
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=3, failed=1, errors=1)
    result.stdout.fnmatch_lines(["E * sent again: one more effect: notes: 1 row added"])
    result.stdout.fnmatch_lines(["this client awaits: await assert_once(*"])


def test_without_the_fixtures_that_it_needs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_once(assert_once):\n    assert_once('POST', '/charges')\n")
    result = run(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*fixture 'client' not found*"])


# --- everything twice -------------------------------------------------------------------------------------

SUITE = """
import pytest


@pytest.mark.parametrize("number", range(8))
def test_charge(client, number):
    assert client.post("/charges", json={"cents": 5}).status_code == 201
    assert client.get("/charges").get_json() == {"charges": 1}


def test_refused(client):
    headers = {"Idempotency-Key": "own"}
    assert client.post("/charges", json={"cents": 5}, headers=headers).status_code == 201
    assert client.post("/charges", json={"cents": 6}, headers=headers).status_code == 422


def test_login(client):
    assert client.post("/login").get_json() == {"token": 0}


@MARK
def test_no_key(client):
    assert client.post("/charges", json={"cents": 5}).status_code == 400
"""


def test_an_existing_suite_with_everything_twice(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(FLASK)
    pytester.makepyfile(SUITE.replace("MARK", "pytest.mark.sent_once"))
    pytester.makeini("[pytest]\ntaptwice_skip =\n    POST /login\n")
    arguments = ("--taptwice-twice=client", "--taptwice-seed=7", "--strict-markers")
    seen = []
    for more in ([], ["-k", "charge"], ["-k", "charge"]):
        result = run(pytester, *arguments, *more)
        found = re.search(r"taptwice: (\d+) requests were sent twice, (\d+) of them at once", lines(result))
        assert found, lines(result)
        seen.append(found.groups())
        assert result.ret == 0
        result.stdout.fnmatch_lines(["taptwice: `client` sends twice, --taptwice-seed=7"])
    assert seen[0][0] == "10"
    assert seen[1] == seen[2]
    assert seen[1][0] == "8"
    assert 0 < int(seen[1][1]) < 8


def test_everything_twice_finds_what_takes_no_key(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(FLASK)
    pytester.makepyfile(SUITE.replace("@MARK\n", ""))
    result = run(pytester, "--taptwice-twice=client")
    result.assert_outcomes(passed=9, failed=2)
    result.stdout.fnmatch_lines(["E * AssertionError: POST /login, sent twice:"])
    assert "sends twice, --taptwice-seed=" in lines(result), "the seed was drawn, and can be given again"


def test_everything_twice_through_a_client_that_awaits(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(FASTAPI)
    pytester.makepyfile(
        """
        async def test_charge(client):
            for number in range(1, 7):
                assert (await client.post("/charges", json={"cents": 5})).json() == {"charge_id": number}

        async def test_note(client):
            await client.put("/notes/2", params={"text": "x"})
            assert len((await client.get("/notes")).json()) == 2
        """
    )
    result = run(pytester, "--taptwice-twice=client", "--taptwice-seed=1")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["taptwice: 7 requests were sent twice, * of them at once*", "FAILED *::test_note*"]
    )


@pytest.mark.parametrize("workers", [(), ("-n2",)])
def test_everything_twice_through_a_fixture_that_no_test_used(
    pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    pytester.makeconftest(FLASK)
    pytester.makepyfile("def test_get(client):\n    client.get('/notes')\n\ndef test_two():\n    pass\n")
    result = run(pytester, "--taptwice-twice=nofix", *workers)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["ERROR: --taptwice-twice=nofix: no test used a fixture `nofix`*"])
    # A fixture that is used, and only reads, is no mistake.
    result = run(pytester, "--taptwice-twice=client", *workers)
    assert result.ret == 0


def test_everything_twice_on_several_workers(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(FLASK)
    pytester.makepyfile(SUITE.replace("@MARK\n", ""))
    result = run(pytester, "--taptwice-twice=client", "-n2", "-k", "charge")
    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines(["taptwice: 8 requests were sent twice, * of them at once*"])
