"""With spatial reduction, patches that do not overlap and normalised branches it is PVT."""

import math
import re

import timm
import torch
from torch import Tensor, nn
from transformers import PvtConfig, PvtForImageClassification

from ..helpers import relative_error

AS_PVT = {
    "attention": "spatial_reduction",
    "overlap": False,
    "pre_norm": True,
    "value_conv": 0,
    "mlp_ratios": (8, 8, 4, 4),
    "num_heads": (1, 2, 5, 8),
}


def test_pvt_tiny_has_its_published_size() -> None:
    """13.2 M; the last stage has a class token, and positions are learned in every stage."""
    model = timm.create_model("softpp_tiny", depths=(2, 2, 2, 2), **AS_PVT)
    theirs = PvtForImageClassification(PvtConfig(num_labels=1000))
    counts = [sum(p.numel() for p in net.parameters()) for net in (model, theirs)]
    assert counts == [13_229_288] * 2


def test_is_pvt_with_its_weights() -> None:
    config = PvtConfig(
        image_size=64,
        hidden_sizes=[8, 16, 20, 24],
        depths=[1, 1, 2, 1],
        num_attention_heads=[1, 2, 2, 3],
        num_labels=5,
    )
    torch.manual_seed(0)
    theirs = PvtForImageClassification(config).double().eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = timm.create_model(
        "softpp_tiny",
        img_size=64,
        num_classes=5,
        embed_dims=(8, 16, 20, 24),
        depths=(1, 1, 2, 1),
        **AS_PVT | {"num_heads": (1, 2, 2, 3)},
    )
    ours.double().eval().load_state_dict(renamed(theirs.state_dict()))
    for net in (ours, theirs):
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-6
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert relative_error(ours(images), theirs(images).logits) < 1e-10


NAMES = {
    r"pvt\.encoder\.patch_embeddings\.(\d)\.projection": r"stages.\1.embed.0.conv",
    r"pvt\.encoder\.patch_embeddings\.(\d)\.layer_norm": r"stages.\1.embed.0.norm",
    r"pvt\.encoder\.patch_embeddings\.(\d)\.cls_token": r"stages.\1.cls_token",
    r"pvt\.encoder\.block\.(\d)\.(\d)\.": r"stages.\1.blocks.\2.",
    r"layer_norm_(\d)": r"norm\1",
    r"attention\.self\.(q|k|v)(uery|ey|alue)": r"attention.\1",
    r"attention\.self\.sequence_reduction\.weight": "attention.reduction.weight",
    r"attention\.self\.sequence_reduction\.bias": "attention.reduction_bias",
    r"attention\.self\.layer_norm": "attention.reduction_norm",
    r"attention\.output\.dense": "attention.proj",
    r"mlp\.dense": "mlp.fc",
    r"pvt\.encoder\.layer_norm": "norm",
    r"classifier": "head",
}


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in state.items():
        if name.endswith("position_embeddings"):
            stage = f"stages.{name.split('.')[3]}.position"
            if tensor.shape[1] % 2:  # the class token's comes first
                found[f"{stage}.prefix"], tensor = tensor[:, :1], tensor[:, 1:]
            side = math.isqrt(tensor.shape[1])
            found[f"{stage}.grid"] = tensor.unflatten(1, (side, side))
            continue
        for theirs, ours in NAMES.items():
            name = re.sub(theirs, ours, name)
        found[name] = tensor
    return found
