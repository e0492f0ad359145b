"""Options of the attentions of a model: what its arguments say, checked and put together."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import UserError
from ..layers.attention import NUM_LANDMARKS, SoftmaxFreeAttention
from ..layers.registry import attention_class, chosen_options

FROM_MODEL = ("ndim", "max_size", "prefix_tokens")
"""Options of an attention that follow from the model it is in."""


def all_options(
    attention: str,
    alone: Mapping[str, Any] | None,
    per_layer: Mapping[str, str],
    **arguments: Any,
) -> dict[str, Any]:
    """Options that all layers of an attention share; refuses one that would be set twice.

    Args:
        attention: Its name.
        alone: The model's `attention_options`.
        per_layer: Options that differ from layer to layer, and the model's arguments for them.
        arguments: The model's arguments that are options of the attention, None if not given.
    """
    alone = alone or {}
    check_own_options(attention, alone)
    names = {option: option for option in arguments} | dict(per_layer)
    for option in alone:
        if option in names:
            raise UserError(
                f"{option} in attention_options is set by an argument of the model; "
                f"pass {names[option]} there"
            )
    return chosen_options(attention, **arguments, **alone)


def check_own_options(attention: str, options: Iterable[str]) -> None:
    """Refuses options that the model, or the attention's name, settles."""
    for option in options:
        if option in FROM_MODEL:
            raise UserError(f"{option} follows from the model; leave it out")
        if option == "normalize" and attention in ("soft", "softpp"):
            raise UserError(
                f"normalize is what tells softpp from soft, and attention is {attention!r}; "
                "choose by the name"
            )


def landmark_options(
    attention: str,
    ratios: Sequence[int] | None,
    num_landmarks: int | None,
    sides: Sequence[int],
) -> list[dict[str, int]]:
    """`ratio` and `num_landmarks` of the attention in each stage.

    With ratios alone every window becomes a landmark. With neither, SOFT and SOFT++ have 49
    landmarks at every size, and other attentions as many as these have at the usual size.

    Args:
        attention: Its name.
        ratios: Sides of the windows; by default the largest that make enough landmarks.
        num_landmarks: How many landmarks, at every size.
        sides: Tokens along a side in each stage, at the usual image size. Windows do not depend
            on the size a model is built for, so that weights fit models of all sizes.
    """
    if ratios is None:
        if num_landmarks is None and issubclass(attention_class(attention), SoftmaxFreeAttention):
            num_landmarks = NUM_LANDMARKS
        ratios = [window_ratio(side, num_landmarks or NUM_LANDMARKS) for side in sides]
    number = {} if num_landmarks is None else {"num_landmarks": num_landmarks}
    return [{"ratio": ratio, **number} for ratio in ratios]


def window_ratio(side: int, num_landmarks: int) -> int:
    """Side of the largest windows that make `num_landmarks` or more of side x side tokens."""
    return max(1, int(side // max(num_landmarks, 1) ** 0.5))
