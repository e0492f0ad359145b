"""In step with softmaxfree: what is written twice gives what torch gave, see vectors/make.py."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from safetensors.numpy import load_file

from softmaxfree_mindspore import (
    SoftmaxFreeAttention,
    SoftmaxFreeTransformer,
    create_model,
    gaussian_attention,
    gaussian_kernel,
    list_models,
    pinv,
    softmax_free_attention,
)
from softmaxfree_mindspore.digits import load_digits, permutation
from softmaxfree_mindspore.layers.samplers import SAMPLERS
from softmaxfree_mindspore.models.checkpoints import load_arrays, state_arrays, torch_name
from softmaxfree_mindspore.models.position import PositionEmbedding, resize_grid
from softmaxfree_mindspore.models.soft import DESIGNS, NANO_SOFTX, SIZES
from softmaxfree_mindspore.train import (
    RECIPE,
    decayed,
    kept_average,
    learning_rate,
    read_recipe,
)

from .conftest import VECTORS, Arrays, assert_close, below, in_modes, pulled_back
from .vectors import inputs

REPOSITORY = Path(__file__).parents[2]
DIGITS = REPOSITORY / "src" / "softmaxfree" / "weights" / "digits-softpp.safetensors"


@pytest.fixture(scope="module")
def vectors() -> Arrays:
    return load_file(VECTORS / "vectors.safetensors")


def check(name: str, vectors: Arrays, function, *tensors: Tensor, tolerance: float = 1e-5) -> None:
    """The output and the inputs' gradients, in the order in which make.py names the inputs."""
    expected = below(vectors, f"{name}/")
    cotangent = inputs.normal(f"{name}/cotangent", *expected["out"].shape)
    out, gradients, _ = pulled_back(function, cotangent, *tensors)
    assert_close(out, expected.pop("out"), tolerance)
    names = [n for n in ("a", "q", "k", "v", "x", "landmarks", "log_weights") if n in expected]
    for n, gradient in zip(names, gradients, strict=True):
        assert_close(gradient, expected[n], tolerance)


def tensor(name: str, *shape: int) -> Tensor:
    return Tensor(inputs.normal(name, *shape))


def fill(cell: nn.Cell) -> nn.Cell:
    shapes = {name: array.shape for name, array in state_arrays(cell).items()}
    load_arrays(cell, inputs.weights(shapes))
    return cell.set_train(False)


def test_kernel(vectors: Arrays) -> None:
    check("kernel", vectors, gaussian_kernel, tensor("q", 2, 7, 6), tensor("k", 2, 5, 6))


@pytest.mark.parametrize("method", inputs.METHODS)
def test_inverse(method: str, vectors: Arrays) -> None:
    def inverse(a: Tensor) -> Tensor:
        return pinv(a, method)

    check(f"pinv/{method}", vectors, inverse, Tensor(inputs.kernels()), tolerance=1e-4)


@pytest.mark.parametrize("name", inputs.ATTENTIONS)
def test_attention(name: str, vectors: Arrays) -> None:
    given, options = attention_inputs(), inputs.ATTENTIONS[name]

    def attend(*given: Tensor) -> Tensor:
        return softmax_free_attention(*given[:4], **options)

    def attend_by_weight(*given: Tensor) -> Tensor:
        return softmax_free_attention(*given[:4], **options, log_weights=given[4])

    def attend_exactly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gaussian_attention(q, k, v, **options)

    if name in ("soft", "softpp"):
        check(f"attention/{name}", vectors, attend, *given[:4], tolerance=1e-4)
        check(f"gaussian/{name}", vectors, attend_exactly, *given[:3])
    else:
        check(f"attention/{name}", vectors, attend_by_weight, *given, tolerance=1e-4)


def attention_inputs() -> list[Tensor]:
    """Queries, keys, values, landmarks, logarithms of the weights of keys."""
    tokens = [tensor(n, 2, size, 8) for n, size in zip("qkvx", (11, 7, 7, 4))]
    return [*tokens, tensor("w", 2, 7)]


def test_sums_do_not_depend_on_where_tokens_are(vectors: Arrays) -> None:
    """Nor on a landmark that is far from all of them."""
    q, k, v, landmarks, weights = attention_inputs()
    landmarks = ops.cat((landmarks, 1e7 * ops.ones_like(landmarks[:, :1])), 1)
    q, k, landmarks = (x + 1e3 for x in (q, k, landmarks))
    out = softmax_free_attention(q, k, v, landmarks, middle="sums", log_weights=weights)
    assert_close(out, vectors["attention/sums/out"], 1e-3)


@pytest.mark.parametrize("magnitude", [1e19, 1e30])
def test_sums_of_large_tokens(magnitude: float) -> None:
    """Results are averages of values, and gradients are finite."""
    q, k, v, landmarks, weights = attention_inputs()

    def attend(q: Tensor, k: Tensor, landmarks: Tensor) -> Tensor:
        return softmax_free_attention(q, k, v, landmarks, middle="sums", log_weights=weights)

    large = [x * magnitude for x in (q, k, landmarks)]
    out, gradients, _ = pulled_back(attend, np.ones((2, 11, 8), np.float32), *large)
    assert all(np.isfinite(x.asnumpy()).all() for x in gradients)
    assert (out <= v.max(-2, keepdims=True) + 1e-5).all()
    assert (out >= v.min(-2, keepdims=True) - 1e-5).all()


def test_a_query_far_from_all_landmarks_gets_nothing() -> None:
    q, *others, _ = attention_inputs()
    assert not softmax_free_attention(q + 30, *others, rows=True).any()


def test_what_does_not_go_together_is_named() -> None:
    *given, weights = attention_inputs()
    with pytest.raises(ValueError, match="middle must be one of inverse, sums, got 'sum'"):
        softmax_free_attention(*given, middle="sum")
    with pytest.raises(ValueError, match="pass rows=True"):
        softmax_free_attention(*given, log_weights=weights)
    with pytest.raises(ValueError, match=r"log_weights must be \(2, 7\), got \(2, 6\)"):
        softmax_free_attention(*given, rows=True, log_weights=weights[:, 1:])
    with pytest.raises(ValueError, match="key_weights need rows"):
        SoftmaxFreeAttention(16, key_weights=True)
    with pytest.raises(ValueError, match="landmarks_of must be one of queries, keys, both"):
        SoftmaxFreeAttention(16, landmarks_of="values")
    with pytest.raises(ValueError, match="needs a class token"):
        create_model("softx_nano", global_pool="token")
    with pytest.raises(ValueError, match="attention_options must be one of 'qkv_bias'"):
        create_model("softx_nano", attention_options={"sampler": "conv"})


@pytest.mark.parametrize("name", inputs.SAMPLERS)
def test_sampler(name: str, vectors: Arrays) -> None:
    arguments = dict(inputs.SAMPLERS[name])
    sampler = fill(SAMPLERS[arguments.pop("sampler")](4, **arguments))
    assert_close(sampler(tensor("q", 2, 2, 35, 4), (7, 5)), vectors[f"sampler/{name}"], 1e-5)


MODES = {"rows": "graph", "softx": "graph"}


@in_modes("name", [(name, MODES.get(name, "pynative")) for name in inputs.LAYERS])
def test_layer(name: str, mode: None, vectors: Arrays) -> None:
    layer = fill(SoftmaxFreeAttention(**inputs.LAYER, **inputs.LAYERS[name]))

    def at_size(x: Tensor) -> Tensor:
        return layer(x, (7, 5))

    check(f"layer/{name}", vectors, at_size, tensor("x", 2, 36, 16), tolerance=1e-4)


@pytest.mark.parametrize(("name", "size"), [("larger", (7, 9)), ("smaller", (3, 2))])
def test_positions(name: str, size: tuple[int, int], vectors: Arrays) -> None:
    """Of a file's grid, and of a model's in its forward pass."""
    grid, expected = inputs.normal("grid", 1, 4, 6, 2), vectors[f"position/{name}"]
    assert_close(resize_grid(grid, size), expected, 1e-6)
    position = PositionEmbedding((4, 6), 2, 0)
    position.grid.set_data(Tensor(grid))
    zeros = Tensor(np.zeros((1, size[0] * size[1], 2), np.float32))
    assert_close(position(zeros, size), expected.reshape(1, -1, 2), 1e-6)


def test_digits(vectors: Arrays) -> None:
    """The same ones are held out, in the same order, and look the same."""
    expected, prepare = below(vectors, "digits/"), read_recipe(RECIPE).preparation
    training, held_out = load_digits()
    assert np.array_equal(held_out.targets, expected["held_out"])
    assert np.array_equal(permutation(len(training), 3), expected["order"])
    images, _ = prepare.to_train(training, np.arange(5), seed=0, epoch=3)
    assert_close(images[:, 0], expected["training"], 1e-6)
    assert_close(prepare.to_score(held_out)[:5, 0], expected["scored"], 1e-6)


def test_schedule(vectors: Arrays) -> None:
    """Learning rate, moving average and weight decay are the recipe's."""
    expected, recipe = below(vectors, "schedule/"), read_recipe(RECIPE)
    batches = len(load_digits()[0]) // recipe.batch_size
    steps, rising = recipe.max_epochs * batches, recipe.warmup_epochs * batches
    rates = [learning_rate(step, steps, rising, recipe.lr) for step in range(0, steps, 16)]
    np.testing.assert_allclose(rates, expected["lr"], rtol=1e-9)
    kept = [kept_average(count, recipe.ema) for count in range(1, 200, 9)]
    np.testing.assert_allclose(kept, expected["kept"], rtol=1e-5)
    model = create_model(recipe.backbone, num_classes=10)
    names = [torch_name(n) for n, p in model.parameters_and_names() if decayed(n, p)]
    assert sorted(names) == expected["decayed"].tobytes().decode().split("\n")


def test_tables(vectors: Arrays) -> None:
    """Every model has the arguments that it has there, and every argument its default."""
    tables = {name: inputs.decoded(array) for name, array in below(vectors, "tables/").items()}
    defaults = tables["defaults"]
    assert json.loads(json.dumps(SIZES)) == tables["sizes"]
    assert json.loads(json.dumps(DESIGNS | {"softx_nano": NANO_SOFTX})) == tables["designs"]
    assert sorted(list_models()) == tables["names"]
    for function in (pinv, softmax_free_attention, SoftmaxFreeTransformer, SoftmaxFreeAttention):
        for name, parameter in inspect.signature(function).parameters.items():
            there = defaults[function.__name__]
            if name in there and parameter.default is not parameter.empty:
                assert json.loads(json.dumps(parameter.default)) == there[name], name


@in_modes("name", [("digits", "pynative"), ("wide", "graph")])
def test_trained_model(name: str, mode: None, vectors: Arrays) -> None:
    """The one that comes with softmaxfree: digits, and images of other sides."""
    model = create_model("softpp_nano", DIGITS, num_classes=10)
    digits = np.repeat(vectors["digits/scored"][:, None], 3, 1)
    images = digits if name == "digits" else inputs.normal("wide", 2, 3, 24, 45)
    assert relative(model(Tensor(images)), vectors[f"nano/{name}"]) < 1e-4


def test_softx(vectors: Arrays) -> None:
    model = fill(create_model("softx_nano", **inputs.SOFTX))
    assert relative(model(tensor("wide", 2, 3, 24, 45)), vectors["softx/wide"]) < 1e-4


@pytest.fixture(scope="module")
def tiny(vectors: Arrays, tmp_path_factory: pytest.TempPathFactory) -> nn.Cell:
    """softpp_tiny from the file that torch's logits are of, to the last byte."""
    path = tmp_path_factory.mktemp("tiny") / "softpp_tiny.safetensors"
    shapes = {name: x.shape for name, x in state_arrays(create_model("softpp_tiny")).items()}
    assert np.array_equal(inputs.write_weights(shapes, path), vectors["tiny/file"])
    return create_model("softpp_tiny", path)


@pytest.mark.parametrize("size", inputs.SIZES)
def test_softpp_tiny(size: str, tiny: nn.Cell, vectors: Arrays) -> None:
    image = tensor(size, 1, 3, *inputs.SIZES[size])
    assert relative(tiny(image), vectors[f"tiny/{size}"]) < 1e-4


def relative(got: Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got.asnumpy() - expected) / np.linalg.norm(expected))
