"""Every attention of the table passes one battery, and so can a user's own."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from softmaxfree import MultiHeadAttention, SoftmaxFreeAttention, register_attention
from softmaxfree.layers.multihead import Layout
from softmaxfree.layers.registry import ATTENTIONS, attention_class, attention_options
from softmaxfree.testing import AttentionBattery

OPTIONS: dict[str, dict[str, Any]] = {"reformer": {"bucket": 8}}

for _name in ATTENTIONS:
    _members = {"name": _name, "options": OPTIONS.get(_name, {})}
    globals()[f"Test_{_name}"] = type(f"Test_{_name}", (AttentionBattery,), _members)


class TestGaussianPlain(AttentionBattery):
    name = "gaussian"
    options: ClassVar[dict[str, Any]] = {"normalize": False}


@pytest.fixture
def table() -> Iterator[None]:
    before = dict(ATTENTIONS)
    yield
    ATTENTIONS.clear()
    ATTENTIONS.update(before)


class Mean(MultiHeadAttention):
    """Every query attends to all keys alike."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        mask = layout.mask
        if mask is None:
            return v.mean(-2, keepdim=True).expand_as(q)
        kept = v.masked_fill(~mask[:, None, :, None], 0).sum(-2, keepdim=True)
        return (kept / mask.sum(-1).clamp(min=1)[:, None, None, None]).expand_as(q)


@pytest.mark.usefixtures("table")
def test_an_attention_of_ones_own_works_everywhere() -> None:
    import timm

    register_attention("mean", tie_qk=False)(Mean)
    model = timm.create_model("softpp_nano", attention="mean", num_classes=3)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert all(
        isinstance(block.attention, Mean) and block.attention.k is not None
        for stage in model.stages
        for block in stage.blocks
    )
    battery = type("Battery", (AttentionBattery,), {"name": "mean"})()
    battery.test_padding_changes_nothing()
    battery.test_context()


@pytest.mark.usefixtures("table")
def test_the_battery_finds_what_is_wrong() -> None:
    class Forgetful(Mean):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
            return v.mean(-2, keepdim=True).expand_as(q)

    class BatchWide(Mean):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
            return super().attend(q, k, v, layout) / q.abs().max()

    class Quadratic(Mean):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
            return (q @ k.mT) @ v

    class Untied(Mean):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
            return super().attend(q, k, v, layout) * (1 if k is q else k.square().mean())

    class Unsaved(Mean):
        def __init__(self, dim: int, num_heads: int, **others: Any) -> None:
            super().__init__(dim, num_heads, **others)
            self.register_buffer("factor", torch.rand(()), persistent=False)

        def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
            return super().attend(q, k, v, layout) * self.factor

    class Unloaded(Unsaved):
        def __init__(self, dim: int, num_heads: int, **others: Any) -> None:
            super().__init__(dim, num_heads, **others)
            self.register_buffer("factor", torch.ones(()))

        def _load_from_state_dict(self, state: dict[str, Tensor], *arguments: Any) -> None:
            super()._load_from_state_dict(state | {"factor": self.factor}, *arguments)

    for name, attention, check in (
        ("forgetful", Forgetful, "test_padding_changes_nothing"),
        ("batch_wide", BatchWide, "test_batch_mates_change_nothing"),
        ("quadratic", Quadratic, "test_cost_grows_as_declared"),
        ("untied", Untied, "test_padding_changes_nothing"),
        ("untied", Untied, "test_padding_an_image_changes_nothing"),
        ("untied", Untied, "test_dropped_keys_change_nothing"),
        ("unsaved", Unsaved, "test_weights_are_saved_and_loaded"),
        ("unloaded", Unloaded, "test_weights_are_saved_and_loaded"),
    ):
        register_attention(name)(attention)
        battery = type("Battery", (AttentionBattery,), {"name": name})()
        with pytest.raises(AssertionError):
            getattr(battery, check)()


@pytest.mark.usefixtures("table")
def test_the_battery_refuses_options_that_are_not_there() -> None:
    register_attention("mean")(Mean)
    battery = type("Battery", (AttentionBattery,), {"name": "mean", "options": {"tie_kq": True}})()
    with pytest.raises(ValueError, match="attention 'mean' has no tie_kq; leave it out"):
        battery.build()


@pytest.mark.usefixtures("table")
def test_the_battery_says_what_it_leaves_out() -> None:
    register_attention("mean")(Mean)
    battery = type("Battery", (AttentionBattery,), {"name": "mean"})()
    with pytest.raises(pytest.skip.Exception, match="mean does not declare `equivariant`"):
        battery.test_the_order_of_tokens()


@pytest.mark.usefixtures("table")
def test_a_class_that_is_defined_again_replaces_itself() -> None:
    cell = "@register_attention('mine', tie_qk=False)\nclass Mine(Mean):\n    number = {}"
    names = {"register_attention": register_attention, "Mean": Mean, "__name__": "__main__"}
    for number in (1, 2):
        exec(cell.format(number), names)
        assert attention_class("mine").number == number
    with pytest.raises(ValueError, match="there is an attention 'mine' already"):
        register_attention("mine")(Mean)


@pytest.mark.usefixtures("table")
def test_options_are_arguments_by_whatever_name() -> None:
    class Named(Mean):
        def __init__(self, dim: int, num_heads: int, *, others: int = 1, **rest: Any) -> None:
            super().__init__(dim, num_heads, **rest)

    register_attention("named")(Named)
    own, inherited = attention_options("named"), attention_options("softmax")
    assert own == inherited | {"others"}


def test_bad_registrations_are_refused() -> None:
    with pytest.raises(ValueError, match="there is an attention 'softpp' already"):
        register_attention("softpp")(Mean)
    with pytest.raises(ValueError, match="there is an attention 'soft' already"):
        register_attention("soft")(SoftmaxFreeAttention)
    with pytest.raises(ValueError, match="must be a word of letters and _, got 'my attention'"):
        register_attention("my attention")
    with pytest.raises(ValueError, match="must be a subclass of MultiHeadAttention"):
        register_attention("mine")(torch.nn.Linear)  # type: ignore[type-var]
    assert "mine" not in ATTENTIONS
