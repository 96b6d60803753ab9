"""The command line. What a script relies on: exit codes, one line of error on stderr, `--json`.

| code | meaning |
|---|---|
| 0   | done; for `run` and `submit --wait`: the run ended `COMPLETED` |
| 1   | the run ended otherwise; `ping`: no answer; `check`, `doctor`: a fault; `replay`: differs |
| 2   | bad input or configuration; nothing was changed |
| 3   | Redis can't be reached, or what answers isn't Redis |
| 4   | there is no such run |
| 5   | too late: the run had ended (cancel, send, resume) or the call was decided (approve, deny) |
| 130 | interrupted |
| 141 | whoever read the output went away |

Imports stand inside the commands, so that a light one doesn't wait for Celery.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from runner.agents import Agent, Agents
    from runner.models import FinalResult
    from runner.settings import Settings
    from tasks import Client, Run
    from worker.show import Style

GOAL = "What is in this folder, and what does its README say?"

DONE, ENDED_OTHERWISE, BAD_INPUT, NO_REDIS, NO_RUN, HAD_ENDED = range(6)
INTERRUPTED = 130
BROKEN_PIPE = 141

REASONS = (
    "COMPLETED",
    "MAX_STEPS",
    "TIMEOUT",
    "CANCELLED",
    "ERROR",
    "BUDGET_EXHAUSTED",
    "REPEATED_ERROR",
    "PERMISSION_DENIED",
)
STATUSES = ("queued", "running", "waiting", "finished")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

EXIT_CODES = """\
exit codes:
  0    done; for run and submit --wait: the run ended COMPLETED
  1    the run ended otherwise; ping: no worker answered; check, doctor: a fault; replay: it differs
  2    bad input or configuration; nothing was changed
  3    Redis can't be reached, or what answers isn't Redis
  4    no such run
  5    the run had already ended (cancel, send, resume) or the call was decided (approve, deny)
  130  interrupted
  141  whoever read the output went away

environment:
  CELERIAC_REDIS_URL   where the runs are; redis://127.0.0.1:6379/0 unless set
  CELERIAC_AGENTS      the modules that define agents, e.g. shop.agents,shop.more
  CELERIAC_MODEL       the model of agents that name none
  OPENAI_API_KEY, OPENAI_BASE_URL   the model's endpoint, for the steps worker
"""

NOT_REDIS = "what answers at CELERIAC_REDIS_URL isn't Redis; check host and port"

MAX_READ = 64 * 1024 * 1024
MAX_ERROR = 1_000
EVENT_ID = re.compile(r"\d{1,18}-\d{1,18}|0")


def main(argv: list[str] | None = None) -> int:
    """Run one command; answers the exit code. Only the parser ends by `SystemExit`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that can't show a character is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    options = make_parser().parse_args(argv)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Nor may the interpreter's own flush at its end complain.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("celeriac: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        known = explain(error)
        if known is None:
            raise
        code, message = known
        _print_error(message)
        _print_log(error)
    return code


def explain(error: Exception) -> tuple[int, str] | None:
    """The exit code and the line for an error that can be foreseen; None for a bug."""
    import redis
    from pydantic import ValidationError

    from runner import errors

    match error:
        case errors.RunNotFound():
            return NO_RUN, str(error)
        case errors.RunFinished() | errors.AlreadyDecided():
            return HAD_ENDED, str(error)
        case errors.RedisUnavailable():
            closed = type(error.__cause__) is redis.ConnectionError
            return NO_REDIS, NOT_REDIS if closed and _is_not_redis() else str(error)
        case redis.RedisError():
            return NO_REDIS, f"Redis refused a command; check its version and settings: {error}"
        case errors.CeleriacError():
            # A worker that `run` started ended with a code of this table.
            return getattr(error, "exit_code", BAD_INPUT), str(error)
        case ValidationError():
            fields = ", ".join(".".join(map(str, each["loc"])) for each in error.errors())
            return BAD_INPUT, (
                f"a {error.title} can't be read (see {fields}); was it written by a newer "
                "celeriac? Upgrade this one"
            )
    return None


def _is_not_redis() -> bool:
    """Whether something else answers there: a web server closes on what Redis' client says."""
    url = urlsplit(os.environ.get("CELERIAC_REDIS_URL", ""))
    try:
        with socket.create_connection((url.hostname or "127.0.0.1", url.port or 6379), 2) as probe:
            probe.sendall(b"PING\r\n")
            answer = probe.recv(1)
    except OSError:
        return False
    return url.scheme == "redis" and answer not in (b"", b"+", b"-")


def _print_error(message: str) -> None:
    line = " ".join(message.split())
    print(f"celeriac: error: {line[:MAX_ERROR]}", file=sys.stderr)


def _print_log(error: Exception) -> None:
    log = getattr(error, "log", "")
    if log:
        print(log.rstrip(), file=sys.stderr)


# --- commands ----------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    from worker.demo import run_goal
    from worker.live import is_live

    goal = _read_goal(options.goal)
    result = run_goal(goal, options.agent, say=_say, style=_style(), live=is_live())
    return _code_of(result)


def worker(options: argparse.Namespace) -> int:
    settings = _settings()
    agents = _agents(settings)
    from worker.app import run_worker

    with _warning_at_start(_missing_key(agents or {}) if options.queue == "steps" else None):
        return run_worker(
            options.queue,
            concurrency=options.concurrency,
            pool=options.pool,
            loglevel=options.loglevel,
        )


def web(options: argparse.Namespace) -> int:
    from runner.errors import SettingsError

    settings = _settings()
    with _client(settings, _agents(settings)) as client:
        try:
            from web.app import serve
        except ModuleNotFoundError as error:
            if error.name not in ("fastapi", "uvicorn", "starlette"):
                raise
            raise SettingsError("it needs the extra web: pip install 'celeriac[web]'") from None
        serve(
            client,
            host=options.host,
            port=options.port,
            ready=lambda url: _say(f"{url} (this machine alone; Ctrl-C ends it)"),
        )
    return DONE


def ping(options: argparse.Namespace) -> int:
    with _client(_settings()) as client:
        seconds = client.ping(options.queue, timeout=options.timeout)
    if options.json:
        _say_json({"queue": options.queue, "seconds": seconds})
    if seconds is None:
        _print_error(
            f"no worker of the queue {options.queue} answered within {options.timeout:g} s"
        )
        return ENDED_OTHERWISE
    if not options.json:
        _say(f"{options.queue}: a worker answered in {seconds * 1000:.0f} ms")
    return DONE


def submit(options: argparse.Namespace) -> int:
    from worker.show import describe_result

    settings = _settings()
    goal = _read_goal(options.goal)
    with _client(settings, _agents(settings)) as client:
        run = client.submit(
            goal,
            agent=options.agent,
            idempotency_key=options.idempotency_key,
            after=options.after,
            conversation=options.conversation,
            when_busy=options.when_busy,
        )
        if not options.wait:
            if options.json:
                _say_json({"run_id": run.id})
            else:
                _say(run.id)
            return DONE
        result = _wait(run, announce=not options.json)
    if options.json:
        _say_json(result.model_dump(mode="json"))
    else:
        _say(f"\n{describe_result(result, _style())}")
    return _code_of(result)


def runs(options: argparse.Namespace) -> int:
    from worker.show import describe_runs

    with _client(_settings()) as client:
        found = client.list(options.status, limit=options.limit)
    if options.json:
        _say_json([each.model_dump(mode="json") for each in found])
    else:
        _say(describe_runs(found) if found else "no runs")
    return DONE


def show(options: argparse.Namespace) -> int:
    from worker.show import describe_run

    with _client(_settings()) as client:
        info = client.get(options.run).info()
        result = client.store.read_result(options.run)
    if options.json:
        ended = None if result is None else result.model_dump(mode="json")
        _say_json({"info": info.model_dump(mode="json"), "result": ended})
    else:
        _say(describe_run(info, result, _style()))
    return DONE


def events(options: argparse.Namespace) -> int:
    from runner.errors import InvalidInput
    from worker.live import follow, is_live
    from worker.show import EventView

    after = options.after
    if after is not None and not EVENT_ID.fullmatch(after):
        raise InvalidInput("--after takes the id of an event, such as 1764480000000-0")
    with _client(_settings()) as client:
        run = client.get(options.run)
        if options.json:
            for event in run.events(after):
                _say_json(event.model_dump(mode="json"))
        else:
            view = EventView(run.info().created, _style())
            follow(run.events(after), view, say=_say, live=is_live())
    return DONE


def cancel(options: argparse.Namespace) -> int:
    with _client(_settings()) as client:
        client.get(options.run).cancel(options.reason)
    if options.json:
        _say_json({"run_id": options.run, "cancelled": True})
    else:
        _say(f"cancelled {options.run}")
    return DONE


def reply(options: argparse.Namespace) -> int:
    with _client(_settings()) as client:
        run = client.get(options.run)
        questions = run.questions()
        if options.text is not None:
            run.reply(_read_goal(options.text), call=options.call)
    if options.json:
        _say_json(
            {"run_id": options.run, "questions": questions, "replied": options.text is not None}
        )
    elif options.text is not None:
        _say(f"replied to {options.run}")
    else:
        lines = [f"{call}  {question}" for call, question in questions.items()]
        _say("\n".join(lines) or "no open question")
    return DONE


def approvals(options: argparse.Namespace) -> int:
    from worker.show import describe_approvals

    with _client(_settings()) as client:
        waiting = client.get(options.run).approvals()
    if options.json:
        _say_json([each.model_dump(mode="json") for each in waiting])
    else:
        _say(describe_approvals(waiting) if waiting else "no call waits for an approval")
    return DONE


def approve(options: argparse.Namespace) -> int:
    with _client(_settings()) as client:
        client.get(options.run).approve(options.call, digest=options.digest, by=options.by)
    return _decided(options, approved=True)


def deny(options: argparse.Namespace) -> int:
    with _client(_settings()) as client:
        run = client.get(options.run)
        run.deny(options.call, options.reason, digest=options.digest, by=options.by)
    return _decided(options, approved=False)


def _decided(options: argparse.Namespace, *, approved: bool) -> int:
    if options.json:
        _say_json({"run_id": options.run, "call": options.call, "approved": approved})
    else:
        _say(f"{'approved' if approved else 'denied'} {options.call} of {options.run}")
    return DONE


def send(options: argparse.Namespace) -> int:
    with _client(_settings()) as client:
        client.get(options.run).send(_read_goal(options.text))
    if options.json:
        _say_json({"run_id": options.run, "sent": True})
    else:
        _say(f"sent to {options.run}")
    return DONE


def delete(options: argparse.Namespace) -> int:
    with _client(_settings()) as client:
        deleted = client.delete(options.run, cancel=options.cancel)
    if options.json:
        _say_json({"run_id": options.run, "deleted": deleted})
    else:
        _say(f"deleted {options.run}" if deleted else f"no run {options.run}: nothing to delete")
    return DONE


def prune(options: argparse.Namespace) -> int:
    from runner.errors import InvalidInput

    if options.older_than is None and options.stop_reason is None:
        raise InvalidInput(
            "say which runs: --older-than SECONDS, --stop-reason REASON or both; --older-than 0 is "
            "every run that has ended"
        )
    with _client(_settings()) as client:
        found = client.prune(
            older_than=options.older_than or 0.0,
            stop_reason=options.stop_reason,
            dry_run=options.dry_run,
        )
    if options.json:
        _say_json({"runs": found, "deleted": not options.dry_run})
        return DONE
    for run_id in found:
        _say(run_id)
    print(f"{len(found)} runs {'would be ' * options.dry_run}deleted", file=sys.stderr)
    return DONE


def resume(options: argparse.Namespace) -> int:
    given = {"max_steps": options.max_steps, "timeout": options.timeout}
    changed = {name: value for name, value in given.items() if value is not None}
    with _client(_settings()) as client:
        run = client.get(options.run)
        status = run.status()
        ended = status == "finished"
        if ended:
            run.resume(run.limits().model_copy(update=changed) if changed else None)
    if options.json:
        _say_json({"run_id": options.run, "resumed": ended})
    elif ended:
        _say(f"resumed {options.run}")
    else:
        _say(f"{options.run} hasn't ended, it is {status}; nothing was changed")
    return DONE


def trace(options: argparse.Namespace) -> int:
    from worker.show import build_trace, describe_trace

    with _client(_settings()) as client:
        run = client.get(options.run)
        # The history last: it only grows, so that it holds all that the trace speaks of.
        info, result = run.info(), client.store.read_result(options.run)
        entries = run.trace()
        steps = build_trace(entries, run.messages())
    if options.json:
        ended = None if result is None else result.model_dump(mode="json")
        _say_json({"info": info.model_dump(mode="json"), "steps": steps, "result": ended})
    else:
        _say(describe_trace(info, steps, result, _style()))
    return DONE


def check(options: argparse.Namespace) -> int:
    from runner.invariants import check_run

    with _client(_settings()) as client:
        faults = check_run(client.store, client.get(options.run).id)
    if options.json:
        _say_json({"run_id": options.run, "faults": faults})
    else:
        _say("\n".join(faults) or f"{options.run} breaks no rule")
    return ENDED_OTHERWISE if faults else DONE


def doctor(options: argparse.Namespace) -> int:
    from worker.doctor import Verdict, examine, worst
    from worker.show import describe_finding

    style, findings = _style(), []
    for each in examine(_settings(), patience=options.timeout):
        findings.append(each)
        if not options.json:
            _say(describe_finding(each, style))
    verdict = worst(findings)
    if options.json:
        found = [each.as_dict() for each in findings]
        _say_json({"verdict": str(verdict), "findings": found})
    return {Verdict.AWAY: NO_REDIS, Verdict.BAD: ENDED_OTHERWISE}.get(verdict, DONE)


def metrics(options: argparse.Namespace) -> int:
    import signal

    from runner.agents import Agents
    from runner.store import RunStore
    from worker.metrics import serve_fleet
    from worker.survey import limits_of

    settings = _settings()
    # Blocked before a thread is started, so that none of them but this one is told.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    store = RunStore(settings)
    limits = limits_of(_agents(settings) or Agents())
    end = serve_fleet(options.address, store, limits)
    _say(f"metrics of the fleet at http://{options.address}/metrics")
    try:
        signal.sigwait(ends)
    finally:
        end()
        store.close()
    return DONE


def result(options: argparse.Namespace) -> int:
    from worker.show import printable

    with _client(_settings()) as client:
        text = client.get(options.run).whole_result(options.call)
    if options.json:
        _say_json({"run_id": options.run, "call": options.call, "text": text})
    else:
        # For a file it stays as it is; a terminal is shown no control characters.
        _say(printable(text) if sys.stdout.isatty() else text)
    return DONE


def replay(options: argparse.Namespace) -> int:
    from pathlib import Path

    from runner.recording import read_recording, save_recording
    from runner.replay import replay as replay_recording
    from worker.show import describe_replay

    settings = _settings()
    with _client(settings) as client:
        recording = read_recording(client.store, client.get(options.run).id)
    if options.save is not None:
        save_recording(recording.redacted(frozenset(settings.redact)), Path(options.save))
        _say_json({"saved": options.save}) if options.json else _say(f"saved {options.save}")
        return DONE
    found = replay_recording(recording, _agents_needed(settings)[recording.run.agent])
    if options.json:
        _say_json(found.as_dict(show=options.show))
    else:
        _say(describe_replay(found, show=options.show, style=_style()))
    return DONE if found.same else ENDED_OTHERWISE


def fork(options: argparse.Namespace) -> int:
    settings = _settings()
    with _client(settings, _agents(settings)) as client:
        run = client.fork(options.run, step=options.step, agent=options.agent)
    if options.json:
        _say_json({"run_id": run.id})
    else:
        _say(run.id)
    return DONE


# --- what the commands share -------------------------------------------------------------------


def _settings() -> Settings:
    from runner.settings import Settings

    settings = Settings.from_env()
    from worker.checks import check_redis_url

    # Before anything is connected: a goal would already have gone over the wire.
    check_redis_url("CELERIAC_REDIS_URL", settings.redis_url, settings)
    check_redis_url("CELERIAC_BROKER_URL", settings.queue_url, settings)
    return settings


def _agents(settings: Settings) -> Agents | None:
    """The agents of this environment, to check a name against; None where it names none."""
    if not settings.agents:
        return None
    from runner.agents import load_agents

    # What a user's module prints at its import is no output of ours.
    with contextlib.redirect_stdout(sys.stderr):
        return load_agents(settings.agents)


def _agents_needed(settings: Settings) -> Agents:
    from runner.errors import AgentError

    agents = _agents(settings)
    if agents is None:
        raise AgentError("CELERIAC_AGENTS isn't set; name the modules that define the run's agent")
    return agents


def _client(settings: Settings, agents: Agents | None = None) -> Client:
    from tasks import Client

    return Client(settings=settings, agents=agents)


def _wait(run: Run, *, announce: bool) -> FinalResult:
    """The result, as soon as there is one. Whatever ends the wait before doesn't end the run."""
    from runner.errors import RedisUnavailable

    try:
        if announce:
            _say(run.id)
        return run.result()
    except KeyboardInterrupt:
        print(f"celeriac: the run goes on: celeriac events {run.id}", file=sys.stderr)
        raise
    except RedisUnavailable:
        print(
            f"celeriac: the run goes on when Redis is back: celeriac events {run.id}",
            file=sys.stderr,
        )
        raise


def _missing_key(agents: Mapping[str, Agent]) -> str | None:
    """What to tell whoever starts a steps worker whose model calls can only fail."""
    asking = sorted(
        name
        for name, agent in agents.items()
        if agent.model is None or isinstance(agent.model, str)
    )
    if not asking or os.environ.get("OPENAI_API_KEY", "").strip():
        return None
    return (
        f"OPENAI_API_KEY isn't set, so runs of {', '.join(asking)} will end ERROR: set it, to any "
        "word for a server of your own that wants none (OPENAI_BASE_URL)"
    )


@contextlib.contextmanager
def _warning_at_start(message: str | None) -> Iterator[None]:
    """Print a warning once a worker of this process starts; none where it refuses to."""
    from celery.signals import celeryd_init

    def warn(**_: object) -> None:
        if message is not None:
            print(f"celeriac: warning: {message}", file=sys.stderr, flush=True)

    celeryd_init.connect(warn, weak=False)
    try:
        yield
    finally:
        celeryd_init.disconnect(warn)


def _read_goal(given: str) -> str:
    """The goal; `-` is standard input, for what is too long for a command line."""
    from runner.errors import InvalidInput

    if given != "-":
        return given
    try:
        return sys.stdin.buffer.read(MAX_READ).decode()
    except UnicodeDecodeError:
        raise InvalidInput("the goal on standard input isn't UTF-8 text") from None


def _code_of(result: FinalResult) -> int:
    return DONE if result.ok else ENDED_OTHERWISE


def _style() -> Style:
    from worker.show import Style

    return Style(colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def _say(text: str) -> None:
    print(text, flush=True)


def _say_json(value: Any) -> None:
    """One line of JSON, the same way for every command."""
    from worker.show import dump

    text = dump(value)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        # Escaped as JSON does it, since what the stream would write isn't JSON.
        text = dump(value, ascii=True)
    _say(text)


# --- the parser --------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all our errors are."""

    def error(self, message: str) -> NoReturn:
        _print_error(f"{message}; see {self.prog} --help")
        sys.exit(BAD_INPUT)


class Version(argparse.Action):
    """`--version`. What is installed is only looked up when somebody asks."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            _say(f"celeriac {version('celeriac')}")
        except PackageNotFoundError:
            _say("celeriac, not installed")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="celeriac",
        description="Run LLM agents as Celery tasks.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    def add(command: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        name = command.__name__
        made = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        made.set_defaults(command=command)
        return made

    one = add(run, "run one goal with a server and workers of its own, and show it live")
    one.add_argument("goal", nargs="?", default=GOAL, metavar="GOAL", help="- is standard input")
    one.add_argument("--agent", metavar="NAME", help="needed where there are several")

    one = add(worker, "serve a queue until told to stop")
    one.add_argument("--queue", required=True, choices=("steps", "tools"))
    one.add_argument("--concurrency", type=_positive, metavar="N")
    one.add_argument("--pool", choices=("threads", "prefork", "solo"), help="unless the usual one")
    one.add_argument("--loglevel", type=str.upper, choices=LEVELS, default="INFO")

    one = add(web, "serve the runs over HTTP, with a page to watch them, to this machine alone")
    one.add_argument("--host", default="127.0.0.1", metavar="HOST", help="a loopback address")
    one.add_argument("--port", type=_port, default=8700, metavar="N", help="0 is any that is free")

    one = add(ping, "send a canary task through a queue: is a worker alive and not deaf?")
    one.add_argument("--queue", required=True, choices=("steps", "tools"))
    one.add_argument("--timeout", type=_seconds, default=5.0, metavar="S")
    _add_json(one)

    one = add(submit, "submit a goal and print the id of its run")
    one.add_argument("goal", metavar="GOAL", help="- is standard input")
    one.add_argument("--agent", required=True, metavar="NAME")
    one.add_argument("--idempotency-key", metavar="KEY", help="the same key gives the same run")
    one.add_argument("--after", metavar="RUN", help="go on from the history of an ended run")
    one.add_argument("--conversation", metavar="NAME", help="go on from its last run")
    one.add_argument(
        "--when-busy",
        choices=("reject", "enqueue", "interrupt"),
        default="reject",
        help="where the conversation has a live run",
    )
    one.add_argument("--wait", action="store_true", help="wait for the end, print the result")
    _add_json(one)

    one = add(runs, "list runs: those that haven't ended, then the last that have")
    one.add_argument("--status", choices=STATUSES)
    one.add_argument("--limit", type=_positive, default=100, metavar="N")
    _add_json(one)

    one = _add_run(add(show, "show a run, and its result where it has ended"))
    _add_json(one)

    one = _add_run(add(events, "show a run's events as they happen, until it ends"))
    one.add_argument("--after", metavar="ID", help="the id of the last event already seen")
    _add_json(one)

    one = _add_run(add(reply, "answer what a model asks; without a text, show the question"))
    one.add_argument("text", nargs="?", metavar="TEXT", help="- is standard input")
    one.add_argument("--call", metavar="ID", help="needed where several questions are open")
    _add_json(one)

    one = _add_run(add(approvals, "show which calls of a run wait for an approval"))
    _add_json(one)

    one = _add_call(add(approve, "let a call run that waits for an approval"))
    _add_json(one)

    one = _add_call(add(deny, "refuse a call that waits for an approval"))
    one.add_argument("reason", metavar="REASON", help="for the model to read")
    _add_json(one)

    one = _add_run(add(send, "say something to a run that hasn't ended; its next step has it"))
    one.add_argument("text", metavar="TEXT", help="- is standard input")
    _add_json(one)

    one = _add_run(add(cancel, "end a run now"))
    one.add_argument("--reason", default="cancelled from the command line")
    _add_json(one)

    one = _add_run(add(resume, "take a run up again that a limit or an error has ended"))
    one.add_argument("--max-steps", type=_positive, metavar="N", help="so many more steps")
    one.add_argument("--timeout", type=_seconds, metavar="S", help="so many more seconds")
    _add_json(one)

    one = _add_run(add(check, "hold a run's record against the rules that every run keeps"))
    _add_json(one)

    one = add(doctor, "look at Redis, workers, versions, settings and what waits; say what to do")
    one.add_argument("--timeout", type=_seconds, default=2.0, metavar="S", help="for an answer")
    _add_json(one)

    one = add(metrics, "show Prometheus what the fleet holds: queues, limits, what is due")
    one.add_argument("--address", default="127.0.0.1:9464", metavar="HOST:PORT")

    one = _add_run(add(delete, "remove an ended run and whatever points to it"))
    one.add_argument("--cancel", action="store_true", help="end it first where it hasn't ended")
    _add_json(one)

    one = add(prune, "delete runs that have ended, and print their ids")
    one.add_argument("--older-than", type=_age, metavar="S", help="that ended so long ago")
    one.add_argument("--stop-reason", type=str.upper, choices=REASONS, metavar="REASON")
    one.add_argument("--dry-run", action="store_true", help="delete nothing")
    _add_json(one)

    one = _add_run(add(replay, "feed what was recorded through the loop again, and compare"))
    one.add_argument("--show", action="store_true", help="show values that differ, not their sizes")
    one.add_argument("--save", metavar="FILE", help="write the recording for a test instead")
    _add_json(one)

    one = _add_run(add(fork, "begin a new run from a step of this one"))
    one.add_argument("--step", type=_whole, required=True, metavar="K", help="the first new step")
    one.add_argument("--agent", metavar="NAME", help="unless the same")
    _add_json(one)

    one = _add_run(add(trace, "show what each step sent, got back, decided and found"))
    _add_json(one)

    one = _add_run(add(result, "print what a call returned, whole where the model got a part"))
    one.add_argument("call", metavar="CALL", help="its step and index, such as 3.0")
    _add_json(one)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("run", metavar="RUN", help="the id of a run")
    return parser


def _add_call(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    _add_run(parser).add_argument("call", metavar="CALL", help="the id of a call, such as 3.0")
    parser.add_argument("--digest", metavar="D", help="of the arguments that were looked at")
    parser.add_argument("--by", metavar="NAME", help="who decides, for the record")
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for a script")


LARGEST = 10**9
"""Of a number on the command line: whatever is more is a slip."""


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < LARGEST:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} isn't a number of seconds greater than 0")


def _age(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < LARGEST:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} isn't a number of seconds, 0 or more")


def _whole(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _port(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 <= int(text) < 65_536:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} isn't a port, 0 to 65535")


def _positive(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 < int(text) < LARGEST:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number, 1 or more and below 10^9")
