"""All that is kept of a run, in one value: what a replay and a fork are made from.

Read in one look, since a run that hasn't ended moves on between two reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from runner import keys
from runner.connection import reporting_redis_errors
from runner.errors import InvalidInput
from runner.models import Evidence, Frozen
from runner.record import RunRecord, parse_record
from runner.redact import redact, redact_entry
from runner.store import EVIDENCE, RunStore, no_such_run

CONTENT_FIELDS = ("answer", "final", "error", "fatal", "metadata", "principal")
"""Fields of a record that hold what a user, a model or a tool said, as JSON."""


class Recording(Frozen):
    """A run's record (its fields as they are stored), history, evidence and trace.

    `hidden` are the names of fields that are hidden in all of it, and not in the trace alone.
    """

    version: Literal[1] = 1
    run_id: str
    record: dict[str, str]
    messages: tuple[dict[str, Any], ...]
    evidence: tuple[Evidence, ...] = ()
    trace: tuple[dict[str, Any], ...]
    hidden: tuple[str, ...] = ()

    @cached_property
    def run(self) -> RunRecord:
        return parse_record(self.run_id, self.record, 0)

    @property
    def names(self) -> frozenset[str]:
        """The names of all fields that something of it hides."""
        marked = (name for entry in self.trace for name in entry.get("hidden", ()))
        return frozenset(marked) | frozenset(self.hidden)

    def exchanges(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each exchange with a model, with the number of its step, in order."""
        for entry in self.trace:
            if entry["kind"] == "model":
                for exchange in entry["exchanges"]:
                    yield entry["step"], exchange

    def redacted(self, names: frozenset[str]) -> Recording:
        """The same without the values of these fields and of those that its trace hides."""
        names |= self.names
        record = self.record | {
            key: redact(self.record[key], names) for key in CONTENT_FIELDS if key in self.record
        }
        evidence = redact([each.model_dump(mode="json") for each in self.evidence], names)
        return Recording(
            run_id=self.run_id,
            record=record,
            messages=redact(self.messages, names),
            evidence=tuple(map(Evidence.model_validate, evidence)),
            trace=tuple(redact_entry(entry, names) for entry in self.trace),
            hidden=tuple(sorted(names)),
        )


def read_recording(store: RunStore, run_id: str) -> Recording:
    """The run as it is at this moment; `RunNotFound` where there is none."""
    pipe: Any = store.redis.pipeline(transaction=True)
    pipe.hgetall(keys.run(run_id))
    for name in (keys.messages(run_id), keys.evidence(run_id), keys.trace(run_id)):
        pipe.lrange(name, 0, -1)
    with reporting_redis_errors():
        record, messages, evidence, trace = pipe.execute()
    if not record:
        raise no_such_run(run_id)
    return Recording(
        run_id=run_id,
        record=record,
        messages=tuple(map(json.loads, messages)),
        evidence=tuple(found for text in evidence for found in EVIDENCE.validate_json(text)),
        trace=tuple(map(json.loads, trace)),
    )


def save_recording(recording: Recording, path: Path) -> None:
    """Write it to a file, as JSON; raises `InvalidInput` where that can't be."""
    try:
        path.write_text(recording.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"can't write {path.name}: {error.strerror}") from None


def load_recording(path: Path) -> Recording:
    """The recording in a file; raises `InvalidInput` where that holds none."""
    try:
        return Recording.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"can't read {path.name}: {error.strerror}") from None
    except ValidationError:
        raise InvalidInput(
            f"{path.name} holds no recording that this version can read; "
            "make one with celeriac replay RUN --save FILE"
        ) from None
