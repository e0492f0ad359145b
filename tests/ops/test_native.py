"""The optional compiled code: the same numbers as torch's, and nothing breaks without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from softmaxfree import SoftmaxFreeAttention, pinv, softmax_free_attention
from softmaxfree.errors import UserError
from softmaxfree.layers.multihead import ValueConv
from softmaxfree.ops.backends import choose, native, torch_only
from softmaxfree.ops.backends.native import Native
from softmaxfree.ops.kernel import kernel_matrix


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


def gradients(q: Tensor, v: Tensor, landmarks: Tensor, k: Tensor | None = None) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, v, landmarks)]
    own = leaves[0]
    out = softmax_free_attention(own, own if k is None else k, *leaves[1:])
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("b", "n", "m", "d"),
    [(1, 1, 1, 1), (2, 15, 3, 8), (3, 16, 49, 32), (2, 100, 50, 20), (1, 3137, 49, 32),
     (1, 70, 64, 33), (1, 70, 65, 32), (2, 33, 7, 100)],
)  # fmt: skip
def test_attention_and_gradients_are_those_of_torch(b: int, n: int, m: int, d: int) -> None:
    q, v, landmarks = randn(b, n, d), randn(b, n, 24, seed=1), randn(b, m, d, seed=2)
    assert type(choose(q)) is Native
    got = gradients(q, v, landmarks)
    with torch_only():
        expected = gradients(q, v, landmarks)
        exact = gradients(q.double(), v.double(), landmarks.double())
    for x, y, z in zip(got, expected, exact):
        assert relative(x, z) < max(3 * relative(y, z), 1e-5)


@pytest.mark.usefixtures("compiled")
def test_keys_of_their_own_and_tokens_with_gaps() -> None:
    wide = randn(2, 300, 96)
    q, k, v = wide[..., :32], wide[..., 32:64], wide[..., 64:]
    landmarks = randn(2, 49, 32, seed=1)
    got = gradients(q, v, landmarks, k)
    with torch_only():
        expected = gradients(q, v, landmarks, k)
    for x, y in zip(got, expected):
        assert relative(x, y) < 1e-5


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e2, 1e4, 1e20, 1e38])
def test_tokens_of_any_magnitude(magnitude: float) -> None:
    q, v, landmarks = randn(1, 50, 32) * magnitude, randn(1, 50, 32), randn(1, 9, 32) * magnitude
    landmarks[:, 1] = landmarks[:, 0] * (1 + 1e-7)  # near-duplicates
    got = softmax_free_attention(q, q, v, landmarks)
    with torch_only():
        expected = softmax_free_attention(q, q, v, landmarks)
    exact = softmax_free_attention(*(x.double() for x in (q, q, v, landmarks)))
    assert got.isfinite().all()
    if magnitude <= 1e2:  # beyond, float32 has no digits left of a distance
        assert relative(got, exact) < max(4 * relative(expected, exact), 1e-5)


@pytest.mark.usefixtures("compiled")
def test_nan_stays_where_it_is() -> None:
    q, v, landmarks = randn(2, 40, 32), randn(2, 40, 8), randn(2, 9, 32)
    clean = softmax_free_attention(q, q, v, landmarks)
    q[0, 3, 5] = torch.nan
    broken = softmax_free_attention(q, q, v, landmarks)
    assert broken[0].isnan().all()  # the whole sample sees it through P^T V
    assert torch.equal(broken[1], clean[1])


@pytest.mark.usefixtures("compiled")
def test_the_kernel_of_landmarks_keeps_its_digits() -> None:
    x = randn(3, 49, 32) + 1e3
    x[:, 1] = x[:, 0] + 1e-3
    kernel = kernel_matrix(x, scale=0.42)
    assert torch.equal(kernel, kernel.mT)
    assert torch.equal(kernel.diagonal(dim1=-2, dim2=-1), torch.ones(3, 49))
    torch.testing.assert_close(kernel, kernel_matrix(x.double(), scale=0.42).float())


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("m", [1, 8, 49, 64, 65])
def test_inverses(m: int) -> None:
    a = kernel_matrix(randn(4, m, 16), scale=0.5)
    exact = torch.linalg.inv(a.double() + 0.01 * torch.eye(m, dtype=torch.float64))
    assert relative(pinv(a, "cholesky", ridge=0.01), exact) < 1e-5
    assert relative(pinv(a), exact) < 1e-5


@pytest.mark.usefixtures("compiled")
def test_a_singular_matrix_gets_its_ridge() -> None:
    a = torch.stack([torch.ones(9, 9), torch.eye(9)])
    with torch_only():
        expected = pinv(a, "cholesky")
    assert torch.equal(pinv(a, "cholesky"), expected)
    assert expected.isfinite().all()


@pytest.mark.usefixtures("compiled")
def test_batch_mates_change_nothing() -> None:
    q, v, landmarks = randn(5, 200, 32), randn(5, 200, 32, seed=1), randn(5, 49, 32, seed=2)
    alone = softmax_free_attention(q[:1], q[:1], v[:1], landmarks[:1])
    together = softmax_free_attention(q, q, v, landmarks)
    torch.testing.assert_close(together[:1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("size", "kernel"), [((7, 9), 9), ((13, 5), 5), ((6, 6), 3), ((9, 8), 11)])
def test_the_gradient_of_the_value_convolution(size: tuple[int, int], kernel: int) -> None:
    torch.manual_seed(0)
    conv = ValueConv(3, kernel, 2)
    v = randn(2, size[0] * size[1], 48).requires_grad_()
    grad = randn(*v.shape, seed=1)
    got = torch.autograd.grad(conv(v, size), [v, conv.weight], grad)
    double = conv.double()
    wide = v.detach().double().requires_grad_()
    exact = torch.autograd.grad(double(wide, size), [wide, double.weight], grad.double())
    for x, y in zip(got, exact):
        assert relative(x, y) < 1e-6


@pytest.mark.usefixtures("compiled")
def test_a_second_derivative_goes_through_the_value_convolution() -> None:
    conv, v = ValueConv(1, 3, 2), randn(1, 12, 8).requires_grad_()
    (first,) = torch.autograd.grad(conv(v, (3, 4)).pow(3).sum(), v, create_graph=True)
    got = torch.autograd.grad(first.square().sum(), [v, conv.weight])
    with torch_only():
        (first,) = torch.autograd.grad(conv(v, (3, 4)).pow(3).sum(), v, create_graph=True)
        expected = torch.autograd.grad(first.square().sum(), [v, conv.weight])
    torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("compiled")
def test_a_model_and_its_gradients() -> None:
    torch.manual_seed(0)
    model, images = timm.create_model("softpp_nano"), randn(2, 3, 40, 32)

    def step() -> list[Tensor]:
        logits = model(images)
        return [logits.detach(), *torch.autograd.grad(logits.square().sum(), model.parameters())]

    got = step()
    with torch_only():
        expected = step()
    largest = max(y.abs().max().item() for y in expected[1:])
    for x, y in zip(got, expected):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-6 * largest)


@pytest.mark.usefixtures("compiled")
def test_threads_change_nothing() -> None:
    q, v, landmarks = randn(2, 333, 32), randn(2, 333, 32, seed=1), randn(2, 49, 32, seed=2)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(softmax_free_attention(q, q, v, landmarks))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*results)


@pytest.mark.usefixtures("compiled")
def test_multiply_adds_are_counted_all_the_same() -> None:
    layer, x = SoftmaxFreeAttention(32, 1, ndim=1, ratio=4), randn(1, 64, 32)

    def count() -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            layer(x)
        return counter.get_total_flops()

    with torch_only():
        expected = count()
    assert count() == expected > 0


@pytest.mark.usefixtures("compiled")
def test_other_types_and_traced_tensors_are_torch_s() -> None:
    assert not Native().takes(randn(3, 3).double())
    assert not Native().takes(randn(3, 3).mT)
    assert not Native().takes(randn(3, 3).to("meta"))
    out = torch.vmap(lambda q: softmax_free_attention(q, q, q, q[:4]))(randn(3, 20, 8))
    assert out.isfinite().all()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", ["none", "tanh"])
@pytest.mark.parametrize("size", [1, 7, 8, 1001])
def test_gelu_in_both_forms(kind: str, size: int) -> None:
    x, grad = randn(size) * 3, randn(size, seed=1)
    wide = x.double().requires_grad_()
    exact = torch.nn.functional.gelu(wide, approximate=kind)
    (slope,) = torch.autograd.grad(exact, wide, grad.double())
    torch.testing.assert_close(Native().gelu(x, kind), exact.detach().float(), rtol=1e-5, atol=1e-6)
    got = Native().gelu_backward(grad.clone(), x, kind)
    torch.testing.assert_close(got, slope.float(), rtol=1e-5, atol=1e-6)


PROBE = "from softmaxfree.ops.backends import native; print(native.library() is not None)"


def probe(**environment: str) -> str:
    inherited = {name: os.environ[name] for name in os.environ if name != "SOFTMAXFREE_NATIVE"}
    call = [sys.executable, "-c", PROBE]
    done = subprocess.run(
        call, env=inherited | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_it_is_found_once_built_and_can_be_left_out(
    cache_with_library: Path, tmp_path: Path
) -> None:
    assert probe(XDG_CACHE_HOME=str(cache_with_library)) == "True"
    assert probe(XDG_CACHE_HOME=str(cache_with_library), SOFTMAXFREE_NATIVE="0") == "False"
    assert probe(XDG_CACHE_HOME=str(tmp_path)) == "False"


def test_without_a_compiler_there_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match="no C\\+\\+ compiler found: install g\\+\\+"):
        native.build()
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(UserError, match="could not compile"):
        native.build()
    assert not native.path().exists()
    assert not list(native.path().parent.iterdir())
