"""`compose.yaml` against the command line and the settings. No container engine is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.keeper import KILL_GRACE
from runner.settings import Settings
from worker import cli
from worker.checks import check_redis_url

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "compose.yaml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BUILT = [name for name, service in SERVICES.items() if "build" in service]
WORKERS = [name for name in BUILT if SERVICES[name]["command"][0] == "celeriac"]

VARIABLE = re.compile(r"\$\{(\w+)(?::([?-])([^}]*))?\}")

VALUES = {
    "REDIS_PASSWORD": "s3cret",
    "OPENAI_API_KEY": "sk-x",
    "FLOWER_USER": "ops",
    "FLOWER_PASSWORD": "pa55",
}
"""The variables that the head of the file asks for."""


def fill(text: str) -> str:
    """What compose makes of `${NAME:?message}` and `${NAME:-default}`."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if name in VALUES:
            return VALUES[name]
        assert kind == "-", f"{name} must be set, and nobody is told"
        return str(rest)

    filled = VARIABLE.sub(value, text)
    assert "${" not in filled, text
    return filled


def environment(name: str) -> dict[str, str]:
    given = SERVICES[name].get("environment", {})
    return {key: fill(str(value)) for key, value in given.items()}


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, text
    return float(match[1])


def test_there_are_the_parts_of_a_whole() -> None:
    assert set(SERVICES) == {"redis", "steps", "tools", "flower"}
    assert WORKERS == ["steps", "tools"]


# --- workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKERS)
def test_a_workers_command_is_one_that_the_command_line_takes(name: str) -> None:
    command, *arguments = SERVICES[name]["command"]
    options = cli.make_parser().parse_args(arguments)
    assert command == "celeriac"
    assert options.command is cli.worker
    assert options.queue == name


@pytest.mark.parametrize("name", SERVICES)
def test_every_variable_of_ours_is_a_setting_with_a_value_that_it_takes(name: str) -> None:
    given = environment(name)
    ours = {key for key in given if key.startswith("CELERIAC_")}
    assert ours <= {f"CELERIAC_{field.upper()}" for field in Settings.__dataclass_fields__}
    settings = Settings.from_env(given)
    assert bool(ours) is (name in WORKERS)
    if name in WORKERS:
        assert settings.redis_url == "redis://:s3cret@redis:6379/0"
        assert settings.agents == ("examples.orders",)


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_accepts_its_redis(name: str) -> None:
    settings = Settings.from_env(environment(name))
    assert not settings.allow_insecure_redis
    check_redis_url("CELERIAC_REDIS_URL", settings.redis_url, settings)


def test_only_the_steps_worker_has_the_models_key() -> None:
    assert [name for name in SERVICES if "OPENAI_API_KEY" in environment(name)] == ["steps"]


def test_there_may_be_several_tools_workers() -> None:
    assert not {"container_name", "hostname", "ports"} & set(SERVICES["tools"])


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_may_finish_before_it_is_killed(name: str) -> None:
    settings = Settings.from_env(environment(name))
    default_tool_timeout = 60 if name == "tools" else 0
    least = max(settings.drain + 5, default_tool_timeout + KILL_GRACE)
    assert seconds(SERVICES[name]["stop_grace_period"]) >= least


@pytest.mark.parametrize("name", SERVICES)
def test_every_part_comes_back_after_a_crash(name: str) -> None:
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert seconds(SERVICES[name]["stop_grace_period"]) >= 10
    if name != "redis":
        assert SERVICES[name]["depends_on"] == {"redis": {"condition": "service_healthy"}}


# --- what is reachable -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_open_on_loopback_alone(name: str) -> None:
    assert "network_mode" not in SERVICES[name]
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", fill(port)), port


def test_no_secret_stands_in_the_file_and_each_one_must_be_set() -> None:
    asked = {name: kind for name, kind, _ in VARIABLE.findall(TEXT)}
    assert {name for name, kind in asked.items() if kind == "?"} == set(VALUES)
    assert not re.search(r"(?im)^ *\w*(password|key|secret|auth): *[^$\s]", TEXT)


def test_the_head_of_the_file_names_every_variable_that_must_be_set() -> None:
    head = TEXT.partition("\nx-build")[0]
    assert set(re.findall(r"(\w+)=\.\.\.", head)) == set(VALUES)


def test_redis_keeps_runs_and_wants_a_password() -> None:
    redis = SERVICES["redis"]
    server, *flags = redis["command"]
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    assert server == "redis-server"
    assert {name: fill(value) for name, value in options.items()} == {
        "--appendonly": "yes",
        "--maxmemory-policy": "noeviction",
        "--requirepass": "s3cret",
    }
    assert all(isinstance(value, str) for value in options.values())
    assert "PONG" in redis["healthcheck"]["test"][-1]
    assert environment("redis")["REDISCLI_AUTH"] == "s3cret"
    [volume] = redis["volumes"]
    assert volume.partition(":")[2] == "/data"
    assert volume.partition(":")[0] in COMPOSE["volumes"]


def test_flower_is_behind_a_login() -> None:
    command = [fill(part) for part in SERVICES["flower"]["command"]]
    assert command[:2] == ["celery", "flower"]
    assert "--basic_auth=ops:pa55" in command
    # Never on a command line, which every process of the host may read.
    assert environment("flower") == {"CELERY_BROKER_URL": "redis://:s3cret@redis:6379/0"}
    assert "FLOWER_UNAUTHENTICATED_API" not in TEXT


# --- images ------------------------------------------------------------------------------------


def test_no_image_is_a_moving_target() -> None:
    images = [service["image"] for service in SERVICES.values() if "image" in service]
    images += re.findall(r"^FROM (\S+)", dockerfile(), re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", dockerfile(), re.MULTILINE))
    assert stages == {"worker", "flower"}
    for image in set(images) - stages:
        assert re.fullmatch(r"[\w./-]+:\d[\w.-]*", image), image
    assert ":latest" not in TEXT


def dockerfile() -> str:
    [text] = {SERVICES[name]["build"]["dockerfile_inline"] for name in BUILT}
    assert isinstance(text, str)
    return text


def test_every_stage_that_is_built_is_there_and_runs_as_nobody_special() -> None:
    stages = re.split(r"(?m)^FROM \S+ AS ", dockerfile())[1:]
    assert {SERVICES[name]["build"]["target"] for name in BUILT} == {
        stage.split("\n", 1)[0] for stage in stages
    }
    for stage in stages:
        assert re.findall(r"(?m)^USER (\S+)", stage)[-1] == "celeriac"
    assert {SERVICES[name]["build"]["target"] for name in WORKERS} == {"worker"}
    assert SERVICES["flower"]["build"]["target"] == "flower"


def test_what_the_image_copies_is_all_that_the_package_is_built_from(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    for line in re.findall(r"(?m)^COPY (.*)$", dockerfile()):
        *sources, target = line.split()
        for source in sources:
            path = ROOT / source
            assert path.exists(), source
            if path.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, folder / target, ignore=ignore)
            else:
                shutil.copy(path, folder / target)
    installed = [line.split()[-1] for line in re.findall(r"(?m)^RUN pip (.*)$", dockerfile())]
    assert installed == [".", "'/src[flower]'"]
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "celeriac.py" in archive.namelist()
