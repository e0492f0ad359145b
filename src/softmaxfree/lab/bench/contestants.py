"""The attentions that are compared: operations, layers of the table, other packages' layers.

Each knows how to get ready for a case, and how to show, on a small input in float64, that it
computes what it claims: `verify` compares it with a formula that is written down independently.
"""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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


@dataclass(frozen=True)
class Case:
    """One input: batch, heads of width d, n tokens, m landmarks; layers in a row."""

    batch: int
    heads: int
    n: int
    m: int = 49
    d: int = 32
    layers: int = 1

    @property
    def dim(self) -> int:
        return self.heads * self.d

    def products(self) -> int:
        """Operations of SOFT's large products: the kernel, P^T V, and P times that."""
        return 3 * 2 * self.batch * self.heads * self.n * self.m * self.d


@dataclass(frozen=True)
class Setting:
    """Where and in what type a contestant computes."""

    device: str = "cpu"
    dtype: str = "float32"

    def tensor(self, *shape: int, generator: torch.Generator) -> Tensor:
        x = torch.randn(shape, generator=generator)
        return x.to(self.device, getattr(torch, self.dtype))


CPU = Setting()


@dataclass(frozen=True)
class Ready:
    """A contestant with its input."""

    call: Callable[[], Tensor]
    leaves: list[Tensor]
    """What a backward pass computes gradients of."""
    last: list[Tensor]
    """Those of the last layer, whose backward pass comes when all others are still kept."""

    def forward(self) -> None:
        with torch.no_grad():
            self.call()

    def train(self) -> None:
        self._backward(self.leaves)

    def train_last(self) -> None:
        self._backward(self.last)

    def _backward(self, leaves: list[Tensor]) -> None:
        out = self.call()
        torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)


@dataclass(frozen=True)
class Contestant:
    """An attention in a comparison.

    title: As tables show it.
    ready: For a case and a setting.
    error: Its relative error on a small input in float64.
    tolerance: The largest that passes.
    package: What has to be installed, if anything.
    matrices: How many n x n matrices of every head it holds at once, forward and in training.
    """

    title: str
    ready: Callable[[Case, Setting], Ready]
    error: Callable[[], float]
    tolerance: float = 1e-8
    package: str | None = None
    matrices: tuple[int, int] = (0, 0)

    def needs(self, case: Case, training: bool) -> int:
        """Bytes of these matrices in float32; training keeps one of every layer of a case."""
        if self.matrices == (0, 0):
            return 0
        matrices = self.matrices[1] + case.layers - 1 if training else self.matrices[0]
        return 4 * matrices * case.batch * case.heads * case.n**2


# Operations: tokens, values and landmarks (B, heads, ., d), without projections.

Operation = Callable[[Tensor, Tensor, Tensor], Tensor]


def softpp(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return softmax_free_attention(q, q, v, landmarks)


def released(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    """SOFT++ as the released code computes it without its CUDA extension, step by step.

    Squared norms by products with ones, one step size for the whole batch, 20 Newton steps with
    the gradient through all of them, P A^+ formed first.
    """
    return _released(q, v, landmarks, _distances_by_products)


def released_lean(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    """The same formula with squared norms by sums: what one would write without much thought."""
    return _released(q, v, landmarks, _distances_by_sums)


def _released(q: Tensor, v: Tensor, landmarks: Tensor, distances: Callable[..., Tensor]) -> Tensor:
    scale = q.shape[-1] ** -0.25
    q, landmarks = q * scale, landmarks * scale
    p = torch.exp(distances(q, landmarks.mT) / -2)
    a = torch.exp(distances(landmarks, landmarks.mT) / -2)
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    alpha = 2 / a.sum(-1).max() ** 2
    square = a @ a
    for _ in range(10):
        if (identity - alpha * square).abs().sum(-1).max() <= 1.01:
            break
        alpha = alpha / 2
    z = alpha * a
    for _ in range(20):
        z = 2 * z - z @ a @ z
    root = a.sum(-1).rsqrt()
    z = root.unsqueeze(-1) * z * root.unsqueeze(-2)
    return (p @ z) @ (p.mT @ v)


def _distances_by_products(x: Tensor, y: Tensor) -> Tensor:
    return x**2 @ torch.ones_like(y) + torch.ones_like(x) @ y**2 - 2 * (x @ y)


def _distances_by_sums(x: Tensor, y: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) + y.square().sum(-2, keepdim=True) - 2 * (x @ y)


def fused_softmax(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, v)


def plain_softmax(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return (q @ q.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def operation(
    title: str, function: Operation, claim: Operation, matrices: tuple[int, int] = (0, 0)
) -> Contestant:
    """A function of tokens, values and landmarks, of which there are evenly spaced ones."""

    def ready(case: Case, setting: Setting) -> Ready:
        generator = torch.Generator().manual_seed(0)
        shape = (case.batch, case.heads, case.n, case.d)
        q, v = (setting.tensor(*shape, generator=generator) for _ in range(2))
        landmarks = q[:, :, torch.linspace(0, case.n - 1, case.m).long()].clone()
        leaves = [x.requires_grad_() for x in (q, v, landmarks)]
        return Ready(lambda: function(*leaves), leaves, leaves)

    def error() -> float:
        generator = torch.Generator().manual_seed(0)
        q, v = torch.randn(2, 1, 1, 60, 8, dtype=torch.float64, generator=generator)
        landmarks = q[:, :, ::6]
        return claims.relative_error(function(q, v, landmarks), claim(q, v, landmarks))

    return Contestant(title, ready, error, matrices=matrices)


def _released_claim(q: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
    return softmax_free_attention(q, q, v, landmarks, method="backtrack")


OPERATIONS: dict[str, Contestant] = {
    "op_softpp": operation("SOFT++", softpp, claims.softmax_free),
    "op_released": operation("released formula", released, _released_claim),
    "op_released_lean": operation("same, norms by sums", released_lean, _released_claim),
    "op_sdpa": operation("softmax, fused", fused_softmax, plain_softmax),
    "op_softmax": operation("softmax, plain", plain_softmax, fused_softmax, (2, 3)),
}


# Layers: tokens (B, n, dim), projections included.


def _layers(case: Case, setting: Setting, build: Callable[[], nn.Module]) -> Ready:
    torch.manual_seed(0)
    layers = [build().to(setting.device, getattr(torch, setting.dtype)) for _ in range(case.layers)]
    generator = torch.Generator().manual_seed(0)
    x = setting.tensor(case.batch, case.n, case.dim, generator=generator).requires_grad_()

    def call() -> Tensor:
        if len(layers) == 1:
            return layers[0](x)
        out = x
        for layer in layers:
            out = out + layer(out)
        return out

    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return Ready(call, [x, *parameters], list(layers[-1].parameters()))


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
"""Of the table's attentions, as tables show them."""


def own_layer(name: str) -> Contestant:
    """The attention of that name, for sequences, with as many landmarks as landmarks."""

    def ready(case: Case, setting: Setting) -> Ready:
        build = partial(
            build_attention, name, case.dim, case.heads, ndim=1, ratio=max(1, case.n // case.m),
            max_size=(case.n,), bucket=case.m,
        )  # fmt: skip
        return _layers(case, setting, build)

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
    """0 if an attention of somebody's own passes the tests that need no formula of it."""
    battery = type("Battery", (AttentionBattery,), {"name": name})()
    battery.test_values_enter_linearly()
    battery.test_batch_mates_change_nothing()
    battery.test_gradients_are_those_of_differences()
    return 0.0


class PlainSoftmax(SoftmaxAttention):
    """Softmax attention that forms its matrix, as the paper's Transformer does."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def plain_transformer() -> Contestant:
    def build(case: Case) -> nn.Module:
        return PlainSoftmax(case.dim, case.heads, ndim=1, tie_qk=False)

    def ready(case: Case, setting: Setting) -> Ready:
        return _layers(case, setting, lambda: build(case))

    def error() -> float:
        torch.manual_seed(0)
        layer = build(Case(1, 2, 32, d=8)).double()
        fused = SoftmaxAttention(16, 2, ndim=1, tie_qk=False).double()
        fused.load_state_dict(layer.state_dict())
        x = torch.randn(1, 32, 16, dtype=torch.float64)
        return claims.relative_error(layer(x), fused(x))

    return Contestant("Transformer, plain", ready, error, matrices=(2, 3))


def pooled_reduction() -> Contestant:
    """Spatial reduction in PVTv2's linear form: of averages, whose projections cost little."""

    def ready(case: Case, setting: Setting) -> Ready:
        build = partial(
            build_attention, "spatial_reduction", case.dim, case.heads, ndim=1, ratio=1,
            num_landmarks=case.m,
        )  # fmt: skip
        return _layers(case, setting, build)

    error = partial(claims.layer_error, "spatial_reduction")
    return Contestant("spatial reduction, pooled", ready, error)


def package(
    title: str, module: str, build: Callable[[Any, Case], nn.Module], claim: str
) -> Contestant:
    """A layer of another package, which is imported when it is needed."""

    def ready(case: Case, setting: Setting) -> Ready:
        found = _imported(module)
        return _layers(case, setting, lambda: build(found, case))

    def error() -> float:
        torch.manual_seed(0)
        case = Case(1, 1, 32, m=8, d=8)
        layer = build(_imported(module), case).double().eval()
        x = torch.randn(1, case.n, case.dim, dtype=torch.float64)
        return claims.relative_error(layer(x), claims.PACKAGES[claim](layer, x))

    return Contestant(title, ready, error, package=module)


def _imported(module: str) -> Any:
    with warnings.catch_warnings():  # performer-pytorch's use of distutils
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(module)


def _linformer(linformer: Any, case: Case) -> nn.Module:
    return linformer.LinformerSelfAttention(case.dim, case.n, k=case.m, heads=case.heads)


def _nystrom(nystrom_attention: Any, case: Case) -> nn.Module:
    return nystrom_attention.NystromAttention(
        case.dim, dim_head=case.d, heads=case.heads, num_landmarks=case.m, residual=False
    )


def _performer(performer_pytorch: Any, case: Case) -> nn.Module:
    return performer_pytorch.SelfAttention(case.dim, heads=case.heads, dim_head=case.d)


def _reformer(reformer_pytorch: Any, case: Case) -> nn.Module:
    # As many rounds as the attention of the table; one where a formula checks it.
    rounds = 4 if case.heads > 1 else 1
    bucket = case.m if case.heads > 1 else case.n // 2
    return reformer_pytorch.LSHSelfAttention(
        case.dim, heads=case.heads, bucket_size=bucket, n_hashes=rounds
    )


VARIANTS: dict[str, Contestant] = {
    "softmax_plain": plain_transformer(),
    "spatial_reduction_pooled": pooled_reduction(),
}
"""Layers of the table in another form."""

PACKAGES: dict[str, Contestant] = {
    "linformer_package": package("linformer, package", "linformer", _linformer, "linformer"),
    "nystrom_attention": package(
        "nystrom-attention, package", "nystrom_attention", _nystrom, "nystrom_attention"
    ),
    "performer_pytorch": package(
        "performer-pytorch, package", "performer_pytorch", _performer, "performer_pytorch"
    ),
    "reformer_pytorch": package(
        "reformer-pytorch, package", "reformer_pytorch", _reformer, "reformer_pytorch"
    ),
}


RELEASED = "released"
"""The name under which models know the released formula: measured by itself only."""


def layer_names() -> list[str]:
    """The attentions of the table, those that were registered included."""
    return [name for name in ATTENTIONS if name != RELEASED]


def find(name: str) -> Contestant:
    """A contestant by its name; refuses one that is not there, or that is not installed."""
    if name in OPERATIONS:
        return OPERATIONS[name]
    if name in ATTENTIONS:
        return own_layer(name)
    if name in VARIANTS:
        return VARIANTS[name]
    if name not in PACKAGES:
        known = ", ".join([*ATTENTIONS, *VARIANTS, *PACKAGES, *OPERATIONS])
        raise UserError(f"unknown contestant {name!r}; choose among {known}")
    contestant = PACKAGES[name]
    try:
        _imported(str(contestant.package))
    except ModuleNotFoundError:
        raise UserError(
            f"{contestant.title} is not installed; install it with: "
            "pip install 'softmaxfree[peers]'"
        ) from None
    return contestant


def verify(names: list[str]) -> None:
    """Every contestant computes what it claims, or nothing is measured."""
    for name in names:
        contestant = find(name)
        try:
            error = contestant.error()
        except AssertionError as failure:
            raise RuntimeError(
                f"{contestant.title} does not keep what attentions must: {failure}; "
                "softmaxfree.testing.AttentionBattery has the tests"
            ) from failure
        if not error <= contestant.tolerance:
            raise RuntimeError(f"{contestant.title} does not compute what it should: {error:.1e}")
