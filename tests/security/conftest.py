"""One fleet for all security tests: its Redis wants a password, and its workers log at DEBUG."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.connection import connect
from support.fleet import fleet, url_of, valkey
from support.model_server import ModelServer
from support.plants import API_KEY, PASSWORD
from support.stage import Stage

AGENTS = r'''
import time

from runner import Agent, Context, Evidence, Result, ToolError, tool


@tool(timeout=10)
def keep(ctx: Context, secret: str) -> Result[str]:
    """Hold on to a secret."""
    ctx.progress(1, 2, "half way")
    found = Evidence(source="safe", text="planted-in-evidence")
    return Result("planted-in-result", evidence=[found])


@tool
def leak() -> None:
    """Fail with a secret in the exception's text."""
    raise RuntimeError("planted-in-exception")


@tool(approval=True)
def pay(account: str) -> str:
    """Pay money to an account."""
    return "planted-in-receipt"


@tool
def measure(text: str) -> int:
    """Tell how long a text is."""
    return len(text)


guarded = Agent(
    name="guarded", instructions="planted-in-instructions", tools=[keep, leak, pay, measure]
)
'''


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("security")
    (folder / "guarded_agents.py").write_text(AGENTS)
    (data := folder / "redis").mkdir()
    made = Stage()
    with valkey(data) as server, ModelServer(made.reply) as made.model:
        admin = connect(url_of(server))
        admin.execute_command(  # type: ignore[no-untyped-call]
            "ACL", "SETUSER", "app", "on", f">{PASSWORD}", "~*", "&*", "+@all"
        )
        admin.close()
        url = f"redis://app:{PASSWORD}@127.0.0.1:{server.port}"
        with (
            fleet(
                f"{url}/0",
                folder,
                model=made.model,
                agents="guarded_agents",
                CELERIAC_RESULT_BACKEND=f"{url}/1",
                OPENAI_API_KEY=API_KEY,
            ) as made.fleet,
            made.fleet.client() as made.client,
        ):
            for queue in ("steps", "tools"):
                made.fleet.start(queue, name=queue, concurrency=4, loglevel="DEBUG")
            made.fleet.wait_for(
                lambda: all(" ready." in made.fleet.log(q) for q in ("steps", "tools"))
            )
            yield made
            assert made.model.violations == []
