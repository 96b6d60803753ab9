"""llmock (PyPI), a model server that breaks on demand and grades its client, as a process of ours.

Its own documentation says what each fault is; `ChaosServer` only queues them and reads the grades.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEY = "sk-llmock"

# The socket is bound before the address is told, so nobody else can answer there; the server ends
# with its parent, whatever becomes of that, since its standard input does.
SERVE = """
import os, sys
from llmock.testing import LLMockServer
server = LLMockServer()
token = os.environ["LLMOCK_TOKEN"]
server.app.get("/_llmock/token")(lambda: token)
with server:
    print(server.url, flush=True)
    sys.stdin.read()
os._exit(0)
"""


class ChaosServer:
    """A running llmock: faults go in, and what it saw and thinks of its client comes out."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.url = f"{root}/v1"

    def queue(self, *behaviors: dict[str, Any]) -> None:
        """Add behaviours; the next requests take the first of each kind."""
        self._admin("POST", "scenario", {"behaviors": list(behaviors)})

    def drop(self) -> None:
        """Forget the behaviours that wait, and keep what was seen."""
        self._admin("DELETE", "scenario")

    def reset(self) -> None:
        """Forget the behaviours, the requests and the quota that was used."""
        self._admin("POST", "reset")

    def drain(self) -> None:
        """Use up the quota of tokens, as another client with the same key would."""
        for size in (50_000, 5_000, 500, 50):
            while self._spend(size):
                pass

    def _spend(self, tokens: int) -> bool:
        # Not the path under test, so that it doesn't count among the requests that are graded.
        try:
            self._send("POST", "/v1/embeddings", {"input": "x", "max_tokens": tokens})
        except urllib.error.HTTPError as error:
            with error:
                return error.code != 429
        return True

    @property
    def token(self) -> Any:
        return self._admin("GET", "token")

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Each request that came, oldest first: body, status, fault, completed, chunks_sent, ..."""
        found: list[dict[str, Any]] = self._admin("GET", "requests")["requests"]
        return found

    @property
    def findings(self) -> list[dict[str, Any]]:
        """What llmock holds against its client: severity, code, title, ..."""
        found: list[dict[str, Any]] = self._admin("GET", "verdict")["findings"]
        return found

    def _admin(self, method: str, what: str, body: Any = None) -> Any:
        return self._send(method, f"/_llmock/{what}", body)

    def _send(self, method: str, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            self._root + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as response:
            return json.load(response)


@contextlib.contextmanager
def chaos_server(folder: Path, **settings: object) -> Iterator[ChaosServer]:
    """Start one in a folder of its own; `settings` are its LLMOCK_ variables."""
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(8)
    inherited = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    given = {f"LLMOCK_{key.upper()}": str(value) for key, value in settings.items()}
    with (
        (folder / "llmock.log").open("ab") as log,
        subprocess.Popen(
            [sys.executable, "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=folder,
            env={**inherited, **given, "LLMOCK_TOKEN": token},
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            root = process.stdout.readline().decode().strip()
            assert root, (folder / "llmock.log").read_text(errors="replace")
            server = ChaosServer(root)
            assert server.token == token, "another server answers at our address"
            yield server
        finally:
            process.kill()
