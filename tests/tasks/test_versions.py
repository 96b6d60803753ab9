"""Workers of two versions side by side: what one can't handle is left to the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import StopReason
from runner.errors import SchemaError
from support.fleet import Fleet, fleet, raw_client, url_of, valkey
from support.model_server import ModelServer, calls, final

NEW_AGENT = """
from runner import Agent, tool

@tool(idempotent=True)
def fresh() -> str:
    '''A tool of the newer version.'''
    return "fresh"

agent = Agent(name="fresh", tools=[fresh])
"""

OLD_AGENT = NEW_AGENT.replace("def fresh", "def stale").replace("[fresh]", "[stale]")


def write(folder: Path, name: str, code: str) -> None:
    (folder / f"{name}.py").write_text(code)


@pytest.fixture
def other_agents(tmp_path: Path) -> Path:
    write(tmp_path, "new_agents", NEW_AGENT)
    write(tmp_path, "old_agents", OLD_AGENT)
    write(tmp_path, "none_of_it", NEW_AGENT.replace('name="fresh"', 'name="another"'))
    return tmp_path


def start_with(made: Fleet, queue: str, agents: str) -> str:
    made.environ["CELERIAC_AGENTS"] = agents
    made.environ["PYTHONPATH"] += f":{made.folder}"
    return made.start(queue)


def test_a_run_whose_agent_a_worker_lacks_is_left_to_the_one_that_has_it(
    other_agents: Path,
) -> None:
    data = other_agents / "redis"
    data.mkdir()
    script = [calls(("fresh", {})), final("done by the newer")]
    with (
        valkey(data) as server,
        ModelServer(script) as model,
        fleet(url_of(server), other_agents, model=model) as made,
        made.client() as client,
    ):
        started = start_with(made, "steps", "new_agents")
        made.wait_for(client.store.read_agents)
        made.stop(started)
        start_with(made, "steps", "none_of_it")
        run = client.submit("go", agent="fresh")
        made.wait_for(lambda: "run.waiting" in types(made, run.id))
        start_with(made, "steps", "new_agents")
        start_with(made, "tools", "old_agents")
        made.wait_for(lambda: "call.waiting" in types(made, run.id))
        start_with(made, "tools", "new_agents")

        result = run.result(timeout=30)

        assert result.answer == "done by the newer"
        (answer,) = [m["content"] for m in run.messages() if m["role"] == "tool"]
        assert answer == "fresh"


def test_a_run_of_an_agent_that_nobody_knows_ends_with_a_clear_error(other_agents: Path) -> None:
    data = other_agents / "redis"
    data.mkdir()
    with (
        valkey(data) as server,
        fleet(url_of(server), other_agents) as made,
        made.client() as client,
    ):
        run = client.submit("go", agent="nobody")  # no worker has told yet which agents there are
        start_with(made, "steps", "new_agents")

        result = run.result(timeout=20)

        assert result.stop_reason is StopReason.ERROR
        assert result.error is not None
        assert result.error.type == "CONFIG_ERROR"
        assert "known agents: fresh" in result.error.message


def test_a_record_of_a_newer_schema_is_left_alone(other_agents: Path) -> None:
    data = other_agents / "redis"
    data.mkdir()
    with (
        valkey(data) as server,
        ModelServer([]) as model,
        fleet(url_of(server), other_agents, model=model) as made,
        made.client() as client,
    ):
        newer = client.submit("go", agent="fresh")
        redis = raw_client(made.redis_url)
        redis.hset(f"celeriac:{newer.id}", "schema", 99)
        start_with(made, "steps", "new_agents")
        canary = client.submit("go too", agent="fresh")
        assert canary.result(timeout=20).ok

        with pytest.raises(SchemaError, match="newer version"):
            newer.status()
        record = redis.hgetall(f"celeriac:{newer.id}")
        assert (record["status"], record["epoch"]) == ("queued", "0")
        assert redis.zscore("celeriac:due", newer.id) is not None
        redis.hset(f"celeriac:{newer.id}", "schema", 1)
        assert newer.result(timeout=20).ok
        redis.close()
        assert "Traceback" not in made.logs()


def types(made: Fleet, run_id: str) -> list[str]:
    redis = raw_client(made.redis_url)
    entries = redis.xrange(f"celeriac:{run_id}:events")
    redis.close()
    return [fields["type"] for _, fields in entries]
