"""The seam between the mathematics and how it is computed."""

import pytest
import torch
from torch import Tensor

from softmaxfree import softmax_free_attention
from softmaxfree.ops import backends, reference
from softmaxfree.ops.backends import TORCH, choose, tiles, torch_only
from softmaxfree.ops.backends.tiles import Stack
from softmaxfree.ops.backends.torch import Torch

from ..helpers import relative_error, tokens


class WholeFactor:
    """P formed by the reference: what a fused backend has to return, in its plainest form."""

    kept = None

    def __init__(self, x: Tensor, landmarks: Tensor) -> None:
        self.x, self.y = x.detach().requires_grad_(), landmarks.detach().requires_grad_()
        with torch.enable_grad():
            y = self.y.view(*x.shape[:2], *landmarks.shape[1:])
            self.p = reference.gaussian_kernel(self.x, y)  # (images, heads, n, m)

    def contract(self, stack: Stack, values: Tensor, out: Tensor) -> Tensor:
        return out.copy_((self.p.detach().mT @ values).flatten(0, 1))

    def expand(self, stack: Stack, w: Tensor, out: Tensor) -> None:
        out.copy_(self.p.detach() @ w.view(*out.shape[:2], *w.shape[1:]))

    def pull_back(
        self,
        stack: Stack,
        as_queries: tuple[Tensor, Tensor] | None,
        as_keys: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        self.grad_p = torch.zeros_like(self.p)
        if as_queries is not None:
            grad, w = as_queries
            self.grad_p += grad @ w.view(*grad.shape[:2], *w.shape[1:]).mT
        if as_keys is not None:
            v, grad_s, grad_v = as_keys
            self.expand(stack, grad_s, grad_v)
            self.grad_p += v @ grad_s.view(*v.shape[:2], *grad_s.shape[1:]).mT

    def gradients(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.p, (self.x, self.y), self.grad_p)


class Whole(Torch):
    """A backend that overrides one method and leaves the rest to torch."""

    def takes(self, *tensors: Tensor) -> bool:
        return all(x.dtype == torch.float64 for x in tensors)

    def factors(self, q: Tensor, k: Tensor | None, landmarks: Tensor, *_, **__):  # type: ignore
        images, heads = q.shape[:2]
        queries = WholeFactor(q, landmarks)
        keys = queries if k is None else WholeFactor(k, landmarks)
        return [Stack(0, 0, images * heads, heads)], queries, keys


@pytest.mark.parametrize("keys", [None, 11], ids=["self", "cross"])
def test_another_backend_is_one_class(keys: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    q = tokens(2, 3, 20, 5).requires_grad_()
    k = q if keys is None else tokens(2, 3, keys, 5, seed=1).requires_grad_()
    v, landmarks = tokens(2, 3, k.shape[-2], 4, seed=2), tokens(2, 3, 6, 5, seed=3)
    leaves = [*{q, k}, v.requires_grad_(), landmarks.requires_grad_()]

    def gradients() -> list[Tensor]:
        out = softmax_free_attention(q, k, v, landmarks)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    expected = gradients()
    monkeypatch.setattr(backends, "FASTER", (Whole(),))
    assert isinstance(choose(q), Whole)
    for ours, theirs in zip(gradients(), expected):
        assert relative_error(ours, theirs) < 1e-10
    with torch_only():
        assert choose(q) is TORCH
    assert choose(q.float()) is TORCH


@pytest.mark.parametrize(("n", "computed"), [(60, 1), (70, 4)], ids=["one-tile", "two-tiles"])
def test_kernel_values_of_a_single_tile_are_computed_once(
    n: int, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large it is: its memory is there for the second product."""
    calls = []

    class Counting(Torch):
        def kernel_of_tokens(self, *arguments: Tensor) -> None:
            calls.append(arguments)
            super().kernel_of_tokens(*arguments)

    monkeypatch.setattr(backends, "FASTER", (Counting(),))
    monkeypatch.setattr(tiles, "_TILE_BYTES", 1)
    monkeypatch.setattr(tiles, "_STORED_BYTES", 1)
    q, landmarks = tokens(1, n, 5), tokens(1, 6, 5, seed=1)
    softmax_free_attention(q, q, q, landmarks)
    assert len(calls) == computed
