"""What a worker refuses to start on, each with the cure."""

from __future__ import annotations

import dataclasses
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery

from runner import SettingsError
from runner.agents import Agents
from runner.settings import Settings
from support.fleet import fleet, url_of, valkey
from worker.app import make_app
from worker.checks import _check_config, _check_pool, _check_promises, check_redis_url


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
        ("task_soft_time_limit", 1000, "leave it out"),
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


ELSEWHERE = "redis://:planted@elsewhere:6379/0"
OURS = Settings(redis_url="redis://127.0.0.1:6379/3")

AppOf = Callable[[str], Celery]


@pytest.fixture
def app_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppOf]:
    """Makes the app of a worker whose operator adds the settings of this code."""
    for name in [each for each in os.environ if each.startswith("CELERY_")]:
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(tmp_path)
    module = f"added_{uuid.uuid4().hex}"

    def make(code: str) -> Celery:
        (tmp_path / f"{module}.py").write_text(code)
        return make_app(dataclasses.replace(OURS, celery_config=module), Agents())

    yield make
    sys.modules.pop(module, None)


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (f"broker_url = {ELSEWHERE!r}", "use CELERIAC_BROKER_URL"),
        (f"BROKER_URL = broker_url = {ELSEWHERE!r}", "use CELERIAC_BROKER_URL"),
        (f"broker_read_url = {ELSEWHERE!r}", "use CELERIAC_BROKER_URL"),
        (f"broker_write_url = {ELSEWHERE!r}", "use CELERIAC_BROKER_URL"),
        ("broker_transport = 'memory'", "use CELERIAC_BROKER_URL"),
        (f"result_backend = {ELSEWHERE!r}", "use CELERIAC_RESULT_BACKEND"),
        ("task_acks_late = True", "the run's record"),
        ("task_reject_on_worker_lost = True", "the run's record"),
        ("task_ignore_result = False", "Celery's own result"),
        ("task_store_errors_even_if_ignored = True", "a refusal"),
        ("task_always_eager = True", "inside the one before"),
        ("task_default_queue = 'planted'", "names are fixed"),
        ("worker_prefetch_multiplier = 4", "can't be seen"),
        ("worker_prefetch_multiplier = 0", "can't be seen"),
        ("worker_disable_prefetch = False", "can't be seen"),
        ("broker_transport_options = {'ack_emulation': True}", "ack_emulation must stay False"),
        ("broker_transport_options = {'ack_emulation': None}", "ack_emulation must stay False"),
        ("broker_transport_options = None", "ack_emulation must stay False"),
        ("broker_transport_options = {'global_keyprefix': 'planted'}", "hides the queues"),
        ("task_annotations = {'*': {'acks_late': True}}", "task_annotations"),
        ("task_annotations = {'celeriac.start': {'ignore_result': False}}", "task_annotations"),
    ],
)
def test_a_users_setting_that_breaks_a_promise_is_refused_by_name(
    app_of: AppOf, code: str, cure: str
) -> None:
    app = app_of(code)

    with pytest.raises(SettingsError) as refused:
        _check_promises(app, OURS)

    said = str(refused.value)
    assert cure in said
    assert code.split(" ")[0].lower() in said
    assert "planted" not in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("variable", "name", "cure"),
    [
        ("CELERY_BROKER_URL", "broker_url", "CELERIAC_BROKER_URL"),
        ("CELERY_BROKER_READ_URL", "broker_read_url", "CELERIAC_BROKER_URL"),
        ("CELERY_BROKER_WRITE_URL", "broker_write_url", "CELERIAC_BROKER_URL"),
        ("CELERY_RESULT_BACKEND", "result_backend", "CELERIAC_RESULT_BACKEND"),
    ],
)
def test_celerys_own_environment_does_not_lead_a_worker_elsewhere(
    monkeypatch: pytest.MonkeyPatch, app_of: AppOf, variable: str, name: str, cure: str
) -> None:
    app = app_of("")
    monkeypatch.setenv(variable, ELSEWHERE)

    with pytest.raises(SettingsError, match=f"{name} was changed.*{variable}.*{cure}") as refused:
        _check_promises(app, OURS)

    assert "planted" not in str(refused.value)


def test_a_user_may_add_what_breaks_no_promise(app_of: AppOf) -> None:
    app = app_of(
        "import os\n"
        f"broker_url = {OURS.queue_url!r}\n"
        "result_backend = None\n"
        "worker_max_tasks_per_child = 50\n"
        "broker_transport_options = {'visibility_timeout': 7, 'socket_timeout': 4}\n"
    )

    _check_promises(app, OURS)
    _check_config(app)
    options = app.conf.broker_transport_options
    assert (options["visibility_timeout"], options["socket_timeout"]) == (7, 4)
    assert (options["ack_emulation"], options["health_check_interval"]) == (False, 5)
    assert app.conf.worker_max_tasks_per_child == 50


@pytest.mark.parametrize("code", ["import no_such_module", "def", "raise RuntimeError('why')"])
def test_a_users_settings_that_cannot_be_imported_are_one_line(app_of: AppOf, code: str) -> None:
    with pytest.raises(SettingsError, match="CELERIAC_CELERY_CONFIG: can't import"):
        app_of(code)


def test_a_result_backend_on_another_host_needs_a_password_too() -> None:
    with pytest.raises(SettingsError, match="CELERIAC_RESULT_BACKEND"):
        check_redis_url("CELERIAC_RESULT_BACKEND", "redis://cache.internal/1", Settings())
    for other in ("", "rpc://", "db+postgresql://db.internal/celery"):
        check_redis_url("CELERIAC_RESULT_BACKEND", other, Settings())


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


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("task_serializer = 'pickle'", "only json"),
        ("task_acks_late = True", "task_acks_late was changed by CELERIAC_CELERY_CONFIG"),
    ],
)
def test_a_users_celery_settings_are_read_and_checked(
    tmp_path: Path, code: str, words: str
) -> None:
    data = tmp_path / "redis"
    data.mkdir()
    with valkey(data) as server:
        said = refused_with(
            url_of(server), tmp_path, "steps", code, CELERIAC_CELERY_CONFIG="shop_config"
        )

    assert words in said
