"""The measurements: right contestants, whole files, honest notes; no assertion on time."""

import csv
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import timm
import torch

from softmaxfree import MultiHeadAttention, register_attention
from softmaxfree.errors import UserError
from softmaxfree.lab.bench import attention, busy, contestants, models, speed, training
from softmaxfree.lab.bench.attention import Preset, bench_attention
from softmaxfree.lab.bench.complexity import complexity
from softmaxfree.lab.bench.contestants import Case, prepare
from softmaxfree.lab.bench.models import ComparedModel
from softmaxfree.lab.bench.released import as_released, distances_by_sums, released
from softmaxfree.lab.bench.runner import memory_of_call
from softmaxfree.lab.measure import Timing, exponent, in_fresh_process, time_interleaved
from softmaxfree.layers.registry import ATTENTIONS
from softmaxfree.models.cost import cost
from softmaxfree.ops import reference, softmax_free_attention


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    """A command sets the number of threads for its process; here others come after it."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = Preset(
        "small",
        [Case(1, 2, n) for n in (196, 3136)],
        list(contestants.OPERATIONS),
        repeats=1,
        memory=False,
    )
    monkeypatch.setitem(attention.PRESETS, "small", preset)
    monkeypatch.setattr(attention, "memory_limit", lambda: 100e6)


@pytest.mark.usefixtures("small")
def test_a_run_writes_table_json_csv_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_attention("small", out=tmp_path)
    content = json.loads((tmp_path / "attention-small.json").read_text())
    assert {
        "schema_version",
        "command",
        "commit",
        "hardware",
        "versions",
        "threads",
        "device",
        "dtype",
        "rows",
    } <= set(content)
    assert content["versions"]["torch"] == torch.__version__
    assert len(content["rows"]) == 10
    assert (tmp_path / "attention-small.png").read_bytes().startswith(b"\x89PNG")
    assert "| n                   |   196 | 3136 |" in (tmp_path / "attention-small.md").read_text()
    with (tmp_path / "attention-small.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 10
    assert float(lines[0]["forward_s"]) == content["rows"][0]["forward_s"]
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if not line.startswith("written: ")]
    assert max(map(len, lines)) <= 100
    # 3136^2 pairs, two heads, 8 bytes each, are over the limit: said, not dropped.
    assert "not run: needs 0.1 GiB" in printed
    notes = {(row["contestant"], row["n"]) for row in content["rows"] if "forward_note" in row}
    assert notes == {("op_softmax", 3136)}


def test_operations_compute_what_they_are_called() -> None:
    """Layers and packages: tests/layers/test_peers.py compares them with each other."""
    q, v = torch.randn(2, 1, 1, 60, 8, dtype=torch.float64)
    landmarks = q[:, :, ::6]
    exact = reference.softmax_free_attention(q, q, v, landmarks)
    torch.testing.assert_close(contestants.softpp(q, v, landmarks), exact)
    theirs = softmax_free_attention(q, q, v, landmarks, method="backtrack")
    torch.testing.assert_close(released(q, v, landmarks), theirs)
    torch.testing.assert_close(released(q, v, landmarks, distances_by_sums), theirs)
    plain, fused = contestants.plain_softmax, contestants.fused_softmax
    torch.testing.assert_close(plain(q, v, landmarks), fused(q, v, landmarks))
    layer, same = (
        kind(16, 2, ndim=1, tie_qk=False).double()
        for kind in (contestants.PlainSoftmax, contestants.SoftmaxAttention)
    )
    same.load_state_dict(layer.state_dict())
    x = torch.randn(1, 32, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x), same(x))


def test_every_contestant_runs() -> None:
    """Each layer and each package at a size, forward and backward, one after the other."""
    for name in contestants.checked(None):
        ready = contestants.find(name).ready(Case(1, 2, 98, layers=2))
        ready.forward()
        ready.training()


def test_an_attention_of_ones_own_is_checked_before_it_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("softmaxfree.layers.registry.ATTENTIONS", table := dict(ATTENTIONS))
    monkeypatch.setattr(contestants, "ATTENTIONS", table)

    @register_attention("sums_over_the_batch")
    class Sums(MultiHeadAttention):
        def attend(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: object
        ) -> torch.Tensor:
            return v + v.sum(0)

    with pytest.raises(RuntimeError, match="sums_over_the_batch fails a test that every attention"):
        contestants.checked(["softpp", "sums_over_the_batch"])


def test_unknown_and_missing_contestants_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown contestant 'nope'; choose among soft, softpp"):
        contestants.checked(["nope"])
    monkeypatch.setitem(sys.modules, "linformer", None)
    with pytest.raises(UserError, match=r"pip install 'softmaxfree\[peers\]'"):
        contestants.checked(["linformer_package"])


@pytest.mark.slow
def test_layers_and_packages_over_n(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's own attention among them, memory of several, one that would take too long."""
    (tmp_path / "own.py").write_text(
        "from softmaxfree import register_attention\n"
        "from softmaxfree.layers.performer import PerformerAttention\n"
        "register_attention('own_attention', features=8)(PerformerAttention)\n"
    )
    monkeypatch.chdir(tmp_path)
    names = ["softpp", "own_attention", "gaussian", "reformer", "nystrom_attention"]
    preset = Preset("layers", [Case(1, 2, n) for n in (98, 196)], names, 1, longest=1e-9)
    monkeypatch.setitem(attention.PRESETS, "layers", preset)
    try:
        content = bench_attention("layers", out=tmp_path, modules=["own"])
        earlier = tmp_path / "attention-layers.json"
        again = bench_attention("layers", out=tmp_path, modules=["own"], against=earlier)
    finally:
        ATTENTIONS.pop("own_attention", None)
    assert [row["contestant"] for row in content["rows"]] == names * 2
    first, second = content["rows"][:5], content["rows"][5:]
    assert all(row["forward_s"] > 0 and row["training_bytes"] >= 0 for row in first)
    assert all("not run: a call would take about" in row["forward_note"] for row in second)
    printed = capsys.readouterr().out
    assert "Reformer, training, n = 196: not run" in printed
    assert "Against the run of commit" in printed
    assert len(again["rows"]) == 10
    ratios = [line.split()[-1] for line in printed.split("Against")[1].splitlines()[3:13]]
    assert set(ratios) != {"1.00"}, "compared with itself: the file was written over first"


def test_contestants_take_turns() -> None:
    order: list[str] = []

    def contestant(name: str) -> None:
        order.append(name)
        time.sleep(0.03)

    timings = time_interleaved(
        {"a": lambda: contestant("a"), "b": lambda: contestant("b")}, repeats=3
    )
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns == ["a", "b"] * 3
    assert all(0 < timing.best <= timing.median for timing in timings.values())


def test_exponent() -> None:
    assert exponent([10, 100, 1000], [3.0, 300.0, 30000.0]) == pytest.approx(2)


def test_memory_is_that_of_the_call() -> None:
    """Plain softmax forms two n x n matrices."""
    n = 4000
    measured = memory_of("op_softmax", Case(1, 1, n), "forward")
    assert measured == pytest.approx(2 * 4 * n**2, rel=0.1)


def memory_of(name: str, case: Case, kind: str) -> int:
    work = partial(prepare, name, case, kind)
    taken, outcome = in_fresh_process(memory_of_call, work, "call", "cpu", None, 1)
    assert outcome == {}
    return taken


@pytest.mark.slow
def test_memory_grows_linearly_and_a_million_tokens_fit() -> None:
    """Forward and backward, one head of width 32."""
    sizes = [3136, 25_088, 200_704, 1_000_000]
    measured = [memory_of("op_softpp", Case(1, 1, n), "training") for n in sizes]
    assert exponent(sizes[:3], measured[:3]) <= 1.05
    assert measured[-1] < 4e9


def test_a_process_that_runs_out_of_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """60,000^2 pairs are 14 GB and more than half of most machines; if not, it is measured."""
    answer = in_fresh_process(too_much)
    assert answer is None
    with pytest.raises(RuntimeError, match="measuring broken"):
        in_fresh_process(broken)


def too_much() -> int:
    return torch.empty(2**44).numel()


def broken() -> int:
    raise KeyError("no such thing")


def test_memory_of_twelve_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [Case(1, 4, n, layers=3) for n in (1568, 3136)]
    monkeypatch.setattr(attention, "MEMORY", replace(attention.MEMORY, cases=cases))
    monkeypatch.setattr(attention, "memory_limit", lambda: 5 * 4 * 4 * 3136**2 - 1)
    names = ["softpp", "softmax_plain", "performer"]
    content = attention.bench_memory(out=tmp_path, contestants=names)
    found = content["exponents"]
    assert found["softpp"]["training_bytes"] < 1.1
    assert (tmp_path / "memory.png").exists()
    plain = [row for row in content["rows"] if row["contestant"] == "softmax_plain"]
    # One matrix a layer is kept, 4 heads of 4 bytes: the plain transformer's is quadratic.
    assert plain[0]["training_bytes"] > 3 * 4 * 4 * 1568**2
    assert "Transformer, plain, n = 3136: not run: needs" in capsys.readouterr().out


def test_training_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "ATTENTIONS", ["softpp", "linformer"])
        patch.setattr(training, "NANO_BATCH", 4)
        content = training.bench_training(out=tmp_path)
    for row in content["rows"]:
        assert row["losses"][-1] < row["losses"][0]
        assert row["step_s"] > 0
    assert "Linformer" in capsys.readouterr().out


def test_the_papers_complexity_formula() -> None:
    """What is measured is below it: the kernel is computed once, and P A^+ is not formed."""
    for row in complexity():
        assert row["auto"] < row["formula"]
        assert row["newton"] > row["auto"]
        if row["n"] >= 3136:
            assert row["auto"] == pytest.approx(3 * row["n"] * row["m"] * row["d"], rel=0.15)


def test_models_against_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"depths": (1, 1, 1, 1)}
    plan = models.Preset(
        "a test",
        "",
        {
            "": [
                ComparedModel("peer", "softpp_nano", arguments=small, as_released=True),
                ComparedModel("ours", "softpp_nano", "peer", small),
            ]
        },
        [(2, 3, 32, 32)],
        repeats=1,
        memory="",
    )
    monkeypatch.setitem(models.PRESETS, "large", plan)
    content = models.bench_models("large", out=tmp_path)
    written = json.loads((tmp_path / "models-large.json").read_text())
    assert [row["title"] for row in written["rows"]] == ["peer", "ours"]
    for row in content["rows"]:
        assert row["inference_s"] > 0
        assert row["training_s"] > 0
    assert "peer" in capsys.readouterr().out
    assert "| ours " in (tmp_path / "models-large.md").read_text()


def test_a_model_as_released_computes_the_same() -> None:
    """Their formulas, order of memory and layers; only the inverse differs, by its scheme."""
    options = {"inverse": "backtrack", "act_layer": "gelu_tanh"}
    ours = ComparedModel("", "softpp_nano", arguments=options).build(32)
    theirs = ComparedModel("", "softpp_nano", as_released=True).build(32)
    theirs.load_state_dict(ours.state_dict())
    names = {type(module).__module__.split(".")[0] for module in theirs.modules()}
    assert {"timm", "torch", "softmaxfree"} <= names
    image = torch.randn(1, 3, 32, 32)  # one: the release's step size is that of a whole batch
    for model in (ours, theirs):
        model.double().eval()
    with torch.no_grad():
        got, expected = (model(image.double()) for model in (theirs, ours))
    assert (got - expected).norm() < 0.05 * expected.norm()


@pytest.mark.slow
def test_promises_about_speed_are_measured_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tiny(contestant: ComparedModel) -> ComparedModel:
        return replace(contestant, model="softpp_nano", arguments={}, sized=False)

    monkeypatch.setattr(speed, "CORE", [Case(1, 1, 3136), Case(1, 2, 64)])
    monkeypatch.setattr(speed, "SIDES", (32,))
    monkeypatch.setattr(speed, "IMAGES", (2, 3, 32, 32))
    for group in ("MODELS", "LARGE"):
        monkeypatch.setattr(speed, group, [tiny(model) for model in getattr(speed, group)])
    monkeypatch.setattr(
        speed,
        "time_interleaved",
        lambda calls, **_: {
            name: Timing(call() is None or 1.0, 1.0) for name, call in calls.items()
        },
    )
    seconds = {"alone": 1.0, "alone, GNU's default": 1.0, "beside": 2.0}
    monkeypatch.setattr(speed.busy, "measure", lambda: seconds)
    content = speed.bench_speed(tmp_path)
    whats = [row["what"] for row in content["rows"]]
    assert len(whats) == len(set(whats))
    for part in (
        "core 1, 2, 64",
        "softx, inverse 1, 2, 64, training",
        "softx_small, 32 pixels",
        "as released",
        "two threads",
        "memory",
        "32 pixels",
        "beside another",
        "import",
    ):
        assert any(part in what for what in whats), part
    assert "| verdict" in (tmp_path / "speed.md").read_text()
    assert "missed" in capsys.readouterr().out  # all take the same time here


def test_a_step_beside_another_training_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that only pretend to train tell how long their threads would spin."""
    (tmp_path / "pretended.py").write_text(
        "import os, sys, time\n"
        "print('training', flush=True)\n"
        "time.sleep(600 if int(sys.argv[1]) > 1000 else 0)\n"
        "print(os.environ.get('GOMP_SPINCOUNT', 7))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GOMP_SPINCOUNT", "1")
    monkeypatch.setattr(busy, "__name__", "pretended")
    monkeypatch.setattr(busy, "ROUNDS", 1)
    assert busy.measure() == {"alone": 7, "alone, GNU's default": 300_000, "beside": 7}


def test_seconds_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "NANO_BATCH", 2)
        assert busy.train(1) > 0
    assert capsys.readouterr().out == "training\n"


@pytest.mark.parametrize(
    ("measured", "least", "verdict"),
    [(0.9, True, "missed"), (1.0, True, "met"), (1.5, True, "stretch"), (2.0, False, "missed"),
     (1.5, False, "met"), (1.4, False, "stretch")],
)  # fmt: skip
def test_verdicts(measured: float, least: bool, verdict: str) -> None:
    target, stretch = (1.0, 1.5) if least else (1.9, 1.4)
    assert speed.Promise("", measured, target, least, stretch).verdict == verdict


def test_models_at_several_sizes_and_one_that_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = models.Preset(
        "a test",
        "",
        {
            "": [
                ComparedModel("ours", "softpp_nano"),
                # Built for 32 pixels, whatever comes.
                ComparedModel("fixed", "softpp_nano", arguments={"attention": "linformer"}),
            ]
        },
        [(1, 3, 32, 32), (1, 3, 64, 64)],
        repeats=1,
        memory="inference",
    )
    monkeypatch.setitem(models.PRESETS, "peers", plan)
    content = models.bench_models("peers", out=tmp_path)
    rows = {(row["title"], row["side"]): row for row in content["rows"]}
    assert "note" not in rows["ours", 64]
    assert rows["ours", 64]["multiply_adds"] > 3 * rows["ours", 32]["multiply_adds"]
    assert "learned for at most" in rows["fixed", 64]["note"]
    assert "cannot run: Linformer's projections" in capsys.readouterr().out


def test_the_papers_setting_has_every_attention_and_its_ablations() -> None:
    groups = models.PRESETS["paper"].groups
    for title, contestants_of in groups.items():
        if "softpp_tiny" in title and ":" not in title and "landmarks" not in title:
            names = {c.arguments.get("attention") for c in contestants_of} - {None}
            assert not names or names >= set(ATTENTIONS)
    assert len(groups) == 6
    assert {c.title for c in groups["softpp_tiny_fudan, number of landmarks"]} == {
        "36 landmarks", "49 landmarks", "64 landmarks", "81 landmarks"
    }  # fmt: skip


def test_the_released_formula_in_a_model() -> None:
    """One image, one head: there the release's step size is that of `backtrack`."""
    arguments = {"depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "dtype": torch.float64}
    arguments |= {"act_layer": "gelu_tanh"}
    ours = timm.create_model("softpp_nano", inverse="backtrack", **arguments).eval()
    theirs = as_released("softpp_nano", arguments).eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(theirs(x), ours(x), atol=1e-8, rtol=1e-8)


@pytest.mark.slow
def test_an_image_of_800_x_1333_pixels_fits_into_1500_mb() -> None:
    """Of a fresh process, its libraries included."""
    _, contestant, _ = models.PRESETS["large"].groups[""]
    assert contestant.title == "softpp_tiny_fudan, auto"
    work = partial(models.prepare_model, contestant, (1, 3, 800, 1333), "inference", "cpu")
    taken, _ = in_fresh_process(
        memory_of_call, work, "process", "cpu", None, 1, module=models.__name__
    )
    assert 3e8 < taken < 1.5e9


@pytest.mark.parametrize("inverse", ["auto", "cholesky", "newton", "damped", "backtrack", "exact"])
def test_the_cost_without_the_inverse_does_not_depend_on_it(inverse: str) -> None:
    arguments = {"depths": (1, 1, 1, 1), "img_size": 64}
    expected = cost(timm.create_model("soft_nano", **arguments), 3, 64, 64)
    found = cost(timm.create_model("soft_nano", inverse=inverse, **arguments), 3, 64, 64)
    bare = expected.multiply_adds - expected.inverse
    assert found.multiply_adds - found.inverse == pytest.approx(bare, rel=1e-3)


def test_counting_leaves_a_model_as_it_is() -> None:
    """CaiT has parameters without a gradient's function, at which torch's counter stumbles."""
    model = timm.create_model("cait_xxs24_224", img_size=32, depth=1).train()
    model.cls_token.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    assert cost(model, 3, 32, 32).multiply_adds > 1e6
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert model.training
