// The list of runs: filters that the address keeps, pages, and a look every few seconds.

import { Fault, fetchRuns } from "./api.js";
import { cost, count, duration, fill, moment, part, plural, setText } from "./dom.js";

const LOOK_EVERY = 3000;
const STATUSES = ["queued", "running", "waiting", "finished"];
const STOP_REASONS = [
  "COMPLETED",
  "MAX_STEPS",
  "TIMEOUT",
  "CANCELLED",
  "ERROR",
  "BUDGET_EXHAUSTED",
  "REPEATED_ERROR",
  "PERMISSION_DENIED",
];
const FILTERS = ["status", "stop_reason", "agent", "id"];

export function showList(main, query, shell) {
  const root = fill("list-template");
  const form = part(root, "filters");
  addOptions(form.elements.status, STATUSES);
  addOptions(form.elements.stop_reason, STOP_REASONS);
  for (const name of FILTERS) form.elements[name].value = query.get(name) ?? "";
  main.replaceChildren(root);
  document.title = "Runs · Celeriac";
  shell.focusHeading();

  const rows = new Map();
  let page = query.get("page");
  let next = null;
  let looking = 0;
  let timer = 0;
  let left = false;

  async function look() {
    clearTimeout(timer);
    const mine = ++looking;
    try {
      const found = await fetchRuns({ ...readFilters(form), cursor: page });
      if (left || mine !== looking) return;
      shell.setLink("live", "Live");
      next = found.cursor;
      draw(root, rows, found.runs);
      showEmpty(root, found.runs, form, page);
      part(root, "next").disabled = !next;
      part(root, "first").disabled = !page;
      part(root, "fault").hidden = true;
    } catch (error) {
      if (left || mine !== looking) return;
      showFault(root, error, shell);
    }
    if (!document.hidden) timer = setTimeout(look, LOOK_EVERY);
  }

  function go(where) {
    page = where;
    const kept = new URLSearchParams(readFilters(form));
    if (page) kept.set("page", page);
    history.replaceState(null, "", `#/${String(kept) ? `?${kept}` : ""}`);
    look();
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => go(null));
  form.addEventListener("reset", () => setTimeout(() => go(null)));
  part(root, "next").addEventListener("click", () => go(next));
  part(root, "first").addEventListener("click", () => go(null));
  const onVisible = () => document.hidden || look();
  document.addEventListener("visibilitychange", onVisible);
  look();

  return () => {
    left = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", onVisible);
  };
}

function addOptions(select, words) {
  for (const word of words) select.append(new Option(word, word));
}

function readFilters(form) {
  const given = FILTERS.map((name) => [name, form.elements[name].value.trim()]);
  return Object.fromEntries(given.filter(([, value]) => value));
}

// Rows stay the same elements, so that focus stays where it is while the list goes on.
function draw(root, rows, runs) {
  const list = part(root, "runs");
  runs.forEach((run, at) => {
    if (!rows.has(run.id)) rows.set(run.id, makeRow(run));
    const row = rows.get(run.id);
    updateRow(row, run);
    if (list.children[at] !== row) list.insertBefore(row, list.children[at] ?? null);
  });
  while (list.children.length > runs.length) {
    const gone = list.lastChild;
    rows.delete(gone.dataset.id);
    gone.remove();
  }
}

function makeRow(run) {
  const row = fill("run-row-template");
  row.dataset.id = run.id;
  row.querySelector("a").href = `#/runs/${encodeURIComponent(run.id)}`;
  setText(part(row, "id"), run.id);
  setText(part(row, "agent"), run.agent || "–");
  const created = moment(run.created);
  created.className = "figure";
  part(row, "created").replaceWith(created);
  return row;
}

function updateRow(row, run) {
  setBadge(part(row, "badge"), run);
  setText(part(row, "steps"), run.ended ? plural(run.step, "step") : `step ${count(run.step)}`);
  const price = run.usage.cost == null ? "" : ` · ${cost(run.usage.cost)}`;
  setText(part(row, "tokens"), `${count(run.usage.total_tokens)} tokens${price}`);
  setText(part(row, "took"), run.ended ? duration((run.ended - run.created) * 1000) : "not ended");
}

export function setBadge(badge, run) {
  const word = run.stop_reason ?? run.status;
  badge.dataset.word = word;
  setText(badge, word.replaceAll("_", " ").toLowerCase());
}

function showEmpty(root, runs, form, page) {
  const empty = part(root, "empty");
  empty.hidden = runs.length > 0;
  const filtered = page || Object.keys(readFilters(form)).length > 0;
  const none = "No runs yet. A run appears here when it is submitted.";
  setText(empty, filtered ? "No run fits these filters." : none);
}

function showFault(root, error, shell) {
  const lost = !(error instanceof Fault) || error.status >= 500;
  shell.setLink("lost", lost ? "Connection lost" : "Refused");
  const fault = part(root, "fault");
  fault.hidden = false;
  const old = "The server doesn't answer. What you see may be old; trying again.";
  setText(fault, lost ? old : error.message);
}
