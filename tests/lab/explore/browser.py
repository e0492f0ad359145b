"""The page in a real browser, without a screen; `python -m tests.lab.explore.browser` draws it."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCREENSHOT = Path(__file__).parents[3] / "docs/figures/explore.png"
MOST_SECONDS = 300
"""To wait for anything; it takes a few where nothing else runs."""


def find_browser() -> str | None:
    """The system's, as its packages install it."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


@contextmanager
def served(*options: str) -> Iterator[str]:
    """The real command in a process of its own; gives the address that it prints."""
    with tempfile.TemporaryFile("w+") as errors:  # a pipe that nobody reads could fill up
        process = subprocess.Popen(
            [sys.executable, "-m", "softmaxfree", "explore", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "http://127.0.0.1:" not in line:
                process.terminate()
                process.wait()
                errors.seek(0)
                raise RuntimeError(f"no address in {line!r}: {errors.read()}")
            yield line.split()[2]
        finally:
            process.terminate()
            try:
                process.communicate(timeout=MOST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                raise


@contextmanager
def opened(browser: str) -> Iterator[Any]:
    """An empty page of the browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        try:
            page = chromium.new_page(viewport={"width": 1440, "height": 900})
            page.set_default_timeout(MOST_SECONDS * 1000)
            yield page
        finally:
            chromium.close()


def ready(page: Any, url: str) -> None:
    """Opens the address and waits for the last picture and for the predictions."""
    page.goto(url)
    page.wait_for_selector("#right-label .label-wrap, #right-label .confidence-set")
    for side in ("left", "right"):
        page.wait_for_selector(f"#{side}-heat img")
    place: Any = None
    while place != (place := page.locator("#patch img").bounding_box()):
        page.wait_for_timeout(500)  # a click would miss a picture that still moves


def changes(page: Any, name: str, action: Any) -> float:
    """Does something and waits until a picture is another one; returns the seconds it took."""
    before = page.locator(f"#{name} img").get_attribute("src")
    start = time.perf_counter()
    action()
    page.wait_for_function(
        "([name, before]) => { const image = document.querySelector(`#${name} img`);"
        "return image && image.getAttribute('src') != before && image.complete; }",
        arg=[name, before],
    )
    return time.perf_counter() - start


def click(page: Any, across: float, down: float) -> None:
    """On a patch, by its place."""
    image = page.locator("#patch img")
    box = image.bounding_box()
    image.click(position={"x": across * box["width"], "y": down * box["height"]})


def upload(page: Any, path: Path) -> None:
    with page.expect_file_chooser() as chooser:
        page.locator("#upload").click()
    chooser.value.set_files(path)


def main() -> None:
    browser = find_browser()
    if browser is None:
        raise SystemExit("there is no Chromium here; install it with: apt-get install chromium")
    with served(*sys.argv[1:]) as url, opened(browser) as page:
        ready(page, url)
        clicks = [
            changes(page, "right-heat", lambda place=place: click(page, place, 0.4))  # type: ignore[misc]
            for place in (0.2, 0.35, 0.65, 0.8)
        ]
        SCREENSHOT.parent.mkdir(exist_ok=True)
        page.mouse.move(0, 0)
        page.screenshot(path=SCREENSHOT, full_page=True)
    shown = ", ".join(f"{seconds:.2f}" for seconds in clicks)
    print(f"written: {SCREENSHOT}; clicks answered in {shown} s, in the browser")


if __name__ == "__main__":
    main()
