"""Computes the shared vectors with torch: what both packages' tests compare themselves with.

    .venv/bin/python mindspore/tests/vectors/make.py

Run it in softmaxfree's environment when a number is meant to change; `tests/test_mindspore.py`
fails in it, and `mindspore/tests/test_vectors.py` beside MindSpore, where another one changes.
"""

import inspect
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import timm
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor, nn

import softmaxfree
from softmaxfree.data import ImageData
from softmaxfree.data.sources import Digits
from softmaxfree.data.transforms import evaluation_transform, training_transform
from softmaxfree.files import recipe
from softmaxfree.layers.samplers import SAMPLERS
from softmaxfree.models.checkpoints import resize_grid
from softmaxfree.models.soft import SoftmaxFreeTransformer
from softmaxfree.models.variants import DESIGNS, NANO_SOFTX, SIZES
from softmaxfree.tasks import Classification
from softmaxfree.tasks.ema import MovingAverage

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import inputs  # noqa: E402 - beside this file, which is a script and no package

DIGITS = Path(softmaxfree.__file__).parent / "weights" / "digits-softpp.safetensors"

Arrays = dict[str, np.ndarray]


def compute() -> Arrays:
    """Every vector by its name."""
    parts = (kernel(), inverses(), attentions(), samplers(), layers(), positions())
    parts += (digits(), schedule(), nano(), tiny(), softx(), tables())
    # safetensors writes memory as it lies there, and a slice has gaps.
    return {name: np.ascontiguousarray(x) for part in parts for name, x in part.items()}


def pulled_back(name: str, out: Tensor, **inputs_: Tensor) -> Arrays:
    """An output, and the gradients of its product with a cotangent."""
    cotangent = torch.from_numpy(inputs.normal(f"{name}/cotangent", *out.shape))
    gradients = torch.autograd.grad(out, list(inputs_.values()), cotangent)
    found = {f"{name}/out": out, **{f"{name}/{n}": g for n, g in zip(inputs_, gradients)}}
    return {key: tensor.detach().numpy() for key, tensor in found.items()}


def tensor(name: str, *shape: int) -> Tensor:
    return torch.from_numpy(inputs.normal(name, *shape)).requires_grad_()


def kernel() -> Arrays:
    q, k = tensor("q", 2, 7, 6), tensor("k", 2, 5, 6)
    return pulled_back("kernel", softmaxfree.gaussian_kernel(q, k), q=q, k=k)


def inverses() -> Arrays:
    found: Arrays = {}
    for method in inputs.METHODS:
        a = torch.from_numpy(inputs.kernels()).requires_grad_()
        found |= pulled_back(f"pinv/{method}", softmaxfree.pinv(a, method), a=a)
    return found


def attentions() -> Arrays:
    found: Arrays = {}
    for name, options in inputs.ATTENTIONS.items():
        q, k, v, x = (tensor(n, 2, size, 8) for n, size in zip("qkvx", (11, 7, 7, 4)))
        given = {"q": q, "k": k, "v": v, "landmarks": x}
        if name in ("rows", "sums"):
            given["log_weights"] = tensor("w", 2, 7)
        out = softmaxfree.softmax_free_attention(**given, **options)
        found |= pulled_back(f"attention/{name}", out, **given)
        if name not in ("soft", "softpp"):
            continue
        q = tensor("q", 2, 11, 8)
        out = softmaxfree.gaussian_attention(q, k, v, **options)
        found |= pulled_back(f"gaussian/{name}", out, q=q, k=k, v=v)
    return found


def samplers() -> Arrays:
    q, found = tensor("q", 2, 2, 35, 4), {}
    for name, arguments in inputs.SAMPLERS.items():
        chosen = dict(arguments)
        sampler = SAMPLERS[chosen.pop("sampler")](4, 2, **chosen).eval()
        fill(sampler)
        found[f"sampler/{name}"] = sampler(q, (7, 5), None)[0].detach().numpy()
    return found


def layers() -> Arrays:
    x, found = tensor("x", 2, 36, 16), {}
    for name, arguments in inputs.LAYERS.items():
        layer = softmaxfree.SoftmaxFreeAttention(**inputs.LAYER, **arguments).eval()
        fill(layer)
        found |= pulled_back(f"layer/{name}", layer(x, (7, 5)), x=x)
    return found


def fill(module: nn.Module) -> None:
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    state = {name: torch.from_numpy(value) for name, value in inputs.weights(shapes).items()}
    module.load_state_dict(state)


def positions() -> Arrays:
    grid = torch.from_numpy(inputs.normal("grid", 1, 4, 6, 2))
    sizes = {"larger": (7, 9), "smaller": (3, 2)}
    return {f"position/{name}": resize_grid(grid, *size).numpy() for name, size in sizes.items()}


def digits() -> Arrays:
    """Which digits are held out, the order of an epoch, and images made ready."""
    held_out, training = Digits("validation"), Digits("train")
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(3))
    return {
        "digits/held_out": np.array(held_out.targets[held_out.numbers], np.uint8),
        "digits/order": order.numpy().astype(np.int16),
        "digits/training": ready_digits(training=True),
        "digits/scored": ready_digits(training=False),
    }


def ready_digits(training: bool) -> np.ndarray:
    """The first digits as `softmaxfree fit` has them in its fourth epoch, one of three channels."""
    data = ImageData(**settings()["data"]["init_args"])
    data.setup("fit")
    transform = (
        training_transform(data.size, **(data.preparation | data.augmentation))
        if training
        else evaluation_transform(data.size, **data.preparation)
    )
    source = data.sources["train" if training else "val"]
    samples = data._dataset(source, transform, data.size, training)
    return np.stack([samples[3, i].image[0].numpy() for i in range(5)])


def settings() -> dict:
    import yaml

    return yaml.safe_load(recipe("digits/softpp_nano.yaml").read_text())


def schedule() -> Arrays:
    """Learning rates of the recipe's run, how much its average keeps, and what decays."""
    task = Classification(**settings()["model"]["init_args"])
    batches = 22
    steps = settings()["trainer"]["max_epochs"] * batches

    class Trainer:
        num_training_batches, accumulate_grad_batches = batches, 1
        estimated_stepping_batches = steps

        class fit_loop:  # noqa: N801 - as the trainer's attribute is called
            @staticmethod
            def setup_data() -> None: ...

    task._trainer = Trainer()
    chosen = task.configure_optimizers()
    optimizer, scheduler = chosen["optimizer"], chosen["lr_scheduler"]["scheduler"]
    rates = []
    for step in range(0, steps, 16):
        scheduler.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    names = {id(parameter): name for name, parameter in task.model.named_parameters()}
    decayed = [
        names[id(parameter)]
        for group in optimizer.param_groups
        if group["weight_decay"] > 0
        for parameter in group["params"]
    ]
    average = MovingAverage(task.ema)
    kept = []
    for count in range(1, 200, 9):
        value = torch.ones(1)
        average._average((value,), (torch.zeros(1),), count)
        kept.append(value.item())
    return {
        "schedule/lr": np.array(rates),
        "schedule/kept": np.array(kept),
        "schedule/decayed": np.frombuffer("\n".join(sorted(decayed)).encode(), np.uint8),
    }


def nano() -> Arrays:
    """Logits of the trained model that comes with softmaxfree, of digits and of a wider image."""
    state = {name.removeprefix("model."): x.float() for name, x in load_file(DIGITS).items()}
    model = timm.create_model("softpp_nano", num_classes=10).eval()
    model.load_state_dict(state)
    images = torch.from_numpy(ready_digits(training=False))[:, None].expand(-1, 3, -1, -1)
    wide = torch.from_numpy(inputs.normal("wide", 2, 3, 24, 45))
    with torch.no_grad():
        return {"nano/digits": model(images).numpy(), "nano/wide": model(wide).numpy()}


def tiny() -> Arrays:
    """Logits of softpp_tiny, its weights from a file, and the file's hash."""
    model = timm.create_model("softpp_tiny")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found: Arrays = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "softpp_tiny.safetensors"
        found["tiny/file"] = inputs.write_weights(shapes, path)
        model = timm.create_model("softpp_tiny", checkpoint_path=path).eval()
    for name, size in inputs.SIZES.items():
        image = torch.from_numpy(inputs.normal(name, 1, 3, *size))
        with torch.no_grad():
            found[f"tiny/{name}"] = model(image).numpy()
    return found


def softx() -> Arrays:
    """Logits of a small softx_nano, of images wider than its own."""
    model = timm.create_model("softx_nano", **inputs.SOFTX).eval()
    fill(model)
    with torch.no_grad():
        return {"softx/wide": model(torch.from_numpy(inputs.normal("wide", 2, 3, 24, 45))).numpy()}


def tables() -> Arrays:
    """Names and arguments of every model, and the defaults of what both packages have, as JSON."""
    shared = (softmaxfree.pinv, softmaxfree.softmax_free_attention, SoftmaxFreeTransformer)
    found = {function.__name__: defaults(function) for function in shared}
    found["SoftmaxFreeAttention"] = defaults(softmaxfree.SoftmaxFreeAttention)
    return {
        "tables/sizes": inputs.encoded(SIZES),
        "tables/designs": inputs.encoded(DESIGNS | {"softx_nano": NANO_SOFTX}),
        "tables/names": inputs.encoded(sorted(timm.list_models(module="variants"))),
        "tables/defaults": inputs.encoded(found),
    }


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    plain = (int, float, str, tuple, NoneType)
    return {p.name: p.default for p in parameters if isinstance(p.default, plain)}


if __name__ == "__main__":
    arrays = compute()
    assert all(np.isfinite(array).all() for array in arrays.values())
    save_file(arrays, FOLDER / "vectors.safetensors")
    size = (FOLDER / "vectors.safetensors").stat().st_size
    print(f"wrote {len(arrays)} vectors, {math.ceil(size / 1024)} KB")
