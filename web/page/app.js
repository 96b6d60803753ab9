// The run page: which view the address asks for, and what all views share.

import { el } from "./dom.js";
import { showList } from "./list.js";
import { showRun } from "./run.js";

const main = document.getElementById("main");
const link = document.getElementById("link");
const said = document.getElementById("said");

const shell = {
  // How the page is connected: live, lost, ended or off.
  setLink(state, text) {
    if (link.dataset.state === state && link.textContent === text) return;
    link.dataset.state = state;
    link.textContent = text;
  },
  // What a screen reader says of a change.
  say(text) {
    said.textContent = text;
  },
  // Whoever comes from another view begins at the heading of this one.
  focusHeading() {
    if (moved) main.querySelector("h1").focus({ preventScroll: true });
  },
  // In place of a view that can't be shown.
  showState(title, text) {
    document.title = `${title} · Celeriac`;
    const heading = el("h1", { tabindex: "-1" }, title);
    const back = el("p", {}, el("a", { href: "#/" }, "All runs"));
    main.replaceChildren(el("section", { class: "state" }, heading, el("p", {}, text), back));
    shell.focusHeading();
  },
};

let leave = () => {};
let moved = false;

function route() {
  leave();
  shell.setLink("off", "");
  const [path, query] = location.hash.slice(1).split("?");
  const run = /^\/runs\/([\w.~-]+)$/.exec(path);
  if (run) {
    leave = showRun(main, run[1], shell);
  } else if (path === "" || path === "/") {
    leave = showList(main, new URLSearchParams(query), shell);
  } else {
    leave = () => {};
    shell.showState("No such page", "The address names neither the list nor a run.");
  }
  scrollTo(0, 0);
}

// The link past the header must not look like a way to another view.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", () => {
  moved = true;
  route();
});
route();
