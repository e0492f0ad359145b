"""Rows of a model's attention matrices, as maps."""

from collections.abc import Sequence

from torch import Tensor, nn

from ..errors import UserError
from ..ops.checks import check_floating, shape
from .attention_record import AttentionRecord
from .hooks import evaluating, recorded_attention


def attention_rows(
    model: nn.Module,
    image: Tensor,
    query: int | Sequence[int],
    layer: int | str,
    head: int | None = None,
) -> Tensor:
    """Returns a row of a layer's attention matrix S: how much one token attends to each other.

        rows = attention_rows(model, image, query=(3, 5), layer=-1)  # (heads, H, W)

    A head's result is S v. Rows of softmax sum to 1; those of SOFT do not, and may have negative
    entries. Only the row is computed, not S. For many queries or layers of one image, record it
    once with `recorded_attention`.

    Args:
        model: A model with attentions of this package; runs in evaluation mode.
        image: (channels, H, W), or a batch of one, normalised as the model expects it.
        query: (row, column) on the layer's grid, or a token's number, which counts tokens before
            the grid, such as the class token, first.
        layer: Name of the layer, or its number in the order of the pass, from the end if negative.
        head: All heads if None.

    Returns:
        (heads, H, W), or (H, W) of one head, on the grid of the layer's keys: the queries', or a
        coarser one of `spatial_reduction`. Columns of tokens before the grid are left out.
    """
    check_floating(image=image)
    batch = image.unsqueeze(0) if image.ndim == 3 else image
    if batch.ndim != 4 or len(batch) != 1:
        raise UserError(f"image must be one image (channels, H, W), got shape {shape(image)}")
    with evaluating(model):
        with recorded_attention(model) as layers:
            model(batch)
        record = chosen_layer(layers, layer)
        token = query if isinstance(query, int) else record.token(*query)
        rows = record.rows([token], head)[0].squeeze(-2)
        return record.on_grid(rows)


def chosen_layer(layers: dict[str, AttentionRecord], layer: int | str) -> AttentionRecord:
    """Finds a layer in the result of `recorded_attention` by its name or its number."""
    if not layers:
        raise UserError("no attention has run; pass the model as it is, not compiled or wrapped")
    if isinstance(layer, str):
        if layer not in layers:
            raise UserError(f"there is no layer {layer!r}; choose one of {', '.join(layers)}")
        return layers[layer]
    count = len(layers)
    if not -count <= layer < count:
        raise UserError(
            f"layer must be a name or a number from {-count} to {count - 1}, got {layer}"
        )
    return list(layers.values())[layer]
