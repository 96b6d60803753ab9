"""What the security tests plant: secrets to look for, and what would run code if it was decoded."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

PASSWORD = "planted-redis-password"
API_KEY = "sk-test-planted-secret"


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self._path),)


def pickled(path: Path) -> bytes:
    return pickle.dumps([[Bomb(path)], {}, {}])


def as_yaml(path: Path) -> bytes:
    return f"!!python/object/apply:os.mknod ['{path}']".encode()
