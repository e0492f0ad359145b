"""`softmaxfree explore`: the page, its controls and the server."""

import functools
import os
import signal
import socket
import sys
import tempfile
import warnings
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import torch

from ...errors import UserError
from ...imports import Names, import_modules, needs
from ...ops.inverse import INVERSES
from ..figures.newton import METHODS

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
with needs("explore", "the explorer"):
    import gradio as gr
    import pandas as pd  # type: ignore[import-untyped]  # comes with gradio

    from .answers import MOST_TIMES, Answers, place_of, taken
    from .attended import ITERATIVE, OWN, STEPS
    from .drawing import FORMAT
    from .looks import Photo
    from .uploads import LIMITS, EndedError, Inbox, Photos
    from .view import NORMALIZE, TRAINED, View, available_models, example_photos

MOST_BYTES = LIMITS.bytes or 0

SESSIONS = 1000
"""Sessions that are remembered, about 130 kB each."""

USERS = 2
"""Users who are answered at the same time; others wait."""

INTRODUCTION = f"""
# What a patch attends to
Choose or upload an image, then **click a patch of it**: below each model is the row of its
attention matrix for this patch, in every layer and head. Bright is much; the cross is the patch.
Files may be {", ".join(LIMITS.formats[:-1])} or {LIMITS.formats[-1]}, of at most
{MOST_BYTES // 2**20} MB and {LIMITS.pixels // 10**6} million pixels, and stay on the machine that
runs this page.
"""

LINES = {method: METHODS[method][1] for method in ITERATIVE} | {"paper": "#888888", OWN: "#E69F00"}
"""Colours of the convergence that can be seen on a light page and on a dark one."""

PRIVATE = {"api_visibility": "private"}
"""Of events: the page has no interface for programs."""

FIXED: dict[str, Any] = {"show_label": False, "interactive": False, "buttons": []}
"""Of pictures that are shown and not edited."""

CSS = """
.titled { gap: 4px; }
#patch img, #left-heat img, #right-heat img { cursor: crosshair; }
"""


Side = namedtuple("Side", "model prediction predicted heat landmarks atlas caption convergence")
"""The components of one of the two models."""

Controls = namedtuple("Controls", "layer head times inverse iters normalize")
"""The controls beside the models, in the order of `Asked`."""

Parts = namedtuple("Parts", "photo place patch message upload examples controls left right")
"""All components of the page, and the state of a session: the image's key and the place."""


def explore(
    checkpoints: list[Path] | None = None,
    host: str = "127.0.0.1",
    port: int = 7860,
    modules: Names = None,
) -> None:
    """Serve a page for the browser that shows what every patch of an image attends to.

    Two models side by side, every layer and head, at several resolutions; the landmarks, the
    prediction, the convergence of the inverse. Prints the page's address; Ctrl-C ends it.
    Everything stays on this machine: nothing is downloaded or sent.

    Args:
        checkpoints: Trained weights to choose from, such as softpp_nano.cifar10 runs/mine, beside
            the models that come with the package.
        host: Address to listen on; any other than 127.0.0.1 lets other machines in.
        port: Port to listen on; 0 for any free port.
        modules: Python modules to import first, which register attentions of your own.
    """
    import_modules(modules)
    port = _free_port(host, port)
    _share_cores()
    warnings.simplefilter("ignore", UserWarning)  # what diagnose warns of is on the page
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # as Ctrl-C: the folder is removed
    view = View(available_models(checkpoints), example_photos())
    with tempfile.TemporaryDirectory(prefix="softmaxfree-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # pictures, and files until they are read
        bypass = [os.environ.get("no_proxy"), host]  # Gradio asks itself whether it is there
        os.environ["no_proxy"] = ",".join(filter(None, bypass))
        page = build(view)
        try:
            _launch(page, host, port)
            print(f"softmaxfree explore: {page.local_url} (end it with Ctrl-C)", flush=True)
            if host not in ("127.0.0.1", "localhost", "::1"):
                print("Other machines can reach it: whoever can, may use it.", flush=True)
            Event().wait()
        finally:
            page.close(verbose=False)


def build(view: View) -> Any:
    """The page, as Gradio's blocks."""
    shown = list(view.photos.values())
    quiet = {"analytics_enabled": False, "delete_cache": (600, 3600)}
    with gr.Blocks(title="softmaxfree explore", fill_width=True, **quiet) as page:
        # Those that the user gave come first, and are chosen.
        names = sorted(view.models, key=lambda name: name.endswith("(digits)"))
        parts = _lay_out(names, shown)
        photos = Photos(shown)
        _take_events(page, parts, shown, photos)
        _answer_events(page, parts, Answers(view, photos))
    return page.queue(default_concurrency_limit=USERS)


def _lay_out(names: list[str], shown: Sequence[Photo]) -> Parts:
    photo, place = gr.State(None), gr.State((0.5, 0.5))
    gr.Markdown(INTRODUCTION)
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            patch = _picture("Click a patch", "patch")
            message = gr.Textbox(show_label=False, visible=False, elem_id="message")
            upload = gr.UploadButton("Upload an image", elem_id="upload", size="sm")
            size: dict[str, Any] = {"columns": 3, "height": 190, "object_fit": "cover"}
            pictures = [example.image for example in shown]
            examples = gr.Gallery(
                pictures, elem_id="examples", allow_preview=False, **size, **FIXED
            )
            controls = _controls()
        left = _side("left", names, names[0])
        right = _side("right", names, names[min(1, len(names) - 1)])
    return Parts(photo, place, patch, message, upload, examples, controls, left, right)


def _take_events(page: Any, parts: Parts, shown: Sequence[Photo], photos: Photos) -> None:
    """Every click, upload and choice of an example changes a state; the changes are answered."""
    inbox = Inbox(page.upload_file_set, lambda: parts.examples.keep_in_cache)

    def start() -> str:
        return shown[0].digest

    def take_click(event: gr.SelectData) -> tuple[float, float]:
        return place_of(event.index)

    def take_upload(path: str, before: str | None) -> tuple[str | None, Any]:
        found, refusal = taken(path, before, inbox, photos)
        return found, gr.Textbox(refusal, visible=bool(refusal))

    def take_example(event: gr.SelectData) -> tuple[str, Any]:
        return shown[event.index].digest, gr.Textbox("", visible=False)

    taking: dict[str, Any] = PRIVATE | {"trigger_mode": "multiple", "show_progress": "hidden"}
    chosen = [parts.photo, parts.message]
    clicks = [picture.select for picture in (parts.patch, parts.left.heat, parts.right.heat)]
    # One at a time: of two clicks that are taken at once the first could be answered last.
    gr.on(clicks, take_click, None, parts.place, concurrency_limit=1, **taking)
    parts.upload.upload(take_upload, [parts.upload, parts.photo], chosen, **taking)
    parts.examples.select(take_example, None, chosen, **taking)
    page.load(start, None, parts.photo, **taking)


def _answer_events(page: Any, parts: Parts, answers: Answers) -> None:
    """Draws what the states and controls ask for.

    Each answer is one event, whatever asks for it: a request that comes while one is on its way is
    answered after it, with the values of that time. Of several events with the same outputs, one
    that was asked for earlier could be shown last.
    """
    controls, sides = parts.controls, (parts.left, parts.right)
    asked = [parts.photo, parts.place, *controls, parts.left.model, parts.right.model]
    maps = [parts.patch, *(part for side in sides for part in side[3:7])]
    curves = [side.convergence for side in sides]
    predictions = [part for side in sides for part in (side.prediction, side.predicted)]

    def curves_of(*values: Any) -> list[Any]:
        return [rows and pd.DataFrame(rows) for rows in answers.curves(*values)]

    def take_bounds(*values: Any) -> list[Any]:
        return [
            gr.Slider(maximum=most) if value <= most else gr.Slider(maximum=most, value=most)
            for most, value in zip(answers.bounds(*values), values[2:4])
        ]

    progress = {"show_progress": "minimal", "show_progress_on": [parts.patch]}
    answering: dict[str, Any] = PRIVATE | {"trigger_mode": "always_last"} | progress
    models = [side.model.input for side in sides]
    settings = [control.input for control in controls]
    anew = [parts.photo.change, *models]
    bounds = [controls.layer, controls.head]
    for triggers, answer, outputs in (
        ([page.load, *models, controls.layer.input], take_bounds, bounds),
        ([*anew, parts.place.change, *settings], _told(answers.maps), maps),
        ([*anew, controls.times.input], _told(answers.predictions), predictions),
        ([*anew, *settings], _told(curves_of), curves),
    ):
        gr.on(triggers, answer, asked, outputs, **answering)


def _told(answer: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """An answer that tells a visitor if the image is gone, and leaves the page as it is."""

    @functools.wraps(answer)
    def told(*values: Any) -> list[Any]:
        try:
            return answer(*values)
        except EndedError as error:
            raise gr.Error(f"{error}.", duration=None, print_exception=False) from error

    return told


def _controls() -> Controls:
    layer = gr.Slider(1, 2, 1, step=1, label="layer", elem_id="layer")
    head = gr.Slider(1, 2, 1, step=1, label="head", elem_id="head")
    times = gr.Slider(
        0.5, MOST_TIMES, 1, step=0.5, label="resolution, times that of training", elem_id="times"
    )
    with gr.Group():
        gr.Markdown(
            "**What if** SOFT and SOFT++ computed with other settings than they were trained with? "
            "Maps and convergence change, the prediction does not.",
            container=True,
        )
        inverse = gr.Dropdown([TRAINED, *INVERSES], label="what if: inverse", elem_id="inverse")
        none = "0: as trained; auto, cholesky and exact take none"
        words = {"label": "what if: iterations", "info": none, "elem_id": "iters"}
        iters = gr.Slider(0, STEPS[-1], 0, step=1, **words)
        normalize = gr.Radio(list(NORMALIZE), value=TRAINED, label="what if: normalisation")
    return Controls(layer, head, times, inverse, iters, normalize)


def _side(place: str, names: list[str], value: str) -> Side:
    with gr.Column(scale=3, min_width=360):
        model = gr.Dropdown(names, value=value, label=f"{place} model", elem_id=f"{place}-model")
        prediction = gr.Label(
            label="prediction", num_top_classes=3, show_heading=False, elem_id=f"{place}-label"
        )
        predicted = gr.Markdown(elem_id=f"{place}-predicted")
        with gr.Row():
            heat = _picture("What the patch attends to", f"{place}-heat")
            landmarks = _picture("Landmarks, bright if near", f"{place}-landmarks")
        caption = gr.Markdown(elem_id=f"{place}-caption")
        atlas = _picture("All layers, downwards, and all heads", f"{place}-atlas", "png")
        convergence = gr.LinePlot(
            x="steps",
            y="exponent",
            color="method",
            color_map=LINES,
            color_title="B: landmark matrix and ridge",
            y_title="log10 of |B X B \N{MINUS SIGN} B| / |B|",
            y_lim=[-9, 1],
            label="Convergence of the inverse",
            elem_id=f"{place}-convergence",
        )
    return Side(model, prediction, predicted, heat, landmarks, atlas, caption, convergence)


def _picture(title: str, name: str, kind: str = FORMAT) -> Any:
    with gr.Column(min_width=160, elem_classes=["titled"]):
        gr.Markdown(f"**{title}**")
        return gr.Image(label=title, format=kind, alt_text=title, elem_id=name, **FIXED)


def _launch(page: Any, host: str, port: int) -> None:
    """Serves the page in threads of its own; nothing is fetched or shared."""
    page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        share=False,
        run_history=False,
        enable_monitoring=False,
        mcp_server=False,
        ssr_mode=False,
        footer_links=[],
        max_file_size=MOST_BYTES,
        state_session_capacity=SESSIONS,
        theme=_theme(),
        css=CSS,
    )


def _theme() -> Any:
    """The default theme with the system's fonts, so that none are fetched."""
    return gr.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )


def _share_cores() -> None:
    """Gives each of the users who are answered at once a part of the threads: with more threads
    than cores they wait for each other."""
    torch.set_num_threads(max(1, torch.get_num_threads() // USERS))


def _free_port(host: str, port: int) -> int:
    """The port, if the address can be listened on."""
    if not 0 <= port <= 65535:
        raise UserError(f"--port must be from 0 to 65535, got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(
            f"cannot listen on {host}, port {port} ({reason}): give another --port, or 0 for any "
            "that is free, or another --host"
        ) from error
