"""Matrices to invert: of any scale, rank and type, with entries of both signs, in stacks.

SOFTMAXFREE_FUZZ_CASES sets the number of cases.
"""

import math
import os
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from softmaxfree import pinv
from softmaxfree.errors import UserError
from softmaxfree.ops.inverse import INVERSES

from .records import record

CASES = int(os.environ.get("SOFTMAXFREE_FUZZ_CASES", "150"))
FUZZ = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    derandomize="SOFTMAXFREE_FUZZ_CASES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
ROUNDING = {torch.float32: 1e-2, torch.float64: 1e-8, torch.bfloat16: 2e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Case:
    """A stack of positive semi-definite matrices; they are drawn with the seed."""

    seed: int
    kind: str
    m: int
    power: int  # of 10, the largest entry's
    dtype: torch.dtype
    method: str
    ridge: float | None

    def matrices(self) -> Tensor:
        """(2, m, m)."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(2, self.m, 8, generator=generator, dtype=torch.float64)
        if self.kind == "gram":  # of rank 8 at most
            a = x @ x.mT
        elif self.kind == "kernel":
            a = torch.exp(-torch.cdist(x, x).square())
        elif self.kind == "duplicates":
            x[:, self.m // 2 :] = x[:, :1]
            a = torch.exp(-torch.cdist(x, x).square())
        elif self.kind == "diagonal":  # entries 20 orders of magnitude apart
            a = torch.diag_embed(10.0 ** (20 * torch.rand(2, self.m, generator=generator) - 20))
            a = a.double()
        else:
            a = torch.zeros(2, self.m, self.m, dtype=torch.float64)
        a = a / a.abs().amax().clamp(min=1e-300)
        return (a * 10.0**self.power).to(self.dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    most = math.floor(math.log10(torch.finfo(dtype).max))
    usual = st.sampled_from([-2, 0, 0, 2])
    ridges = [None, None, 0.0, 1e-12, 1e-2, 1e3, 1e30, 1e200, -1.0, math.nan]
    return Case(
        seed=draw(st.integers(0, 2**31)),
        kind=draw(st.sampled_from(["gram", "kernel", "kernel", "duplicates", "diagonal", "zeros"])),
        m=draw(st.sampled_from([1, 2, 9, 33, 65])),
        power=draw(usual | st.integers(-most, most)),
        dtype=dtype,
        method=draw(st.sampled_from(sorted(INVERSES))),
        ridge=draw(st.sampled_from(ridges)),
    )


def is_refused(case: Case) -> bool:
    """What the documentation says is refused."""
    if case.ridge is None:
        return False
    if not 0 <= case.ridge <= 1e30:
        return True
    return case.ridge == 0 and case.method in ("auto", "rescaled")


@FUZZ
@given(case=cases())
def test_inverses_are_finite(case: Case) -> None:
    a = case.matrices().requires_grad_()
    try:
        z = pinv(a, case.method, ridge=case.ridge)
    except UserError:
        assert is_refused(case)
        record(kind="matrices", dtype=str(case.dtype).removeprefix("torch."), refused=True)
        return
    assert not is_refused(case)
    (gradient,) = torch.autograd.grad(z.float().mean(), a)
    # The gradient is promised where the type can hold the square of the inverse.
    in_range = z.detach().double().norm() ** 2 < torch.finfo(case.dtype).max
    finite = bool(z.isfinite().all()) and (not in_range or bool(gradient.isfinite().all()))
    record(
        kind="matrices",
        dtype=str(case.dtype).removeprefix("torch."),
        magnitude=10.0**case.power,
        finite=finite,
    )
    assert finite


@FUZZ
@given(case=cases())
def test_a_ridge_bounds_the_error(case: Case) -> None:
    """By factorisation, with a hundredth of the largest entry on the diagonal, at any scale."""
    largest = 10.0**case.power
    if case.dtype in (torch.bfloat16, torch.float16) or case.kind == "zeros" or largest > 1e31:
        return
    a, ridge = case.matrices(), 0.01 * largest
    wide = a.double() / largest + 0.01 * torch.eye(case.m, dtype=torch.float64)
    expected = torch.linalg.inv(wide)
    got = pinv(a, "auto", ridge=ridge).double() * largest
    off = ((got - expected).norm() / expected.norm()).item()
    in_range = largest > 1e-36 if case.dtype == torch.float32 else largest > 1e-300
    record(
        kind="inverse",
        dtype=str(case.dtype).removeprefix("torch."),
        magnitude=largest,
        finite=math.isfinite(off),
        **{"error": off} if in_range else {},
    )
    assert not in_range or off < ROUNDING[case.dtype]
