"""A model for the demo without a key: rules behind the chat-completions protocol, on loopback.

The rule: it decides from the messages and the tools of each request alone, and says only what the
results in them say. Nothing is remembered between two requests.
"""

from __future__ import annotations

import json
import re
import socketserver
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Message = dict[str, Any]
Definition = dict[str, Any]

MAX_BODY_BYTES = 64_000_000
MAX_GOAL_CHARS = 20_000  # the rules search it once for each file of a listing
MAX_CALLS = 32
MAX_READS = 8
MAX_FOLDERS = 8
MAX_NAMES = 8
MAX_QUOTE_CHARS = 400


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that a rule wants to be made."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A call that was made, with the result as the conversation has it.

    `data` is the object that the tool answered, None where it isn't one, or where `error` is set.
    """

    call: Call
    data: dict[str, Any] | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """What the model knows of one set of tools: which calls to make, and what to say at the end."""

    tools: frozenset[str]
    plan: Callable[[str, Sequence[Outcome]], list[Call]]
    answer: Callable[[str, Sequence[Outcome]], str]


def decide(
    messages: Sequence[Message],
    tools: Sequence[Definition],
    *,
    tool_choice: str | dict[str, Any] | None = "auto",
    parallel: bool = True,
) -> Message:
    """The assistant message that follows on `messages`: tool calls, or an answer in text.

    A `tool_choice` that names a function leaves only the calls of that one; "required" is the same
    as "auto", since there may be nothing to call.
    """
    offered = {tool["function"]["name"] for tool in tools}
    goal = "\n".join(_text(each) for each in messages if each["role"] == "user")[:MAX_GOAL_CHARS]
    outcomes = list(_read_outcomes(messages))
    rule = next((rule for rule in RULES if rule.tools & offered), None)
    if rule is None:
        return {"role": "assistant", "content": UNKNOWN_TOOLS}
    made = [outcome.call for outcome in outcomes]
    wanted = [call for call in rule.plan(goal, outcomes) if call not in made]
    allowed = offered & _choose(tool_choice, offered)
    calls = [call for call in wanted if call.name in allowed][: MAX_CALLS if parallel else 1]
    if not calls:
        return {"role": "assistant", "content": rule.answer(goal, outcomes)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            _write_call(call, f"call_{number}") for number, call in enumerate(calls, len(made))
        ],
    }


# --- the conversation --------------------------------------------------------------------------


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def _read_outcomes(messages: Sequence[Message]) -> Iterator[Outcome]:
    """Each call that the conversation holds a result of, in the order of the calls."""
    open_calls: dict[str, Call] = {}
    for message in messages:
        for entry in message.get("tool_calls") or ():
            open_calls[entry["id"]] = _read_call(entry["function"])
        if message["role"] == "tool":
            call = open_calls.pop(message["tool_call_id"])
            yield _read_outcome(call, _text(message))


def _read_call(function: dict[str, Any]) -> Call:
    given = _parse_object(function["arguments"])
    return Call(function["name"], given or {})


def _read_outcome(call: Call, content: str) -> Outcome:
    data = _parse_object(content)
    if data is None:
        return Outcome(call, None, "the result is in a form that this model can't read")
    if data.get("ok") is False and isinstance(error := data.get("error"), dict):
        return Outcome(call, None, f"{error.get('message')} ({error.get('type')})")
    return Outcome(call, data)


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _choose(tool_choice: str | dict[str, Any] | None, offered: set[str]) -> set[str]:
    match tool_choice:
        case "none":
            return set()
        case {"function": {"name": str(name)}}:
            return {name}
        case _:
            return offered


def _write_call(call: Call, id: str) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _named(outcomes: Iterable[Outcome], name: str) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.call.name == name]


def _list_words(words: Sequence[str]) -> str:
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- the workspace: list_files and read_file ---------------------------------------------------

TEXT_SUFFIXES = "cfg css csv html ini json lock log md py rst sh sql toml txt xml yaml yml"
SUFFIX = re.compile(rf"\.({'|'.join(TEXT_SUFFIXES.split())})$", re.IGNORECASE)
README = re.compile(r"readme(\.\w+)?", re.IGNORECASE)
NOTABLE = re.compile(r"readme(\.\w+)?|pyproject\.toml|makefile|package\.json|.*\.md", re.IGNORECASE)
MAX_NOTABLE = 4
ABOUT_THE_WHOLE = re.compile(
    r"\b(folder|director(y|ies)|workspace|project|files|here)\b",
    re.IGNORECASE,
)
ABOUT_SUBFOLDERS = re.compile(
    r"\b(sub-?(folder|director(y|ie))s?|(each|every|all)\s+(the\s+)?folders?|recursive\w*|everything)\b",
    re.IGNORECASE,
)
OUTSIDE = re.compile(r"\.{0,2}/[\w.]")


def plan_workspace(goal: str, outcomes: Sequence[Outcome]) -> list[Call]:
    """First the folder itself; then the files and folders in it that the goal is about."""
    listings = _named(outcomes, "list_files")
    if not listings:
        return [Call("list_files", {"path": "."})]
    entries = _list_entries(listings)
    files = [path for path in entries if not path.endswith("/")]
    # From the workspace itself alone: each folder below would bring further ones for ever.
    folders = [path for path in _list_entries(listings[:1]) if path.endswith("/")]
    reads = _spend(MAX_READS, _choose_files(goal, files), _named(outcomes, "read_file"))
    lists = _spend(MAX_FOLDERS, _choose_folders(goal, folders), listings[1:])
    return [
        *(Call("read_file", {"path": path}) for path in reads),
        *(Call("list_files", {"path": path}) for path in lists),
    ]


def _list_entries(listings: Sequence[Outcome]) -> list[str]:
    found = [outcome.data.get("entries") for outcome in listings if outcome.data is not None]
    return [
        entry["path"]
        for entries in found
        if isinstance(entries, list)
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("path"), str)
    ]


def _spend(most: int, paths: Sequence[str], made: Sequence[Outcome]) -> list[str]:
    """Those of `paths` that are new, as far as `most` calls in all allow."""
    done = [outcome.call.arguments.get("path") for outcome in made]
    return [path for path in paths if path not in done][: max(0, most - len(done))]


def _choose_files(goal: str, files: Sequence[str]) -> list[str]:
    asked = [path for path in files if _mentions_file(goal, path)]
    listed = {known.casefold() for path in files for known in (path, _base_name(path))}
    asked += [path for path in _find_paths(goal) if path.casefold() not in listed]
    if asked and not ABOUT_THE_WHOLE.search(goal):
        return asked
    notable = [path for path in files if NOTABLE.fullmatch(path)]
    # The README first, since it is what says most about a folder.
    notable.sort(key=lambda path: not README.fullmatch(path))
    return list(dict.fromkeys((*asked, *notable[:MAX_NOTABLE])))


def _choose_folders(goal: str, folders: Sequence[str]) -> list[str]:
    if ABOUT_SUBFOLDERS.search(goal):
        return [path for path in folders if not path.startswith(".")]
    return [path for path in folders if _mentions(goal, path.rstrip("/"))]


def _mentions_file(goal: str, path: str) -> bool:
    name = _base_name(path)
    stem = name.partition(".")[0]
    # A stem of one or two letters would be found in any sentence.
    return _mentions(goal, name) or (len(stem) > 2 and _mentions(goal, stem))


def _base_name(path: str) -> str:
    return path.rpartition("/")[2]


def _mentions(goal: str, word: str) -> bool:
    pattern = rf"(?<![\w.-]){re.escape(word)}(?![\w-])"
    return bool(word) and re.search(pattern, goal, re.IGNORECASE) is not None


def _find_paths(goal: str) -> list[str]:
    """What the goal spells like a file's path: it is tried, whether a listing shows it or not."""
    words = (word.strip("\"'`“”‘’()[]<>,;:!?").rstrip(".") for word in goal.split())
    return [
        word.removeprefix("./")
        for word in words
        if "://" not in word and (SUFFIX.search(word) or OUTSIDE.match(word))
    ]


def answer_workspace(_goal: str, outcomes: Sequence[Outcome]) -> str:
    """The counts, the names, and what the files say; then what was read and what couldn't be."""
    lists, reads = _named(outcomes, "list_files"), _named(outcomes, "read_file")
    texts = {
        str(outcome.call.arguments.get("path")): str(outcome.data.get("content", ""))
        for outcome in reads
        if outcome.data is not None
    }
    parts = [_describe_listing(outcome) for outcome in lists if outcome.data is not None]
    parts += [_describe_text(path, text) for path, text in texts.items()]
    parts.append(f"I read {_list_words(list(texts))}." if texts else "I read no file.")
    parts += [
        f"I could not {'read' if outcome in reads else 'list'} "
        f"{outcome.call.arguments.get('path')}: {outcome.error}."
        for outcome in (*lists, *reads)
        if outcome.error is not None
    ]
    return "\n\n".join(parts)


def _describe_listing(outcome: Outcome) -> str:
    # What begins with a dot comes last: it says least.
    paths = sorted(_list_entries([outcome]), key=lambda path: path.startswith("."))
    folders = [path for path in paths if path.endswith("/")]
    files = [path for path in paths if not path.endswith("/")]
    where = outcome.call.arguments.get("path", ".")
    subject = "The folder" if where == "." else where
    text = f"{subject} holds {_count(len(files), 'file')} and {_count(len(folders), 'folder')}"
    if paths:
        shown = [*folders[:MAX_NAMES], *files[:MAX_NAMES]]
        text += f": {', '.join(shown)}{'' if len(shown) == len(paths) else ', …'}"
    note = (outcome.data or {}).get("note")
    return f"{text}." if not note else f"{text}. The listing is not whole: {note}"


def _describe_text(path: str, text: str) -> str:
    if not text.strip():
        return f"{path} is empty."
    title, paragraph = summarize(text)
    if not README.fullmatch(_base_name(path)) and not path.lower().endswith(".md"):
        first = next(line.strip() for line in text.splitlines() if line.strip())
        lines = _count(len(text.splitlines()), "line")
        return f"{path} begins with “{_shorten(first)}” ({lines} read)."
    said = " ".join(f"“{_shorten(part)}”" for part in (title, paragraph) if part)
    return f"{path} says: {said}" if said else f"{path} has no title and no paragraph of text."


def summarize(markdown: str) -> tuple[str, str]:
    """The title and the first paragraph of a Markdown text; either may be missing, so empty."""
    title, paragraph, fenced = "", list[str](), False
    lines = markdown.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        text = line.strip()
        underline = bool(text) and re.fullmatch(r"=+\s*", following) is not None
        if text.startswith(("```", "~~~")):
            fenced = not fenced
        elif fenced:
            continue
        elif not title and not paragraph and (text.startswith("# ") or underline):
            title = text.lstrip("#").strip()
        elif _is_prose(text):
            paragraph.append(text)
            continue
        # Whatever isn't prose ends the paragraph, once there is one.
        if paragraph:
            break
    return title, " ".join(paragraph)


def _is_prose(text: str) -> bool:
    # Headings, badges, HTML, tables and rules are no sentences.
    return bool(text) and not re.match(r"#|<|!\[|\[!\[|\||[=\-*_]{3,}\s*$", text)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_QUOTE_CHARS else f"{text[:MAX_QUOTE_CHARS].rstrip()}…"


# --- the shop: get_order, get_refund_policy and get_weather ------------------------------------

ORDER = re.compile(r"\b[A-Za-z]\d{3,}\b")
REFUND = re.compile(r"\b(refund\w*|return\w*|money\s+back|policy)\b", re.IGNORECASE)
WEATHER = re.compile(r"\b(weather|temperature|forecast|rain\w*|sunny|warm|cold)\b", re.IGNORECASE)
PLACE = r"[A-ZÀ-ÖØ-Þ][\w'’-]*(?:\s+[A-ZÀ-ÖØ-Þ][\w'’-]*)*"
JOINED = r"(?:\s*,\s*(?:and|or)\s+|\s*,\s*|\s+(?:and|or)\s+)"
CITIES = re.compile(rf"\b(?i:in|for|at|of)\s+((?:{PLACE})(?:{JOINED}(?:in\s+)?(?:{PLACE}))*)")
CITY_BEFORE = re.compile(rf"({PLACE})(?:['’]s)?\s+(?:weather|temperature|forecast)")
CITY_IN_LOWER_CASE = re.compile(r"(?:weather|temperature|forecast).*?\b(?:in|for|at)\s+([\w-]+)")


def plan_support(goal: str, _outcomes: Sequence[Outcome]) -> list[Call]:
    """Everything that the goal names, at once: no call here depends on another's result."""
    calls = [Call("get_order", {"order_id": number}) for number in find_orders(goal)]
    if REFUND.search(goal):
        calls.append(Call("get_refund_policy", {}))
    return [*calls, *(Call("get_weather", {"city": city}) for city in find_cities(goal))]


def find_orders(goal: str) -> list[str]:
    return list(dict.fromkeys(number.upper() for number in ORDER.findall(goal)))


def find_cities(goal: str) -> list[str]:
    """The places in those sentences of the goal that speak of the weather, in their order."""
    found: list[str] = []
    for sentence in re.split(r"[?!;\n]|\.\s", goal):
        if WEATHER.search(sentence):
            found += _find_places(sentence)
    return list(dict.fromkeys(found))


def _find_places(sentence: str) -> list[str]:
    groups = CITIES.findall(sentence) or CITY_BEFORE.findall(sentence)
    groups = groups or CITY_IN_LOWER_CASE.findall(sentence)
    places = [re.sub(r"^in\s+", "", place) for each in groups for place in re.split(JOINED, each)]
    return [place for place in places if not ORDER.search(place)]


def answer_support(_goal: str, outcomes: Sequence[Outcome]) -> str:
    """A sentence for each order and each city, from the results and nothing else."""
    policies = _named(outcomes, "get_refund_policy")
    parts = [_describe_order(outcome, policies) for outcome in _named(outcomes, "get_order")]
    if policies and not parts:
        parts.append(_describe_policy(policies[-1]))
    parts += [_describe_weather(outcome) for outcome in _named(outcomes, "get_weather")]
    return " ".join(parts) or NOTHING_TO_LOOK_UP


def _describe_order(outcome: Outcome, policies: Sequence[Outcome]) -> str:
    number, order = outcome.call.arguments.get("order_id"), outcome.data
    if order is None:
        return f"I could not look up order {number}: {outcome.error}."
    subject = f"Order {number} ({order.get('item')})"
    if not policies:
        when = f" on {order['delivered_on']}" if order.get("delivered_on") else ""
        return f"{subject} is {order.get('status')}{when}."
    if (policy := policies[-1].data) is None:
        return f"{subject} is {order.get('status')}. {_describe_policy(policies[-1])}"
    return judge_refund(subject, order, policy)


def judge_refund(subject: str, order: dict[str, Any], policy: dict[str, Any]) -> str:
    """Whether the policy covers the order, by its status first and then by its days."""
    status, covered = order.get("status"), policy.get("statuses") or []
    passed, allowed = order.get("days_since_delivery"), policy.get("days")
    if status not in covered:
        only = _list_words([str(each) for each in covered])
        return f"{subject} can't be refunded: it is {status}, and only {only} orders can be."
    if not isinstance(passed, int) or not isinstance(allowed, int):
        return f"{subject} is {status}, but I can't tell how long ago it was delivered."
    ago = f"it was delivered {_count(passed, 'day')} ago, on {order.get('delivered_on')}"
    if passed <= allowed:
        return f"{subject} can be refunded: {ago}, within the policy's {_count(allowed, 'day')}."
    return f"{subject} can't be refunded: {ago}, and the policy allows {_count(allowed, 'day')}."


def _describe_policy(outcome: Outcome) -> str:
    if outcome.data is None:
        return f"I could not look up the refund policy: {outcome.error}."
    return str(outcome.data.get("text", "The refund policy has no text."))


def _describe_weather(outcome: Outcome) -> str:
    city, weather = outcome.call.arguments.get("city"), outcome.data
    if weather is None:
        return f"I could not look up the weather in {city}: {outcome.error}."
    conditions, degrees = weather.get("conditions"), weather.get("temperature_c")
    return f"The weather in {weather.get('city')}: {conditions}, {degrees} °C."


# --- what it knows -----------------------------------------------------------------------------

UNKNOWN_TOOLS = (
    "I am the offline model of the demo: a few rules that know only the tools of the two example"
    " agents, so I can't work on this. Set OPENAI_API_KEY (and OPENAI_BASE_URL, CELERIAC_MODEL) to"
    " use a real model."
)
NOTHING_TO_LOOK_UP = (
    "I found nothing to look up. I am the offline model of the demo: name an order such as A001,"
    " the refund policy, or the weather in a city, or set OPENAI_API_KEY to use a real model."
)

RULES = (
    Rule(frozenset({"list_files", "read_file"}), plan_workspace, answer_workspace),
    Rule(
        frozenset({"get_order", "get_refund_policy", "get_weather"}), plan_support, answer_support
    ),
)


# --- the protocol ------------------------------------------------------------------------------


NO_SUCH_PATH = "the offline model has no such path; it answers POST /v1/chat/completions"


class BadRequest(Exception):
    """What is wrong with a request, in words for whoever sent it."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


def respond(body: object) -> dict[str, Any]:
    """The response to the body of a request; raises `BadRequest`."""
    request = check_request(body)
    messages, tools = request["messages"], request.get("tools") or []
    message = decide(
        messages,
        tools,
        tool_choice=request.get("tool_choice"),
        parallel=request.get("parallel_tool_calls") is not False,
    )
    prompt, completion = _count_tokens([messages, tools]), _count_tokens(message)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request["model"],
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }


def _count_tokens(value: object) -> int:
    # A rule of thumb: no tokenizer is worth a dependency here.
    return max(1, len(json.dumps(value, ensure_ascii=False)) // 4)


def check_request(body: object) -> dict[str, Any]:
    """The body as far as the rules read it, or `BadRequest`."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    _require(isinstance(body.get("model"), str), "model must be a string")
    messages, tools = body.get("messages"), body.get("tools") or []
    _require(isinstance(messages, list) and messages != [], "messages must be a list, not empty")
    _require(isinstance(tools, list), "tools must be a list")
    for index, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str()}}:
                continue
        raise BadRequest(f"tools[{index}] must be a function with a name")
    _check_messages(body["messages"])
    return body


def _check_messages(messages: list[Any]) -> None:
    """Each on its own, and each tool message right behind the turn that asked for it."""
    waiting: list[str] = []
    for index, message in enumerate(messages):
        _require(_is_message(message), f"messages[{index}] is not a message")
        if message["role"] == "tool":
            answered = message["tool_call_id"]
            _require(answered in waiting, f"messages[{index}] answers no tool call before it")
            waiting.remove(answered)
            continue
        _require(not waiting, f"messages[{index}] comes before the results of all tool calls")
        waiting = [entry["id"] for entry in message.get("tool_calls") or ()]
    _require(not waiting, "the last tool calls have no results")


def _is_message(message: object) -> bool:
    match message:
        case {"role": "tool", "tool_call_id": str(), "content": content}:
            return _is_content(content)
        case {"role": "assistant", "tool_calls": list(calls), **rest}:
            return all(map(_is_call, calls)) and _is_content(rest.get("content") or "")
        case {"role": "assistant" | "user" | "system" | "developer", "content": content}:
            return _is_content(content)
    return False


def _is_content(content: object) -> bool:
    match content:
        case str():
            return True
        case list():
            return all(map(_is_part, content))
    return False


def _is_part(part: object) -> bool:
    match part:
        case {"type": "text", "text": str()}:
            return True
    return False


def _is_call(entry: object) -> bool:
    match entry:
        case {"id": str(), "function": {"name": str(), "arguments": str()}}:
            return True
    return False


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise BadRequest(problem)


def _error(message: str, type: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": None, "code": None}}


def split_answer(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A whole answer as the chunks of a stream: a few words each, the calls, the usage."""
    [choice] = answer["choices"]
    message = choice["message"]
    head = {key: answer[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    words = re.findall(r"\S+\s*|\s+", message.get("content") or "")
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    deltas += [{"content": "".join(words[at : at + 4])} for at in range(0, len(words), 4)]
    if entries := message.get("tool_calls"):
        deltas.append({"tool_calls": [{"index": n, **each} for n, each in enumerate(entries)]})
    for delta in deltas:
        yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield head | {"choices": [end], "usage": answer["usage"]}


# --- the server --------------------------------------------------------------------------------


class OfflineModel:
    """The server, in a thread of its own on a free port: a context manager, or start and stop."""

    def __init__(self) -> None:
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The base URL for an OpenAI client, ending in /v1; the server must have been started."""
        if self._server is None:
            raise RuntimeError("the offline model isn't started")
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def start(self) -> Self:
        if self._server is None:
            self._server = _Server(("127.0.0.1", 0), _Handler)
            # Polls for a stop every 50 ms, not every 500.
            self._thread = threading.Thread(
                target=self._server.serve_forever, args=(0.05,), name="offline-model", daemon=True
            )
            self._thread.start()
        return self

    def stop(self) -> None:
        """Stop answering and free the port; also where it was never started."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is not None and thread is not None:
            server.shutdown()
            server.server_close()
            thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # The default of 5 would refuse a burst of runs.
    request_queue_size = 128

    def server_bind(self) -> None:
        # HTTPServer's own asks the resolver for the host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, *_: Any) -> None:
        """Nothing: mostly a client that went away, as a cancelled step does, and no traceback."""


class _Handler(BaseHTTPRequestHandler):
    """HTTP/1.0, a connection for each request: no idle thread is left when the server stops."""

    timeout = 30
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        try:
            body = self._read_request()
            answer = respond(body)
            if body.get("stream"):
                self._send_stream(answer)
            else:
                self._send(HTTPStatus.OK, answer)
        except BadRequest as problem:
            self._send(problem.status, _error(str(problem)))
        except Exception as error:  # noqa: BLE001 - an answer, whatever a rule stumbled over
            self._send(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                _error(f"the offline model failed with {type(error).__name__}", "server_error"),
            )

    def do_GET(self) -> None:
        self._send(HTTPStatus.NOT_FOUND, _error(NO_SUCH_PATH))

    def _read_request(self) -> dict[str, Any]:
        # Read before anything is refused: to close on unread data would reset the connection.
        body = self._read_body()
        if self.path.partition("?")[0] != "/v1/chat/completions":
            raise BadRequest(NO_SUCH_PATH, HTTPStatus.NOT_FOUND)
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            raise BadRequest("the body is not JSON") from None
        return check_request(parsed)

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise BadRequest("a Content-Length is needed")
        if int(length) > MAX_BODY_BYTES:
            raise BadRequest(f"the body is larger than {MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(length))

    def _send(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_stream(self, answer: dict[str, Any]) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for chunk in split_answer(answer):
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the live view has the terminal."""
