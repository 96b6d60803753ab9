// What the page asks of the server: always beside itself, whatever prefix it is mounted under.

import { parseExactly } from "./dom.js";

// A refusal of the server, with its status and the line that names the cure.
export class Fault extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const runPath = (id) => `runs/${encodeURIComponent(id)}`;
const callPath = (id, call) => `${runPath(id)}/calls/${encodeURIComponent(call)}`;

async function ask(path, options = {}) {
  const response = await fetch(path, { cache: "no-store", ...options });
  const text = await response.text();
  if (!response.ok) throw new Fault(response.status, readMessage(text, response.status));
  return { body: parseExactly(text), at: Date.parse(response.headers.get("date")) };
}

// An application that the page is mounted in may refuse in words of its own.
function readMessage(text, status) {
  try {
    const body = JSON.parse(text);
    const found = body.error?.message ?? body.detail;
    if (typeof found === "string") return found;
  } catch {
    // Not JSON: a proxy's page, of which the status says enough.
  }
  return `The server refused: status ${status}.`;
}

export async function fetchRuns(filters) {
  const given = Object.entries(filters).filter(([, value]) => value);
  return (await ask(`runs?${new URLSearchParams(given)}`)).body;
}

// The run's record with how the server's clock stands to this one: events have the server's times.
export async function fetchRun(id) {
  const { body, at } = await ask(runPath(id));
  return { ...body, ...body.info, ahead: at ? at - Date.now() : 0 };
}

export const fetchCall = async (id, call) => (await ask(callPath(id, call))).body;

const ACTIONS = {
  cancel: ({ reason }) => ["cancel", reason ? { reason } : {}],
  send: ({ text }) => ["send", { text }],
  reply: ({ call, text }) => ["reply", { call, text }],
  approve: ({ call, digest }) => [`calls/${encodeURIComponent(call)}/approve`, { digest }],
  deny: ({ call, ...given }) => [`calls/${encodeURIComponent(call)}/deny`, given],
};

// `key` makes a repeat of the same action, after an answer that was lost, no second one.
export async function act(id, name, given) {
  const [path, body] = ACTIONS[name](given);
  const headers = { "Content-Type": "application/json" };
  if (given.key) headers["Idempotency-Key"] = given.key;
  await ask(`${runPath(id)}/${path}`, { method: "POST", headers, body: JSON.stringify(body) });
}

// Hands over each event once and in order, over lost connections, until the run has ended or the
// function that it answers is called. `onState` is told live, lost and ended, `onRefused` a Fault.
export function followEvents(id, after, { onEvent, onState, onRefused, isOver }) {
  let source;
  let timer;
  let last = after;

  function connect() {
    const from = last ? `?after=${encodeURIComponent(last)}` : "";
    source = new EventSource(`${runPath(id)}/events${from}`);
    source.onopen = () => onState("live");
    source.onmessage = ({ data }) => {
      const event = JSON.parse(data);
      last = event.id;
      onEvent(event);
    };
    source.onerror = () => {
      // The server ends the stream when the run has ended; a browser would ask again for ever.
      source.close();
      if (!isOver()) timer = setTimeout(look, 1000);
      onState(isOver() ? "ended" : "lost");
    };
  }

  // An EventSource doesn't say why it was refused.
  async function look() {
    try {
      await ask(runPath(id));
    } catch (error) {
      if (error instanceof Fault && error.status < 500) onRefused(error);
      else timer = setTimeout(look, 2000);
      return;
    }
    connect();
  }

  connect();
  return () => {
    clearTimeout(timer);
    source.close();
  };
}
