// A run as steps and calls over time: made from its events alone, and drawn as bars.

import { duration, el, fill, part, plural, reveal, revealTurns, setText, since } from "./dom.js";

// What a bar says. The order is that of the legend.
const KINDS = {
  queued: "in the queue",
  model: "waiting for the model",
  slot: "waiting for a slot",
  approval: "waiting for approval",
  reply: "waiting for a reply",
  retry: "waiting to try again",
  turn: "waiting for its turn",
  tool: "tool at work",
};
const WAITS = { LIMIT: "slot", QUESTION: "reply", CONVERSATION: "turn" };

// Runs of more steps than this start with all but the newest of them closed.
const MANY_STEPS = 30;
const NEWEST = 3;

const UNITS = [1, 2, 5, 10, 20, 50, 100, 200, 500].concat(
  [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200, 86_400].map(
    (seconds) => seconds * 1000,
  ),
);

export class Timeline {
  // `open(row)` is asked for the details of a call when somebody wants to see them.
  constructor(root, { created, steps, open }) {
    this.created = created * 1000;
    this.root = root;
    this.known = steps;
    this.open = open;
    this.steps = new Map();
    this.calls = new Map();
    this.used = new Set();
    this.ended = null;
    this.last = 0; // of all events so far
    this.idle = 0; // since when nothing is known to wait or to work
    this.text = "";
    this.textOf = "";
    this.list = part(root, "steps");
    this.axis = part(root, "axis");
    this.legend = part(root, "legend");
    this.changed = new Set();
    this._bindButtons();
    this.list.addEventListener("keydown", moveFocus);
  }

  // --- what happened --------------------------------------------------------------------------

  add(event) {
    const at = event.at * 1000 - this.created;
    this.last = Math.max(this.last, at);
    const handle = this[`_on_${event.type.replace(".", "_")}`];
    if (handle) handle.call(this, event, at);
  }

  _on_run_created(event, at) {
    this._begin(this._step(0), "queued", at);
  }

  _on_step_started(event, at) {
    const step = this._step(event.step);
    if (!step.spans.length) this._begin(step, "queued", this.idle);
    this._begin(step, "model", at);
    this.text = "";
  }

  _on_model_answered(event, at) {
    const step = this._step(event.step);
    this._end(step, at);
    step.asked = event.data.calls ?? 0;
    this.idle = at;
    this._queueNext(step, at);
  }

  // Once the calls of a step are done, the next one waits for a worker: it is shown from then on.
  _queueNext(step, at) {
    const isDone = step.asked && step.calls.every((call) => call.result);
    if (isDone && step.calls.length >= step.asked && this.ended === null) {
      this._begin(this._step(step.number + 1), "queued", at);
    }
  }

  _on_model_delta({ step, data }) {
    const source = `${step} ${data.attempt} ${data.exchange}`;
    this.text = source === this.textOf ? this.text + data.text : data.text;
    this.textOf = source;
  }

  _on_run_waiting(event, at) {
    const kind = WAITS[event.data.reason] ?? "retry";
    if (event.call != null) {
      this._begin(this._call(event, "ask_user"), kind, at);
      return;
    }
    const known = this._step(event.step ?? Math.max(0, ...this.steps.keys()));
    this._begin(known.asked === undefined ? known : this._step(known.number + 1), kind, at);
  }

  _on_call_queued(event, at) {
    this._begin(this._call(event, event.data.tool), "queued", at);
  }

  _on_approval_requested(event, at) {
    this._begin(this._call(event, event.data.tool), "approval", at);
  }

  _on_approval_decided(event, at) {
    this._begin(this._call(event), "queued", at);
  }

  _on_call_started(event, at) {
    this._begin(this._call(event), "tool", at);
  }

  _on_call_waiting(event, at) {
    const failed = Boolean(event.data.error);
    this._begin(this._call(event), WAITS[event.data.reason] ?? "retry", at, failed);
  }

  _on_call_progress(event) {
    const call = this._call(event);
    call.progress = event.data;
    this.changed.add(call);
  }

  _on_call_finished(event, at) {
    const call = this._call(event, event.data.tool);
    this._end(call, at, !event.data.ok);
    call.result = event.data;
    call.progress = null;
    this.idle = at;
    if (call.parts.row.getAttribute("aria-expanded") === "true") this._open(call);
    this._queueNext(call.step, at);
  }

  _on_run_message(event, at) {
    this._note(at, `Somebody sent a message of ${plural(event.data.chars ?? 0, "character")}`);
  }

  _on_run_recovered(event, at) {
    this._note(at, "A worker died; another took the step over");
  }

  _on_budget_warning(event, at) {
    this._note(at, `Four fifths used of ${Object.keys(event.data).join(", ")}`);
  }

  _on_gap(event, at) {
    this._note(at, "Older events are no longer kept: what is shown has a gap here", "gap");
  }

  _on_run_resumed(event, at) {
    this.ended = null;
    this.idle = at;
    this._note(at, "The run was taken up again");
  }

  _on_run_finished(event, at) {
    this.ended = at;
    for (const row of [...this.steps.values(), ...this.calls.values()]) this._end(row, at);
    this._dropUnbegun();
  }

  // A step that was to come and never did is none.
  _dropUnbegun() {
    const last = [...this.steps.values()].at(-1);
    const begun = last?.calls.length || last?.spans.some((span) => span.kind !== "queued");
    if (!last?.number || begun) return;
    last.element.remove();
    this.steps.delete(last.number);
    this.changed.delete(last);
  }

  // --- rows and their spans ---------------------------------------------------------------------

  _step(number) {
    const found = this.steps.get(number);
    if (found) return found;
    const step = { number, spans: [], calls: [], element: fill("step-template") };
    step.parts = rowParts(step.element);
    setText(step.parts.name, `Step ${number}`);
    step.parts.row.addEventListener("click", () => this._toggle(step, step.closed));
    step.closed = this.known > MANY_STEPS && number < this.known - NEWEST;
    this.steps.set(number, step);
    this.list.append(step.element);
    this._toggle(step, !step.closed);
    return step;
  }

  _call(event, name) {
    const found = this.calls.get(event.call);
    if (found) {
      if (name && !found.name) found.name = name;
      return found;
    }
    const step = this._step(event.step ?? Number(event.call.split(".")[0]));
    const call = { id: event.call, name: name ?? "", step, spans: [] };
    call.element = fill("call-template");
    call.parts = rowParts(call.element);
    call.parts.row.addEventListener("click", () => this._show(call));
    step.calls.push(call);
    step.element.querySelector("ol").append(call.element);
    this.calls.set(event.call, call);
    step.parts.row.setAttribute("aria-expanded", String(!step.closed));
    this.changed.add(step);
    return call;
  }

  _begin(row, kind, at, failed = false) {
    this._end(row, at, failed);
    row.spans.push({ kind, from: at, to: null });
    this.used.add(kind);
  }

  _end(row, at, failed = false) {
    const open = row.spans.at(-1);
    if (open && open.to === null) {
      open.to = at;
      open.failed = failed && (open.kind === "tool" || open.kind === "model");
    }
    this.changed.add(row);
    if (row.step) this.changed.add(row.step);
  }

  _note(at, text, kind = "") {
    const where = [...this.steps.values()].at(-1)?.element ?? this.list;
    const when = el("span", { class: "when" }, `at ${duration(at)}`);
    const note = el("p", { class: `note ${kind}` }, when, ` ${text}`);
    if (where === this.list) this.list.before(note);
    else where.append(note);
  }

  // --- drawing ----------------------------------------------------------------------------------

  // `now` is milliseconds since the run was created.
  draw(now) {
    const end = this.ended ?? Math.max(now, this.last);
    for (const row of this.changed) this._drawRow(row, end);
    if (this.changed.size) this._drawLegend();
    this.changed.clear();
    if (this.ended === null) this._drawOpenRows(end);
    this._drawAxis(end);
  }

  _drawRow(row, end) {
    const { track } = row.parts;
    const bars = row.spans.filter((span) => span.to === null || span.to - span.from >= 1);
    const wanted = row.calls?.length ? [hull(row), ...bars] : bars;
    while (track.children.length > wanted.length) track.lastChild.remove();
    wanted.forEach((span, at) => {
      drawBar(track.children[at] ?? track.appendChild(el("span")), span);
    });
    this._drawState(row, end);
    if (row.step) this._base(row.step);
    else this._base(row);
  }

  _drawState(row, end) {
    const state = row.step ? describeCall(row, end) : describeStep(row, end);
    const { name, outcome, spoken } = row.parts;
    row.element.dataset.state = state.word;
    setText(outcome, state.text);
    setText(spoken, state.spoken);
    if (!row.step) return;
    setText(name, reveal(row.name || "call"));
    setText(row.parts.id, row.id);
    drawProgress(row);
  }

  _drawOpenRows(end) {
    for (const row of [...this.steps.values(), ...this.calls.values()]) {
      if (row.spans.at(-1)?.to === null) this._drawState(row, end);
    }
  }

  _drawLegend() {
    const kinds = Object.keys(KINDS).filter((kind) => this.used.has(kind));
    if (this.legend.children.length === kinds.length) return;
    this.legend.replaceChildren(
      ...kinds.map((kind) =>
        el("li", {}, el("span", { class: `bar ${kind}`, "aria-hidden": "true" }), KINDS[kind]),
      ),
    );
  }

  // Bars are placed by CSS from these numbers, so that time going on changes only them.
  _drawAxis(end) {
    const perStep = this.root.dataset.scale === "step";
    const lengths = [...this.steps.values()].map((step) => stepEnd(step, end) - stepStart(step));
    const span = Math.max(perStep ? Math.max(0, ...lengths) : end, 10);
    this.root.style.setProperty("--span", span);
    this.root.style.setProperty("--now", end);
    const most = this.axis.clientWidth < 400 ? 4 : 8;
    const unit = UNITS.find((each) => span / each <= most) ?? span / most;
    const marks = [];
    for (let at = 0; at <= span; at += unit) marks.push(at);
    if (this.axis.dataset.marks !== `${unit} ${marks.length}`) {
      this.axis.dataset.marks = `${unit} ${marks.length}`;
      this.axis.replaceChildren(...marks.map((at) => tick(at, at / span > 0.94)));
    }
    this.root.style.setProperty("--unit", unit);
  }

  _base(step) {
    step.element.style.setProperty("--base", stepStart(step));
  }

  _bindButtons() {
    const scale = part(this.root, "scale");
    scale.addEventListener("change", (event) => {
      this.root.dataset.scale = event.target.value;
      this.draw(this.last);
    });
    part(this.root, "fold").addEventListener("click", () => {
      const closed = [...this.steps.values()].some((step) => step.closed);
      for (const step of this.steps.values()) this._toggle(step, closed);
    });
  }

  _toggle(step, open) {
    step.closed = !open;
    if (step.calls.length) step.parts.row.setAttribute("aria-expanded", String(open));
    step.element.querySelector("ol").hidden = !open;
    const some = [...this.steps.values()].some((each) => each.closed);
    setText(part(this.root, "fold"), some ? "Open all steps" : "Close all steps");
  }

  _show(call) {
    const open = call.parts.row.getAttribute("aria-expanded") !== "true";
    call.parts.row.setAttribute("aria-expanded", String(open));
    call.element.querySelector(".details").hidden = !open;
    if (open) this._open(call);
  }

  _open(call) {
    this.open(call, call.element.querySelector(".details"));
  }
}

const rowParts = (element) => ({
  row: element.querySelector(".row"),
  ...Object.fromEntries(
    [...element.querySelectorAll("[data-part]")].map((each) => [each.dataset.part, each]),
  ),
});

const stepStart = (step) => step.spans[0]?.from ?? step.calls[0]?.spans[0]?.from ?? 0;

const rowEnd = (row, end) => {
  const last = row.spans.at(-1);
  return last ? (last.to ?? end) : 0;
};

const stepEnd = (step, end) => Math.max(...[step, ...step.calls].map((row) => rowEnd(row, end)));

// A line under the step's own bars, from the start of its first call to the end of its last.
function hull(step) {
  const spans = step.calls.flatMap((call) => call.spans);
  const isOpen = spans.some((span) => span.to === null);
  return {
    kind: "hull",
    from: Math.min(...spans.map((span) => span.from)),
    to: isOpen ? null : Math.max(...spans.map((span) => span.to)),
  };
}

function drawBar(bar, span) {
  const open = span.to === null;
  bar.className = `bar ${span.kind}${open ? " open" : ""}${span.failed ? " failed" : ""}`;
  bar.style.setProperty("--from", span.from);
  if (open) bar.style.removeProperty("--to");
  else bar.style.setProperty("--to", span.to);
  if (KINDS[span.kind]) {
    bar.title = open ? KINDS[span.kind] : `${KINDS[span.kind]}: ${duration(span.to - span.from)}`;
  }
}

function tick(at, isLast) {
  const says = at ? duration(at).replace(".0 ", " ") : "0";
  const made = el("span", { class: isLast ? "tick last" : "tick" }, says);
  made.style.setProperty("--from", at);
  return made;
}

function drawProgress(call) {
  const bar = call.parts.progress;
  bar.hidden = !call.progress;
  if (!call.progress) return;
  const { done, total, note } = call.progress;
  const meter = bar.querySelector("progress");
  if (total) {
    meter.max = total;
    meter.value = done ?? 0;
  } else {
    meter.removeAttribute("value");
  }
  const far = total ? `${done} of ${total}` : done != null ? `${done}` : "";
  setText(bar.querySelector("span"), revealTurns([far, note].filter(Boolean).join(" · ")));
}

// How long a row was in each kind of span, in words.
function sumUp(row, end) {
  const sums = new Map();
  for (const { kind, from, to } of row.spans) {
    sums.set(kind, (sums.get(kind) ?? 0) + (to ?? end) - from);
  }
  return [...sums]
    .filter(([, ms]) => ms >= 1)
    .map(([kind, ms]) => `${KINDS[kind]} ${duration(ms)}`)
    .join(", ");
}

const waitText = ({ kind, from }, end) => ({
  word: kind,
  text: `${KINDS[kind]} · ${since(end - from)}`,
  spoken: KINDS[kind],
});

function describeStep(step, end) {
  const open = step.spans.at(-1);
  const took = duration(stepEnd(step, end) - stepStart(step));
  const calls = step.calls.length ? plural(step.calls.length, "call") : "";
  if (open?.to === null) return waitText(open, end);
  const failed = step.calls.filter((call) => call.result && !call.result.ok).length;
  const text = [calls, failed ? `${failed} failed` : "", took].filter(Boolean).join(" · ");
  return { word: "done", text, spoken: `${text}; ${sumUp(step, end)}` };
}

function describeCall(call, end) {
  const open = call.spans.at(-1);
  if (!call.result && open?.to === null) {
    return waitText(open, end);
  }
  const took = call.spans.length ? duration(rowEnd(call, end) - call.spans[0].from) : "";
  const failed = call.result && !call.result.ok;
  const outcome = failed ? (call.result.error ?? "failed") : call.result ? "ok" : "open at the end";
  const sign = failed ? "✕" : call.result ? "✓" : "–";
  const shown = [outcome === "ok" ? "" : outcome, took].filter(Boolean).join(" · ");
  return {
    word: failed ? "failed" : call.result ? "ok" : "cut",
    text: `${sign} ${shown}`,
    spoken: [outcome, sumUp(call, end)].filter(Boolean).join("; "),
  };
}

// Up and down go from row to row, past rows that are closed.
function moveFocus(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || !event.target.matches(".row")) return;
  const rows = [...this.querySelectorAll(".row")].filter((row) => row.offsetParent);
  rows[rows.indexOf(event.target) + step]?.focus();
  event.preventDefault();
}
