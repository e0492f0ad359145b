"""What the authors' code does that this package does not, and their names, for comparing."""

import math
import re

import numpy as np
from mindspore import Tensor, nn, ops

from softmaxfree_mindspore.ops.inverse import backtracked_alpha
from softmaxfree_mindspore.ops.products import product

MODULES = {
    "att.mha.W_q": "attention.q",
    "att.mha.W_v": "attention.v",
    "att.mha.ff": "attention.proj",
    "att.mha.attn.Qlandmark_op": "attention.sampler",
    "att.mha.attn.Qnorm_act.0": "attention.landmark_norm.0",
    "att.mha.attn.conv": "attention.value_conv",
    "att.ff1": "mlp.fc1",
    "att.ff2": "mlp.fc2",
    "att.norm1": "norm1",
    "att.norm2": "norm2",
    "attn.q": "attention.q",
    "attn.proj": "attention.proj",
}
"""Modules of a block: the authors' names and ours, where they differ."""


class ReleasedBacktrack(nn.Cell):
    """The release's scheme with its defect: one step size for the whole batch, and the gradient
    taken through all steps and through the step size."""

    def __init__(self, iters: int, ridge: float) -> None:
        super().__init__()
        self.iters = iters

    def construct(self, a: Tensor) -> Tensor:
        alpha = 2 / ops.square(a.sum(-1).max())
        alpha = backtracked_alpha(a, alpha * ops.ones_like(a[..., :1, :1])).min()
        z = alpha * a
        for _ in range(self.iters):
            z = 2 * z - product(product(z, a), z)
        return z


def renamed(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The authors' state dict under the names that `softmaxfree convert` gives it."""
    found: dict[str, np.ndarray] = {}
    for key, array in state.items():
        found |= _renamed(key, array)
    return found


def _renamed(key: str, array: np.ndarray) -> dict[str, np.ndarray]:
    if key == "cls_token":
        return {"stages.3.cls_token": array}
    if found := re.fullmatch(r"pos_embed(\d)", key):
        position, side = f"stages.{int(found[1]) - 1}.position", math.isqrt(array.shape[1])
        prefix = array.shape[1] - side * side
        state = {f"{position}.grid": array[:, prefix:].reshape(1, side, side, -1)}
        return state | ({f"{position}.prefix": array[:, :prefix]} if prefix else {})
    if found := re.fullmatch(r"patch_embed(\d)\.proj\.(\d)\.(\w+)", key):
        unit, layer = divmod(int(found[2]), 3)
        embed = f"stages.{int(found[1]) - 1}.embed.{unit}"
        return {f"{embed}.{'bn' if layer else 'conv'}.{found[3]}": array}
    if found := re.fullmatch(r"block(\d)\.(\d+)\.(.+)\.(\w+)", key):
        block, module, leaf = f"stages.{int(found[1]) - 1}.blocks.{found[2]}", found[3], found[4]
        if module == "attn.kv":
            k, v = np.split(array, 2)
            return {f"{block}.attention.k.{leaf}": k, f"{block}.attention.v.{leaf}": v}
        return {f"{block}.{MODULES.get(module, module)}.{leaf}": array}
    return {key: array}
