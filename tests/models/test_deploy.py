"""Compiled, exported, in half precision, in parallel: the same numbers."""

import copy
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from softmaxfree.deploy import compare, export, graph

from ..helpers import relative_error
from .test_backbones import build, images


def small(**arguments: object) -> nn.Module:
    return build(depths=(1, 1, 1, 1), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"num_landmarks": 16}], ids=str)
def test_compiles_whole(arguments: dict[str, object]) -> None:
    model, x = small(**arguments), images(2, 3, 32, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert relative_error(compiled(x), model(x)) < 1e-5
    twin = copy.deepcopy(model).train()
    torch.compile(model.train(), fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    twin(x).square().sum().backward()
    gradients = [torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, twin)]
    assert relative_error(*gradients) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's default backend needs g++")
def test_compiles_with_the_default_backend() -> None:
    """A stage, which has all there is; a whole model takes it a minute."""
    stage, x = small().stages[1], images(2, 32, 16, 16)
    with torch.no_grad():
        got, _ = torch.compile(stage, fullgraph=True)(x)
    assert relative_error(got, stage(x)[0]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"num_landmarks": 16, "stage4": "softmax"},
        {"inverse": "damped", "pad": "drop", "tie_qk": False},
        {"overlap": False, "attention": "gaussian"},
    ],
    ids=str,
)
def test_an_exported_graph_is_for_all_sizes(arguments: dict[str, object]) -> None:
    model = small(**arguments)
    run = graph(model, (48, 64)).module()
    for batch, height, width in ((1, 64, 64), (3, 49, 81), (2, 97, 51)):
        x = images(batch, 3, height, width)
        assert relative_error(run(x), model(x)) < 1e-5


@pytest.mark.slow
def test_exported_files_are_opened_again(tmp_path: Path) -> None:
    model, path = small(attention="softmax"), tmp_path / "model.pt2"
    export(model, path, (48, 64))
    found = compare(model, path, [images(1, 3, 64, 64), images(2, 3, 49, 81)])
    assert len(found) == 2
    assert all(one.error < 1e-5 and one.same_class for one in found)


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in .onnx or .pt2, got model.pt"):
        export(small(), Path("model.pt"), (32, 32))
    with pytest.raises(ValueError, match=r"no operator for inverse='cholesky'.*inverse='auto'"):
        export(small(inverse="cholesky"), tmp_path / "model.onnx", (32, 32))
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is", "ignore::torch.jit.TracerWarning")
def test_torchscript_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"TorchScript .* use torch.export, torch.compile or"):
        torch.jit.trace(small(), images(1, 3, 32, 32))


@pytest.mark.parametrize("name", ["softpp_nano", "softpp_vit_small"])
def test_channels_last_images_and_weights(name: str) -> None:
    model, x = build(name), images(2, 3, 48, 40)
    expected = model(x)
    model = model.to(memory_format=torch.channels_last)
    got = model(x.to(memory_format=torch.channels_last))
    assert relative_error(got, expected) < 1e-5


def test_bfloat16_autocast() -> None:
    model, x = build(), images(4, 3, 64, 64)
    expected = model(x)
    x[3] = 1.0
    with torch.autocast("cpu", torch.bfloat16):
        got = model(x)
        got.float().square().sum().backward()
    assert got.dtype == torch.bfloat16
    assert relative_error(got[:3], expected[:3]) < 0.05
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def _train_in_parallel(rank: int, store: str, name: str, arguments: dict[str, object]) -> None:
    warnings.simplefilter("ignore")  # DDP's advice on strides
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    model = DistributedDataParallel(build(name, **arguments).train())
    for step in range(3):  # a parameter without a gradient would stop the second step
        model.zero_grad()
        model(images(2, 3, 32, 32, seed=10 * step + rank)).square().sum().backward()
    sums = torch.stack([parameter.grad.double().sum() for parameter in model.parameters()])
    both = [torch.empty_like(sums) for _ in range(2)]
    dist.all_gather(both, sums)
    assert torch.equal(*both)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("softx_nano", {}),
        ("softpp_nano", {"global_pool": "avg"}),
        ("soft_vit_small", {"depth": 2}),
    ],
    ids=str,
)
def test_trains_in_parallel_without_unused_parameters(
    name: str, arguments: dict[str, object], tmp_path: Path
) -> None:
    arguments_of_both = (str(tmp_path / "store"), name, arguments)
    mp.start_processes(_train_in_parallel, arguments_of_both, nprocs=2, start_method="fork")
