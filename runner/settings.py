"""What an operator may set: read from `CELERIAC_*` once, checked before anything is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import redis

from runner.errors import SettingsError
from runner.models import StopReason

STEPS_QUEUE = "celeriac.steps"
TOOLS_QUEUE = "celeriac.tools"

LONGEST = 10.0**9
"""Seconds, about thirty years: whatever is longer is a slip."""

REDIS_SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings with their defaults. Durations are in seconds, sizes in characters.

    `redis_url` holds the runs' state; `broker_url` (the same Redis unless said otherwise) carries
    the hints; `result_backend` (none unless given) is where Celery's `AsyncResult(run_id)` looks.
    `allow_insecure_redis` and `allow_unlimited_tools` lift two checks at a worker's start;
    `model_profile` names what kind of server the default one is, where its address doesn't tell.
    `redact` names fields whose values no trace shows; `celery_config` is a module with Celery
    settings to add to a worker's. `lease` is how long a silent attempt is presumed alive,
    `renew_every` its heartbeat.
    `drain` is how long a stopping worker lets what runs finish before others take it over.
    `tools_concurrency` is how many tool calls run at once in the whole fleet, and the requests and
    tokens a minute are those of one model endpoint, shared by all workers; 0 is no limit.
    `hint_grace` is how long a published hint may take before recovery asks where it is.
    `max_result_chars` is how much of a result that was cut for the model is kept for the user.
    `metrics_address` is a `host:port` at which a worker shows its metrics (none: it has none),
    `log_format` is `text` or `json`, and with `trace_content` spans hold what was said.
    `retention_by_stop_reason` holds texts such as `ERROR=604800`, for ends that are to be read for
    longer or shorter than `retention`.
    """

    # A URL holds a password, which no repr may show.
    redis_url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    broker_url: str = field(default="", repr=False)
    result_backend: str = field(default="", repr=False)
    agents: tuple[str, ...] = ()
    model: str = "gpt-4o-mini"
    model_profile: str = ""
    model_timeout: float = 120.0
    lease: float = 15.0
    renew_every: float = 5.0
    hint_grace: float = 2.0
    recover_every: float = 0.5
    drain: float = 10.0
    retention: float = 7 * 24 * 3600.0
    max_events: int = 10_000
    max_queued: int = 10_000
    max_goal_chars: int = 1_000_000
    max_result_chars: int = 5_000_000
    celery_config: str = ""
    redact: tuple[str, ...] = ()
    tools_concurrency: int = 0
    model_requests_per_minute: int = 0
    model_tokens_per_minute: int = 0
    metrics_address: str = ""
    log_format: str = "text"
    trace_content: bool = False
    allow_insecure_redis: bool = False
    allow_unlimited_tools: bool = False
    retention_by_stop_reason: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("redis_url", "broker_url"):
            url = getattr(self, name)
            if url and not _is_redis_url(url):
                raise SettingsError(
                    f"{_variable(name)} must be a redis://, rediss:// or unix:// URL; "
                    "for a local server: redis://127.0.0.1:6379/0"
                )
        positive = ("model_timeout", "lease", "renew_every", "hint_grace", "recover_every")
        for name in (*positive, "retention", "max_events", "max_goal_chars"):
            if not 0 < getattr(self, name) < LONGEST:
                raise SettingsError(f"{_variable(name)} must be greater than 0, and finite")
        for name in (
            "tools_concurrency",
            "model_requests_per_minute",
            "model_tokens_per_minute",
            "max_queued",
        ):
            if not 0 <= getattr(self, name) < LONGEST:
                raise SettingsError(f"{_variable(name)} must be 0 (no limit) or more, and finite")
        for name in ("drain", "max_result_chars"):
            if not 0 <= getattr(self, name) < LONGEST:
                raise SettingsError(f"{_variable(name)} must be 0 or more, and finite")
        self._check_watching()
        self._retentions()  # read once, to refuse what can't be
        if self.renew_every >= self.lease:
            raise SettingsError(
                "CELERIAC_RENEW_EVERY must be smaller than CELERIAC_LEASE, or every attempt would "
                "lose its lease; a third of it is usual"
            )

    def _check_watching(self) -> None:
        if self.log_format not in ("text", "json"):
            raise SettingsError("CELERIAC_LOG_FORMAT must be text or json")
        host, _, port = self.metrics_address.rpartition(":")
        if self.metrics_address and not (host and port.isdigit()):
            raise SettingsError(
                "CELERIAC_METRICS_ADDRESS must be host:port, such as 127.0.0.1:9101"
            )

    def retention_of(self, stop_reason: StopReason) -> float:
        """How long a run that has ended so can be read, in seconds."""
        return self._retentions().get(stop_reason, self.retention)

    def _retentions(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for text in self.retention_by_stop_reason:
            name, _, seconds = text.partition("=")
            try:
                value = float(seconds)
            except ValueError:
                value = 0.0
            if name not in set(StopReason) or not 0 < value < LONGEST:
                raise SettingsError(
                    "CELERIAC_RETENTION_BY_STOP_REASON takes stop reasons with seconds greater "
                    "than 0, with commas, such as COMPLETED=3600,ERROR=604800"
                )
            found[name] = value
        return found

    @property
    def queue_url(self) -> str:
        """Where Celery's queues are."""
        return self.broker_url or self.redis_url

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read every setting from its variable; raises `SettingsError` naming the variable."""
        environ = os.environ if environ is None else environ
        given: dict[str, object] = {}
        for name, default in _defaults().items():
            text = environ.get(_variable(name), "").strip()
            if text:
                given[name] = _parse(name, text, default)
        return cls(**given)  # type: ignore[arg-type]


def _is_redis_url(url: str) -> bool:
    """Whether redis-py can make a client of it; nothing is connected."""
    try:
        redis.ConnectionPool.from_url(url)
    except (ValueError, TypeError):
        return False
    return urlsplit(url).scheme in REDIS_SCHEMES


def _defaults() -> dict[str, object]:
    return {name: field.default for name, field in Settings.__dataclass_fields__.items()}


def _variable(name: str) -> str:
    return f"CELERIAC_{name.upper()}"


def _parse(name: str, text: str, default: object) -> object:
    try:
        match default:
            case tuple():
                return tuple(part.strip() for part in text.split(",") if part.strip())
            case bool():
                return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
            case int():
                return int(text)
            case float():
                return float(text)
    except KeyError:
        raise SettingsError(f"{_variable(name)} must be 1 or 0") from None
    except ValueError:
        raise SettingsError(f"{_variable(name)} must be a number") from None
    return text
