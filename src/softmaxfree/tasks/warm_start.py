"""Warm starts: weights of another model, and the predictions of a teacher."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..models.checkpoints import checkpoint_filter_fn, matching
from ..models.projections import rename_projections
from ..models.weights import Weights


def initialise(model: nn.Module, weights: Weights) -> str:
    """Loads the weights whose names and shapes the model has; returns what was taken.

    Position embeddings are resized. Projections of timm's and torch's attentions are taken
    even if the attention was replaced, in the file or in the model.
    """
    state = {name.removeprefix("model."): tensor for name, tensor in weights.state.items()}
    with matching(weights.source):
        state = rename_projections(checkpoint_filter_fn(state, model), model)
    own = model.state_dict()
    taken = {
        name: tensor
        for name, tensor in state.items()
        if name in own and own[name].shape == tensor.shape
    }
    left = [name for name in own if name not in taken]
    if not any(name in taken for name, _ in model.named_parameters()):
        raise UserError(
            f"nothing in {weights.source} fits this {type(model).__name__} by name and shape: "
            "it holds the weights of another kind of model"
        )
    nn.Module.load_state_dict(model, taken, strict=False)
    shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
    rest = f"; left as they were: {shown}" if left else ""
    return f"{weights.source}: {len(taken)} of the model's {len(own)} tensors taken{rest}"


class Teacher:
    """A trained model whose predictions a student learns from.

    Args:
        weights: A classifier's.
        num_classes: The student's number of classes.
        mean, std: Normalisation of the student's images, which is converted to the teacher's.
    """

    def __init__(
        self,
        weights: Weights,
        num_classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        if len(weights.classes) != num_classes:
            raise UserError(
                f"the teacher {weights.source} has {len(weights.classes)} classes, the student "
                f"{num_classes}: give a teacher that was trained for the same classes"
            )
        self.model = weights.build().requires_grad_(False)
        images = weights.preparation
        ours, theirs = torch.tensor([mean, std]), torch.tensor([images.mean, images.std])
        self.scale = (ours[1] / theirs[1]).view(1, -1, 1, 1)
        self.shift = ((ours[0] - theirs[0]) / theirs[1]).view(1, -1, 1, 1)

    def to(self, device: torch.device) -> None:
        self.model.to(device)
        self.scale, self.shift = self.scale.to(device), self.shift.to(device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits (B, classes) for the student's images (B, 3, H, W)."""
        logits: Tensor = self.model(images * self.scale + self.shift)
        return logits


def distillation_loss(
    student: Tensor, teacher: Tensor, kind: Literal["soft", "hard"], temperature: float
) -> Tensor:
    """The loss of a student's logits (B, classes) against a teacher's."""
    if kind == "hard":
        return F.cross_entropy(student, teacher.argmax(1))
    divergence = F.kl_div(
        F.log_softmax(student / temperature, 1),
        F.log_softmax(teacher / temperature, 1),
        reduction="batchmean",
        log_target=True,
    )
    return divergence * temperature**2
