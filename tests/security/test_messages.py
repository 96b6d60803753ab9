"""What a stranger puts into the queues is refused, and never run."""

from __future__ import annotations

import base64
import json
import pickle
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.settings import STEPS_QUEUE, TOOLS_QUEUE
from support.fleet import raw_client
from support.plants import as_yaml, pickled
from support.stage import Stage

QUEUES = {"steps": STEPS_QUEUE, "tools": TOOLS_QUEUE}
TASKS = ("celeriac.start", "celeriac.step", "celeriac.call_tool", "celeriac.ping")
DEEP = b"[" * 100_000 + b"]" * 100_000


def message(body: bytes, *, kind: Any = "application/json", **headers: Any) -> str:
    """What Kombu writes into a queue, with this body."""
    return json.dumps(
        {
            "body": base64.b64encode(body).decode(),
            "content-encoding": "utf-8",
            "content-type": kind,
            "headers": {"id": "hostile-run", "lang": "py", "argsrepr": "", "kwargsrepr": ""}
            | headers,
            "properties": {
                "delivery_info": {"exchange": "", "routing_key": ""},
                "delivery_tag": str(uuid.uuid4()),
                "body_encoding": "base64",
            },
        }
    )


def sent(*args: Any, **headers: Any) -> dict[str, Any]:
    return {"body": json.dumps([args, {}, {}]).encode()} | headers


HOSTILE: dict[str, dict[str, Any]] = {
    "no tuple": {"body": b'{"planted": 1}'},
    "null": {"body": b"null"},
    "nothing": {"body": b""},
    "numbers": {"body": b"[1, 2, 3]"},
    "no JSON": {"body": b"planted"},
    "no text": {"body": b"\xff\xfeplanted"},
    "deep": {"body": b"[[" + DEEP + b"], {}, {}]"},
    "a long number": {"body": b'[["hostile-run", ' + b"9" * 5_000 + b"], {}, {}]"},
    "no number": {"body": b'[["hostile-run", NaN, Infinity], {}, {}]'},
    "half a pair": {"body": b'[["hostile\\ud800-run", 0, 0], {}, {}]'},
    "a key twice": {"body": b'[[], {"run_id": "hostile-run", "run_id": "due", "step": 0}, {}]'},
    "a type of Kombu's": {"body": b'[[{"__type__": "datetime", "__value__": "x"}], {}, {}]'},
    "a date of Kombu's": {"body": b'[[{"__type__": "uuid", "__value__": []}], {}, {}]'},
    "no arguments": sent(),
    "too many": sent("hostile-run", 0, 0, 0, 0),
    "a dict": sent({"run": "hostile-run"}, 0, 0),
    "beyond 64 bits": sent("hostile-run", 2**63, 2**64),
    "below zero": sent("hostile-run", -(2**63), -1),
    "a fraction": sent("hostile-run", 0.5, 1e308),
    "a long id": sent("x" * 1_000_000, 0, 0),
    "another key": sent("due", 0, 0),
    "another hash": sent("agents", 0, 0),
    "a part of a run": sent("hostile-run:calls", 0, 0),
    "a path": sent("../../etc/passwd", 0, 0),
    "an encoded path": sent("..%2f..%2fetc%2fpasswd", 0, 0),
    "NUL": sent("hostile\0run", 0, 0),
    "an id that is none": sent("hostile-run", 0, 0, id={"a": 1}),
    "an id of a list": sent("hostile-run", 0, 0, id=["x"]),
    "no id": sent("hostile-run", 0, 0, id=None),
    "deep headers": sent("hostile-run", 0, 0, extra=json.loads("[" * 400 + "]" * 400)),
    "no date": sent("hostile-run", 0, 0, eta="never"),
    "an infinite date": sent("hostile-run", 0, 0, eta=1e308),
    "no expiry": sent("hostile-run", 0, 0, expires="never"),
    "a limit": sent("hostile-run", 0, 0, timelimit="x"),
    "limits": sent("hostile-run", 0, 0, timelimit=["a", "b"]),
    "stamps": sent("hostile-run", 0, 0, stamped_headers=3, stamps=4),
    "tasks to follow": {
        "body": b'[["hostile-run", 0, 0], {}, {"chain": [{"task": "os.system", "args": ["x"]}]}]'
    },
    "no kind": sent(kind=None),
    "a kind of a dict": sent(kind={}),
    "text": {"body": b"planted", "kind": "text/plain"},
    "bytes": {"body": b"planted", "kind": "application/data"},
    "msgpack": {"body": b"\x93\x90\x80\x80", "kind": "application/x-msgpack"},
}


@pytest.mark.parametrize("queue", QUEUES)
def test_a_message_that_is_none_of_ours_is_dropped_and_its_worker_goes_on(
    stage: Stage, tmp_path: Path, queue: str
) -> None:
    planted = tmp_path / "planted"
    redis = raw_client(stage.fleet.redis_url)
    before = set(redis.scan_iter("celeriac:*"))
    worker = stage.fleet.workers[queue]
    hostile = [
        *HOSTILE.values(),
        {"body": pickled(planted), "kind": "application/x-python-serialize"},
        {"body": pickled(planted), "kind": "pickle"},
        {"body": as_yaml(planted), "kind": "application/x-yaml"},
        {"body": as_yaml(planted), "kind": "yaml"},
        {"body": pickled(planted)},
        {"body": as_yaml(planted)},
    ]
    for given in hostile:
        for task in (*TASKS, "celery.chain", "celery.map"):
            redis.lpush(QUEUES[queue], message(task=task, **given))
    redis.lpush(QUEUES[queue], message(task="os.system", **sent("touch", str(planted))))

    assert stage.client.ping(queue, timeout=60) is not None
    stage.fleet.wait_for(lambda: redis.llen(QUEUES[queue]) == 0)
    assert worker.poll() is None
    assert not planted.exists()
    # A ping's token may be any text; what it leaves is gone within a minute.
    left = {key for key in redis.scan_iter("celeriac:*") if not key.startswith("celeriac:ping:")}
    assert left <= before | {f"celeriac:seen:{QUEUES[queue]}"}
    redis.close()


def test_these_bombs_would_go_off(tmp_path: Path) -> None:
    pickle.loads(pickled(tmp_path / "pickle"))
    yaml.unsafe_load(as_yaml(tmp_path / "yaml"))
    assert {each.name for each in tmp_path.iterdir()} == {"pickle", "yaml"}
