"""What the page shows, without a page."""

import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from time_page import untrained
from torch import Tensor, nn

from softmaxfree import attention_rows, recorded_attention
from softmaxfree.analysis.attention_record import AttentionRecord
from softmaxfree.lab.explore.answers import Answers
from softmaxfree.lab.explore.attended import (
    AS_TRAINED,
    OWN,
    STEPS,
    Place,
    WhatIf,
    attended,
    convergence_of,
    factors_of,
    landmark_boxes,
    supposed,
)
from softmaxfree.lab.explore.looks import Look, Photo, look
from softmaxfree.lab.explore.uploads import Photos
from softmaxfree.lab.explore.view import Asked, View, side_of
from softmaxfree.lab.figures.subject import Subject
from softmaxfree.layers.registry import build_attention

from .conftest import ATTENTIONS, noise

PLACES = [(0.0, 0.0), (0.3, 0.8), (1.0, 1.0)]


def maps_of(found: Look, layer: int, place: Place, what_if: WhatIf = AS_TRAINED) -> Tensor:
    return attended(found.layers[layer], factors_of(found, layer, what_if), place).maps


def answers_of(view: View, *sent: Photo) -> Answers:
    photos = Photos(view.photos.values())
    for photo in sent:
        photos.keep(photo)
    return Answers(view, photos)


def asked(view: View, **changes: Any) -> Asked:
    chosen = Asked(view.photos["noise"].digest, left="softpp", right="softmax")
    return chosen._replace(**changes)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_maps_are_rows_of_the_attention(name: str, view: View) -> None:
    subject = view.models[name]
    found = view.look(name, view.photos["noise"])
    image = subject.classifier.tensor(view.photos["noise"].image)
    for layer, record in enumerate(found.layers):
        for place in PLACES:
            query = [min(int(f * side), side - 1) for f, side in zip(place, record.layout.size)]
            expected = attention_rows(subject.classifier.model, image, query, layer)
            torch.testing.assert_close(maps_of(found, layer, place), expected)


def test_the_atlas_has_no_white_beside_its_maps(view: View) -> None:
    """A white margin would glare on a dark page."""
    atlas = view.maps(view.look("softpp", view.photos["noise"]), Asked()).atlas
    assert atlas.getpixel((0, 0)) == (0, 0, 0, 0)
    assert atlas.getpixel((60, 40))[3] == 255


def test_a_caption_begins_with_the_whole_name(models: dict[str, Subject]) -> None:
    """In the list of models a long name is cut."""
    name = f"SOFT++ (runs/{'long-' * 20}name/last.ckpt)"
    view = View({name: models["softpp"], "softmax": models["softmax"]}, {"noise": noise(0)})
    _, caption, _, _ = answers_of(view).predictions(*asked(view, left=name))
    assert caption.startswith(f"{name}: 32 x 32 pixels, trained at 32 x 32.")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of a size that is not the trained one
def test_the_prediction_is_the_models(view: View) -> None:
    subject, shown = view.models["softpp"], view.photos["noise"]
    found = view.look("softpp", shown, 2)
    with torch.no_grad():
        logits = subject.classifier.model(subject.classifier.tensor(shown.image, 64))
    probabilities, caption = view.prediction(found)
    assert list(probabilities.values()) == pytest.approx(logits.softmax(1)[0].tolist())
    assert "64 x 64 pixels, trained at 32 x 32" in caption
    assert "The model knows 1000 classes and nothing else: 0, 1, 2" in caption


def passes(subject: Subject) -> tuple[list[int], Any]:
    """A list that grows with each forward pass, and the hook to be removed."""
    sizes: list[int] = []
    hook = subject.classifier.model.register_forward_hook(
        lambda _, inputs, __: sizes.append(inputs[0].shape[-1])
    )
    return sizes, hook


def test_only_what_has_changed_is_computed_again(view: View) -> None:
    sizes, hook = passes(view.models["softpp"])
    try:
        answers = answers_of(view, noise(1))
        for place in PLACES:
            answers.maps(*asked(view, place=place))
            answers.curves(*asked(view, place=place))
            answers.maps(*asked(view, place=place, layer=3, head=2, inverse="newton", iters=4))
            answers.predictions(*asked(view, place=place))
        assert sizes == [32]
        answers.maps(*asked(view, times=2))
        assert sizes == [32, 64]
        answers.maps(*asked(view, photo=noise(1).digest))
        assert sizes == [32, 64, 32]
    finally:
        hook.remove()


@pytest.mark.parametrize(("room", "runs"), [(2.5, 4), (0.5, 7)])
def test_what_is_kept_is_bounded(
    room: float, runs: int, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two passes the one used longest ago goes; a pass too large is not kept."""
    size = view.look("softpp", noise(0)).nbytes
    monkeypatch.setattr("softmaxfree.lab.explore.view.MOST_BYTES", int(room * size))
    small = View(view.models, view.photos)
    sizes, hook = passes(small.models["softpp"])
    try:
        for seed in (0, 1, 0, 2, 0, 1, 0):  # 1 goes when 2 comes
            assert small.maps(small.look("softpp", noise(seed)), Asked()).heat is not None
        assert len(sizes) == runs
    finally:
        hook.remove()


@pytest.mark.parametrize("name", ["softpp", "soft"])
def test_what_if_is_a_layer_with_other_settings(name: str, view: View) -> None:
    subject, layer = view.models[name], 1
    model = subject.classifier.model
    before = {key: str(value) for key, value in _settings(model).items()}
    found = view.look(name, view.photos["noise"])
    other = "SOFT++" if name == "soft" else "SOFT"
    chosen = Asked(layer=layer + 1, inverse="newton", iters=3, normalize=other)
    what_if = chosen.what_if
    assert what_if == WhatIf("newton", 3, normalize=name == "soft")
    maps = maps_of(found, layer, (0.5, 0.5), what_if)
    assert {key: str(value) for key, value in _settings(model).items()} == before

    changed = deepcopy(model)
    attention: Any = changed.get_submodule(found.layers[layer].name)
    attention.inverse, attention.iters, attention.normalize = what_if
    image = subject.classifier.tensor(view.photos["noise"].image)
    expected = attention_rows(changed, image, (4, 4), layer)
    torch.testing.assert_close(maps, expected)
    as_trained = maps_of(found, layer, (0.5, 0.5))
    assert (maps - as_trained).abs().max() > 0.1 * as_trained.abs().max()
    assert "WHAT IF newton, 3 steps" in view.maps(found, chosen).caption


def _settings(model: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, part in model.named_modules()
        for key, value in vars(part).items()
        if not key.startswith("_")
    }


@pytest.mark.parametrize("name", ["softmax", "softx"])
def test_what_if_does_not_apply_where_nothing_is_inverted(name: str, view: View) -> None:
    found = view.look(name, view.photos["noise"])
    chosen = Asked(inverse="exact", normalize="SOFT")
    assert supposed(found.layers[0], chosen.what_if) is found.layers[0]
    maps = view.maps(found, chosen)
    assert "What-if does not apply" in maps.caption
    assert "WHAT IF" not in maps.caption
    assert (maps.landmarks is None) == (name == "softmax")
    assert ("landmarks, inverse: none" in maps.caption) == (name == "softx")
    assert view.convergence(found, chosen) is None


def record_with(**options: Any) -> AttentionRecord:
    layer = build_attention("softpp", 24, 3, **({"ratio": 4} | options)).eval()
    with torch.no_grad(), recorded_attention(layer) as layers:
        layer(torch.randn(1, 10 * 12 + options.get("prefix_tokens", 0), 24), (10, 12))
    return next(iter(layers.values()))


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "conv"},
        {"sampler": "conv", "pad": "drop"},
        {"sampler": "conv", "num_landmarks": 4},
        {"sampler": "avg", "prefix_tokens": 1},
        {"sampler": "avg", "num_landmarks": 9},
        {"sampler": "random"},
        {"sampler": "biased", "num_landmarks": 16},
    ],
    ids=str,
)
def test_landmarks_are_drawn_where_their_tokens_are(options: dict[str, Any]) -> None:
    record = record_with(**options)
    found = landmark_boxes(record)
    assert len(found) + record.attention.prefix_tokens == record.factors().P.shape[-1]
    if options == {"sampler": "conv"}:
        assert found[1] == pytest.approx((0, 1 / 3, 0.4, 2 / 3))
        assert found[-1] == pytest.approx((0.8, 2 / 3, 1, 1))
    if options["sampler"] == "biased":
        assert found[1] == pytest.approx((0, 1 / 12, 0.1, 2 / 12))


def test_convergence() -> None:
    record = record_with(inverse="newton", iters=8)
    curves: dict[str, list[float]] = {}
    for row in convergence_of(record, record.factors(), 1):
        assert row["steps"] == STEPS[len(curves.setdefault(row["method"], []))]
        curves[row["method"]].append(row["exponent"])
    assert curves[OWN] == [pytest.approx(curves["newton"][5], abs=1e-3)] * 12  # after 8 steps
    assert curves["newton"][0] > -1 > -3 > curves["newton"][-1]
    assert curves["rescaled"][-1] < -4


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_resolution_that_fails_is_told(view: View) -> None:
    shown = view.photos["noise"]
    with pytest.warns(UserWarning, match="32 x 32"):
        assert "as SOFT is not normalised" in view.prediction(view.look("soft", shown, 2))[1]
    for name in ("softpp", "softmax", "softx"):
        assert "times as strong" not in view.prediction(view.look(name, shown, 2))[1]


def test_sides(models: dict[str, Subject]) -> None:
    nano = models["softpp"]
    assert [side_of(nano, times) for times in (0.5, 1, 1.5, 4)] == [16, 32, 48, 128]
    large = nano._replace(classifier=deepcopy(nano.classifier))
    large.classifier.size = 225
    assert [side_of(large, times) for times in (0.5, 1, 2, 4)] == [128, 225, 448, 512]


def test_a_size_that_a_model_does_not_take_is_a_sentence() -> None:
    vit = untrained("vit_tiny_patch16_224", 224, "softpp")
    view = View({"softpp": vit, "softmax": vit}, {"noise": noise(0)})
    answers = answers_of(view)
    *_, caption = answers.maps(*asked(view, times=2))
    assert "takes no images of 448 x 448 pixels" in caption
    assert answers.predictions(*asked(view, times=2)) == [None, "", None, ""]
    assert None not in answers.maps(*asked(view, layer=12)) + answers.curves(*asked(view))
    assert answers.curves(*asked(view, times=2)) == [None, None]
    assert answers.bounds(*asked(view)) == (12, 3)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(calls)
    start = threading.Barrier(len(calls))

    def call(number: int) -> None:
        start.wait()
        results[number] = [calls[number]() for _ in range(2)][-1]

    threads = [threading.Thread(target=call, args=[number]) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.filterwarnings("ignore::UserWarning")  # of a size that is not the trained one
def test_two_users_at_once_see_what_each_sees_alone(view: View) -> None:
    users = [
        asked(view, times=1, layer=2),
        asked(
            view, photo=noise(1).digest, times=2, place=(0.1, 0.9), inverse="exact", right="soft"
        ),
    ]

    def everything(view: View, values: Asked) -> list[Any]:
        answers = answers_of(view, noise(1))
        return answers.maps(*values) + answers.curves(*values) + answers.predictions(*values)

    alone = [everything(View(view.models, view.photos), values) for values in users]
    together = at_once(*(lambda values=values: everything(view, values) for values in users))  # type: ignore[misc]
    for expected, got in zip(alone, together):
        assert expected == got


def test_timms_models_serve_two_sizes_at_once() -> None:
    options = {"img_size": 32, "patch_size": 8, "depth": 2, "dynamic_img_size": True}
    subject = untrained("vit_tiny_patch16_224", 32, "softpp", options)
    view = View({"vit": subject}, {"noise": noise(0)})

    def seen(times: float) -> Look:
        return view.look("vit", noise(int(times)), times)

    found = at_once(lambda: seen(1), lambda: seen(2))
    for times, got in zip((1, 2), found):
        expected = look(subject, noise(times), 32 * times)
        assert got.layers[0].layout == expected.layers[0].layout
        assert torch.equal(got.probabilities, expected.probabilities)
