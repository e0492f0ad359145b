"""Writes the golden tensors that every clone has: `python tests/golden/selection.py DIR`.

DIR is the folder of the full set. README.md beside this file says what is in both.
"""

import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

LAYERS = ("kernel/base/r2_8x6/", "kernel/norm/r2_8x6/", "block/base/r2_8x6/", "block/norm/r2_8x6/",
          "newton/m4_well/", "newton/m9_mid/", "newton/m16_identity/")  # fmt: skip
MINIS = ("soft_mini", "soft_norm_mini")
SIZE = "256x192"
"""Of the images whose maps after stage 2 are stored: not the size that positions are learned at."""
LATER = ("state/patch_embed3", "state/patch_embed4", "state/pos_embed3", "state/pos_embed4",
         "state/block3", "state/block4", "state/norm", "state/head", "state/cls_token")  # fmt: skip


def select(folder: Path) -> dict[str, dict[str, Tensor]]:
    """By file: layers in float64; of the minis everything from stage 3 on."""
    layers = load_file(folder / "layers_f64.safetensors")
    found = {
        "layers_f64": {
            name: tensor
            for name, tensor in layers.items()
            if name.startswith(LAYERS) and not name.endswith("out_torchkernel")
        }
    }
    for mini in MINIS:
        state = load_file(folder / f"{mini}_f32.safetensors")  # float64's are the same, upcast
        wide = load_file(folder / f"{mini}_f64.safetensors")
        kept = {name: tensor for name, tensor in state.items() if name.startswith(LATER)}
        if mini == "soft_norm_mini":  # what both share is stored once
            kept = {
                name: tensor
                for name, tensor in kept.items()
                if not tensor.equal(found["soft_mini"][name])
            }
        found[mini] = kept | {
            name: wide[name] for name in (f"out/{SIZE}/stage2", f"out/{SIZE}/logits")
        }
    return found


if __name__ == "__main__":
    for name, tensors in select(Path(sys.argv[1])).items():
        save_file(tensors, Path(__file__).with_name(f"{name}.safetensors"))
