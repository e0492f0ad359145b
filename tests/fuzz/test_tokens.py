"""Tokens as nobody would choose them: magnitudes, outliers, duplicates, gaps, types, masks, sizes.

SOFTMAXFREE_FUZZ_CASES sets the number of cases.
"""

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from softmaxfree import softmax_free_attention
from softmaxfree.ops import reference

from .records import record

CASES = int(os.environ.get("SOFTMAXFREE_FUZZ_CASES", "60"))
FUZZ = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    derandomize="SOFTMAXFREE_FUZZ_CASES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
TYPES = [torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 1e-2, torch.float64: 1e-8, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""How far a single case may be from the reference; percentiles are in `results/fuzz.md`."""


@dataclass(frozen=True)
class Case:
    """One call of the attention; tensors are drawn with the seed."""

    seed: int
    batch: int
    n: int
    keys: int  # 0: the queries are the keys
    m: int
    d: int
    e: int
    dtype: torch.dtype
    spread: float  # of the tokens, before the kernel's own scale
    offset: float  # that all of them have, as a multiple of the spread
    outliers: int  # landmarks that lie so many spreads away, each of them a token, too
    distance: float
    duplicates: int  # landmarks that are equal, or nearly so, to the first one
    layout: str  # how tokens lie in memory
    masked: bool
    normalize: bool
    middle: str

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """SOFT or SOFT++, or softx, whose Z has no inverse."""
        normalize = self.normalize and self.middle == "inverse"
        return softmax_free_attention(q, k, v, landmarks, normalize, mask=mask, middle=self.middle)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values, landmarks."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(count: int, width: int) -> Tensor:
            shape = (self.batch, count, width)
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        most = torch.finfo(self.dtype).max / 4
        q, k = draw(self.n, self.d), draw(self.keys or 1, self.d)
        q[:, : self.outliers] *= self.distance
        q, k = (self.spread * (x + self.offset) for x in (q, k))
        places = torch.arange(self.m) % self.n
        landmarks = q[:, places]
        noise = 1 + 1e-7 * draw(self.duplicates, self.d) if self.duplicates else 1.0
        landmarks[:, self.m - self.duplicates :] = landmarks[:, :1] * noise
        q, k, landmarks = (self._laid_out(x.clamp(-most, most)) for x in (q, k, landmarks))
        if not self.keys:
            k = q
        return q, k, self._laid_out(draw(k.shape[1], self.e)), landmarks

    def _laid_out(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if self.layout == "gaps":
            return torch.cat([x, x.new_full(x.shape, torch.nan)], -1)[..., : x.shape[-1]]
        if self.layout == "transposed":
            return x.mT.contiguous().mT
        return x.transpose(0, 1).contiguous().transpose(0, 1) if self.layout == "tokens" else x

    def mask(self, keys: int) -> Tensor | None:
        """(batch, keys), at least one of them kept."""
        if not self.masked:
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        mask = torch.rand(self.batch, keys, generator=generator) > 0.4
        mask[:, 0] = True
        return mask


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from(TYPES))
    m = draw(st.sampled_from([1, 2, 9, 16, 49, 65]))
    powers = st.sampled_from([-6, -3, -1, 0, 0, 0, 1, 2, 3, 4])
    return Case(
        seed=draw(st.integers(0, 2**31)),
        batch=draw(st.integers(1, 2)),
        n=draw(st.sampled_from([1, 2, 17, 70, 130])),
        keys=draw(st.sampled_from([0, 0, 1, 40])),
        m=m,
        d=draw(st.sampled_from([1, 3, 8, 16, 32])),
        e=draw(st.sampled_from([1, 8])),
        dtype=dtype,
        spread=10.0 ** draw(powers),
        offset=draw(st.sampled_from([0.0, 0.0, 1.0, 1e2, 1e4])),
        outliers=draw(st.sampled_from([0, 1, 1, 3])),
        distance=10.0 ** draw(st.sampled_from([1, 2, 3, 4, 6, 6])),
        duplicates=min(m - 1, draw(st.sampled_from([0, 0, 1, 8]))),
        layout=draw(st.sampled_from(["plain", "gaps", "transposed", "tokens"])),
        masked=draw(st.booleans()),
        normalize=draw(st.booleans()),
        middle=draw(st.sampled_from(["inverse", "inverse", "sums"])),
    )


def averaged(x: Tensor, y: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, float]:
    """softmax(-|x - y|^2 / (2 sqrt d)) v, and the size of its exponents' rounding errors."""
    exponents = (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1) / (-2 * x.shape[-1] ** 0.5)
    rounding = 4 * torch.finfo(torch.float64).eps * exponents.abs().max().item()
    if mask is not None:
        exponents = exponents.masked_fill(~mask.unsqueeze(-2), -torch.inf)
    return exponents.softmax(-1) @ v, rounding


def reference_of(case: Case, wide: list[Tensor], mask: Tensor | None) -> tuple[Tensor, float]:
    """The result in float64, and how far it may be from the true one."""
    q, k, v, landmarks = wide
    if case.middle == "inverse":
        return reference.softmax_free_attention(q, k, v, landmarks, case.normalize, mask=mask), 0.0
    of_landmarks, first = averaged(landmarks, k, v, mask)
    out, second = averaged(q, landmarks, of_landmarks)
    return out, first + second


def error(got: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Relative, in float64; of what is nothing beside the values, relative to these.

    Below a type's smallest normal number its digits are absolute, not relative: 3e-8 in float16.
    """
    size = torch.maximum(expected.norm(), 1e-6 * scale.double().norm())
    size = size.clamp(min=torch.finfo(got.dtype).smallest_normal)
    return ((got.double() - expected).norm() / size).item()


@FUZZ
@given(case=cases())
def test_results_are_those_of_float64(case: Case) -> None:
    q, k, v, landmarks = case.tensors()
    mask = case.mask(k.shape[1])
    leaves = [x.requires_grad_() for x in dict.fromkeys((q, k, v, landmarks))]
    out = case.attention(q, k, v, landmarks, mask)
    gradients = torch.autograd.grad(out.float().sum(), leaves)
    wide = {x: x.detach().double() for x in leaves}
    expected, uncertain = reference_of(case, [wide[x] for x in (q, k, v, landmarks)], mask)
    off = error(out.detach(), expected, wide[v])
    finite = bool(out.isfinite().all()) and all(bool(x.isfinite().all()) for x in gradients)
    record(
        kind="tokens",
        dtype=str(case.dtype).removeprefix("torch."),
        magnitude=landmarks.detach().abs().max().item(),
        outliers=case.distance if case.outliers else 0.0,
        finite=finite,
        error=off,
    )
    assert finite
    assert off < ROUNDING[case.dtype] + uncertain


@FUZZ
@given(case=cases(), mate=cases())
def test_batch_mates_change_nothing(case: Case, mate: Case) -> None:
    shape = ("batch", "n", "keys", "m", "d", "e", "dtype", "duplicates", "middle")
    mate = Case(**vars(mate) | {name: getattr(case, name) for name in shape})
    own, others = case.tensors(), mate.tensors()

    def attention(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor) -> Tensor:
        return case.attention(q, k if case.keys else q, v, landmarks)

    alone = attention(*own)
    together = attention(*(torch.cat(pair) for pair in zip(own, others)))[: case.batch]
    off = error(together, alone.double(), own[2])
    record(
        kind="batch-mates",
        dtype=str(case.dtype).removeprefix("torch."),
        magnitude=own[3].abs().max().item(),
        outliers=case.distance if case.outliers else 0.0,
        finite=bool(together.isfinite().all()),
        error=off,
    )
    assert off < ROUNDING[case.dtype] + reference_of(case, [x.double() for x in own], None)[1]


@FUZZ
@given(case=cases(), junk=st.sampled_from([0.0, 1e4, torch.inf, torch.nan]))
def test_what_is_dropped_changes_nothing(case: Case, junk: float) -> None:
    q, k, v, landmarks = case.tensors()
    count = k.shape[1]
    own = (k if case.keys else q, v)
    more_k, more_v = (F.pad(x, (0, 0, 0, 3), value=junk) for x in own)
    mask = (torch.arange(count + 3) < count).expand(case.batch, -1)
    more_q = q if case.keys else more_k
    leaves = [x.requires_grad_() for x in dict.fromkeys((more_q, more_k, more_v, landmarks))]
    got = case.attention(more_q, more_k, more_v, landmarks, mask)
    got = got[:, : q.shape[1]]
    gradients = torch.autograd.grad(got.float().sum(), leaves)
    expected = case.attention(q, own[0], v, landmarks).detach()
    off = error(got.detach(), expected.double(), v)
    finite = all(bool(x.isfinite().all()) for x in (got, *gradients))
    record(
        kind="dropped",
        dtype=str(case.dtype).removeprefix("torch."),
        magnitude=landmarks.detach().abs().max().item(),
        outliers=case.distance if case.outliers else 0.0,
        finite=finite,
        error=off,
    )
    assert finite
    assert off < ROUNDING[case.dtype]
