"""The servers that peers need, each started in a folder of its own, where the machine has them."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support.fleet import wait_for

ROOT = Path(__file__).resolve().parents[2]

RESTATE = ROOT / ".venv-bench" / "restate" / "node_modules" / ".bin" / "restate-server"

QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}


class Missing(Exception):
    """This machine doesn't have what a peer needs; the message says what."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A Postgres with its own defaults, which write through at each commit; yields its URL."""
    tools = [_find_postgres("initdb"), _find_postgres("postgres")]
    with tempfile.TemporaryDirectory(prefix="celeriac-bench-pg-") as folder:
        # Postgres refuses to run as root.
        user = None
        if os.getuid() == 0:
            user = "postgres" if _has_user("postgres") else "nobody"
            shutil.chown(folder, user)
        data, port = f"{folder}/data", free_port()
        subprocess.run(
            [tools[0], "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"],
            check=True,
            user=user,
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        server = subprocess.Popen(
            [tools[1], "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", folder],
            user=user,
            cwd=folder,
            **QUIET,  # type: ignore[call-overload]
        )
        try:
            wait_for(lambda: listens(port), timeout=30)
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
        finally:
            server.terminate()
            server.wait(20)


@contextlib.contextmanager
def restate() -> Iterator[tuple[int, int]]:
    """A Restate server with its own defaults; yields the ports of its ingress and its admin."""
    if not RESTATE.exists():
        raise Missing("restate-server isn't installed (npm has it; is npm there?)")
    ingress, admin, node = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="celeriac-bench-restate-") as folder:
        environ = os.environ | {
            "RESTATE_BASE_DIR": folder,
            "RESTATE_LISTEN_MODE": "tcp",
            "RESTATE_BIND_ADDRESS": f"127.0.0.1:{node}",
            "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{ingress}",
            "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{admin}",
            "RESTATE_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "1",
        }
        with (Path(folder) / "log").open("wb") as log:
            options = QUIET | {"stdout": log, "stderr": log}
            server = subprocess.Popen([RESTATE], env=environ, **options)  # type: ignore[call-overload]
        try:
            wait_for(
                lambda: listens(ingress) and listens(admin),
                timeout=60,
                explain=(Path(folder) / "log").read_text,
            )
            yield ingress, admin
        finally:
            server.terminate()
            server.wait(30)


def _find_postgres(name: str) -> str:
    places = [*map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise Missing("there is no Postgres server on this machine")
    return str(Path(found).resolve())


def _has_user(name: str) -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False
