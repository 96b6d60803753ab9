"""Where hints and results go: verified, with the password, and to a backend that can be used."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import ssl
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery
from celery.result import AsyncResult

from runner import Agent, InvalidInput, SettingsError, StopReason
from runner.agents import Agents
from runner.models import OnFinish
from runner.settings import Settings
from runner.store import RunStore
from runner.testing import ScriptedModel, calls
from support.command import Invoke
from support.fleet import raw_client, url_of, valkey
from support.loops import RUN, Loops, drive, open_loops
from tasks import Client
from tasks.config import publishing_config
from tasks.deliver import close_backend, deliver
from worker.app import make_app
from worker.checks import _check_config, _check_promises


def check(app: Celery, settings: Settings) -> None:
    """What a worker looks at in its own configuration before it starts."""
    _check_promises(app, settings)
    _check_config(app)


# --- TLS ---------------------------------------------------------------------------------------

TLS = [
    ("rediss://:pw@cache.internal:6379/0", "?ssl_cert_reqs=required", ssl.CERT_REQUIRED),
    ("rediss://cache.internal/3?ssl_cert_reqs=none", "", ssl.CERT_NONE),
    ("rediss://cache.internal/3?ssl_cert_reqs=required", "", ssl.CERT_REQUIRED),
]


@pytest.fixture
def app_for() -> Iterator[Callable[..., Celery]]:
    """Makes apps that publish with these settings; none of them connects to anything."""
    made: list[Celery] = []

    def make(**options: Any) -> Celery:
        made.append(Celery("publisher", set_as_current=False))
        made[-1].conf.update(publishing_config(Settings(**options)))
        return made[-1]

    yield make
    for app in made:
        app.close()


@pytest.mark.parametrize(("url", "more", "expected"), TLS)
def test_a_broker_with_tls_is_verified_unless_its_url_says_otherwise(
    app_for: Callable[..., Celery], url: str, more: str, expected: ssl.VerifyMode
) -> None:
    app = app_for(broker_url=url)

    assert app.conf.broker_url == url + more
    assert app.connection_for_write().ssl["ssl_cert_reqs"] == expected


@pytest.mark.parametrize(("url", "more", "expected"), TLS)
def test_a_result_backend_with_tls_is_verified_unless_its_url_says_otherwise(
    app_for: Callable[..., Celery], url: str, more: str, expected: ssl.VerifyMode
) -> None:
    app = app_for(result_backend=url)

    assert app.conf.result_backend == url + more
    assert app.backend.connparams["ssl_cert_reqs"] == expected


def test_an_option_that_is_there_keeps_its_place_beside_the_check() -> None:
    url = "rediss://cache.internal/0?ssl_ca_certs=/ca.pem"
    config = publishing_config(Settings(broker_url=url, result_backend=url))

    assert config["broker_url"] == config["result_backend"] == f"{url}&ssl_cert_reqs=required"


def test_a_url_without_tls_is_left_as_it_is() -> None:
    url = "redis://:pw@cache.internal:6379/0"
    config = publishing_config(Settings(broker_url=url, result_backend=url))

    assert config["broker_url"] == config["result_backend"] == url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:6379/2?socket_timeout=3", "redis://h:6379/2"),
        ("redis://h?db=2&socket_connect_timeout=1&client_name=x", "redis://h/2"),
        ("redis://:p%40w@h/1?health_check_interval=9", "redis://:p%40w@h/1"),
        ("redis://h/1?password=p@w&protocol=3", "redis://:p%40w@h/1"),
        (
            "rediss://h/1?socket_timeout=3&ssl_ca_certs=/ca.pem",
            "rediss://h/1?ssl_ca_certs=%2Fca.pem&ssl_cert_reqs=required",
        ),
    ],
)
def test_what_only_redis_py_reads_in_a_url_keeps_neither_hints_nor_results_away(
    app_for: Callable[..., Celery], url: str, expected: str
) -> None:
    app = app_for(redis_url=url, result_backend=url)

    assert app.conf.broker_url == app.conf.result_backend == expected
    assert app.connection_for_write().hostname == app.backend.connparams["host"] == "h"


def test_a_url_with_options_of_redis_pys_submits_and_reads(redis_url: str) -> None:
    url = f"{redis_url}?socket_timeout=3&health_check_interval=2"
    with Client(settings=Settings(redis_url=url, result_backend=url)) as client:
        run = client.submit("go", agent="helper")

        assert client.store.redis.llen("celeriac.steps") == 1
        assert AsyncResult(run.id, app=client._app).state == "STARTED"


def test_a_worker_starts_on_a_broker_and_a_backend_with_tls() -> None:
    settings = Settings(redis_url=TLS[0][0], result_backend=TLS[0][0])
    app = make_app(settings, Agents())

    check(app, settings)

    assert app.connection_for_read().ssl["ssl_cert_reqs"] == ssl.CERT_REQUIRED
    app.close()


def test_a_client_writes_to_a_backend_with_tls_too() -> None:
    url = TLS[0][0]

    with Client(settings=Settings(result_backend=url)) as client:
        assert client._app.backend.connparams["ssl_cert_reqs"] == ssl.CERT_REQUIRED


# --- a socket with a password ------------------------------------------------------------------


@pytest.mark.parametrize("form", ["unix://:{}@{}?db=1", "unix://{1}?db=1&password={0}"])
@pytest.mark.parametrize("password", ["pw", "p@w/ö%"])
def test_a_socket_with_a_password_takes_hints(tmp_path: Path, form: str, password: str) -> None:
    # A socket's path may have about a hundred characters, which a test's folder may exceed.
    with (
        tempfile.TemporaryDirectory() as short,
        valkey(tmp_path, unixsocket=f"{short}/redis.sock") as server,
    ):
        admin = raw_client(url_of(server))
        admin.config_set("requirepass", password)
        url = form.format(quote(password, safe=""), f"{short}/redis.sock")
        with Client(settings=Settings(redis_url=url)) as client:
            client.store.check()
            client._app.send_task("shop.any", queue="shop", retry=False)
            (message,) = client.store.redis.lrange("shop", 0, -1)  # in the database of the run
        admin.config_set("requirepass", "")
        admin.close()

    assert json.loads(str(message))["headers"]["task"] == "shop.any"


def test_a_socket_without_a_password_has_none() -> None:
    url = publishing_config(Settings(redis_url="unix:///run/redis.sock"))["broker_url"]

    assert url == "redis+socket:///run/redis.sock?virtual_host=0"


# --- result backends ---------------------------------------------------------------------------

MEMORY = "cache+memory://"


@pytest.fixture
def promised(redis_url: str) -> Iterator[Loops]:
    """A finished run, whose result was promised to a backend by whoever submitted it."""
    store = RunStore(Settings(redis_url=redis_url, result_backend=MEMORY))
    for loops in open_loops(store):
        agent = Agent(name="a", model=ScriptedModel(["done"]))
        store.create_run(
            run_id=RUN,
            agent="a",
            messages=[{"role": "user", "content": "go"}],
            limits=agent.limits,
            on_finish=OnFinish(task="shop.open_ticket", queue="shop"),
            promised=True,
        )
        drive(loops.open(agent))
        assert loops.result.stop_reason is StopReason.COMPLETED
        yield loops
    store.close()


@pytest.fixture
def app_of_worker() -> Iterator[Callable[[Settings], Celery]]:
    made: list[Celery] = []

    def make(settings: Settings) -> Celery:
        made.append(make_app(settings, Agents()))
        return made[-1]

    yield make
    for app in made:
        app.close()


def test_a_worker_without_the_backend_leaves_what_was_promised_to_one_that_has_it(
    promised: Loops, app_of_worker: Callable[[Settings], Celery]
) -> None:
    settings = promised.store.settings
    bare = dataclasses.replace(settings, result_backend="")
    store = RunStore(bare)

    deliver(app_of_worker(bare), store, RUN)

    assert promised.record.promised
    assert store.redis.llen("shop") == 0
    assert store.redis.zscore("celeriac:due", RUN) is not None
    store.close()

    app = app_of_worker(settings)
    deliver(app, promised.store, RUN)

    assert not promised.record.promised
    assert promised.store.redis.llen("shop") == 1
    assert AsyncResult(RUN, app=app).state == "SUCCESS"
    assert AsyncResult(RUN, app=app).result["answer"] == "done"


@pytest.mark.parametrize("url", ["", MEMORY, "rpc://", "file:///tmp"])
def test_a_backend_of_any_kind_can_be_closed(
    app_of_worker: Callable[[Settings], Celery], url: str
) -> None:
    close_backend(app_of_worker(Settings(result_backend=url)))


def test_a_client_with_a_backend_of_another_kind_closes(redis_url: str) -> None:
    with Client(settings=Settings(redis_url=redis_url, result_backend=MEMORY)) as client:
        run = client.submit("go", agent="helper")
        assert AsyncResult(run.id, app=client._app).state == "STARTED"


UNUSABLE = ["nonsense://:planted@elsewhere", "db+nonsense://planted", "redis://h:port/planted"]


@pytest.mark.parametrize("url", UNUSABLE)
def test_a_backend_that_cannot_be_used_is_refused_in_one_line(
    app_of_worker: Callable[[Settings], Celery], url: str
) -> None:
    app = app_of_worker(Settings(result_backend=url))

    with pytest.raises(SettingsError, match="CELERIAC_RESULT_BACKEND can't be used") as refused:
        _check_config(app)

    assert "planted" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("url", UNUSABLE)
def test_a_client_with_such_a_backend_is_refused_before_it_is_made(
    redis_url: str, url: str
) -> None:
    with pytest.raises(SettingsError, match="CELERIAC_RESULT_BACKEND can't be used") as refused:
        Client(settings=Settings(redis_url=redis_url, result_backend=url))

    assert "planted" not in str(refused.value)


def test_a_client_closes_whose_backend_has_gone_away(redis_url: str) -> None:
    gone = "redis://127.0.0.1:1/0"
    with Client(settings=Settings(redis_url=redis_url, result_backend=gone)) as client:
        client.list()


def test_a_worker_with_such_a_backend_does_not_start(invoke: Invoke) -> None:
    environ = {"CELERIAC_AGENTS": "support.agents", "CELERIAC_RESULT_BACKEND": UNUSABLE[0]}

    ran = invoke("worker", "--queue", "steps", **environ)

    ran.refused(2, "CELERIAC_RESULT_BACKEND can't be used")


# --- what a configuration may not change -------------------------------------------------------


@pytest.fixture
def refusal_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """What a worker says whose operator adds the settings of this code."""
    monkeypatch.syspath_prepend(tmp_path)
    module = f"added_{uuid.uuid4().hex}"

    def start(code: str) -> str:
        (tmp_path / f"{module}.py").write_text(code)
        settings = Settings(celery_config=module)
        app = make_app(settings, Agents())
        with contextlib.closing(app), pytest.raises(SettingsError) as refused:
            check(app, settings)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    yield start
    sys.modules.pop(module, None)


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        ("task_soft_time_limit = 1", "@tool(timeout=)"),
        ("task_soft_time_limit = 100_000", "@tool(timeout=)"),
        ("task_soft_time_limit = '5'", "@tool(timeout=)"),
        ("task_annotations = {'celeriac.call_tool': {'soft_time_limit': 1}}", "@tool(timeout=)"),
        ("accept_content = 5", "['json']"),
        ("accept_content = 'json'", "['json']"),
        ("accept_content = None", "['json']"),
        ("result_accept_content = 5", "['json']"),
        ("task_default_priority = 6", "task_default_priority was changed"),
        ("task_queue_max_priority = 10", "task_queue_max_priority was changed"),
        ("task_default_rate_limit = '10/m'", "task_default_rate_limit was changed"),
        ("CELERY_DEFAULT_RATE_LIMIT = '10/m'", "task_default_rate_limit was changed"),
    ],
)
def test_a_setting_that_hides_hints_or_interrupts_tools_is_refused(
    refusal_of: Callable[[str], str], code: str, cure: str
) -> None:
    assert cure in refusal_of(code)


@pytest.mark.parametrize(
    "code",
    [
        "task_annotations = {'*': {'rate_limit': '10/m'}}",
        "task_annotations = {'celeriac.step': {'rate_limit': '10/m'}}",
        "task_annotations = {'celeriac.call_tool': {'priority': 6}}",
    ],
)
def test_annotations_that_hide_hints_are_refused(
    refusal_of: Callable[[str], str], code: str
) -> None:
    assert "task_annotations" in refusal_of(code)


# --- replies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 1])
def test_a_reply_has_the_size_of_a_goal_at_most(redis_url: str, more: int) -> None:
    settings = Settings(redis_url=redis_url, max_goal_chars=1_000)
    model = ScriptedModel([calls(("ask_user", {"question": "which?"}))])
    agent = Agent(name="a", model=model, clarify=True)
    with Client(settings=settings, agents=Agents([agent])) as client:
        run = client.submit("go", agent="a")
        for loops in open_loops(client.store):
            loops.open(agent).advance(run.id, 0)

        if not more:
            run.reply("x" * 1_000)
            assert run.questions() == {}
            return
        with pytest.raises(InvalidInput, match="1001 characters, at most 1000"):
            run.reply("x" * 1_001)
        assert len(run.questions()) == 1


def test_a_reply_to_something_that_is_no_id_is_refused(client: Client) -> None:
    run = client.submit("go", agent="helper")

    with pytest.raises(InvalidInput, match="id of a question"):
        run.reply("yes", call=["0.0"])  # type: ignore[arg-type]
