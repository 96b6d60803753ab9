"""Asks a model server from a parent and four forked children that inherit its client.

Prints what each was answered, as JSON: `{"parent": [...], "child 0": [...], ...}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from runner.model import OpenAIModel
from runner.models import Final, ModelRequest

model = OpenAIModel(sys.argv[1], "sk-test")


async def ask(tag: str) -> str:
    goal = {"role": "user", "content": tag}
    reply = await model.respond(ModelRequest(model="fake-1", messages=(goal,)))
    assert isinstance(reply, Final)
    return reply.text


async def ask_ten(who: str) -> list[str]:
    return await asyncio.gather(*(ask(f"{who}, request {n}") for n in range(10)))


def main() -> None:
    parent = asyncio.new_event_loop()
    # The connection that this leaves open is what the children must not use.
    answers = {"before": [parent.run_until_complete(ask("before"))]}
    readers = {}
    for number in range(4):
        reader, writer = os.pipe()
        if os.fork() == 0:
            told = asyncio.new_event_loop().run_until_complete(ask_ten(f"child {number}"))
            os.write(writer, json.dumps(told).encode())
            os._exit(0)
        os.close(writer)
        readers[f"child {number}"] = reader
    answers["parent"] = parent.run_until_complete(ask_ten("parent"))
    for who, reader in readers.items():
        with os.fdopen(reader, encoding="utf-8") as pipe:
            answers[who] = json.loads(pipe.read() or "[]")
    parent.run_until_complete(model.aclose())
    sys.stdout.write(json.dumps(answers))


main()
