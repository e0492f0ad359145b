"""Classification of sequences: the Long Range Arena's tasks, with any attention."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from ..data import SequenceData
from ..data.samples import NOTHING
from ..data.sequence_data import SequenceBatch
from ..errors import UserError
from ..models.sequence_classifier import SequenceClassifier
from .classification import Scores
from .task import Task


class SequenceClassification(Task):
    """Learns the class of a sequence of tokens, or of a pair of them.

    Args:
        attention: soft, softpp, softmax, linformer, spatial_reduction, performer, nystromformer,
            agent, reformer, skyformer, gaussian, or one that a module of --modules registers.
        options: Further arguments of the attention, such as {num_landmarks: 128}. By default SOFT
            and SOFT++ average windows of 4 tokens, as in the paper, at a cost that is quadratic in
            the length; with num_landmarks it is linear. The peers are the benchmark's.
        num_classes: Number of classes in the data.
        vocabulary: Number of different tokens, padding included; at least the data's.
        length: Tokens of the longest sequence; at least the data's.
        pairs: Whether samples are pairs of sequences, as in retrieval.
        dim: Width of the tokens.
        hidden: Width of the hidden layers.
        depth: Layers of attention.
        num_heads: Heads of the attention.
        dropout: Dropout of embeddings, hidden layers and residual branches.
        task: Arguments of Task: optimiser, schedule, moving average, weights to start from.
    """

    def __init__(
        self,
        attention: str = "softpp",
        options: dict[str, Any] | None = None,
        num_classes: int = 10,
        vocabulary: int = 32,
        length: int = 2000,
        pairs: bool = False,
        dim: int = 64,
        hidden: int = 128,
        depth: int = 2,
        num_heads: int = 2,
        dropout: float = 0.1,
        **task: Any,
    ) -> None:
        super().__init__(**task)
        self.save_hyperparameters()
        self.num_classes, self.vocabulary, self.length = num_classes, vocabulary, length
        self.pairs = pairs
        self.model = SequenceClassifier(
            num_classes,
            vocabulary,
            length,
            attention,
            options,
            pairs,
            dim,
            hidden,
            depth=depth,
            num_heads=num_heads,
            dropout=dropout,
        )
        self.scores = Scores(num_classes)
        self.freeze_parts()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = self.data
        if not isinstance(data, SequenceData):
            return
        if data.vocabulary > self.vocabulary:
            raise UserError(
                f"{data.dataset} has {data.vocabulary} tokens, but the model has "
                f"{self.vocabulary}: give --model.vocabulary {data.vocabulary}"
            )
        if data.longest > self.length:
            raise UserError(
                f"sequences have up to {data.longest} tokens, but the model is built for "
                f"{self.length}: give --model.length {data.longest} or a smaller --data.max_length"
            )
        if data.pairs != self.pairs:
            raise UserError(
                f"samples of {data.dataset} are {'' if data.pairs else 'no '}pairs of sequences: "
                f"give --model.pairs {str(data.pairs).lower()}"
            )

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Logits (B, classes)."""
        logits: Tensor = self.model(*batch[:4])
        return logits

    def training_step(self, batch: SequenceBatch, batch_idx: int) -> Tensor:
        return self.logged(F.cross_entropy(self(batch), batch.targets), batch.indices)

    def score(self, batch: SequenceBatch, part: str, loader: int) -> None:
        there = batch.targets != NOTHING
        self.scores.count(self(batch)[there], batch.targets[there])
        for name, metric in self.scores.items():
            assert isinstance(metric, Metric)
            shown = name == "accuracy"
            self.log(f"{part}/{name}", metric, on_epoch=True, prog_bar=shown, batch_size=len(there))

    def closing_lines(self, scores: dict[str, Any]) -> list[str]:
        return [
            *super().closing_lines(scores),
            f"held-out accuracy: {scores['accuracy'] * 100:.2f} %",
        ]
