"""The attentions that are compared: operations, this package's layers, other packages' layers.

That they compute what their papers say is shown by `tests/layers` and `tests/lab/bench`.
"""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import UserError
from ...imports import needs
from ...layers.multihead import Layout
from ...layers.registry import ATTENTIONS, build_attention
from ...layers.softmax import SoftmaxAttention
from ...ops import softmax_free_attention
from ...testing import AttentionBattery
from ..measure import noise
from .released import distances_by_sums, released
from .runner import Device

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Case:
    """One input: batch, heads of width d, n tokens, m landmarks; layers in a row; where and in
    which type it is computed."""

    batch: int
    heads: int
    n: int
    m: int = 49
    d: int = 32
    layers: int = 1
    device: Device = "cpu"
    dtype: Dtype = "float32"

    @property
    def dim(self) -> int:
        return self.heads * self.d

    def products(self) -> int:
        """Operations of SOFT's large products: the kernel, P^T V, and P times that."""
        return 3 * 2 * self.batch * self.heads * self.n * self.m * self.d

    def tensors(self, count: int, *shape: int) -> list[Tensor]:
        return list(noise(count, *shape).to(self.device, getattr(torch, self.dtype)))


class Ready(NamedTuple):
    """A contestant with its input: the forward pass, and tensors that training differentiates."""

    call: Callable[[], Tensor]
    leaves: list[Tensor]

    def forward(self) -> None:
        with torch.no_grad():
            self.call()

    def training(self) -> None:
        out = self.call()
        torch.autograd.grad(out, self.leaves, torch.ones_like(out), allow_unused=True)


@dataclass(frozen=True)
class Contestant:
    """An attention in a comparison.

    title: As tables show it.
    ready: For a case.
    matrices: How many n x n matrices of every head it holds at once, forward and in training.
    """

    title: str
    ready: Callable[[Case], Ready]
    matrices: tuple[int, int] = (0, 0)

    def needs(self, case: Case, training: bool) -> int:
        """Bytes of these matrices in float32; training keeps one for each layer of a case."""
        if self.matrices == (0, 0):
            return 0
        matrices = self.matrices[1] + case.layers - 1 if training else self.matrices[0]
        return 4 * matrices * case.batch * case.heads * case.n**2


Operation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of tokens, values and landmarks (B, heads, ., d), without projections."""


def operation(title: str, function: Operation, matrices: tuple[int, int] = (0, 0)) -> Contestant:
    """A function of tokens, values and evenly spaced landmarks."""

    def ready(case: Case) -> Ready:
        q, v = case.tensors(2, case.batch, case.heads, case.n, case.d)
        landmarks = q[:, :, torch.linspace(0, case.n - 1, case.m).long()].clone()
        leaves = [x.requires_grad_() for x in (q, v, landmarks)]
        return Ready(lambda: function(*leaves), leaves)

    return Contestant(title, ready, matrices)


def softpp(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return softmax_free_attention(q, q, v, landmarks)


def fused_softmax(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, v)


def plain_softmax(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return (q @ q.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


OPERATIONS: dict[str, Contestant] = {
    "op_softpp": operation("SOFT++", softpp),
    "op_released": operation("released formula", released),
    "op_released_lean": operation(
        "same, norms by sums", partial(released, distances=distances_by_sums)
    ),
    "op_sdpa": operation("softmax, fused", fused_softmax),
    "op_softmax": operation("softmax, plain", plain_softmax, (2, 3)),
}


# Layers: tokens (B, n, dim), projections included.

Build = Callable[[Case], nn.Module]


def _ready_layers(build: Build, case: Case) -> Ready:
    """One layer, or several with residual connections.

    The backward pass through several layers stops after the last, when memory is largest.
    """
    torch.manual_seed(0)
    (x,) = case.tensors(1, case.batch, case.n, case.dim)
    layers = [build(case).to(x) for _ in range(case.layers)]
    x.requires_grad_()

    def call() -> Tensor:
        if len(layers) == 1:
            return layers[0](x)
        out = x
        for layer in layers:
            out = out + layer(out)
        return out

    return Ready(call, [*([x] if case.layers == 1 else []), *layers[-1].parameters()])


TITLES = {
    "soft": "SOFT",
    "softpp": "SOFT++",
    "softmax": "Transformer, fused",
    "linformer": "Linformer",
    "spatial_reduction": "spatial reduction",
    "performer": "Performer",
    "nystromformer": "Nyströmformer",
    "agent": "Agent Attention",
    "reformer": "Reformer",
    "skyformer": "Skyformer",
    "gaussian": "Gaussian, exact",
}
"""This package's attentions, as tables show them."""


def own_layer(name: str) -> Contestant:
    """A registered attention for sequences, with m landmarks or what corresponds to them."""

    def build(case: Case) -> nn.Module:
        return build_attention(
            name, case.dim, case.heads, ndim=1, ratio=max(1, case.n // case.m),
            max_size=(case.n,), bucket=case.m,
        )  # fmt: skip

    matrices = (2, 4) if name == "gaussian" else (0, 0)
    return Contestant(TITLES.get(name, name), partial(_ready_layers, build), matrices)


class PlainSoftmax(SoftmaxAttention):
    """Softmax attention that forms its matrix, as the paper's Transformer does."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def _plain_transformer(case: Case) -> nn.Module:
    return PlainSoftmax(case.dim, case.heads, ndim=1, tie_qk=False)


def _pooled_reduction(case: Case) -> nn.Module:
    """Spatial reduction in PVTv2's linear form: of averages, whose projections cost little."""
    return build_attention(
        "spatial_reduction", case.dim, case.heads, ndim=1, ratio=1, num_landmarks=case.m
    )


VARIANTS: dict[str, Contestant] = {
    "softmax_plain": Contestant(
        "Transformer, plain", partial(_ready_layers, _plain_transformer), (2, 3)
    ),
    "spatial_reduction_pooled": Contestant(
        "spatial reduction, pooled", partial(_ready_layers, _pooled_reduction)
    ),
}
"""Layers of this package in another form."""


def package(name: str, layer: str, options: Callable[[Case], dict[str, Any]]) -> Contestant:
    """A layer of another package, which is imported when it is needed."""
    module = name.replace("-", "_")

    def build(case: Case) -> nn.Module:
        with needs("peers", "comparing with packages"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # performer-pytorch: distutils
            found = importlib.import_module(module)
        return getattr(found, layer)(case.dim, heads=case.heads, **options(case))

    return Contestant(f"{name}, package", partial(_ready_layers, build))


PACKAGES: dict[str, Contestant] = {
    "linformer_package": package(
        "linformer", "LinformerSelfAttention", lambda case: {"seq_len": case.n, "k": case.m}
    ),
    "nystrom_attention": package(
        "nystrom-attention",
        "NystromAttention",
        lambda case: {"dim_head": case.d, "num_landmarks": case.m, "residual": False},
    ),
    "performer_pytorch": package(
        "performer-pytorch", "SelfAttention", lambda case: {"dim_head": case.d}
    ),
    "reformer_pytorch": package(  # as many rounds as this package's
        "reformer-pytorch",
        "LSHSelfAttention",
        lambda case: {"bucket_size": case.m, "n_hashes": 4},
    ),
}


def find(name: str) -> Contestant:
    """A contestant by its name; raises UserError for an unknown one."""
    if name in ATTENTIONS:
        return own_layer(name)
    others = VARIANTS | PACKAGES | OPERATIONS
    if name not in others:
        known = ", ".join([*ATTENTIONS, *others])
        raise UserError(f"unknown contestant {name!r}; choose among {known}")
    return others[name]


def checked(names: list[str] | None) -> list[str]:
    """The contestants of a benchmark, all layers if none are named.

    Raises UserError for one that is unknown or not installed, and RuntimeError for a user's
    attention that fails a test which needs no formula of it.
    """
    names = names or [*ATTENTIONS, *VARIANTS, *PACKAGES]
    for name in names:
        find(name).ready(Case(1, 1, 196))
        if name in ATTENTIONS and name not in TITLES:
            battery = type("Battery", (AttentionBattery,), {"name": name})()
            try:
                battery.test_values_enter_linearly()
                battery.test_batch_mates_change_nothing()
                battery.test_gradients_are_those_of_differences()
            except AssertionError as failure:
                raise RuntimeError(
                    f"{name} fails a test that every attention must pass: {failure}; "
                    "see softmaxfree.testing.AttentionBattery"
                ) from failure
    return names


def prepare(name: str, case: Case, kind: str) -> Callable[[], None]:
    """The call that is measured: `forward`, or `training` with a backward pass."""

    def call(case: Case) -> Callable[[], None]:
        ready = find(name).ready(case)
        return ready.forward if kind == "forward" else ready.training

    small = Case(1, case.heads, 196, case.m, case.d, device=case.device, dtype=case.dtype)
    call(small)()  # loads libraries and their buffers
    return call(case)
