"""What all data modules share: splits, shares of a batch, loaders that resume."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import Dataset

from ..errors import UserError
from .loader import ResumableLoader, ShardedSampler, prepare_worker
from .samples import Sample, Samples
from .sources import Source


class Data(LightningDataModule):
    """Data shared out between processes, in an order that is a function of counters.

    Args:
        splits: The data set's names for its parts train, val and test.
        batch_size: Samples a step, over all processes and all accumulated batches.
        eval_batch_size: Samples a process scores at a time; its share of batch_size if not given.
        num_workers: Processes that load samples, for each process that trains.
        seed: Order and augmentation are functions of (seed, epoch, sample).
    """

    def __init__(
        self,
        splits: dict[str, str],
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        seed: int,
    ) -> None:
        super().__init__()
        for option, given, least in (
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if given is not None and given < least:
                raise UserError(f"--data.{option} must be at least {least}, got {given}")
        self.splits = splits
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.num_workers, self.seed = num_workers, seed
        self.sources: dict[str, Any] = {}
        self.training: ResumableLoader | None = None
        self.resumed: dict[str, int] | None = None

    @abstractmethod
    def open(self, part: str) -> Any:
        """Opens the source of a part: train, val or test."""

    def setup(self, stage: str) -> None:
        parts = {"fit": ["train", "val"], "validate": ["val"], "test": ["test"]}.get(stage, [])
        for part in parts:
            if part not in self.sources:
                self.sources[part] = self.open(part)
        self.check_classes(training=stage == "fit")
        train = self.sources.get("train") if stage == "fit" else None
        if isinstance(train, Source) and len(train) < self.batch_size:
            raise UserError(
                f"the training split has {len(train)} samples, fewer than one batch of "
                f"{self.batch_size}: give a smaller --data.batch_size"
            )

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, if the data set has them."""
        found = [source.classes for source in self.sources.values() if isinstance(source, Source)]
        return next((classes for classes in found if classes), None)

    def check_classes(self, training: bool) -> None:
        """Raises UserError unless all splits have the same classes, as many as the model."""
        expected, first = self.num_classes(), self.classes
        for part, source in self.sources.items():
            classes = source.classes if isinstance(source, Source) else None
            if classes and first and classes != first:
                raise UserError(
                    f"the classes of the {part} split ({source.origin or self.splits[part]}) are "
                    f"not those of the training split: {_difference(classes, first)}; give every "
                    "class images in both, or remove it"
                )
            if classes and expected is not None and len(classes) != expected:
                if not training:
                    raise other_classes(classes, f"the model has {expected}")
                raise UserError(
                    f"the data has {len(classes)} classes in its {part} split, but the model has "
                    f"num_classes={expected}: give --model.num_classes {len(classes)} for a new "
                    f"model, or data with {expected} classes"
                )

    def num_classes(self) -> int | None:
        """The model's number of classes, if it is known."""
        module = self.trainer.lightning_module if self.trainer else None
        return getattr(module, "num_classes", None)

    def samples_per_process(self) -> int:
        """Samples that a process takes at a time."""
        assert self.trainer is not None
        processes, accumulated = self.trainer.world_size, self.trainer.accumulate_grad_batches
        share, rest = divmod(self.batch_size, processes * accumulated)
        if rest or not share:
            raise UserError(
                f"a batch of {self.batch_size} samples cannot be shared equally by {processes} "
                f"processes of {accumulated} accumulated batches: give --data.batch_size a "
                f"multiple of {processes * accumulated}"
            )
        return share

    def describe(self, indices: Sequence[int]) -> list[str]:
        """Files or numbers of training samples, for messages."""
        source = self.sources.get("train")
        if isinstance(source, Source):
            return [source.describe(index) for index in indices]
        return [f"image {index} of a worker's stream" for index in indices]

    def training_loader(self, dataset: Dataset[Any], **functions: Any) -> ResumableLoader:
        """The loader of training, which resumes at the position of a checkpoint."""
        self.training = self._loader(dataset, self.samples_per_process(), True, **functions)
        if self.resumed:
            self.training.load_state_dict(self.resumed)
            self.resumed = None
        return self.training

    def evaluation_loader(self, dataset: Dataset[Any], **functions: Any) -> ResumableLoader:
        """A loader that gives every sample once."""
        share = self.eval_batch_size or self.samples_per_process()
        return self._loader(dataset, share, False, **functions)

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch.

        It is saved here because Lightning restores the state of loaders with its loops, after it
        has already asked them for their number of steps.
        """
        return self.training.state_dict() if self.training else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed = state_dict

    def _loader(
        self,
        dataset: Any,
        share: int,
        training: bool,
        collate: Callable[[list[Any]], Any],
        check: Callable[[Any, ResumableLoader], None],
    ) -> ResumableLoader:
        trainer = self.trainer
        assert trainer is not None
        sampler = None
        if hasattr(dataset, "__getitem__"):
            sampler = ShardedSampler(
                len(dataset),
                self.seed,
                shuffle=training,
                whole=self.batch_size if training else 0,
                rank=trainer.global_rank,
                replicas=trainer.world_size,
            )
        return ResumableLoader(
            dataset,
            epoch=lambda: trainer.current_epoch,
            check=check,
            batch_size=share,
            sampler=sampler,
            drop_last=training,
            collate_fn=collate,
            num_workers=self.num_workers,
            worker_init_fn=prepare_worker,
            persistent_workers=self.num_workers > 0 and sampler is not None,
            pin_memory=trainer.strategy.root_device.type == "cuda",
        )


class SplitData(Data):
    """Data that is prepared in one way for training and in one way for evaluation."""

    nothing: tuple[Any, Any]
    """Input and target of padding."""
    collate: Callable[[list[Sample]], Any]
    """Makes a batch of samples; not a method, since it is sent to workers without the module."""

    @abstractmethod
    def prepare(self, training: bool) -> Callable[[Any, Any], tuple[Any, Any]]:
        """The function that prepares an input and its target for the model."""

    def train_dataloader(self) -> ResumableLoader:
        dataset = self._samples("train", training=True)
        return self.training_loader(dataset, collate=self.collate, check=_check)

    def val_dataloader(self) -> ResumableLoader:
        return self._evaluation("val")

    def test_dataloader(self) -> ResumableLoader:
        return self._evaluation("test")

    def _evaluation(self, part: str) -> ResumableLoader:
        dataset = self._samples(part, training=False)
        return self.evaluation_loader(dataset, collate=self.collate, check=_check)

    def _samples(self, part: str, training: bool) -> Samples:
        prepare = self.prepare(training)
        return Samples(self.sources[part], prepare, self.nothing, self.seed, training)


def _check(batch: Any, loader: ResumableLoader) -> None:
    loader.refuse_missing(batch.incomplete)


def other_classes(classes: list[str], trained: str) -> UserError:
    """The error for data whose classes are not those of trained weights.

    Args:
        classes: Those of the data.
        trained: What has other classes, and which.
    """
    return UserError(
        f"the data has {len(classes)} classes ({several(classes)}), but {trained}: give data with "
        "the classes that it was trained for, or train it on these, by `softmaxfree fit` with "
        "--model.init_checkpoint in place of --checkpoint"
    )


def several(names: Sequence[str], most: int = 6) -> str:
    """The first few of many names, for messages."""
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")


def _difference(classes: list[str], others: list[str]) -> str:
    missing = [name for name in others if name not in classes]
    if missing:
        return f"it has no images of {several(missing)}"
    more = [name for name in classes if name not in others]
    return f"it also has {several(more)}" if more else "their order differs"
