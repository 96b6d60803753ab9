"""A Redis behind a socket in the file system: runs, hints and results go over it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from support.fleet import fleet, valkey
from support.model_server import ModelServer, calls, final


def test_a_run_ends_where_redis_is_a_socket_in_the_file_system(tmp_path: Path) -> None:
    data = tmp_path / "redis"
    data.mkdir()
    # A socket's path may have about a hundred characters, which a test's folder may exceed.
    with (
        tempfile.TemporaryDirectory() as short,
        ModelServer([calls(("ping", {})), final("ok")]) as m,
    ):
        socket = Path(short) / "redis.sock"
        with (
            valkey(data, unixsocket=str(socket)),
            fleet(f"unix://{socket}?db=3", tmp_path, model=m) as workers,
            workers.client() as client,
        ):
            workers.start("steps")
            workers.start("tools")
            workers.wait_for(client.store.read_agents)

            assert client.submit("go", agent="helper").result(timeout=20).answer == "ok"
