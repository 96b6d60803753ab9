// Making elements, and saying sizes, times and durations. What a run holds becomes text nodes only.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

// A change of a text that says the same would be read aloud again, and lose a selection.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function fill(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

export function part(root, name) {
  return root.querySelector(`[data-part="${name}"]`);
}

const numbers = new Intl.NumberFormat("en");
const clock = { hour: "2-digit", minute: "2-digit", second: "2-digit" };
const day = { month: "short", day: "numeric", ...clock };
const moments = new Intl.DateTimeFormat(undefined, day);
const longAgo = new Intl.DateTimeFormat(undefined, { year: "numeric", ...day });

export const count = (value) => numbers.format(value);
export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;
export const cost = (value) => (value && value < 0.01 ? value.toPrecision(2) : value.toFixed(2));

// Milliseconds in words: 340 ms, 2.1 s, 3 min 20 s, 2 h 5 min, 3 d 4 h.
export function duration(ms) {
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  if (ms < 59_950) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return join(Math.floor(seconds / 60), "min", seconds % 60, "s");
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1440) return join(Math.floor(minutes / 60), "h", minutes % 60, "min");
  return join(Math.floor(minutes / 1440), "d", Math.floor((minutes % 1440) / 60), "h");
}

// The same for what still goes on, without a digit that nobody can read.
export const since = (ms) =>
  duration(ms < 10_000 ? ms : Math.floor(ms / 1000) * 1000).replace(".0 ", " ");

const join = (large, unit, small, smaller) =>
  small ? `${large} ${unit} ${small} ${smaller}` : `${large} ${unit}`;

export function moment(seconds) {
  const date = new Date(seconds * 1000);
  const says = date.getFullYear() === new Date().getFullYear() ? moments : longAgo;
  return el("time", { datetime: date.toISOString() }, says.format(date));
}

// Marks that turn the direction of text would show it as other than it is, and in arguments so
// would those that aren't seen at all: they are shown as the escapes that JSON has for them.
const TURNING = /[\u202a-\u202e\u2066-\u2069]/g;
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

const escape = (mark) => `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`;

// For prose, which may need some marks to be written right, and for data and names.
export const revealTurns = (text) => text.replace(TURNING, escape);
export const reveal = (text) => text.replace(UNSEEN, escape);

// JSON whose numbers stay as they were written where a browser would change them.
export function parseExactly(text) {
  const keep = (_, value, context) =>
    typeof value === "number" && isTooLong(context?.source) && JSON.rawJSON
      ? JSON.rawJSON(context.source)
      : value;
  return JSON.parse(text, keep);
}

// A fraction of 17 digits is what a browser's own number comes from; a whole one may not be.
const isTooLong = (source = "") => {
  const digits = source.replace(/e.*$/i, "").replace(/^[-0.]+|\D/g, "");
  const most = source.includes(".") ? 17 : 15;
  return digits.length > most && !Number.isSafeInteger(Number(source));
};

export const pretty = (value) => reveal(JSON.stringify(value, null, 2) ?? "");
