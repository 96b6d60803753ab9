"""The run page in a real browser, by what a person sees, clicks and types."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from playwright.sync_api import Browser, FloatRect, Locator, Page, expect

from runner import Settings, keys
from runner.testing import calls as turn
from support.browser import CONTRASTS, PHONE, Visit, open_browser, visit
from support.fleet import url_of, valkey
from support.http import serving
from support.model_server import calls, chunk, final, stream_of
from support.page_runs import Told, move_back, start_run, tell_events
from support.stage import Stage, open_stage
from tasks import Client
from web import create_app, create_router

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    " \u202egnp.exe\u202c end"
)
ORDER = ("get_order", {"order_id": "A001"})
REFUND = ("refund", {"order_id": "A001", "cents": 4900})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Real workers of a shop's agents."""
    with open_stage(tmp_path_factory.mktemp("stage"), agents="support.page_agents") as made:
        yield made


@pytest.fixture(scope="module")
def staged(stage: Stage) -> Iterator[str]:
    """The address of the page of the runs on the stage."""
    with serving(create_app(stage.client)) as url:
        yield f"{url}/"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client on a database that no worker looks at: its runs are made by the tests."""
    with (
        valkey(tmp_path_factory.mktemp("desk")) as server,
        Client(settings=Settings(redis_url=url_of(server))) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def site(desk: Client) -> Iterator[str]:
    """The address of the page of the runs that the tests made."""
    with serving(create_app(desk)) as url:
        yield f"{url}/"


@pytest.fixture
def look(browser: Browser, tmp_path: Path) -> Iterator[Any]:
    """Opens an address. After the test a picture of each page is in its folder, and none of them
    has asked another origin, or told its console of an error."""
    visits: list[Visit] = []
    with ExitStack() as stack:

        def open_page(url: str, **options: Any) -> Visit:
            visits.append(stack.enter_context(visit(browser, url, **options)))
            return visits[-1]

        yield open_page
        for number, each in enumerate(visits):
            each.page.screenshot(path=tmp_path / f"page-{number}.png", full_page=True)
            assert each.faults() == []
            assert len(each.origins()) == 1, each.origins()
            assert "owned" not in each.page.title()


def refund_of(number: int) -> tuple[str, dict[str, Any]]:
    return "refund", {"order_id": f"A{number:03}", "cents": 100}


def row(page: Page, name: str) -> Locator:
    """The row of a step or a call in the timeline."""
    return page.get_by_role("button", name=name)


def bar(page: Page, name: str, kind: str) -> FloatRect:
    """Where the first bar of this kind is in a row, in pixels."""
    return box_of(row(page, name).locator(f".bar.{kind}").first)


def boxes_of(places: Locator) -> list[dict[str, float]]:
    script = "found => found.map(each => each.getBoundingClientRect().toJSON())"
    boxes: list[dict[str, float]] = places.evaluate_all(script)
    return boxes


def box_of(place: Locator) -> FloatRect:
    box = place.bounding_box()
    assert box is not None, "it isn't seen"
    return box


# --- on real workers ---------------------------------------------------------------------------


def test_a_run_is_watched_decided_on_and_read_while_it_goes_on(
    stage: Stage, staged: str, look: Any
) -> None:
    visit = look(staged)
    page = visit.page
    expect(page.get_by_text("No runs yet")).to_be_visible()

    denied = ("refund", {"order_id": "A002", "cents": 18900})
    turns = [
        calls(ORDER, ("count_shelf", {"shelf": 1}), ("count_shelf", {"shelf": 2})),
        calls(REFUND, denied),
        final("Order A001 is paid back, and A002 isn't."),
    ]
    run = stage.submit(turns, agent="clerk")
    page.get_by_role("link", name=run.id).click()

    expect(page.get_by_text("Live")).to_be_visible()
    expect(page.locator("[data-state=tool] > .row")).to_contain_text("count_shelf")
    expect(page.locator("[data-state=slot] > .row")).to_contain_text("waiting for a slot")
    expect(page.get_by_text("1 of 4 · shelf")).to_be_visible()
    stage.fleet.tell(run.id)

    first = page.get_by_role("region", name="Waiting for you").locator("> *").first
    expect(first).to_contain_text("refund waits for approval")
    expect(first.get_by_label("Arguments")).to_contain_text('"cents": 4900')
    expect(row(page, "refund 1.0")).to_contain_text("waiting for approval")
    first.get_by_role("button", name="Approve").click()
    expect(page.get_by_text("refund waits for approval")).to_have_count(1)
    page.get_by_role("button", name="Deny").click()
    page.get_by_role("textbox", name="Why?").fill("too old")
    page.get_by_role("dialog").get_by_role("button", name="Deny").click()

    expect(page.get_by_text("Order A001 is paid back, and A002 isn't.")).to_be_visible()
    expect(page.get_by_text("completed", exact=True)).to_be_visible()
    expect(page.get_by_text("Ended", exact=True)).to_be_visible()
    expect(page.get_by_role("status")).to_have_text("The run has ended: COMPLETED")
    expect(row(page, "refund 1.1")).to_contain_text("DENIED")
    expect(page.get_by_role("meter", name="Steps")).to_have_attribute("aria-valuetext", "3 of 8")
    expect(page.get_by_role("meter", name="Tokens")).to_have_attribute(
        "aria-valuetext", "54 of 50,000"
    )
    page.get_by_text("Rests on 1 piece of evidence").click()
    expect(page.get_by_text("desk lamp, delivered")).to_be_visible()

    legend = page.get_by_role("list", name="Legend")
    expect(legend).to_contain_text("waiting for a slot")
    expect(legend).to_contain_text("waiting for approval")
    assert box_of(page.locator(".call .bar.slot").first)["width"] > 3
    ends = [box["x"] + box["width"] for box in boxes_of(page.locator(".call .bar.tool"))]
    # A bar of no length is still some pixels wide.
    assert bar(page, "Step 1", "model")["x"] >= max(ends[:3]) - 4

    # Nothing of a call is fetched before somebody asks for it.
    assert not any("/calls/0.0" in path for path in visit.paths())
    row(page, "get_order 0.0").click()
    expect(page.get_by_role("region", name="Result")).to_contain_text("desk lamp")
    assert visit.paths().count(f"/runs/{run.id}/calls/0.0") == 1
    assert stage.results(run)[-1].count("too old") == 1


def test_a_run_is_cancelled_with_a_reason_that_is_kept(
    stage: Stage, staged: str, look: Any
) -> None:
    run = stage.submit([calls(("count_shelf", {"shelf": 1}))], agent="clerk")
    page = look(f"{staged}#/runs/{run.id}").page
    expect(row(page, "count_shelf 0.0")).to_contain_text("tool at work")

    page.get_by_role("button", name="Cancel run").click()
    page.get_by_role("dialog").get_by_role("button", name="Back").click()
    expect(page.get_by_role("button", name="Cancel run")).to_be_focused()
    page.get_by_role("button", name="Cancel run").click()
    page.get_by_role("textbox", name="Why?").fill("not needed any more")
    page.get_by_role("dialog").get_by_role("button", name="Cancel run").click()

    expect(page.get_by_text("Ended: cancelled")).to_be_visible()
    expect(page.get_by_text("not needed any more")).to_be_visible()
    expect(row(page, "count_shelf 0.0")).to_contain_text("CANCELLED")
    expect(page.get_by_role("button", name="Cancel run")).to_be_hidden()
    assert run.result(timeout=1).stop_reason == "CANCELLED"


def test_a_question_is_answered_and_a_message_is_sent(stage: Stage, staged: str, look: Any) -> None:
    question = calls(("ask_user", {"question": "Which order do you mean?"}))
    run = stage.submit([question, calls(REFUND), final("done")], agent="clerk")
    page = look(f"{staged}#/runs/{run.id}").page

    expect(page.get_by_text("Which order do you mean?")).to_be_visible()
    page.get_by_label("Your reply").fill("A001, the lamp")
    page.get_by_role("button", name="Reply", exact=True).click()
    expect(page.get_by_text("refund waits for approval")).to_be_visible()
    page.get_by_label("Say something to the run").fill("and be quick")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("message of 12 characters")).to_be_visible()
    expect(page.get_by_label("Say something to the run")).to_have_value("")
    page.get_by_role("button", name="Approve").click()

    expect(page.get_by_text("completed", exact=True)).to_be_visible()
    said = [each["content"] for each in run.messages() if each["role"] in ("tool", "user")]
    assert "A001, the lamp" in said
    assert any("and be quick" in text for text in said)


def test_an_answer_is_read_while_it_comes(stage: Stage, staged: str, look: Any) -> None:
    go_on = threading.Event()
    pieces = [chunk({"role": "assistant", "content": "First half, "}), go_on]
    pieces += [chunk({"content": "second half."}), chunk(finish_reason="stop")]
    run = stage.submit([stream_of(*pieces)], agent="narrator")
    page = look(f"{staged}#/runs/{run.id}").page

    expect(page.get_by_text("First half,")).to_be_visible()
    expect(page.get_by_role("heading", name="Answer, as it comes")).to_be_visible()
    go_on.set()
    expect(page.get_by_text("First half, second half.")).to_be_visible()
    expect(page.get_by_role("heading", name="Answer", exact=True)).to_be_visible()


# --- on runs that the tests have made ----------------------------------------------------------

WAITS: list[Told] = [
    (0, "run.created", None, None, {"agent": "clerk"}),
    (1, "step.started", 0, None, {"attempt": 1}),
    (2, "run.waiting", 0, None, {"reason": "MODEL_HTTP_ERROR", "delay": 2, "status": 503}),
    (4, "step.started", 0, None, {"attempt": 2}),
    (6, "model.answered", 0, None, {"calls": 2, "refused": 0}),
    (6, "call.queued", 0, "0.0", {"tool": "get_order"}),
    (6, "approval.requested", 0, "0.1", {"tool": "refund", "digest": "d"}),
    (6, "call.waiting", 0, "0.0", {"reason": "LIMIT", "limit": "orders"}),
    (8, "call.started", 0, "0.0", {"attempt": 1}),
    (10, "call.finished", 0, "0.0", {"tool": "get_order", "ok": False, "error": "NOT_FOUND"}),
    (16, "approval.decided", 0, "0.1", {"approved": True, "by": "ops"}),
    (16, "call.started", 0, "0.1", {"attempt": 1}),
    (18, "call.finished", 0, "0.1", {"tool": "refund", "ok": True, "error": None}),
    (18, "step.started", 1, None, {"attempt": 1}),
    (20, "model.answered", 1, None, {"calls": 0, "refused": 0}),
    (20, "run.finished", None, None, {"stop_reason": "COMPLETED", "ok": True}),
]


def test_bars_are_as_long_as_what_they_stand_for_and_each_wait_looks_its_own(
    desk: Client, site: str, look: Any
) -> None:
    start_run(desk.store, "run-of-waits", [turn(ORDER, REFUND)])
    tell_events(desk.store, "run-of-waits", WAITS)
    page = look(f"{site}#/runs/run-of-waits").page
    expect(row(page, "Step 1")).to_be_visible()

    track = box_of(row(page, "Step 0").locator(".track"))

    def seconds(name: str, kind: str) -> tuple[float, float]:
        """From when to when a bar goes, by its place: the axis is 20 s long."""
        box = bar(page, name, kind)
        start = (box["x"] - track["x"]) / track["width"] * 20
        return round(start, 1), round(start + box["width"] / track["width"] * 20, 1)

    assert seconds("Step 0", "queued") == (0, 1)
    assert seconds("Step 0", "model") == (1, 2)
    assert seconds("Step 0", "retry") == (2, 4)
    assert seconds("get_order 0.0", "slot") == (6, 8)
    assert seconds("get_order 0.0", "tool") == (8, 10)
    assert seconds("refund 0.1", "approval") == (6, 16)
    assert seconds("refund 0.1", "tool") == (16, 18)
    assert seconds("Step 1", "model") == (18, 20)
    expect(row(page, "get_order 0.0")).to_contain_text("NOT_FOUND")
    expect(row(page, "get_order 0.0")).to_have_accessible_name(
        re.compile("waiting for a slot 2.0 s, tool at work 2.0 s")
    )

    page.get_by_role("radio", name="Step by step").check(force=True)
    box = bar(page, "Step 1", "model")
    assert abs(box["x"] - track["x"]) < 2
    assert abs(box["width"] / track["width"] - 2 / 18) < 0.01

    looks = (
        page.get_by_role("list", name="Legend")
        .locator(".bar")
        .evaluate_all(
            """bars => bars.map(bar => {
          const style = getComputedStyle(bar);
          return [style.backgroundColor, style.backgroundImage + style.borderStyle];
        })"""
        )
    )
    assert len(looks) == 6
    colours = {colour for colour, _ in looks}
    waits = [pattern for colour, pattern in looks]
    assert len(colours) == len(looks)
    assert len(set(waits)) == len(looks) - 1  # the model's bars and the tools' are both plain


def test_a_lost_connection_is_told_and_afterwards_nothing_is_missing_or_doubled(
    desk: Client, look: Any
) -> None:
    start_run(desk.store, "run-over-a-gap", [turn(ORDER, REFUND)])
    with serving(create_app(desk)) as url:
        visit = look(f"{url}/#/runs/run-over-a-gap")
        page = visit.page
        expect(row(page, "get_order 0.0")).to_contain_text("✓")
    expect(page.get_by_role("alert")).to_contain_text("connection is lost")
    expect(page.get_by_text("Connection lost, trying again")).to_be_visible()

    desk.get("run-over-a-gap").cancel("while nobody saw it")

    with serving(create_app(desk), int(url.rsplit(":", 1)[1])):
        expect(page.get_by_text("while nobody saw it")).to_be_visible()
        expect(page.get_by_text("Ended", exact=True)).to_be_visible()
        expect(page.get_by_role("alert").filter(has_text="lost")).to_have_count(0)
        assert page.locator(".call").count() == 2
    visit.may_be_refused = True


def test_what_a_run_says_never_becomes_part_of_the_page(desk: Client, site: str, look: Any) -> None:
    big = {"text": f"{HOSTILE}{'x' * 60_000}"}
    start_run(desk.store, "run-of-words", [turn(("echo", big)), f"{HOSTILE}{'y' * 60_000}"])
    asked = ("refund", {"order_id": HOSTILE, "cents": 9007199254740993})
    start_run(desk.store, "run-of-marks", [turn(asked)], goal=HOSTILE)
    visit = look(f"{site}#/runs/run-of-words", viewport=PHONE)
    page = visit.page

    expect(page.get_by_text("<script>document.title='owned'</script>").first).to_be_visible()
    page.get_by_role("button", name="Show all 60,").click()
    row(page, "echo 0.0").click()
    expect(page.get_by_role("region", name="Arguments")).to_contain_text("\\u202egnp.exe\\u202c")
    expect(page.get_by_role("region", name="Result")).to_contain_text("<script>")
    assert page.locator("main script, main img").count() == 0
    assert visit.width_over() == 0

    # What is approved is what is seen: no number is rounded, and no mark turns the text.
    page.goto(f"{site}#/runs/run-of-marks")
    shown = page.get_by_role("region", name="Waiting for you").get_by_label("Arguments")
    expect(shown).to_contain_text('"cents": 9007199254740993')
    expect(shown).to_contain_text("\\u202egnp.exe\\u202c end")
    expect(page.get_by_role("region", name="Goal")).to_contain_text("\\u202egnp.exe")
    assert visit.width_over() == 0


def test_a_long_run_opens_folded_and_is_soon_there(desk: Client, site: str, look: Any) -> None:
    told: list[Told] = [WAITS[0]]
    for step in range(200):
        at = step * 2.0
        told.append((at, "step.started", step, None, {"attempt": 1}))
        told.append((at + 1, "model.answered", step, None, {"calls": 2, "refused": 0}))
        for call in (f"{step}.0", f"{step}.1"):
            told.append((at + 1, "call.queued", step, call, {"tool": "get_order"}))
            told.append((at + 1, "call.started", step, call, {"attempt": 1}))
            told.append((at + 2, "call.finished", step, call, {"tool": "get_order", "ok": True}))
    start_run(desk.store, "run-of-200-steps")
    desk.store.redis.hset(keys.run("run-of-200-steps"), "step", "200")
    move_back(desk.store, "run-of-200-steps", 401)
    tell_events(desk.store, "run-of-200-steps", told)
    page = look(f"{site}#/runs/run-of-200-steps").page

    expect(page.get_by_role("button", name=re.compile("Step 199 "))).to_be_attached()
    assert page.locator(".step").count() == 201  # and the one that waits for a worker
    expect(page.locator(".call:visible")).to_have_count(4)
    page.get_by_role("button", name=re.compile("Step 7 ")).click()
    expect(page.locator(".call:visible")).to_have_count(6)
    page.get_by_role("button", name="Open all steps").click()
    expect(page.locator(".call:visible")).to_have_count(400)
    took = page.evaluate("performance.now()")
    assert took < 8_000


def test_sixteen_parallel_calls_are_sixteen_bars_side_by_side(
    desk: Client, site: str, look: Any
) -> None:
    start_run(desk.store, "run-of-16-calls", [turn(*map(refund_of, range(16)))])
    page = look(f"{site}#/runs/run-of-16-calls").page
    expect(page.locator(".call")).to_have_count(16)
    tops = [box["y"] for box in boxes_of(page.locator(".call .track"))]
    assert tops == sorted(set(tops))
    expect(page.get_by_role("region", name="Waiting for you").locator("> *")).to_have_count(16)


def test_a_decision_that_comes_too_late_is_refused_in_words(
    desk: Client, site: str, look: Any
) -> None:
    start_run(desk.store, "run-decided-twice", [turn(refund_of(1), refund_of(2))])
    visit = look(f"{site}#/runs/run-decided-twice")
    page = visit.page
    expect(page.get_by_role("button", name="Approve")).to_have_count(2)
    # Somebody else is faster, and the page hasn't heard of it: its looks at the run fail.
    page.route("**/runs/run-decided-twice", lambda route: route.abort())
    desk.get("run-decided-twice").deny("0.1", "no")
    page.get_by_role("button", name="Approve").nth(1).click()
    expect(page.get_by_role("alert").filter(has_text="already denied")).to_be_visible()
    visit.may_be_refused = True


def test_the_list_is_filtered_paged_and_kept_in_the_address(tmp_path: Path, look: Any) -> None:
    with (
        valkey(tmp_path) as server,
        Client(settings=Settings(redis_url=url_of(server))) as client,
        serving(create_app(client)) as url,
    ):
        page = look(f"{url}/").page
        expect(page.get_by_text("No runs yet")).to_be_visible()
        for number in range(60):
            start_run(client.store, f"run-number-{number:02}", name=f"agent-{number % 2}")
        client.get("run-number-07").cancel()
        rows = page.get_by_role("list", name="Runs").get_by_role("link")
        expect(rows).to_have_count(50)
        page.get_by_role("button", name="Older").click()
        expect(rows).to_have_count(10)
        page.get_by_role("button", name="Newest").click()
        expect(rows).to_have_count(50)

        page.get_by_label("Stop reason").select_option("CANCELLED")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("run-number-07")
        page.get_by_role("button", name="Clear").click()
        page.get_by_label("Id").fill("number-1")
        expect(rows).to_have_count(10)
        page.get_by_label("Agent").fill("agent-1")
        expect(rows).to_have_count(5)
        page.get_by_label("Status").select_option("queued")
        page.reload()
        expect(rows).to_have_count(5)
        expect(page.get_by_label("Id")).to_have_value("number-1")
        rows.first.click()
        expect(page.get_by_role("heading", name="agent-1")).to_be_visible()
        page.go_back()
        expect(rows).to_have_count(5)
        page.get_by_label("Id").fill("nothing like it")
        expect(page.get_by_text("No run fits these filters")).to_be_visible()


def test_the_page_says_what_it_cannot_show(desk: Client, site: str, look: Any) -> None:
    visit = look(f"{site}#/runs/run-that-never-was")
    page = visit.page
    expect(page.get_by_role("heading", name="No such run")).to_be_visible()
    page.get_by_role("link", name="All runs").click()
    expect(page.get_by_role("heading", name="Runs")).to_be_focused()
    page.goto(f"{site}#/no/such/%place")
    expect(page.get_by_role("heading", name="No such page")).to_be_visible()
    visit.may_be_refused = True

    start_run(desk.store, "run-with-a-gap", [turn(ORDER, REFUND)])
    tell_events(desk.store, "run-with-a-gap", WAITS[3:9])
    page.goto(f"{site}#/runs/run-with-a-gap")
    expect(page.get_by_text("Older events are no longer kept")).to_be_visible()
    expect(row(page, "get_order 0.0")).to_be_visible()


def test_whoever_may_not_look_is_told_so_under_any_prefix(desk: Client, look: Any) -> None:
    def refuse() -> None:
        raise HTTPException(403, "ask your administrator for the role runs")

    app = FastAPI()
    app.include_router(create_router(desk, principal=refuse), prefix="/ops/agents")
    with serving(app) as url:
        visit = look(f"{url}/ops/agents/")
        page = visit.page
        expect(page.get_by_role("heading", name="Runs")).to_be_visible()
        expect(page.get_by_role("alert")).to_contain_text("ask your administrator")
        page.goto(f"{url}/ops/agents/#/runs/run-of-others")
        expect(page.get_by_role("heading", name="Not yours to see")).to_be_visible()
        expect(page.get_by_text("ask your administrator for the role runs")).to_be_visible()
        assert {path for path in visit.paths() if not path.startswith("/ops/agents/")} == set()
        visit.may_be_refused = True


# --- for everybody -----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_on_a_phone_in_both_schemes(
    desk: Client, site: str, look: Any, scheme: str
) -> None:
    name = "a_tool_with_a_name_that_is_longer_than_any_phone_is_wide"
    start_run(desk.store, "run-on-a-phone", [turn(ORDER, (name, {}), REFUND)])
    start_run(desk.store, "run-that-failed", [turn(("get_order", {"order_id": "A009"})), "no"])
    start_run(desk.store, "run-that-waited", [turn(ORDER, REFUND)])
    tell_events(desk.store, "run-that-waited", WAITS)
    visit = look(f"{site}#/runs/run-on-a-phone", viewport=PHONE, color_scheme=scheme)
    page = visit.page
    row(page, "get_order 0.0").click()
    expect(page.get_by_role("region", name="Result")).to_be_visible()
    for address in (None, "#/runs/run-that-failed", "#/runs/run-that-waited", "#/"):
        if address:
            page.goto(site + address)
            expect(page.locator(".badge").first).to_be_visible()
        assert visit.width_over() == 0
        weak = [each for each in page.evaluate(CONTRASTS) if each[1] < 4.5]
        assert weak == []


def test_the_keyboard_alone_reaches_and_does_everything(desk: Client, site: str, look: Any) -> None:
    start_run(desk.store, "run-by-keyboard", [turn(ORDER, ORDER, REFUND)])
    page = look(f"{site}#/runs/run-by-keyboard").page
    expect(row(page, "get_order 0.1")).to_contain_text("✓")

    met: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            """() => {
              const at = document.activeElement;
              if (at === document.body) return ["the end", ""];
              const shown = at.matches("input[type=radio]") ? at.nextElementSibling : at;
              const name = at.querySelector("[data-part=name]")?.innerText;
              return [name || at.ariaLabel || at.innerText || at.name,
                      getComputedStyle(shown).outlineStyle];
            }"""
        )
        met.append(name)
        assert outline != "none", f"nobody sees that the focus is on {met[-1]}"
    wanted = ["Skip to the content", "Celeriac", "All runs", "Cancel run", "Goal", "Arguments"]
    wanted += ["Approve", "Deny", "scale", "Close all steps", "Step 0", "get_order"]
    wanted += ["refund", "text", "Send", "About this run", "the end"]
    assert list(dict.fromkeys(met)) == wanted

    row(page, "Step 0").focus()
    page.keyboard.press("ArrowDown")
    expect(row(page, "get_order 0.0")).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Result")).to_contain_text("desk lamp")
    expect(row(page, "get_order 0.1")).to_have_attribute("aria-expanded", "true")
    page.get_by_role("button", name="Deny").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Deny")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Approve")).to_have_count(0)
    expect(page.get_by_role("heading", name="clerk")).to_be_focused()
    assert desk.store.read_decided("run-by-keyboard", "0.2") is not None
