"""Agent Attention: two softmax attentions through pooled queries. Han et al., arXiv 2312.08874."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from ..ops.precision import compute_dtype, without_autocast
from .attention import NUM_LANDMARKS
from .multihead import Layout, MultiHeadAttention, dropped_to_zero
from .samplers import Size, fit, landmark_grid, pool
from .softmax import masked_softmax

BLOCK = 7
"""Side of the block bias, which is resized to the grid."""


class AgentAttention(MultiHeadAttention):
    """Agents, which are averages of queries, attend to the keys, and queries attend to the agents.

    With agents A, the queries' grid averaged to a small one, and biases B1 and B2 by place,

        O = softmax(Q A^T / sqrt d + B2) softmax(A K^T / sqrt d + B1) V

    Prefix tokens are queries and keys but not agents. The paper adds a depthwise convolution of
    the values with a kernel for each channel: `value_conv=3, value_conv_per_channel=True`.

    Args:
        dim, num_heads: Width of the tokens, and heads that divide it.
        max_size: The grid that the biases are learned for, (N,) or (H, W); they are resized to
            others.
        ratio, num_landmarks: Set the number of agents, 49 if neither is given: that of landmarks
            that SOFT with its sampler `avg` would have on that grid. Smaller grids have fewer
            agents if they have fewer tokens along a side, larger ones have no more.
        others: Of `MultiHeadAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        max_size: Sequence[int],
        ratio: int | None = None,
        num_landmarks: int | None = None,
        tie_qk: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(dim, num_heads, tie_qk=tie_qk, **others)
        if ratio is None:
            ratio, num_landmarks = 1, NUM_LANDMARKS if num_landmarks is None else num_landmarks
        self.agents = landmark_grid(max_size, self.ndim, ratio, num_landmarks)
        self.key_bias = AgentBias(num_heads, self.agents, max_size, self.prefix_tokens)
        self.query_bias = AgentBias(num_heads, self.agents, max_size, self.prefix_tokens)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        size, mask, query_mask, prefix = (
            layout.size, layout.mask, layout.query_mask, self.prefix_tokens,
        )  # fmt: skip
        grid: Size = tuple(map(torch.sym_min, self.agents, size))  # type: ignore[arg-type]
        grid_mask = None if query_mask is None else query_mask[:, prefix:]
        agents, kept = pool(q[..., prefix:, :], size, grid, grid_mask)
        k, v, dtype = dropped_to_zero(k, mask), dropped_to_zero(v, mask), compute_dtype(q)
        with without_autocast(q):
            agents = agents.to(dtype) * self.head_dim**-0.5
            from_keys = agents @ k.to(dtype).mT + self.key_bias(grid, layout.context_size, mask)
            to_queries = q.to(dtype) @ agents.mT + self.query_bias(grid, size, query_mask).mT
            gathered = masked_softmax(from_keys, mask) @ v.to(dtype)
            return (masked_softmax(to_queries, kept) @ gathered).to(v.dtype)


class AgentBias(nn.Module):
    """A bias for each head, agent and place: of blocks of the grid, of its rows and its columns.

    All are resized bilinearly. With a mask, to the lines that hold a token to keep: a padded and
    masked grid has the biases that the grid alone has. Sequences, which have no rows and columns,
    have blocks alone; prefix tokens have biases of their own.

    Args:
        heads: Number of heads.
        agents, size: Grids of the agents and of the places.
        prefix: How many tokens come before the grid.
    """

    def __init__(self, heads: int, agents: Size, size: Sequence[int], prefix: int) -> None:
        super().__init__()
        self.block = nn.Parameter(torch.empty(heads, *agents, *[BLOCK] * len(size)))
        sides = size if len(size) == 2 else ()
        self.lines = nn.ParameterList([torch.empty(heads, *agents, side) for side in sides])
        self.prefix = nn.Parameter(torch.empty(heads, *agents, prefix)) if prefix else None
        for bias in self.parameters():
            trunc_normal_(bias, std=0.02)

    def forward(self, agents: Size, size: Size, mask: Tensor | None) -> Tensor:
        """The biases of agents on a grid, at prefix and places: (B or 1, heads, m, prefix + N).

        Args:
            agents: Grid of the agents, at most that of the constructor.
            size: Grid of the places.
            mask: (B, prefix + N), True for the tokens to keep; None for all.
        """

        def of_agents(bias: Tensor) -> Tensor:
            """(heads, *agents, ...) -> (heads, m, ...)."""
            for axis, count in enumerate(agents, start=1):
                bias = fit(bias, axis, bias.shape[axis], count, replicate=True)
            return bias.flatten(1, len(agents)).to(compute_dtype(bias))

        block = of_agents(self.block)
        if mask is None:
            lines = [torch.ones(1, side, dtype=torch.bool, device=block.device) for side in size]
        else:
            prefix = 0 if self.prefix is None else self.prefix.shape[-1]
            kept = mask[:, prefix:].unflatten(-1, size)
            lines = [kept] if len(size) == 1 else [kept.any(2), kept.any(1)]
        weights = [resizing(line, BLOCK, block.dtype) for line in lines]
        if len(size) == 1:
            bias = torch.einsum("kai,bni->bkan", block, *weights)
        else:
            bias = torch.einsum("bhi,kaij,bwj->bkahw", weights[0], block, weights[1])
            for axis, (line, own) in enumerate(zip(lines, map(of_agents, self.lines))):
                weight = resizing(line, own.shape[-1], own.dtype)
                bias = bias + torch.einsum("kai,bni->bkan", own, weight).unsqueeze(4 - axis)
            bias = bias.flatten(3)
        if self.prefix is None:
            return bias
        first = of_agents(self.prefix).expand(bias.shape[0], -1, -1, -1)
        return torch.cat([first, bias], -1)


def resizing(kept: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Weights that resize a line bilinearly to the entries to keep: (B, L) -> (B, L, length).

    Lines have their ends in common, as in `interpolate` with `align_corners=False`.
    """
    rank, count = kept.cumsum(-1) - 1, kept.sum(-1, keepdim=True).clamp(min=1)
    place = ((rank.to(dtype) + 0.5) * length / count - 0.5).clamp(0, length - 1)
    distance = place.unsqueeze(-1) - torch.arange(length, dtype=dtype, device=kept.device)
    return (1 - distance.abs()).clamp(min=0)
