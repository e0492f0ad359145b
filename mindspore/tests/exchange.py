"""What the tests of weights exchange with torch, in mindspore/build/exchange.

    .venv/bin/python mindspore/tests/exchange.py write    # before them, for MindSpore to read
    .venv/bin/python mindspore/tests/exchange.py check    # after them: what MindSpore has written

Runs in softmaxfree's environment; `make test-mindspore` calls both.
"""

import sys
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file, save_file

from softmaxfree.models.convert import convert

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "mindspore" / "build" / "exchange"


def write() -> None:
    """Weights as in the authors' files by way of `softmaxfree convert`, and their logits."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT))
    from tests.models.test_checkpoints import to_released

    torch.manual_seed(0)
    model = timm.create_model("soft_tiny_fudan")
    with torch.no_grad():  # no weight or statistic stays at its initial value
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
        model.train()(torch.randn(2, 3, 64, 64))
    released, converted = FOLDER / "released.pth", FOLDER / "soft_tiny_fudan.safetensors"
    torch.save({"state_dict": to_released(model.state_dict())}, released)
    convert(released, converted)
    released.unlink()
    images = torch.randn(1, 3, 256, 192)
    model = timm.create_model("soft_tiny_fudan", checkpoint_path=converted).eval()
    with torch.no_grad():
        save_file({"images": images, "logits": model(images)}, FOLDER / "logits.safetensors")


def check() -> None:
    """The file that MindSpore saved gives the logits that it had there."""
    path = FOLDER / "from_mindspore.safetensors"
    if not path.exists():
        sys.exit(f"there is no {path}: run the tests of mindspore/ first, `make test-mindspore`")
    there = load_file(FOLDER / "logits_from_mindspore.safetensors")
    model = timm.create_model("softx_nano", num_classes=10, checkpoint_path=path).eval()
    with torch.no_grad():
        error = (model(there["images"]) - there["logits"]).norm() / there["logits"].norm()
    if not error < 1e-4:
        sys.exit(f"logits of {path.name} are {error:.1e} (relative) from MindSpore's")
    print(f"weights from MindSpore: logits agree to {error:.1e}")


if __name__ == "__main__":
    {"write": write, "check": check}[sys.argv[1]]()
