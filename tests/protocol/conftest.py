from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite("support.protocol")

# After the line above, for its effect.
from support.model_server import ModelServer, Reply  # noqa: E402
from support.protocol import ALLOWED  # noqa: E402
from support.stage import Stage, open_stage  # noqa: E402


@pytest.fixture(scope="session")
def stage(
    tmp_path_factory: pytest.TempPathFactory, deepseek_server: ModelServer, stages: list[Stage]
) -> Iterator[Stage]:
    """Real workers for all cases: each case's goal has a script of its own."""
    with open_stage(
        tmp_path_factory.mktemp("protocol"),
        agents="support.protocol_agents",
        CELERIAC_LEASE="5",
        CELERIAC_RENEW_EVERY="1.5",
        CELERIAC_TEST_DEEPSEEK_URL=deepseek_server.url,
    ) as made:
        stages.append(made)
        yield made


@pytest.fixture(scope="session")
def stages() -> list[Stage]:
    """The stage, once it is there: it has to know the server that asks it what to answer."""
    return []


@pytest.fixture(scope="session")
def deepseek_server(stages: list[Stage]) -> Iterator[ModelServer]:
    """A second server with the same scripts, which takes what DeepSeek takes."""

    def reply(body: dict[str, Any]) -> Reply:
        return stages[0].reply(body)

    with ModelServer(reply, allow=ALLOWED["deepseek"]) as server:
        yield server
        assert server.violations == []


@pytest.fixture
def fragile_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Two tools workers, of which one dies whole after the first tool that returned."""
    folder = tmp_path_factory.mktemp("fragile")
    with open_stage(
        folder / "stage",
        agents="support.protocol_agents",
        CELERIAC_LEASE="2",
        CELERIAC_RENEW_EVERY="0.5",
        CELERIAC_FAILPOINT=f"call.ran:group:{folder / 'died'}",
    ) as made:
        made.fleet.start("tools", name="tools-second")
        yield made


@pytest.fixture
def hasty_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Workers that give a model attempt one second in all."""
    with open_stage(
        tmp_path_factory.mktemp("hasty"),
        agents="support.protocol_agents",
        CELERIAC_MODEL_TIMEOUT="1",
    ) as made:
        yield made
