"""The page: it is built without a network, and says so if it cannot be served."""

import gc
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from softmaxfree.lab.explore.answers import place_of, taken
from softmaxfree.lab.explore.uploads import Inbox, Photos
from softmaxfree.lab.explore.view import Asked, View
from softmaxfree.lab.figures.subject import Subject

from .conftest import noise


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture
def page() -> Iterator[Any]:
    """The module; event loops that Gradio leaves open are closed before other tests run."""
    pytest.importorskip("gradio", reason="gradio is not installed")
    from softmaxfree.lab.explore import page

    yield page
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_is_built_of_what_is_here(page: Any, view: View) -> None:
    blocks = page.build(view)
    config = str(blocks.get_config_file())
    for name in ("patch", "left-heat", "right-heat", "layer", "head", "times", "inverse"):
        assert f"'{name}'" in config
    assert "what if: normalisation" in config
    kinds = {
        part["props"].get("elem_id"): part["type"]
        for part in blocks.get_config_file()["components"]
    }
    assert kinds["left-convergence"] == "nativeplot"  # drawn in the page's colours, light or dark
    theme = page._theme()
    assert not theme._stylesheets
    assert not any(function.api_visibility == "public" for function in blocks.fns.values())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_models_that_the_user_gave_are_chosen(page: Any, models: dict[str, Subject]) -> None:
    names = {"left-model": "SOFT (runs/mine)", "right-model": "SOFT++ (digits)"}
    found = {"SOFT++ (digits)": models["softpp"], "softmax (digits)": models["softmax"]}
    blocks = page.build(View(found | {"SOFT (runs/mine)": models["soft"]}, {"noise": noise(0)}))
    props = [part["props"] for part in blocks.get_config_file()["components"]]
    assert {p["elem_id"]: p["value"] for p in props if p.get("elem_id") in names} == names


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_each_picture_has_one_event_that_draws_it(page: Any, view: View) -> None:
    """Of several that run at once the one that was asked for first may answer last, and stay."""
    config = page.build(view).get_config_file()
    names = {part["id"]: part["props"].get("elem_id") for part in config["components"]}
    drawing: dict[str, list[str]] = {}
    for event in config["dependencies"]:
        for output in event["outputs"]:
            drawing.setdefault(names[output] or "", []).append(event["trigger_mode"])
    parts = ("heat", "landmarks", "atlas", "caption", "convergence", "label", "predicted")
    for name in ("patch", *(f"{side}-{part}" for side in ("left", "right") for part in parts)):
        assert drawing[name] == ["always_last"], name


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_addresses_that_cannot_be_listened_on(
    page: Any, taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from softmaxfree.cli import main

    for options, sentence in (
        (["--port", str(taken_port)], f"127.0.0.1, port {taken_port} (address already in use)"),
        (["--port", "70000"], "--port must be from 0 to 65535, got 70000"),
        (["--port", "0", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
    ):
        with pytest.raises(SystemExit):
            main(["explore", *options])
        told = capsys.readouterr().err
        assert sentence in told
        assert told.count("\n") == 1


def test_users_share_the_cores(page: Any) -> None:
    before = torch.get_num_threads()
    try:
        for threads, expected in ((1, 1), (2, 1), (8, 4)):
            torch.set_num_threads(threads)
            page._share_cores()
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_a_file_is_taken_or_refused_and_gone_in_either_case(tmp_path: Path) -> None:
    path, files, photos = tmp_path / "file.png", set[str](), Photos([noise(0)])
    inbox = Inbox(files, set)
    noise(1).image.save(path)
    files.add(str(path))
    key, refusal = taken(str(path), "before", inbox, photos)
    assert (photos.get(key), refusal) == (noise(1)._replace(name="file.png"), "")
    assert not path.exists()
    path.write_text("no image")
    files.add(str(path))
    key, refusal = taken(str(path), "before", inbox, photos)
    assert key == "before"
    assert refusal.startswith(
        "Refused: file.png cannot be read as an image: it does not begin as PNG"
    )
    assert not path.exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_visitor_whose_session_has_ended_is_told(page: Any, view: View) -> None:
    import gradio as gr

    blocks = page.build(view)
    for name in ("maps", "predictions", "curves_of"):
        (function,) = [f.fn for f in blocks.fns.values() if f.name == name]
        with pytest.raises(gr.Error, match="Your session has ended"):
            function(*Asked(left="softpp", right="softmax"))


def test_places() -> None:
    assert place_of([100, 300]) == (0.75, 0.25)
    assert place_of([-3, 1000]) == (1, 0)
