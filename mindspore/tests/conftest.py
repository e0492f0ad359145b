"""What the tests share: golden tensors, both modes, and how near is near."""

from collections.abc import Callable, Iterator
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor
from safetensors.numpy import load_file

SHARED = Path(__file__).parents[3] / "shared"
VECTORS = Path(__file__).parent / "vectors"

MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}

Arrays = dict[str, np.ndarray]


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """The mode that a test is parametrised with; all others run in PyNative mode."""
    ms.set_context(mode=MODES[request.param])
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def in_modes(names: str, cases: list[tuple[object, str]]) -> pytest.MarkDecorator:
    """Parametrises with cases of a value and the mode that it is tested in."""
    return pytest.mark.parametrize((names, "mode"), cases, indirect=["mode"])


def load_golden(name: str) -> Arrays:
    path = SHARED / "golden" / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"the golden tensors {path.name} are not beside this clone, in ../shared")
    return load_file(path)


def below(arrays: Arrays, prefix: str) -> Arrays:
    found = {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
    assert found, f"nothing is below {prefix}"
    return found


def assert_close(got: Tensor | np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Largest difference over the largest value, 1 at least."""
    got = got.asnumpy() if isinstance(got, Tensor) else got
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


def pulled_back(
    function: Callable[..., Tensor],
    cotangent: np.ndarray,
    *inputs: Tensor,
    weights: list[Parameter] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The output, the inputs' gradients and the weights'."""
    weight = Tensor(cotangent)

    def loss(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        out = function(*inputs)
        return (out * weight).sum(), out

    positions = tuple(range(len(inputs)))
    (_, out), gradients = ms.value_and_grad(loss, positions, weights, has_aux=True)(*inputs)
    gradients, learned = gradients if weights else (gradients, ())
    return out, (gradients,) if isinstance(gradients, Tensor) else gradients, learned
