"""The attentions that are compared: operations, this package's layers, other packages' layers.

Each can show, on a small input in float64, that it computes what it claims: `verify` compares it
with a formula that is written down independently.
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
from ...layers.multihead import Layout
from ...layers.registry import ATTENTIONS, build_attention
from ...layers.softmax import SoftmaxAttention
from ...ops import softmax_free_attention
from ...testing import AttentionBattery
from . import claims
from .released import distances_by_sums, released

Device = Literal["cpu", "cuda"]
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
        """Noise, always the same."""
        x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))
        return list(x.to(self.device, getattr(torch, self.dtype)))


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
    error: Its relative error on a small input in float64.
    tolerance: The largest error that passes.
    matrices: How many n x n matrices of every head it holds at once, forward and in training.
    """

    title: str
    ready: Callable[[Case], Ready]
    error: Callable[[], float]
    tolerance: float = 1e-8
    matrices: tuple[int, int] = (0, 0)

    def needs(self, case: Case, training: bool) -> int:
        """Bytes of these matrices in float32; training keeps one for each layer of a case."""
        if self.matrices == (0, 0):
            return 0
        matrices = self.matrices[1] + case.layers - 1 if training else self.matrices[0]
        return 4 * matrices * case.batch * case.heads * case.n**2


Operation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of tokens, values and landmarks (B, heads, ., d), without projections."""


def operation(
    title: str, function: Operation, claim: Operation, matrices: tuple[int, int] = (0, 0)
) -> Contestant:
    """A function of tokens, values and evenly spaced landmarks."""

    def ready(case: Case) -> Ready:
        q, v = case.tensors(2, case.batch, case.heads, case.n, case.d)
        landmarks = q[:, :, torch.linspace(0, case.n - 1, case.m).long()].clone()
        leaves = [x.requires_grad_() for x in (q, v, landmarks)]
        return Ready(lambda: function(*leaves), leaves)

    def error() -> float:
        q, v = (x.double() for x in Case(1, 1, 60).tensors(2, 1, 1, 60, 8))
        landmarks = q[:, :, ::6]
        return claims.relative_error(function(q, v, landmarks), claim(q, v, landmarks))

    return Contestant(title, ready, error, matrices=matrices)


def softpp(q: Tensor, v: Tensor, landmarks: Tensor, method: str = "auto") -> Tensor:
    return softmax_free_attention(q, q, v, landmarks, method=method)


def fused_softmax(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, v)


def plain_softmax(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return (q @ q.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


_CLAIM = partial(softpp, method="backtrack")
_LEAN = partial(released, distances=distances_by_sums)
OPERATIONS: dict[str, Contestant] = {
    "op_softpp": operation("SOFT++", softpp, claims.softmax_free),
    "op_released": operation("released formula", released, _CLAIM),
    "op_released_lean": operation("same, norms by sums", _LEAN, _CLAIM),
    "op_sdpa": operation("softmax, fused", fused_softmax, plain_softmax),
    "op_softmax": operation("softmax, plain", plain_softmax, fused_softmax, (2, 3)),
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

    ready = partial(_ready_layers, build)
    if name not in claims.LAYERS:
        return Contestant(name, ready, partial(_battery_error, name))
    return Contestant(
        TITLES[name],
        ready,
        partial(claims.layer_error, name),
        claims.LAYERS[name].tolerance,
        matrices=(2, 4) if name == "gaussian" else (0, 0),
    )


def _battery_error(name: str) -> float:
    """0 if a user's attention passes the tests that need no formula of it."""
    battery = type("Battery", (AttentionBattery,), {"name": name})()
    battery.test_values_enter_linearly()
    battery.test_batch_mates_change_nothing()
    battery.test_gradients_are_those_of_differences()
    return 0.0


class PlainSoftmax(SoftmaxAttention):
    """Softmax attention that forms its matrix, as the paper's Transformer does."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def _plain_transformer(case: Case) -> nn.Module:
    return PlainSoftmax(case.dim, case.heads, ndim=1, tie_qk=False)


def _plain_error() -> float:
    torch.manual_seed(0)
    layer = _plain_transformer(Case(1, 2, 32, d=8)).double()
    fused = SoftmaxAttention(16, 2, ndim=1, tie_qk=False).double()
    fused.load_state_dict(layer.state_dict())
    x = torch.randn(1, 32, 16, dtype=torch.float64)
    return claims.relative_error(layer(x), fused(x))


def _pooled_reduction(case: Case) -> nn.Module:
    """Spatial reduction in PVTv2's linear form: of averages, whose projections cost little."""
    return build_attention(
        "spatial_reduction", case.dim, case.heads, ndim=1, ratio=1, num_landmarks=case.m
    )


VARIANTS: dict[str, Contestant] = {
    "softmax_plain": Contestant(
        "Transformer, plain",
        partial(_ready_layers, _plain_transformer),
        _plain_error,
        matrices=(2, 3),
    ),
    "spatial_reduction_pooled": Contestant(
        "spatial reduction, pooled",
        partial(_ready_layers, _pooled_reduction),
        partial(claims.layer_error, "spatial_reduction"),
    ),
}
"""Layers of this package in another form."""


def package(name: str, layer: str, options: Callable[[Case], dict[str, Any]]) -> Contestant:
    """A layer of another package, which is imported when it is needed."""
    module = name.replace("-", "_")

    def build(case: Case) -> nn.Module:
        try:
            with warnings.catch_warnings():  # performer-pytorch imports distutils
                warnings.simplefilter("ignore", DeprecationWarning)
                found = importlib.import_module(module)
        except ModuleNotFoundError:
            raise UserError(
                f"{name} is not installed; install it with: pip install 'softmaxfree[peers]'"
            ) from None
        return getattr(found, layer)(case.dim, heads=case.heads, **options(case))

    def error() -> float:
        torch.manual_seed(0)
        case = Case(1, 1, 32, m=8, d=8)
        built = build(case).double().eval()
        x = torch.randn(1, case.n, case.dim, dtype=torch.float64)
        return claims.relative_error(built(x), claims.PACKAGES[module](built, x))

    return Contestant(f"{name}, package", partial(_ready_layers, build), error)


def _reformer(case: Case) -> dict[str, int]:
    """As many rounds as this package's Reformer; one where a formula checks it."""
    checked = case.heads == 1
    return {"bucket_size": case.n // 2 if checked else case.m, "n_hashes": 1 if checked else 4}


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
    "reformer_pytorch": package("reformer-pytorch", "LSHSelfAttention", _reformer),
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


def verified(names: list[str] | None) -> list[str]:
    """The contestants of a benchmark, all layers if none are named.

    Raises RuntimeError if one does not compute what it claims.
    """
    names = names or [*ATTENTIONS, *VARIANTS, *PACKAGES]
    for name in names:
        contestant = find(name)
        try:
            error = contestant.error()
        except AssertionError as failure:
            raise RuntimeError(
                f"{contestant.title} fails a test that every attention must pass: {failure}; "
                "see softmaxfree.testing.AttentionBattery"
            ) from failure
        if not error <= contestant.tolerance:
            raise RuntimeError(f"{contestant.title} does not compute what it should: {error:.1e}")
    return names


def prepare(name: str, case: Case, kind: str) -> Callable[[], None]:
    """The call that is measured: `forward`, or `training` with a backward pass."""

    def call(case: Case) -> Callable[[], None]:
        ready = find(name).ready(case)
        return ready.forward if kind == "forward" else ready.training

    small = Case(1, case.heads, 196, case.m, case.d, device=case.device, dtype=case.dtype)
    call(small)()  # loads libraries and their buffers
    return call(case)
