"""A real browser for the tests of the run page: Chromium as the system has it, driven by clicks."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")

PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """One browser; without one the tests fail, since a page that nobody looked at isn't tested."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    assert path, "the run page is tested in Chromium: install it with make browser"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page in a window of its own, and what it did that nobody sees."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    may_be_refused: bool = False
    """Whether requests of it are meant to fail, which a browser notes as errors."""

    def faults(self) -> list[str]:
        """The errors and warnings that nobody meant to happen."""
        refused = "Failed to load resource" if self.may_be_refused else "\0"
        return [text for text in self.errors if refused not in text]

    def paths(self) -> list[str]:
        """The paths that were asked for, in order."""
        return [urlsplit(each.url).path for each in self.requests]

    def origins(self) -> set[str]:
        """The schemes and hosts that were asked."""
        parts = [urlsplit(each.url) for each in self.requests]
        return {f"{each.scheme}://{each.netloc}" for each in parts}

    def width_over(self) -> int:
        """By how many pixels the page is wider than its window."""
        size = "Math.max(0, document.documentElement.scrollWidth - innerWidth)"
        return int(self.page.evaluate(size))


@contextlib.contextmanager
def visit(browser: Browser, url: str, **options: Any) -> Iterator[Visit]:
    """Open an address; `options` are those of Playwright's `new_context`."""
    context = browser.new_context(**{"viewport": DESK, "locale": "en-GB", **options})
    context.set_default_timeout(10_000)
    try:
        made = Visit(context.new_page())
        made.page.on("request", lambda request: made.requests.append(request))
        made.page.on("pageerror", lambda error: made.errors.append(str(error)))

        def note(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                made.errors.append(message.text)

        made.page.on("console", note)
        made.page.goto(url)
        yield made
    finally:
        context.close()


CONTRASTS = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => {
      const share = v / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !element.checkVisibility({ visibilityProperty: true })) continue;
    if (element.closest(".unseen, :disabled, .skip")) continue;
    const style = getComputedStyle(element);
    const [one, two] = [light(parse(style.color)), light(ground(element))];
    const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    found.push([text.slice(0, 40), Math.round(ratio * 100) / 100]);
  }
  return found;
}"""
"""Each text that is seen, with the contrast of its colour to what is behind it."""
