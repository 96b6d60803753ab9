"""Asks a model under a step's lease, and keeps what each exchange cost.

The request runs in the process's event loop while the step's thread waits: the thread renews the
lease, passes on what streams in, and drops the request as soon as the step has no say any more.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import JsonValue

from runner import background
from runner.errors import ModelError, RedisUnavailable, ScriptError
from runner.guards import Progress
from runner.models import (
    Model,
    ModelReply,
    ModelRequest,
    Price,
    RunErrorType,
    StreamingModel,
    Usage,
)
from runner.observe import Observer
from runner.record import RunRecord
from runner.render import clean
from runner.replies import describe_error, describe_reply
from runner.settings import Settings
from runner.store import Hint, Outcome, RunStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

Call = concurrent.futures.Future[ModelReply]

PROMPT = 0.01
"""Seconds within which a model has answered promptly."""

TELL_EVERY = 0.15
"""Seconds between two `model.delta` events of a stream."""


class LetGo(Exception):
    """This attempt may not go on; its outcome says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class Released(Exception):
    """This process stops: another is to take the attempt."""


class Turns(Protocol):
    """Whoever lets a thread go on from one step to the next."""

    @property
    def holds_up(self) -> bool:
        """Whether others are held up for this thread."""

    def goes_on(self) -> bool:
        """Whether the thread takes another step; asked when one is done, before it is committed."""

    def takes_long(self) -> None:
        """The step waits for a model, or for a user's check."""


@dataclass(slots=True)
class Asked:
    """What asking the model cost so far in this attempt: every exchange, not only the last.

    Where its thread goes on with others, the hint of one is `taken` with the commit.
    """

    usage: Usage = field(default_factory=Usage)
    exchanges: list[dict[str, Any]] = field(default_factory=list)
    answer: JsonValue = None
    progress: Progress = field(default_factory=Progress)
    turns: Turns | None = None
    taken: Hint | None = None
    news: threading.Event = field(default_factory=threading.Event)
    woken: bool = False

    def wake(self) -> None:
        """The run may have been ended from outside: whoever waits is to look now.

        No more than that: the word may be of an end that came before the run was resumed.
        """
        self.woken = True  # first: whoever is told that there is news then sees which
        self.news.set()

    def was_woken(self) -> bool:
        """Whether so, since this was last asked."""
        woken = self.woken
        if woken:
            self.woken = False
        return woken


class Heard:
    """What has streamed in and wasn't told yet. Filled by the event loop, emptied by the step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        with self._lock:
            self._parts.append(text)

    def take(self) -> str:
        with self._lock:
            text = "".join(self._parts)
            self._parts.clear()
        return text


class Asker:
    """Makes the model calls of this process, and lets go of all of them when it stops."""

    def __init__(
        self, store: RunStore, settings: Settings, observer: Observer | None = None
    ) -> None:
        self._store = store
        self._observer = observer or Observer()
        self._settings = settings
        self._calls: set[Call] = set()
        self.stopping = False

    def release(self) -> None:
        """This process stops: let go of every model call, so that another worker makes it."""
        self.stopping = True
        for call in tuple(self._calls):
            call.cancel()

    def exchange(
        self,
        record: RunRecord,
        model: Model,
        request: ModelRequest,
        described: dict[str, Any],
        asked: Asked,
        *,
        price: Price | None = None,
        stream: bool = False,
    ) -> ModelReply:
        """One request and its response, both for the trace."""
        exchange: dict[str, Any] = {"request": described}
        asked.exchanges.append(exchange)
        started = time.monotonic()
        try:
            reply = self._observer.exchange(
                record,
                request,
                model,
                lambda: self._hold_step(record, model, request, asked, stream=stream),
            )
        except ModelError as error:
            usage = (error.usage or _cost_of(error)).priced(price)
            exchange["error"] = describe_error(error)
            exchange["response"] = error.raw
            raise
        else:
            usage = reply.usage.priced(price)
            exchange["response"] = reply.raw
            if (described_reply := describe_reply(reply)) is not None:
                exchange["reply"] = described_reply
            return reply
        finally:
            exchange["duration_ms"] = int((time.monotonic() - started) * 1000)
            if "response" in exchange:
                exchange["usage"] = usage.model_dump()
                asked.usage += usage

    def _hold_step(
        self,
        record: RunRecord,
        model: Model,
        request: ModelRequest,
        asked: Asked,
        *,
        stream: bool,
    ) -> ModelReply:
        """Keep the lease while the model answers; let go when the store says so."""
        if self.stopping:
            raise Released
        heard = Heard()
        call = background.submit(_respond(model, request, heard if stream else None))
        self._calls.add(call)
        if self.stopping:
            call.cancel()  # the stop came between the two lines above, and didn't see it
        try:
            self._wait(record, call, asked, heard if stream else None)
            return _reply_of(call)
        finally:
            call.cancel()  # whatever went wrong here: nobody waits for the answer any more
            self._calls.discard(call)

    def keep_lease(self, record: RunRecord, asked: Asked, work: Callable[[], T]) -> T:
        """Do what may take long, such as a user's check, without losing the step meanwhile.

        It can't be interrupted: if the step has no say any more, its result is dropped.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        future.set_running_or_notify_cancel()  # from here on it can't be cancelled

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised where the step waits
                future.set_exception(error)

        threading.Thread(target=run, name="celeriac-check", daemon=True).start()
        self._wait(record, future, asked)
        return future.result()

    def _wait(
        self,
        record: RunRecord,
        call: concurrent.futures.Future[Any],
        asked: Asked,
        heard: Heard | None = None,
    ) -> None:
        """Wait for the end of `call` under the step's lease."""
        renew_every = self._settings.renew_every
        renew_at = time.monotonic() + renew_every
        call.add_done_callback(lambda _: asked.news.set())
        if asked.turns is not None and asked.turns.holds_up and not asked.news.wait(PROMPT):
            asked.turns.takes_long()
        while True:
            left = max(0.0, renew_at - time.monotonic())
            asked.news.wait(left if heard is None else TELL_EVERY)
            asked.news.clear()  # before the look: what comes after that is news again
            done = call.done()  # looked at first: what came up to the end is told below
            if heard is not None and (text := heard.take()):
                self._tell(record, text, len(asked.exchanges))
            if done and not call.cancelled():
                return
            woken = asked.was_woken()
            if not call.cancelled() and not woken and time.monotonic() < renew_at:
                continue
            renew_at = time.monotonic() + renew_every
            try:
                outcome = self._store.renew_step(record.run_id, record.epoch)
            except RedisUnavailable as error:
                if call.cancelled():
                    raise
                # A Redis that is away for a while is no reason to lose what was asked:
                # the lease decides.
                logger.warning("run=%s can't renew its lease: %s", record.run_id, error)
                continue
            if outcome is not Outcome.OK:
                call.cancel()
                raise LetGo(outcome)
            if call.cancelled():
                # Nobody ended the run, so it is this process that ends.
                raise Released

    def _tell(self, record: RunRecord, text: str, exchange: int) -> None:
        """Followers that see a new `attempt` or `exchange` drop what they had of the step."""
        data = {"text": clean(text), "attempt": record.epoch, "exchange": exchange}
        try:
            self._store.add_event(
                record.run_id,
                "model.delta",
                step=record.step,
                call=None,
                data=data,
                epoch=record.epoch,
            )
        except RedisUnavailable as error:
            logger.warning("run=%s can't tell what streams in: %s", record.run_id, error)


async def _respond(model: Model, request: ModelRequest, heard: Heard | None) -> ModelReply:
    try:
        if heard is not None and isinstance(model, StreamingModel):
            return await model.stream(request, heard.add)
        return await model.respond(request)
    except (SystemExit, KeyboardInterrupt) as error:
        # Either would end the loop of this process, and with it every later model call.
        name = type(error).__name__
        raise ModelError(
            f"the model raised {name}", type=RunErrorType.MODEL_BAD_RESPONSE
        ) from error


def _cost_of(error: ModelError) -> Usage:
    """What an attempt cost of which the server told no usage."""
    if error.status is None and error.type is RunErrorType.CONFIG_ERROR:
        return Usage()  # nothing was sent
    # What a server refused, it didn't bill; of all else nobody knows.
    return Usage(requests=1, known=400 <= (error.status or 0) < 500)


def _reply_of(call: Call) -> ModelReply:
    """The reply; whatever a user's own model raises is an error of the model's, not of the loop."""
    error = call.exception()
    if error is None or isinstance(error, ModelError | ScriptError):
        return call.result()  # a script's error is for its test to see
    name = type(error).__name__
    raise ModelError(f"the model raised {name}", type=RunErrorType.MODEL_BAD_RESPONSE) from error
