"""Settings are checked before anything is used, and the error names the variable."""

from __future__ import annotations

import pytest

from runner.errors import SettingsError
from runner.settings import Settings


def test_without_variables_the_defaults_hold() -> None:
    assert Settings.from_env({}) == Settings()
    assert Settings().queue_url == Settings().redis_url


def test_every_setting_is_read_from_its_variable() -> None:
    given = {
        "CELERIAC_REDIS_URL": "rediss://h:1/2",
        "CELERIAC_BROKER_URL": "unix:///run/redis.sock",
        "CELERIAC_AGENTS": " shop.agents, more ,",
        "CELERIAC_MODEL": "m",
        "CELERIAC_LEASE": "30",
        "CELERIAC_RENEW_EVERY": "2.5",
        "CELERIAC_MAX_EVENTS": "7",
    }
    settings = Settings.from_env(given)
    assert (settings.redis_url, settings.queue_url) == ("rediss://h:1/2", "unix:///run/redis.sock")
    assert settings.agents == ("shop.agents", "more")
    assert (settings.model, settings.lease, settings.renew_every) == ("m", 30.0, 2.5)
    assert settings.max_events == 7


def test_an_empty_variable_is_none() -> None:
    assert Settings.from_env({"CELERIAC_LEASE": "  ", "CELERIAC_REDIS_URL": ""}) == Settings()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CELERIAC_REDIS_URL", "localhost:6379"),
        ("CELERIAC_REDIS_URL", "http://localhost"),
        ("CELERIAC_BROKER_URL", "amqp://localhost"),
        ("CELERIAC_LEASE", "soon"),
        ("CELERIAC_LEASE", "0"),
        ("CELERIAC_LEASE", "nan"),
        ("CELERIAC_HINT_GRACE", "-1"),
        ("CELERIAC_RETENTION", "0"),
        ("CELERIAC_MAX_EVENTS", "1.5"),
        ("CELERIAC_MAX_GOAL_CHARS", "0"),
        ("CELERIAC_RENEW_EVERY", "15"),
        ("CELERIAC_LEASE", "4"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_variable(name: str, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({name: text})
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["CELERIAC_LEASE", "CELERIAC_RETENTION", "CELERIAC_HINT_GRACE"])
def test_a_duration_without_end_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        Settings.from_env({name: "inf"})


def test_an_error_does_not_show_the_password() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({"CELERIAC_REDIS_URL": "http://user:hunter2@host"})
    assert "hunter2" not in str(caught.value)
