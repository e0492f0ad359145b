"""Classification: its losses, its scores, and where its weights come from."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import VisionTransformer, build_model_with_cfg, register_model
from timm.models._hub import save_for_hf
from torch import nn

from softmaxfree import MultiHeadAttention, SoftmaxFreeAttention, SoftmaxFreeTransformer
from softmaxfree.data.counters import seed_step
from softmaxfree.data.samples import Batch
from softmaxfree.layers.softmax import SoftmaxAttention
from softmaxfree.models.build import BackboneConfig, build_model
from softmaxfree.models.replaced_modules import TiedProjection
from softmaxfree.models.weights import find_weights
from softmaxfree.tasks import Classification
from softmaxfree.tasks.classification import Scores
from softmaxfree.tasks.warm_start import Teacher, distillation_loss, initialise

from ..models.test_checkpoints import to_released
from .test_task import NANO, train


def batch(count: int = 8, size: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, size, size, generator=generator)
    return Batch(images, torch.arange(count) % 10, torch.arange(count), ())


def quiet(task: Classification) -> Classification:
    task.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    return task


def test_the_loss_is_cross_entropy_with_smoothed_labels() -> None:
    task = quiet(Classification(**NANO, smoothing=0.1)).eval()
    images, targets, *_ = batch()
    smooth = F.one_hot(targets, 10) * 0.9 + 0.01
    expected = -(smooth * task(images).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(task.training_step(batch(), 0), expected)


def test_mixing_mixes_images_and_labels_alike() -> None:
    task = quiet(Classification(**NANO, mixup=0.8, cutmix=1.0, smoothing=0.1)).eval()
    assert task.mix is not None
    seed_step(1)
    loss = task.training_step(batch(), 0)
    seed_step(1)
    images, targets = task.mix(batch().images, batch().targets)
    assert targets.sum(1) == pytest.approx(torch.ones(8))
    assert not torch.equal(images, batch().images)
    torch.testing.assert_close(loss, F.cross_entropy(task(images), targets))


def test_scores_count_every_sample_once_and_nothing_else() -> None:
    scores = Scores(10)
    logits = torch.zeros(6, 10)
    logits[torch.arange(6), torch.tensor([0, 1, 2, 9, 9, 9])] = 1.0
    scores.count(logits[:2], torch.tensor([0, 1]))
    scores.count(logits[2:], torch.tensor([2, 3, 4, 9]))
    scores.count(logits[:0], torch.tensor([], dtype=torch.long))  # a batch of nothing but padding
    assert scores["accuracy"].compute() == pytest.approx(4 / 6)  # type: ignore[operator]
    assert scores["loss"].compute() > 0  # type: ignore[operator]
    assert "accuracy_top5" not in Scores(5)


def test_a_checkpoint_starts_a_model_of_other_classes(tmp_path: Path) -> None:
    task = Classification(**NANO)
    torch.save({"state_dict": task.state_dict()}, tmp_path / "run.ckpt")
    other = Classification(**NANO | {"num_classes": 4})
    told = initialise(other.model, find_weights(tmp_path / "run.ckpt"))
    assert "left as they were: head.weight, head.bias" in told
    for name, tensor in task.model.state_dict().items():
        if not name.startswith("head"):
            assert torch.equal(other.model.state_dict()[name], tensor), name


def test_a_journal_model_starts_from_a_released_checkpoint(tmp_path: Path) -> None:
    """The released tiny has fewer blocks and softmax in stage 4; what fits is taken."""
    released = timm.create_model("soft_tiny_fudan", num_classes=10, img_size=64)
    torch.save({"state_dict": to_released(released.state_dict())}, tmp_path / "SOFT_tiny.pth")
    journal = build_model(BackboneConfig("softpp_tiny", options={"img_size": 64}), 10)
    before = {name: tensor.clone() for name, tensor in journal.state_dict().items()}
    told = initialise(journal, find_weights(tmp_path / "SOFT_tiny.pth"))
    after, theirs = journal.state_dict(), released.state_dict()
    for name in ("stages.0.blocks.0.attention.q.weight", "stages.2.blocks.2.mlp.fc1.weight"):
        assert torch.equal(after[name], theirs[name])
    assert torch.equal(after["stages.2.blocks.4.mlp.fc1.weight"],
                       before["stages.2.blocks.4.mlp.fc1.weight"])  # fmt: skip
    taken = sum(torch.equal(after[name], theirs[name]) for name in theirs if name in after
                and after[name].shape == theirs[name].shape)  # fmt: skip
    assert taken > len(after) / 2
    assert "left as they were" in told


SMALL_TIMM = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "swin_tiny_patch4_window7_224": {
        "img_size": 56, "embed_dim": 24, "depths": (2, 1), "num_heads": (2, 4)
    },
}  # fmt: skip


def projections(model: nn.Module) -> list[torch.Tensor]:
    """q, v and proj of all layers, whatever the attention is."""
    found: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            found += [module.q.weight, module.v.bias, module.proj.weight]
        elif isinstance(qkv := getattr(module, "qkv", None), TiedProjection):
            found += [qkv.q.weight, qkv.v.bias, module.proj.weight]
        elif isinstance(qkv, nn.Linear):
            found += [qkv.weight.chunk(3)[0], qkv.bias.chunk(3)[2], module.proj.weight]
    return found


@pytest.mark.parametrize("backbone", SMALL_TIMM)
@pytest.mark.parametrize(
    ("trained", "started"),
    [
        ({}, {"attention": "softpp"}),
        ({}, {"attention": "softmax"}),
        ({}, {"tie_qk": True}),
        ({"tie_qk": True}, {"attention": "softmax"}),
        ({"attention": "softpp"}, {"attention": "softpp"}),
        ({"attention": "softpp"}, {"attention": "softmax"}),
        ({"attention": "softpp"}, {}),
    ],
    ids=str,
)
def test_projections_are_taken_by_another_attention(
    backbone: str, trained: dict[str, Any], started: dict[str, Any], tmp_path: Path
) -> None:
    """Of timm's ViT and Swin, from and to all kinds of attention."""
    options = SMALL_TIMM[backbone]
    source = build_model(BackboneConfig(backbone, options=options, **trained), 10)
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    torch.save({f"model.{n}": tensor for n, tensor in source.state_dict().items()},
               tmp_path / "run.ckpt")  # fmt: skip
    model = build_model(BackboneConfig(backbone, options=options, **started), 10)
    told = initialise(model, find_weights(tmp_path / "run.ckpt"))
    expected = projections(source)
    assert len(expected) == (9 if "swin" in backbone else 6)
    for ours, theirs in zip(projections(model), expected, strict=True):
        assert torch.equal(ours, theirs)
    if trained == started:
        assert "left" not in told
    attentions = [m for m in model.modules() if isinstance(m, MultiHeadAttention) and m.k]
    if not trained:  # keys, where both have some
        keys = [m.qkv.weight.chunk(3)[1] for m in source.modules() if hasattr(m, "qkv")]
        for attention, key in zip(attentions, keys):
            assert torch.equal(attention.k.weight, key)
    for attention in attentions if "softpp" in trained.values() else ():  # which has none
        assert torch.equal(attention.k.weight, attention.q.weight)


def test_a_run_that_goes_on_needs_no_weights_to_start_from(tmp_path: Path) -> None:
    """From Python, where nothing but the Trainer knows of the checkpoint."""
    start, run = tmp_path / "start.pth", tmp_path / "run.ckpt"
    torch.save(Classification(**NANO).model.state_dict(), start)
    arguments = {**NANO, "init_checkpoint": str(start)}
    task = Classification(**arguments)
    train(task, tmp_path, steps=2)
    task.trainer.save_checkpoint(run)
    start.unlink()
    again = Classification(**arguments)
    recorder = train(again, tmp_path, steps=2, epochs=2, ckpt_path=run)
    assert len(recorder.weights) == 2
    with pytest.raises(ValueError, match=r"there is no file .*start.pth"):
        train(Classification(**arguments), tmp_path, steps=2)


def test_weights_of_another_kind_are_refused(tmp_path: Path) -> None:
    torch.save({"layer.weight": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"nothing in .*other.pth fits"):
        initialise(build_model("softpp_nano", 10), find_weights(tmp_path / "other.pth"))


def test_distillation_is_the_divergence_from_the_teacher() -> None:
    student, teacher = torch.randn(2, 5, 10, generator=torch.Generator().manual_seed(0))
    p, q = (teacher / 2).softmax(1), (student / 2).softmax(1)
    expected = (p * (p / q).log()).sum(1).mean() * 4
    torch.testing.assert_close(distillation_loss(student, teacher, "soft", 2.0), expected)
    hard = F.cross_entropy(student, teacher.argmax(1))
    torch.testing.assert_close(distillation_loss(student, teacher, "hard", 2.0), hard)
    assert distillation_loss(teacher, teacher, "soft", 1.0) == pytest.approx(0, abs=1e-6)


def test_a_teacher_sees_images_as_it_was_trained_to(tmp_path: Path) -> None:
    model = timm.create_model("resnet10t", num_classes=10)
    save_for_hf(model, tmp_path)
    teacher = Teacher(find_weights(tmp_path), 10, (0.5,) * 3, (0.5,) * 3)
    pixels = torch.rand(2, 3, 32, 32)
    config = model.pretrained_cfg
    mean, std = (torch.tensor(config[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    expected = model.eval()((pixels - mean) / std)
    torch.testing.assert_close(teacher((pixels - 0.5) / 0.5), expected, rtol=1e-4, atol=1e-5)


def test_a_student_follows_its_teacher_and_does_not_carry_it(tmp_path: Path) -> None:
    task = Classification(**NANO, teacher="softpp_nano.cifar10", ema=0.9)
    train(task, tmp_path, steps=2)
    assert task.teacher is not None
    assert not any("teacher" in name for name in task.state_dict())
    assert not any(parameter.requires_grad for parameter in task.teacher.model.parameters())


def test_another_attention_is_one_argument() -> None:
    task = Classification(**NANO, attention="softmax")
    names = {type(module).__name__ for module in task.model.modules()}
    assert "SoftmaxAttention" in names
    assert "SoftmaxFreeAttention" not in names


@pytest.mark.parametrize("backbone", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_another_attention_in_timms_own_backbones(backbone: str) -> None:
    """And the symmetric kernel of the paper's ablation."""
    arguments = {"img_size": 64, "window_size": 4} if "swin" in backbone else {"img_size": 64}
    images = torch.randn(1, 3, 64, 64)
    plain, tied, replaced = (
        build_model(BackboneConfig(backbone, options=arguments, **chosen), 5)
        for chosen in ({}, {"tie_qk": True}, {"attention": "softpp"})
    )
    assert replaced(images).shape == tied(images).shape == (1, 5)
    count, fewer = (sum(p.numel() for p in net.parameters()) for net in (plain, tied))
    assert fewer < count
    assert any(isinstance(module, SoftmaxFreeAttention) for module in replaced.modules())
    with pytest.raises(ValueError, match="is for timm's ViT, DeiT"):
        build_model(BackboneConfig("resnet10t", attention="softpp"), 5)


def test_another_attention_in_models_of_ones_own() -> None:
    """Registered in timm by a module of the user's: one of ours, and one of timm's."""

    @register_model
    def my_soft(pretrained: bool = False, **arguments: Any) -> nn.Module:
        arguments = NANO["options"] | {"img_size": 32} | arguments
        return build_model_with_cfg(SoftmaxFreeTransformer, "my_soft", pretrained, **arguments)

    @register_model
    def my_vit(pretrained: bool = False, **arguments: Any) -> nn.Module:
        arguments = {"img_size": 32, "embed_dim": 48, "depth": 1} | arguments
        return build_model_with_cfg(VisionTransformer, "my_vit", pretrained, **arguments)

    for name in ("my_soft", "my_vit"):
        model = build_model(BackboneConfig(name, attention="softmax", tie_qk=True), 5)
        layers = [m for m in model.modules() if isinstance(m, MultiHeadAttention)]
        assert {type(layer) for layer in layers} == {SoftmaxAttention}
        assert all(layer.tie_qk for layer in layers)
        assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 5)
    plain, tied = (
        sum(p.numel() for p in build_model(BackboneConfig("my_vit", tie_qk=tie), 5).parameters())
        for tie in (None, True)
    )
    assert tied < plain


@pytest.mark.parametrize("attention", [None, "softmax"])
def test_a_backbone_with_a_tag_means_its_trained_weights(
    attention: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with another attention: what fits is taken."""
    task = Classification("softpp_nano.cifar10", attention=attention, lr=0.0, warmup_lr=0.0)
    train(task, tmp_path, steps=1)
    weights = find_weights("softpp_nano.cifar10").state
    for name, tensor in task.model.named_parameters():
        if attention is None or "attention" not in name:
            assert torch.equal(tensor, weights[name].float()), name
    assert ("left as they were" in capsys.readouterr().out) == (attention is not None)
