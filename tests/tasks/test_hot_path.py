"""What a step costs the server: counted, so that it doesn't depend on who else uses the machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.fleet import raw_client
from support.model_server import calls, final
from support.stage import Stage, by_turn

STEPS, CALLS = 10, 4


@contextmanager
def watching_commands(stage: Stage) -> Iterator[list[dict[str, Any]]]:
    """Every command that a client sends to Redis meanwhile; what a script does isn't one."""
    redis = raw_client(stage.fleet.redis_url)
    found: list[dict[str, Any]] = []
    ready, token = threading.Event(), "celeriac-test-is-done"

    def listen() -> None:
        with redis.monitor() as monitor:
            ready.set()
            for command in monitor.listen():
                if token in command["command"]:
                    return
                if command["client_type"] != "lua":
                    found.append(command)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert ready.wait(5)
    yield found
    redis.echo(token)
    thread.join(5)
    redis.close()


def test_a_step_of_four_calls_costs_few_commands(stage: Stage) -> None:
    turns = [calls(*[("add", {"a": step, "b": n}) for n in range(CALLS)]) for step in range(STEPS)]
    with watching_commands(stage) as commands:
        run = stage.submit(by_turn([*turns, final("done")]))
        assert run.result(timeout=30).ok

    sent = [each["command"].split(" ")[0].upper() for each in commands]
    # Who waits for the end reads as often as the run takes time.
    assert len(sent) - sent.count("XREAD") <= 35 * (STEPS + 1), "a script counts one"
    assert sent.count("LPUSH") == 0, "the scripts send all hints"
    histories = f"LRANGE celeriac:{run.id}:messages "
    assert not [each for each in commands if each["command"].startswith(histories)], (
        "a step is handed its history as it begins"
    )
    assert sent.count("HGETALL") <= STEPS, (
        "who waits for the end looks at the record when it is told"
    )


def test_a_collection_leaves_out_what_a_worker_has_loaded(stage: Stage) -> None:
    run = stage.submit([calls(("count_frozen", {})), final("done")], agent="frozen")
    assert run.result(timeout=20).ok
    [answered] = [each for each in run.messages() if each["role"] == "tool"]
    assert int(answered["content"]) > 10_000
