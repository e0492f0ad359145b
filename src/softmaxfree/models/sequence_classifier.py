"""The encoder of the Long Range Arena in PyTorch, with any attention, for one sequence or two."""

from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from ..errors import UserError
from ..layers.blocks import PreNormBlock
from ..layers.registry import attention_options, build_attention, chosen_options

WINDOW = 4
"""Tokens that the paper averages to one landmark: landmarks grow with the sequence."""

BENCHMARK: dict[str, dict[str, Any]] = {
    "linformer": {"num_landmarks": 256},
    "nystromformer": {"num_landmarks": 64, "value_conv": 35},
    "performer": {"features": 256},
    "reformer": {"hashes": 2},
    "skyformer": {"num_landmarks": 128},
    "spatial_reduction": {"num_landmarks": 128},
    "agent": {"num_landmarks": 128},
}
"""Options of the peers, as Nyströmformer's authors set them in the benchmark; it does not have the
last three."""


class SequenceEncoder(nn.Module):
    """Tokens with learned positions through layers of attention, averaged to one vector.

    The average leaves padding out, so that padding changes nothing. (In the benchmark the average
    is over all tokens, and the result depends on the length of the padding.)

    Args:
        vocabulary: Number of tokens, padding included.
        length: Of the longest sequence.
        attention: Name in the table of attentions.
        options: Further arguments of the attention, such as num_landmarks: 128. By default SOFT and
            SOFT++ average windows of 4 tokens, as in the paper, and the peers have the options of
            the benchmark.
        dim: Width of the tokens.
        hidden: Width of the feed-forward networks.
        depth: Layers.
        num_heads: Heads of the attention.
        dropout: Of embeddings, of hidden layers and of what is added to the residual path.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        attention: str = "softpp",
        options: dict[str, Any] | None = None,
        dim: int = 64,
        hidden: int = 128,
        depth: int = 2,
        num_heads: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.empty(length, dim))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            PreNormBlock(
                build_attention(attention, dim, num_heads, **_options(attention, length, options)),
                dim,
                hidden / dim,
                drop=dropout,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        for weight in (self.embedding.weight, self.position):
            trunc_normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (B, n) of int64, of which those of the mask (B, n) count -> (B, dim)."""
        n = tokens.shape[1]
        if n > self.length:
            raise UserError(
                f"a sequence has {n} tokens, but the model is built for {self.length}: cut it, "
                "or build the model with a larger length"
            )
        x = self.drop(self.embedding(tokens) + self.position[:n])
        for block in self.blocks:
            x = block(x, mask=mask)
        x = self.norm(x)
        if mask is None:
            return x.mean(1)
        total = x.masked_fill(~mask.unsqueeze(-1), 0).sum(1)
        return total / mask.sum(1, keepdim=True).clamp(min=1)


def _options(attention: str, length: int, options: dict[str, Any] | None) -> dict[str, Any]:
    given: dict[str, Any] = {"ndim": 1, "max_size": (length,), "sampler": "avg", "ratio": WINDOW}
    given |= BENCHMARK.get(attention, {}) | chosen_options(attention, **(options or {}))
    return {name: value for name, value in given.items() if name in attention_options(attention)}


class SequenceClassifier(nn.Module):
    """Classifies sequences, or pairs of them, through one encoder.

    Args:
        num_classes: Of the result.
        pairs: Whether samples are pairs, whose vectors a and b go on as a, b, ab and a - b.
        hidden: Width of the encoder's feed-forward networks and of the head's hidden layer.
        encoder: The other arguments of SequenceEncoder.
    """

    def __init__(
        self,
        num_classes: int,
        vocabulary: int,
        length: int,
        attention: str = "softpp",
        options: dict[str, Any] | None = None,
        pairs: bool = False,
        dim: int = 64,
        hidden: int = 128,
        **encoder: Any,
    ) -> None:
        super().__init__()
        self.pairs = pairs
        self.encoder = SequenceEncoder(
            vocabulary, length, attention, options, dim, hidden, **encoder
        )
        self.head = nn.Sequential(
            nn.Linear(4 * dim if pairs else dim, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
        )

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        second_tokens: Tensor | None = None,
        second_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, num_classes) of tokens (B, n), and of second ones (B, m) where samples are
        pairs; masks are True for tokens that count."""
        if self.pairs != (second_tokens is not None):
            raise UserError(
                "this model takes "
                + ("pairs: give second_tokens" if self.pairs else "no second_tokens")
            )
        x = self.encoder(tokens, mask)
        if second_tokens is not None:
            y = self.encoder(second_tokens, second_mask)
            x = torch.cat([x, y, x * y, x - y], 1)
        logits: Tensor = self.head(x)
        return logits
