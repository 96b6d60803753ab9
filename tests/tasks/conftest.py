from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.stage import Stage, open_stage


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with open_stage(
        tmp_path_factory.mktemp("stage"), CELERIAC_LEASE="5", CELERIAC_RENEW_EVERY="1.5"
    ) as made:
        yield made
