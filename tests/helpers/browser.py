"""Headless Chromium for tests of pages; what it complains of and asks the network for is kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# without its background services it asks no server of its maker for anything; --no-sandbox: root may start it
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Pages:
    """Opens files; `complaints` and `requests` are what all pages together said and asked for."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def open(
        self, path: Path, *, width: int = 1366, height: int = 768, scheme: str = "light", touch: bool = False
    ) -> Any:
        page = self._browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=touch, is_mobile=touch
        )
        page.set_default_timeout(60_000)
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(path.resolve().as_uri())
        return page


@contextmanager
def chromium() -> Iterator[Pages]:
    """A browser for as long as the context lasts. Fails with what to install where there is none."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path is not None, "no chromium here; install Debian's package: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS), timeout=120_000)
        try:
            yield Pages(browser)
        finally:
            browser.close()
