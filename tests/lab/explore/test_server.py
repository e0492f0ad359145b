"""The page as programs use it: sessions and files by plain requests to the real command."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from .browser import served
from .conftest import noise

httpx = pytest.importorskip("httpx", reason="gradio is not installed")
pytest.importorskip("gradio", reason="gradio is not installed")
pytestmark = pytest.mark.slow


class Visitor:
    """A session, by its name."""

    def __init__(self, client: Any, name: str) -> None:
        self.client, self.name = client, name
        self.config = client.get("/config").raise_for_status().json()

    def component(self, name: str) -> dict[str, Any]:
        return next(c for c in self.config["components"] if c["props"].get("elem_id") == name)

    def event(self, trigger: str, output: str) -> dict[str, Any]:
        """One that has a trigger, and an output by the name of its component."""
        number = self.component(output)["id"]
        return next(
            event
            for event in self.config["dependencies"]
            if number in event["outputs"] and trigger in [kind for _, kind in event["targets"]]
        )

    def ask(self, event: dict[str, Any], *values: Any) -> dict[str, Any]:
        """What the server says of an event once it is done."""
        body = {"data": values, "fn_index": event["id"], "session_hash": self.name}
        self.client.post("/gradio_api/queue/join", json=body).raise_for_status()
        query = {"session_hash": self.name}
        with self.client.stream("GET", "/gradio_api/queue/data", params=query) as stream:
            for line in stream.iter_lines():
                message = json.loads(line.removeprefix("data:")) if line else {}
                if message.get("msg") == "process_completed":
                    return message
        raise AssertionError("the server has closed the stream")

    def start(self) -> None:
        photo = self.event("upload", "message")["outputs"][0]
        event = next(
            e
            for e in self.config["dependencies"]
            if e["outputs"] == [photo] and "load" in [kind for _, kind in e["targets"]]
        )
        assert self.ask(event)["success"]

    def send(self, seed: int) -> str:
        file = io.BytesIO()
        noise(seed).image.save(file, "PNG")
        files = {"files": ("noise.png", file.getvalue())}
        answer = self.client.post("/gradio_api/upload", files=files).raise_for_status()
        return answer.json()[0]

    def take(self, path: str) -> str:
        """Says that a file is an upload; returns what the page says of it."""
        data = {"path": path, "meta": {"_type": "gradio.FileData"}}
        message = self.ask(self.event("upload", "message"), data, None)
        assert message["success"], message
        return message["output"]["data"][1]["value"]

    def look(self) -> dict[str, Any]:
        """The maps of whatever image the session has, with the settings of the start."""
        event = self.event("change", "patch")
        values = {c["id"]: c["props"].get("value") for c in self.config["components"]}
        return self.ask(event, *[values[number] for number in event["inputs"]])


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with served() as url, httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        yield client


def test_only_what_a_visitor_has_sent_is_taken(client: Any) -> None:
    visitor = Visitor(client, "one")
    visitor.start()
    example = visitor.component("examples")["props"]["value"][0]["image"]
    assert "was not sent by you" in visitor.take(example["path"])
    assert visitor.client.get(f"/gradio_api/file={example['path']}").status_code == 200
    sent = visitor.send(1)
    assert visitor.take(sent) == ""
    assert visitor.take(sent) == ""  # somebody else may have sent the same
    # What the page shows, sent under its own name, has the path of what the page shows.
    content = visitor.client.get(f"/gradio_api/file={example['path']}").content
    name = example["path"].rsplit("/", 1)[-1]
    again = visitor.client.post("/gradio_api/upload", files={"files": (name, content)}).json()[0]
    assert again == example["path"]
    assert visitor.take(again) == ""
    assert visitor.client.get(f"/gradio_api/file={example['path']}").status_code == 200


def test_an_upload_stays_however_many_others_come(client: Any) -> None:
    first = Visitor(client, "first")
    first.start()
    assert first.take(first.send(2)) == ""
    before = first.look()
    assert before["success"]
    for number in range(25):
        other = Visitor(client, f"other-{number}")
        other.start()
    after = first.look()
    assert after["output"]["data"][0]["path"] == before["output"]["data"][0]["path"]
    stranger = Visitor(client, "never started")  # as one whose session the server has forgotten
    told = stranger.look()
    assert not told["success"]
    assert "Your session has ended" in str(told["output"]["error"])
