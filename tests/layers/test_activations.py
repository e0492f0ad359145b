"""The activation: torch's function, faster."""

import pytest
import torch
import torch.nn.functional as F

from softmaxfree.layers.activations import TanhGELU

from ..helpers import relative_error, tokens


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_is_torchs_function(dtype: torch.dtype, tolerance: float) -> None:
    x = 4 * tokens(50, 40, dtype=dtype)
    assert relative_error(TanhGELU()(x), F.gelu(x, approximate="tanh")) < tolerance
    ends = torch.tensor([-1e30, -50.0, 0.0, 50.0, 1e30], dtype=dtype)
    assert torch.equal(TanhGELU()(ends), F.gelu(ends, approximate="tanh"))


def test_gradients() -> None:
    x = tokens(4, 5).requires_grad_()
    assert torch.autograd.gradcheck(TanhGELU(), x)
    assert torch.autograd.gradgradcheck(TanhGELU(), x)
    slopes = torch.func.vmap(torch.func.grad(lambda x: TanhGELU()(x).sum()))(x)
    (expected,) = torch.autograd.grad(F.gelu(x, approximate="tanh").sum(), x)
    torch.testing.assert_close(slopes, expected)


def test_half_precision_is_torchs_own() -> None:
    x = tokens(10, 10).bfloat16()
    assert torch.equal(TanhGELU()(x), F.gelu(x, approximate="tanh"))
