"""The page as somebody uses it, in Chromium."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from .browser import changes, click, find_browser, opened, ready, served, upload
from .conftest import noise

pytest.importorskip("gradio", reason="gradio is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")
BROWSER = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as address:
        yield address


@pytest.fixture
def page(url: str) -> Iterator[Any]:
    assert BROWSER is not None
    with opened(BROWSER) as page:
        yield page


def test_a_visit(page: Any, url: str, tmp_path: Path) -> None:
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    ready(page, url)

    # A click on a patch: another row in both models.
    caption = page.locator("#left-caption")
    assert "Layer 1 of 5, head 1 of 2" in caption.inner_text()
    changes(page, "right-heat", lambda: click(page, 0.7, 0.3))
    first = page.locator("#right-heat img").get_attribute("src")

    # Clicks that come before the answer: the last one counts.
    for across in (0.1, 0.4, 0.9, 0.7):
        click(page, across, 0.3)
    page.wait_for_timeout(3000)  # and then as long as a busy machine needs
    page.wait_for_function(
        "first => document.querySelector('#right-heat img').getAttribute('src') == first", arg=first
    )

    # Sliders: another layer, another resolution.
    changes(page, "left-heat", lambda: page.locator("#layer input[type=range]").press("ArrowRight"))
    page.wait_for_selector("#left-caption:has-text('Layer 2 of 5')")
    page.locator("#times input[type=range]").press("ArrowRight")
    page.wait_for_selector("#left-predicted:has-text('48 x 48 pixels, trained at 32 x 32')")

    # What if: another inverse, in maps and convergence.
    page.locator("#iters input[type=range]").press("ArrowRight")
    page.wait_for_selector("#left-caption:has-text('WHAT IF 1 step.')")
    page.locator("#inverse input").click()
    page.get_by_role("option", name="newton").click()
    page.wait_for_selector("#left-caption:has-text('WHAT IF newton, 1 step.')")
    page.wait_for_selector("#left-convergence canvas, #left-convergence svg")

    # Files: a bad one, one of too many pixels, one that is too large, a good one.
    (tmp_path / "notes.png").write_text("not an image")
    upload(page, tmp_path / "notes.png")
    message = page.locator("#message").get_by_role("textbox")
    message.wait_for()
    assert message.input_value().startswith("Refused: notes.png cannot be read as an image")
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    upload(page, tmp_path / "bomb.png")
    page.wait_for_function(
        "() => document.querySelector('#message textarea, #message input').value.startsWith("
        "'Refused: bomb.png cannot be read as an image: it has far more pixels')"
    )
    (tmp_path / "heavy.png").write_bytes(bytes(10 * 2**20 + 1))
    upload(page, tmp_path / "heavy.png")
    page.get_by_text("exceed the maximum allowed size of 10").first.wait_for()
    noise(3).image.save(tmp_path / "noise.png")
    changes(page, "patch", lambda: upload(page, tmp_path / "noise.png"))
    message.wait_for(state="hidden")

    assert not errors
    outside = {address for address in asked if not address.startswith((url, "data:", "blob:"))}
    assert not outside
