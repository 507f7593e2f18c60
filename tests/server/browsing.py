"""A real Chromium, and pages that remember everything that went wrong in them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 120_000
"""Milliseconds that a step may take on a busy machine."""


FAINT = """() => {
  const context = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1); context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
    return context.getImageData(0, 0, 1, 1).data;
  };
  const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, part, n) => {
    const value = colour[n] / 255;
    return sum + part * (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  }, 0);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = rgba(getComputedStyle(element).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  };
  const isText = (node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim();
  return [...document.querySelectorAll('body *')].filter((element) => {
    if (!element.offsetParent || element.disabled || ![...element.childNodes].some(isText)) return false;
    const [one, other] = [light(rgba(getComputedStyle(element).color)), light(behind(element))];
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05) < 4.5;
  }).map((element) => `${element.nodeName}.${element.className}: ${element.textContent.slice(0, 40)}`);
}"""
"""Visible texts with less contrast than the guidelines for accessible pages ask for."""


@contextmanager
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program, "the dashboard is looked at in a browser: apt-get install chromium, or make test"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS, timeout=PATIENCE)
        yield browser
        browser.close()


class Seen:
    """A page of the dashboard with its errors and requests."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(PATIENCE)
        self.page: Page = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", self._said)
        self.page.on("dialog", lambda dialog: self.wrong.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def _said(self, said: Any) -> None:
        # The browser reports every reply with an error status, also one that a test asks for.
        if said.type in ("error", "warning") and "Failed to load resource" not in said.text:
            self.wrong.append(said.text)

    def open(self, path: str = "") -> None:
        self.page.goto(f"{self.url}/dashboard{path}")

    def fits(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))

    def faint(self) -> list[str]:
        found: list[str] = self.page.evaluate(FAINT)
        return found

    def check(self) -> None:
        """Nothing went wrong, and nothing was asked of other sites."""
        assert self.wrong == []
        assert [url for url in self.asked if not url.startswith((self.url, "data:"))] == []
