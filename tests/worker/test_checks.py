"""What a worker refuses to start on, each with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import SettingsError
from runner.agents import Agents
from runner.settings import Settings
from support.fleet import fleet, url_of, valkey
from worker.app import make_app
from worker.checks import _check_config, _check_pool, check_redis_url


def refused_with(redis_url: str, folder: Path, queue: str, code: str = "", **environ: str) -> str:
    """Start a worker that won't start; returns what it said."""
    (folder / "shop_config.py").write_text(code)
    with fleet(redis_url, folder) as made:
        made.environ.update(environ)
        made.environ["PYTHONPATH"] += f":{folder}"
        name = made.start(queue)
        assert made.workers[name].wait(20) != 0
        return made.log(name)


@pytest.mark.parametrize(
    ("url", "ok"),
    [
        ("redis://127.0.0.1:6379/0", True),
        ("redis://localhost/0", True),
        ("redis://[::1]:6379/0", True),
        ("unix:///run/redis.sock", True),
        ("redis://cache.internal:6379/0", False),
        ("redis://10.0.0.7:6379/0", False),
        ("redis://:secret@cache.internal:6379/0", True),
        ("rediss://cache.internal:6379/0", True),
    ],
)
def test_r45_a_remote_redis_needs_a_password_or_tls(url: str, ok: bool) -> None:
    if ok:
        check_redis_url("CELERIAC_REDIS_URL", url, Settings())
        return
    with pytest.raises(SettingsError, match="rediss://"):
        check_redis_url("CELERIAC_REDIS_URL", url, Settings())
    check_redis_url("CELERIAC_REDIS_URL", url, Settings(allow_insecure_redis=True))


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("task_serializer", "pickle", "json"),
        ("accept_content", ["json", "pickle"], "json"),
        ("result_serializer", "yaml", "json"),
        ("task_acks_on_timeout", False, "leave it on"),
        ("task_soft_time_limit", 1000, "below the hard limit"),
    ],
)
def test_a_configuration_that_breaks_a_promise_is_refused(
    name: str, value: object, cure: str
) -> None:
    app = make_app(Settings(), Agents())
    _check_config(app)
    app.conf.update({name: value})

    with pytest.raises(SettingsError, match=cure):
        _check_config(app)


def test_an_eviction_policy_is_refused_at_start(tmp_path: Path) -> None:
    data = tmp_path / "redis"
    data.mkdir()
    with valkey(data, **{"maxmemory-policy": "allkeys-lru"}) as server:
        said = refused_with(url_of(server), tmp_path, "steps")

    assert "noeviction" in said
    assert "SettingsError" in said


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_r24_a_tools_worker_without_time_limits_is_refused(pool: str) -> None:
    with pytest.raises(SettingsError, match="CELERIAC_ALLOW_UNLIMITED_TOOLS"):
        _check_pool(Settings(), "tools", pool)
    _check_pool(Settings(allow_unlimited_tools=True), "tools", pool)
    _check_pool(Settings(), "steps", pool)


def test_a_users_celery_settings_are_read_and_checked(tmp_path: Path) -> None:
    data = tmp_path / "redis"
    data.mkdir()
    with valkey(data) as server:
        said = refused_with(
            url_of(server),
            tmp_path,
            "steps",
            "task_serializer = 'pickle'",
            CELERIAC_CELERY_CONFIG="shop_config",
        )

    assert "only json" in said
