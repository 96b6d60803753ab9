// One run: what it waits for, what it used, its answer, and its timeline, as its events come.

import { act, Fault, fetchCall, fetchRun, followEvents } from "./api.js";
import {
  cost,
  count,
  duration,
  el,
  fill,
  moment,
  parseExactly,
  part,
  plural,
  pretty,
  reveal,
  revealTurns,
  setText,
  since,
} from "./dom.js";
import { setBadge } from "./list.js";
import { Timeline } from "./timeline.js";

const DRAW_EVERY = 250;
const LOOK_AFTER = 400;
// Of a longer text, so much is shown until more is asked for.
const MOST_SHOWN = 20_000;
// Events after which the record tells something new.
const LOOK_AT = /^(run\.|approval\.|model\.answered|step\.started|call\.finished)/;

export function showRun(main, id, shell) {
  const view = new RunView(main, id, shell);
  view.start();
  return () => view.leave();
}

class RunView {
  constructor(main, id, shell) {
    Object.assign(this, { main, id, shell });
    this.left = false;
    this.asks = new Map();
    this.stopEvents = () => {};
    this.onVisible = () => (document.hidden ? this.stopEvents() : this.follow());
  }

  async start() {
    document.title = `Run ${this.id} · Celeriac`;
    try {
      this.run = await fetchRun(this.id);
    } catch (error) {
      if (!this.left) this.showRefused(error);
      return;
    }
    if (this.left) return;
    this.opened = this.now();
    this.root = fill("run-template");
    this.timeline = new Timeline(part(this.root, "timeline"), {
      created: this.run.created,
      steps: this.run.step + 1,
      open: (call, details) => this.showCall(call, details),
    });
    this.main.replaceChildren(this.root);
    this.shell.focusHeading();
    this.bindActions();
    this.drawRun();
    this.follow();
    this.timer = setInterval(() => this.draw(), DRAW_EVERY);
    document.addEventListener("visibilitychange", this.onVisible);
  }

  // The time by the server's clock.
  now() {
    return Date.now() + this.run.ahead;
  }

  leave() {
    this.left = true;
    this.stopEvents();
    clearInterval(this.timer);
    clearTimeout(this.looking);
    document.removeEventListener("visibilitychange", this.onVisible);
  }

  showRefused(error) {
    if (error instanceof Fault && error.status === 404) {
      this.shell.showState("No such run", `There is no run ${this.id}, or it is no longer kept.`);
    } else if (error instanceof Fault && error.status < 500) {
      this.shell.showState("Not yours to see", error.message);
    } else {
      this.shell.setLink("lost", "Connection lost");
      this.shell.showState("The server doesn't answer", "Trying again.");
      this.timer = setTimeout(() => this.left || this.start(), 2000);
    }
  }

  // --- what comes in ----------------------------------------------------------------------------

  follow() {
    this.stopEvents();
    this.stopEvents = followEvents(this.id, this.lastEvent, {
      onEvent: (event) => this.take(event),
      onState: (state) => this.setLink(state),
      isOver: () => this.timeline.ended !== null,
      onRefused: (error) => {
        this.leave();
        this.showRefused(error);
      },
    });
  }

  setLink(state) {
    const words = { live: "Live", lost: "Connection lost, trying again", ended: "Ended" };
    this.shell.setLink(state, words[state]);
    const fault = part(this.root, "fault");
    fault.hidden = state !== "lost";
    setText(fault, "The connection is lost: what you see may be old. Trying again.");
    if (state === "live") this.lookSoon();
  }

  take(event) {
    if (event.type !== "gap") this.lastEvent = event.id;
    this.timeline.add(event);
    this.undrawn = true;
    const news = event.at * 1000 > this.opened && tellNews(event);
    if (news) this.shell.say(news);
    if (LOOK_AT.test(event.type)) this.lookSoon();
  }

  // Usage and status are in the record, not in the events.
  lookSoon() {
    this.looking ??= setTimeout(async () => {
      this.looking = undefined;
      try {
        const run = await fetchRun(this.id);
        if (this.left) return;
        this.run = run;
        this.drawRun();
      } catch {
        // The events tell of a lost connection, and the next of them looks again.
      }
    }, LOOK_AFTER);
  }

  // --- drawing ----------------------------------------------------------------------------------

  draw() {
    const live = this.timeline.ended === null;
    if (!live && !this.undrawn) return;
    this.undrawn = false;
    const now = this.now() - this.run.created * 1000;
    this.timeline.draw(now);
    part(this.root, "nothing").hidden = this.timeline.steps.size > 0;
    if (live) this.drawMeters(now);
    this.drawOutcome();
  }

  drawRun() {
    const { run, root } = this;
    setText(part(root, "agent"), run.agent || "Run");
    setText(part(root, "id"), run.id);
    setBadge(part(root, "badge"), run);
    const over = run.stop_reason != null;
    part(root, "cancel").hidden = over;
    part(root, "say").hidden = over;
    this.drawMeta();
    this.drawAsks();
    const end = run.ended ? run.ended * 1000 : this.now();
    this.drawMeters(end - run.created * 1000);
    this.drawOutcome();
  }

  drawMeta() {
    const { run } = this;
    const meta = part(this.root, "meta");
    const said = JSON.stringify([run.ended, run.limits, run.goal]);
    if (meta.dataset.said === said) return;
    meta.dataset.said = said;
    meta.replaceChildren("Submitted ", moment(run.created));
    if (run.ended) meta.append(", ended after ", duration((run.ended - run.created) * 1000));
    if (run.after) {
      const before = el("a", { href: `#/runs/${encodeURIComponent(run.after)}` }, "the run before");
      meta.append(" · goes on from ", before);
    }
    showText(part(this.root, "goal"), run.goal ?? "");
    if (run.conversation) meta.append(" · conversation ", el("bdi", {}, reveal(run.conversation)));
    const about = { id: run.id, metadata: run.metadata, limits: run.limits };
    setText(part(this.root, "about-text"), pretty(about));
  }

  drawMeters(elapsed) {
    const { run, timeline } = this;
    const limits = run.limits ?? {};
    const steps = run.result?.steps ?? Math.max(run.step + 1, timeline.steps.size);
    const tokens = run.usage.total_tokens;
    const known = run.usage.known ? "" : " or more";
    setMeter(this.root, "Steps", steps, limits.max_steps, count);
    const called = Math.max(run.tool_calls, timeline.calls.size);
    setMeter(this.root, "Tool calls", called, limits.max_tool_calls, count);
    setMeter(this.root, "Tokens", tokens, limits.max_tokens, count, known);
    const allowed = (run.deadline - run.created) * 1000;
    setMeter(this.root, "Time", elapsed, allowed, run.ended ? duration : since);
    if (run.usage.cost != null || limits.max_cost != null) {
      setMeter(this.root, "Cost", run.usage.cost ?? 0, limits.max_cost, cost, known);
    }
  }

  drawOutcome() {
    const { run, timeline } = this;
    const { result } = run;
    const text = result ? null : timeline.text;
    const title = result ? outcomeTitle(result) : "Answer, as it comes";
    part(this.root, "outcome").hidden = !result && !text;
    if (!result && !text) return;
    setText(part(this.root, "outcome-title"), title);
    const error = part(this.root, "error");
    error.hidden = !result?.error;
    if (result?.error) {
      const limit = result.limit ? ` (limit: ${result.limit})` : "";
      setText(error, reveal(`${result.error.type}: ${result.error.message}${limit}`));
    }
    this.drawAnswer(result ? result.answer : text);
    this.drawEvidence(result?.evidence ?? []);
  }

  drawAnswer(answer) {
    const box = part(this.root, "answer");
    box.hidden = answer == null;
    if (answer == null) return;
    const text = typeof answer === "string" ? answer : pretty(answer);
    box.classList.toggle("data", typeof answer !== "string");
    if (this.answerShown === text) return;
    this.answerShown = text;
    showText(box, text);
  }

  drawEvidence(evidence) {
    const box = part(this.root, "evidence");
    box.hidden = evidence.length === 0;
    const list = part(this.root, "evidence-list");
    if (list.children.length === evidence.length) return;
    const title = `Rests on ${plural(evidence.length, "piece")} of evidence`;
    setText(part(this.root, "evidence-title"), title);
    list.replaceChildren(...evidence.map(makeEvidence));
  }

  // --- what waits for somebody ------------------------------------------------------------------

  drawAsks() {
    const { approvals, questions } = this.run;
    const wanted = new Map();
    for (const each of approvals) {
      wanted.set(`approval ${each.call_id}`, () => this.makeApproval(each));
    }
    for (const [call, text] of Object.entries(questions)) {
      wanted.set(`question ${call}`, () => this.makeQuestion(call, text));
    }
    for (const [key, card] of this.asks) {
      if (!wanted.has(key)) {
        this.asks.delete(key);
        this.removeAsk(card);
      }
    }
    for (const [key, make] of wanted) {
      if (this.asks.has(key)) continue;
      const card = make();
      this.asks.set(key, card);
      part(this.root, "asks").append(card);
    }
    part(this.root, "asks").hidden = this.asks.size === 0;
  }

  // Focus must not fall back to the top of the page with the button that was pressed.
  removeAsk(card) {
    const focused = card.contains(document.activeElement);
    const next = card.nextElementSibling ?? card.previousElementSibling;
    card.remove();
    if (focused) (next?.querySelector("button") ?? part(this.root, "agent")).focus();
  }

  // The digest goes with what is shown: other arguments than these aren't approved.
  makeApproval({ call_id: call, tool, arguments: given, digest, decide_by: until }) {
    const card = fill("approval-template");
    const name = reveal(tool);
    setText(part(card, "title"), `${name} waits for approval`);
    const late = until && new Date(until * 1000).toLocaleTimeString();
    setText(
      part(card, "hint"),
      late ? `Call ${call}, denied if nobody decides until ${late}` : `Call ${call}`,
    );
    part(card, "shown").append(textBox("Arguments", pretty(given)));
    const buttons = card.querySelector(".buttons");
    part(card, "approve").addEventListener("click", (event) =>
      this.do(event.target, buttons, "approve", { call, digest }),
    );
    part(card, "deny").addEventListener("click", async (event) => {
      const reason = await askReason(`Deny ${name}?`, "Why? The model reads it.", "Deny", true);
      if (reason) this.do(event.target, buttons, "deny", { call, reason, digest });
    });
    return card;
  }

  makeQuestion(call, text) {
    const card = fill("question-template");
    setText(part(card, "question"), revealTurns(text));
    card.addEventListener("submit", (event) => {
      event.preventDefault();
      const reply = card.elements.text.value.trim();
      const buttons = card.querySelector(".buttons");
      if (reply) this.do(event.submitter, buttons, "reply", { call, text: reply });
    });
    return card;
  }

  bindActions() {
    const { root } = this;
    part(root, "cancel").addEventListener("click", async (event) => {
      const why = "Why? It is kept with the run.";
      const reason = await askReason("Cancel this run?", why, "Cancel run");
      if (reason != null) this.do(event.target, part(root, "meta"), "cancel", { reason });
    });
    const say = part(root, "say");
    let sent = {};
    say.addEventListener("submit", async (event) => {
      event.preventDefault();
      const text = say.elements.text.value.trim();
      if (!text) return;
      // The same text again is the same message: the answer to the first may have been lost.
      if (sent.text !== text) sent = { text, key: `${this.id} ${Date.now()} ${Math.random()}` };
      if (await this.do(event.submitter, say, "send", sent)) {
        say.reset();
        sent = {};
        this.shell.say("Sent");
      }
    });
  }

  // One action, with its button held while it is on its way, and its refusal where it was asked.
  async do(button, place, name, given) {
    // A button that is disabled would lose the focus.
    if (button.ariaDisabled === "true") return false;
    button.ariaDisabled = "true";
    try {
      await act(this.id, name, given);
      clearError(place);
      this.lookSoon();
      return true;
    } catch (error) {
      showError(place, error);
      return false;
    } finally {
      button.ariaDisabled = "false";
    }
  }

  // --- a call -----------------------------------------------------------------------------------

  async showCall(call, details) {
    const ended = Boolean(call.result);
    if (details.dataset.whole === "yes") return;
    details.replaceChildren(el("p", { class: "hint" }, "Loading …"));
    try {
      const found = await fetchCall(this.id, call.id);
      details.replaceChildren(...callParts(call, found));
      details.dataset.whole = ended ? "yes" : "";
    } catch (error) {
      details.replaceChildren(el("p", { class: "alert", role: "alert" }, faultText(error)));
    }
  }
}

function tellNews({ type, step, call, data }) {
  if (type === "approval.requested") return `Call ${call}, ${data.tool}, waits for approval`;
  if (type === "run.waiting" && data.question) return "The model asks a question";
  if (type === "run.finished") return `The run has ended: ${data.stop_reason}`;
  if (type === "step.started") return `Step ${step} has begun`;
  return null;
}

const outcomeTitle = (result) =>
  result.ok ? "Answer" : `Ended: ${result.stop_reason.replaceAll("_", " ").toLowerCase()}`;

function setMeter(root, name, used, most, say, more = "") {
  const box = part(root, "meters");
  let meter = box.querySelector(`[data-name="${name}"]`);
  if (!meter) {
    meter = el("div", { class: "meter", "data-name": name });
    const id = `meter-${name.replace(" ", "-").toLowerCase()}`;
    const spoken = { role: "meter", "aria-labelledby": id, "aria-valuemin": 0 };
    meter.append(
      el("span", { class: "meter-name", id }, name),
      el("span", { class: "meter-text" }),
      el("span", { class: "meter-bar", ...spoken }, el("span")),
    );
    box.append(meter);
  }
  const bar = meter.querySelector(".meter-bar");
  const text = most == null ? `${say(used)}${more}` : `${say(used)}${more} of ${say(most)}`;
  setText(meter.querySelector(".meter-text"), text);
  bar.hidden = most == null;
  const share = most ? Math.min(1, used / most) : 0;
  bar.setAttribute("aria-valuemax", most ?? 0);
  bar.setAttribute("aria-valuenow", Math.min(used, most ?? used));
  bar.setAttribute("aria-valuetext", text);
  bar.firstChild.style.setProperty("--share", share);
  meter.dataset.level = share >= 1 ? "full" : share >= 0.8 ? "high" : "";
}

function makeEvidence(each) {
  const item = el("li", {}, el("b", { dir: "auto" }, reveal(each.source)));
  if (each.call_id) item.append(" ", el("span", { class: "call-id" }, each.call_id));
  if (each.text) item.append(el("p", { dir: "auto" }, revealTurns(each.text)));
  if (each.data != null) item.append(textBox("Data", pretty(each.data)));
  return item;
}

function callParts(call, found) {
  const parts = [];
  const facts = [`Call ${call.id}`];
  if (found.decided) facts.push(decisionText(found.decided));
  if (found.result) {
    facts.push(`attempt ${found.result.attempt}`, plural(found.result.output_chars, "character"));
    if (found.result.truncated) facts.push("cut for the model");
  }
  parts.push(el("p", { class: "hint", dir: "auto" }, reveal(facts.join(" · "))));
  parts.push(textBox("Arguments", pretty(parseExactly(found.decision.arguments))));
  if (found.result) {
    const { error } = found.result;
    const said = error && reveal(`${error.type}: ${error.message}`);
    if (said) parts.push(el("p", { class: "alert", dir: "auto" }, said));
    parts.push(textBox("Result", resultText(found.result)));
    const evidence = found.result.evidence.map(makeEvidence);
    if (evidence.length) parts.push(el("h3", {}, "Evidence"), el("ol", {}, ...evidence));
  } else {
    parts.push(el("p", { class: "hint" }, "It has no result yet."));
  }
  return parts;
}

function decisionText({ approved, by, reason }) {
  const who = by ? ` by ${by}` : "";
  return `${approved ? "approved" : "denied"}${who}${reason ? `: ${reason}` : ""}`;
}

// A tool's data where there is any, and otherwise what the model reads.
const resultText = (result) =>
  result.data != null && typeof result.data === "object" ? pretty(result.data) : result.content;

function textBox(title, text) {
  const box = el("pre", { tabindex: "0", role: "region", "aria-label": title });
  showText(box, text);
  return el("section", {}, el("h3", {}, title), box);
}

function showText(box, text) {
  text = revealTurns(text);
  box.replaceChildren(text.slice(0, MOST_SHOWN));
  if (text.length <= MOST_SHOWN) return;
  const says = `Show all ${count(text.length)} characters`;
  const more = el("button", { type: "button", class: "quiet" }, says);
  more.addEventListener("click", () => {
    box.replaceChildren(text);
    box.focus();
  });
  box.append("… ", more);
}

const faultText = (error) =>
  error instanceof Fault
    ? error.message
    : "The server doesn't answer. Try again: nothing is done twice.";

function clearError(place) {
  place.parentElement?.querySelectorAll(":scope > .refused").forEach((each) => each.remove());
}

function showError(place, error) {
  clearError(place);
  place.after(el("p", { class: "alert refused", role: "alert" }, faultText(error)));
}

// The reason that somebody gives; null where they think better of it.
function askReason(title, label, go, needed = false) {
  const dialog = fill("reason-template");
  setText(part(dialog, "title"), title);
  dialog.setAttribute("aria-label", title);
  setText(part(dialog, "label"), label);
  setText(part(dialog, "go"), go);
  setText(part(dialog, "stop"), "Back");
  const text = dialog.querySelector("textarea");
  text.required = needed;
  document.body.append(dialog);
  part(dialog, "stop").addEventListener("click", () => dialog.close());
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "go" ? text.value.trim() : null);
    });
  });
}
