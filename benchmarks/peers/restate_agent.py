"""Restate as its documents have an agent: a handler whose model calls and tools are journalled.

`python -m benchmarks.peers.restate_agent PORT INGRESS ADMIN inside|calls` serves the handlers on a
port and registers them; the tools run inside of the handler, or as calls of another one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import urllib.request
from typing import Any

import hypercorn
import hypercorn.asyncio
import restate

from benchmarks.load import Load, Message, answer
from benchmarks.peers.answering import answer_counts

agent = restate.Service("agent")
tools = restate.Service("tools")


def give_back(call: dict[str, Any]) -> Message:
    content = str(json.loads(call["function"]["arguments"])["n"])
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


async def ask_model(history: list[Message]) -> Message:
    return answer(history)


async def run_inside(call: dict[str, Any]) -> Message:
    return give_back(call)


@tools.handler()
async def run_tool(_: restate.Context, call: dict[str, Any]) -> dict[str, Any]:
    return give_back(call)


@agent.handler()
async def run_agent(ctx: restate.Context, given: dict[str, Any]) -> str:
    history: list[Message] = [{"role": "user", "content": given["goal"]}]
    while True:
        reply = await ctx.run_typed("ask", ask_model, history=history)
        history.append(reply)
        calls = reply.get("tool_calls")
        if not calls:
            return str(reply["content"])
        if given["how"] == "calls":
            futures = [ctx.service_call(run_tool, arg=call) for call in calls]
        else:
            futures = [ctx.run_typed(f"tool {call['id']}", run_inside, call=call) for call in calls]
        await restate.gather(*futures)
        history += [await each for each in futures]


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def main(port: str, ingress: str, admin: str, how: str) -> None:
    config = hypercorn.Config()
    config.bind = [f"127.0.0.1:{port}"]
    app = restate.app(services=[agent, tools])
    stopped = threading.Event()

    async def wait_for_stop() -> None:
        await asyncio.to_thread(stopped.wait)

    def serve() -> None:
        asyncio.run(hypercorn.asyncio.serve(app, config, shutdown_trigger=wait_for_stop))

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    post(f"http://127.0.0.1:{admin}/deployments", {"uri": f"http://127.0.0.1:{port}"})
    given = {"goal": Load().goal, "how": how}

    def run() -> None:
        assert post(f"http://127.0.0.1:{ingress}/agent/run_agent", given) == "done"

    answer_counts(run)
    stopped.set()
    server.join(5)


if __name__ == "__main__":
    main(*sys.argv[1:])
