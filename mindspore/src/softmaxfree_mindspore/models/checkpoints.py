"""Weights to and from softmaxfree's safetensors files: names, grids, and what is wrong."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from mindspore import Parameter, Tensor, nn
from safetensors.numpy import load_file, save_file

from .position import resize_grid

Arrays = dict[str, np.ndarray]

TORCH_NAMES = {
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
"""Parameters of normalisations: MindSpore's names and torch's. All others are called the same."""

_COUNTER = "num_batches_tracked"
"""torch's batch normalisation counts its steps. Nothing here depends on it: a file's counts are
kept beside the model and saved as they came, 0 where none came."""


def load_weights(model: nn.Cell, path: str | Path) -> None:
    """Loads a file that softmaxfree saved, of any position grid; half precision is widened.

    Released checkpoints come by way of `softmaxfree convert`.

    Args:
        model: Takes the weights.
        path: .safetensors file; names may begin with `model.`, as a training run's do.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give the path of a .safetensors file")
    try:
        arrays = load_file(path)
    except Exception as error:  # whatever a broken file makes the reader raise
        raise ValueError(
            f"{path} cannot be read as safetensors ({error}); "
            "`softmaxfree convert` writes other checkpoints as such"
        ) from error
    load_arrays(model, {name.removeprefix("model."): array for name, array in arrays.items()})


def save_weights(model: nn.Cell, path: str | Path) -> None:
    """Writes a file that softmaxfree loads, by `checkpoint_path` of timm's `create_model`.

    Args:
        model: Gives the weights.
        path: .safetensors file to write.
    """
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"the file must end in .safetensors, got {path}")
    save_file(state_arrays(model), path, metadata={"format": "pt"})


def torch_name(name: str) -> str:
    """What softmaxfree calls a parameter."""
    module, _, leaf = name.rpartition(".")
    leaf = TORCH_NAMES.get(leaf, leaf)
    return f"{module}.{leaf}" if module else leaf


def state_arrays(model: nn.Cell) -> Arrays:
    """All weights under softmaxfree's names, its counters included."""
    arrays: Arrays = {}
    counts = getattr(model, "batches_tracked", {})
    for name, parameter in _parameters(model).items():
        arrays[name] = np.ascontiguousarray(parameter.asnumpy())
        if name.endswith("running_var"):
            counter = name.replace("running_var", _COUNTER)
            arrays[counter] = counts.get(counter, np.zeros((), np.int64))
    return arrays


def load_arrays(model: nn.Cell, arrays: Mapping[str, np.ndarray]) -> None:
    """Loads weights under softmaxfree's names; position grids are resized to the model's."""
    parameters = _parameters(model)
    counts = {name: array for name, array in arrays.items() if name.endswith(_COUNTER)}
    state = {name: array for name, array in arrays.items() if name not in counts}
    for name in state:
        if name.endswith("position.grid") and name in parameters:
            state[name] = resize_grid(state[name], parameters[name].shape[1:3])
    _check(state, parameters, type(model).__name__)
    for name, parameter in parameters.items():
        parameter.set_data(Tensor(state[name], parameter.dtype))
    model.batches_tracked = counts


def _parameters(model: nn.Cell) -> dict[str, Parameter]:
    return {torch_name(name): parameter for name, parameter in model.parameters_and_names()}


def _check(state: Arrays, expected: dict[str, Parameter], model: str) -> None:
    """Refuses weights that do not fit, in one sentence that says which."""
    missing = [name for name in expected if name not in state]
    unknown = [name for name in state if name not in expected]
    shapes = [
        f"{name} {state[name].shape} in place of {tuple(parameter.shape)}"
        for name, parameter in expected.items()
        if name in state and state[name].shape != tuple(parameter.shape)
    ]
    titles = {"missing:": missing, "unknown:": unknown, "of other shape:": shapes}
    wrong = [f"{title} {_some(names)}" for title, names in titles.items() if names]
    if wrong:
        raise ValueError(
            f"these weights do not fit this {model}; {'; '.join(wrong)}; build the model with the "
            "arguments that `softmaxfree convert` prints for the file"
        )


def _some(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
