"""What the tests share: the golden tensors, the compiled code, and one thread per worker.

Without a compiler everything has to work, so tests are of torch's way; with SOFTMAXFREE_NATIVE=1
they are of the compiled code, which is then built first.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from softmaxfree.ops.backends import native
from softmaxfree.ops.inverse import INVERSES

SHARED = Path(__file__).parents[2] / "shared"
SELECTION = Path(__file__).parent / "golden"

os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "all"  # in every test, not only the first

# A first backward pass after fake tensors have been used would start threads in autograd, and
# tests could not fork this process any more.
torch.ones(1, requires_grad=True).sum().backward()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

if os.environ.setdefault("SOFTMAXFREE_NATIVE", "0") != "0":
    native.build()


@pytest.fixture(scope="session")
def cache_with_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which the compiled code lies."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler here")
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        native.build()
    native.library.cache_clear()
    return folder


@pytest.fixture
def compiled(cache_with_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiled code is there and used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_with_library))
    monkeypatch.delenv("SOFTMAXFREE_NATIVE")
    native.library.cache_clear()
    assert native.library() is not None
    yield
    native.library.cache_clear()


class Golden:
    """Tensors computed with the authors' released code, by name."""

    def __init__(
        self, tensors: dict[str, Tensor], dtype: torch.dtype, selected: bool = False
    ) -> None:
        self.tensors, self.dtype, self.selected = tensors, dtype, selected

    def below(self, prefix: str) -> dict[str, Tensor]:
        found = {
            name.removeprefix(prefix): tensor.clone()
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }
        if not found and self.selected:
            pytest.skip(f"{prefix} is in the full set of golden tensors only, in ../shared")
        assert found, f"no golden tensors below {prefix}"
        return found


def load_golden(name: str, precision: str) -> Golden:
    """Of the full set, if that is beside this clone; else of the selection in tests/golden."""
    file = f"{name}_{precision}.safetensors"
    for folder in (SHARED / "golden", SELECTION):
        if (folder / file).exists():
            dtype = torch.float64 if precision == "f64" else torch.float32
            return Golden(load_file(folder / file), dtype, selected=folder == SELECTION)
    pytest.skip(f"the golden tensors {file} are in the full set only, in ../shared")


@pytest.fixture(scope="session", params=["f64", "f32"])
def golden_layers(request: pytest.FixtureRequest) -> Golden:
    return load_golden("layers", request.param)


@pytest.fixture
def released_backtrack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release's own scheme as `inverse="released_backtrack"`."""
    from .released import released_backtrack

    monkeypatch.setitem(INVERSES, "released_backtrack", released_backtrack)
