"""What stands beside a running call: it renews, ends what has to end, and else sleeps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from runner.interrupt import Body, ToolInterrupted
from runner.keeper import HeldCall, Keeper, keeper_of_this_thread
from runner.store import Outcome


class Renewals:
    """Answers renewals with the given words, then with `OK`, and counts them."""

    def __init__(self, *words: Outcome) -> None:
        self.words = list(words)
        self.count = 0
        self.renewed = threading.Event()

    def __call__(self) -> Outcome:
        self.count += 1
        self.renewed.set()
        return self.words.pop(0) if self.words else Outcome.OK


def held(
    renew: Callable[[], Outcome],
    body: Body | None = None,
    *,
    renew_every: float = 60,
    timeout: float = 60,
    remaining: float = 60,
) -> HeldCall:
    return HeldCall(
        renew=renew,
        renew_every=renew_every,
        timeout=timeout,
        remaining=remaining,
        body=body or Body(),
        give_up=lambda _: None,
    )


@contextmanager
def interrupted() -> Iterator[None]:
    started = time.monotonic()
    with pytest.raises(ToolInterrupted):
        yield
    assert time.monotonic() - started < 10


def sleep() -> None:
    time.sleep(30)


def keepers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "celeriac-lease"]


def test_a_thread_has_one_keeper_for_all_its_calls_and_a_quick_call_does_not_wake_it() -> None:
    keeper, renewals = keeper_of_this_thread(), Renewals()
    before = len(keepers())
    for _ in range(100):
        keeper.expect()
        with keeper_of_this_thread().hold(held(renewals)):
            pass
    assert len(keepers()) == before
    assert keeper_of_this_thread() is keeper
    assert renewals.count == 0


def test_a_forked_child_has_a_keeper_of_its_own() -> None:
    keeper = keeper_of_this_thread()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with keeper_of_this_thread().hold(held(renewals := Renewals(), renew_every=0.01)):
            os.write(write, b"1" if renewals.renewed.wait(5) else b"0")
        os._exit(0 if keeper_of_this_thread() is not keeper else 1)
    assert os.read(read, 1) == b"1"
    assert os.waitpid(child, 0)[1] == 0


def test_the_lease_is_renewed_for_as_long_as_the_body_runs() -> None:
    renewals = Renewals()
    with Keeper().hold(held(renewals, renew_every=0.01)):
        while renewals.count < 5:
            renewals.renewed.clear()
            assert renewals.renewed.wait(5)


def test_a_call_that_must_be_looked_at_sooner_than_the_one_before_it_is() -> None:
    keeper, renewals, body = Keeper(), Renewals(), Body()
    with keeper.hold(held(renewals)):
        pass  # the keeper may sleep for a minute now
    with interrupted(), keeper.hold(held(renewals, body, timeout=0.05)):
        body.run(sleep, {})
    assert renewals.count == 0


def test_a_body_is_ended_when_its_run_has_ended() -> None:
    body = Body()
    call = held(Renewals(Outcome.OK, Outcome.CANCELLED), body, renew_every=0.01)
    with interrupted(), Keeper().hold(call):
        body.run(sleep, {})
    assert call.reason is Outcome.CANCELLED


def test_a_nudge_is_heard_in_the_body_and_right_before_it() -> None:
    keeper = Keeper()
    for before in (True, False):
        body = Body()
        call = held(Renewals(Outcome.STALE), body)
        keeper.expect()
        if before:
            keeper.nudge()
        with interrupted(), keeper.hold(call):
            if not before:
                threading.Timer(0.02, keeper.nudge).start()
            body.run(sleep, {})
        assert call.reason is Outcome.STALE


def test_a_nudge_of_the_call_before_is_forgotten() -> None:
    keeper, renewals = Keeper(), Renewals()
    keeper.nudge()
    keeper.expect()
    done = Renewals()
    with keeper.hold(held(renewals, renew_every=60)):
        pass
    with keeper.hold(held(done, renew_every=0.01)):
        assert done.renewed.wait(5)
    assert renewals.count == 0


def test_a_body_that_does_not_let_go_is_given_up_once_and_its_call_ends_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runner.keeper.KILL_GRACE", 0.05)
    told: list[Outcome | None] = []
    gone = threading.Event()

    def give_up(reason: Outcome | None) -> None:
        told.append(reason)
        gone.set()

    call = HeldCall(
        renew=Renewals(Outcome.FENCED),
        renew_every=0.01,
        timeout=60,
        remaining=60,
        body=Body(),  # it never runs, so nothing can interrupt it
        give_up=give_up,
    )
    with Keeper().hold(call):
        assert gone.wait(5)
        assert told == [Outcome.FENCED]


def test_a_keeper_outlives_a_call_that_it_could_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("runner.keeper.KILL_GRACE", 0.01)
    keeper, renewals = Keeper(), Renewals()
    failed = threading.Event()

    def give_up(_: Outcome | None) -> None:
        failed.set()
        raise OSError("away")

    broken = HeldCall(
        renew=renewals,
        renew_every=60,
        timeout=0,
        remaining=60,
        body=Body(),
        give_up=give_up,
    )
    with keeper.hold(broken):
        assert failed.wait(5)
    with keeper.hold(held(renewals, renew_every=0.01)):
        assert renewals.renewed.wait(5)
    assert "a call could not be ended" in caplog.text


def test_a_renewal_that_fails_leaves_the_lease_to_decide() -> None:
    renewals = Renewals()

    def fail() -> Outcome:
        renewals()
        raise OSError("away")

    call = held(fail, renew_every=0.01)
    with Keeper().hold(call):
        while renewals.count < 3:
            renewals.renewed.clear()
            assert renewals.renewed.wait(5)
    assert call.reason is None
