"""Faults need a fleet of their own: each test kills what it needs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.stage import OpenStage, Stage, open_stage


@pytest.fixture
def open_fleet(tmp_path: Path) -> Iterator[OpenStage]:
    """Opens stages that end with the test; settings are given as environment variables."""
    with ExitStack() as stack:

        def make(**environ: str) -> Stage:
            defaults = {"CELERIAC_LEASE": "2", "CELERIAC_RENEW_EVERY": "0.5"}
            return stack.enter_context(open_stage(tmp_path / "stage", **defaults | environ))

        yield make


@pytest.fixture(scope="session")
def shared_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """For faults that leave the workers whole."""
    with open_stage(
        tmp_path_factory.mktemp("faults"), CELERIAC_LEASE="5", CELERIAC_RENEW_EVERY="1.5"
    ) as stage:
        yield stage
