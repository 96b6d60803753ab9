"""A network between a test's parts that fails in the ways real ones do, and a stage behind it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from support.fleet import fleet
from support.model_server import ModelServer
from support.stage import Stage


class Proxy:
    """Forwards TCP to a port of this host. Use as a context manager.

    `black_hole` lets nothing through any more and closes nothing: connections that are open stay
    so and are dead for good, and so are those made before `heal`. `refuse` closes all of them and
    the port as well, until `heal`. `deafen` is a black hole for those that listen to a channel
    alone. `lose_replies` lets the next scripts through and not their replies: the client finds its
    connection cut, and sends them again.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._swallow = False
        self._pairs: list[_Pair] = []
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._to_lose = 0
        self.lost = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def black_hole(self) -> None:
        with self._lock:
            self._swallow = True
            for pair in self._pairs:
                pair.dead.set()

    def deafen(self) -> int:
        """Answers how many connections hear nothing more."""
        with self._lock:
            deaf = [pair for pair in self._pairs if pair.listens and not pair.dead.is_set()]
        for pair in deaf:
            pair.dead.set()
        return len(deaf)

    def lose_replies(self, count: int = 1) -> None:
        with self._lock:
            self._to_lose += count

    def _loses_reply(self) -> bool:
        with self._lock:
            loses = self._to_lose > 0
            self._to_lose -= loses
            self.lost += loses
            return loses

    def refuse(self) -> None:
        with self._lock:
            listener, self._listener = self._listener, None
            pairs = list(self._pairs)
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes its accept
            listener.close()
        for pair in pairs:
            pair.close()

    def heal(self) -> None:
        """Let new connections through."""
        with self._lock:
            self._swallow = False
        if self._listener is None:
            self._listen()

    def __enter__(self) -> Self:
        self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        for thread in self._threads:
            thread.join(5)

    def _listen(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._start(self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                if self._listener is not listener:
                    return
                with contextlib.suppress(OSError, UnboundLocalError):
                    near.close()
                continue
            pair = _Pair(near, far, self._loses_reply)
            with self._lock:
                if self._swallow:
                    pair.dead.set()
                self._pairs.append(pair)
                refused = self._listener is not listener
            if refused:
                pair.close()
            self._start(pair.ask)
            self._start(pair.answer)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()


class _Pair:
    """One connection: the client's end and the server's."""

    def __init__(
        self, near: socket.socket, far: socket.socket, loses_reply: Callable[[], bool]
    ) -> None:
        self.dead = threading.Event()
        self.listens = False
        self._sent_script = False
        self._loses_reply = loses_reply
        self._ends = (near, far)

    def ask(self) -> None:
        near, far = self._ends
        self._pump(near, far, self._notice)

    def answer(self) -> None:
        near, far = self._ends
        self._pump(far, near, self._may_pass)

    def _notice(self, data: bytes) -> bool:
        self.listens = self.listens or b"SUBSCRIBE" in data
        self._sent_script = b"EVALSHA" in data
        return True

    def _may_pass(self, data: bytes) -> bool:
        return not (self._sent_script and self._loses_reply())

    def _pump(
        self, source: socket.socket, target: socket.socket, may_pass: Callable[[bytes], bool]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.dead.is_set():
                    continue
                if not may_pass(data):
                    break
                target.sendall(data)
        if not self.dead.is_set():
            self.close()

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextlib.contextmanager
def stage_on(redis_url: str, folder: Path, **environ: str) -> Iterator[Stage]:
    """A stage on a server that the test brings, with no worker started yet."""
    stage = Stage()
    folder.mkdir(parents=True, exist_ok=True)
    with (
        ModelServer(stage.reply) as stage.model,
        fleet(redis_url, folder, model=stage.model, **environ) as stage.fleet,
        stage.fleet.client() as stage.client,
    ):
        yield stage
        assert stage.model.violations == []
