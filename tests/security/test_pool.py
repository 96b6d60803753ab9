"""A task that fails outside of its body gives its worker's place back: no message makes it deaf."""

from __future__ import annotations

import threading
from typing import Any

from worker.pool import StepPool


def fail(*_: Any, **__: Any) -> None:
    raise AttributeError("as Celery's own tracing does for a chain that is none")


def test_whatever_is_raised_the_place_is_given_back() -> None:
    pool = StepPool(limit=1)
    answers: list[Any] = []
    told = threading.Event()

    def tell(answer: Any) -> None:
        answers.append(answer)
        told.set()

    pool.on_apply(fail, ("a task",), {}, callback=tell)

    assert told.wait(5)
    [(failed, info, _)] = answers
    assert failed
    assert isinstance(info.exception.exc, AttributeError)
    pool.on_stop()


def test_an_answer_is_passed_on_as_it_is() -> None:
    pool = StepPool(limit=1)
    answers: list[Any] = []
    pool.on_apply(lambda *given: (0, given, 0.5), ("a task", 1), {}, callback=answers.append)
    pool.on_stop()
    assert answers == [(0, ("a task", 1), 0.5)]
