"""The moving average of weights: what it averages, and what it copies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from softmaxfree.data import ImageData
from softmaxfree.tasks import Classification

from .test_task import NANO, Recorder


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_features_that_are_drawn_anew_are_copied(tmp_path: Path, precision: Any) -> None:
    """Performer's: an average of independent draws is no draw."""
    options = NANO["options"] | {"attention_options": {"redraw": 2}}
    task = Classification(num_classes=10, attention="performer", options=options, ema=0.9)
    recorder = Recorder()
    trainer = Trainer(
        accelerator="cpu", precision=precision, max_epochs=1, limit_train_batches=8,
        limit_val_batches=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[recorder], default_root_dir=tmp_path,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(task, datamodule=ImageData(size=16, batch_size=16, num_workers=0))
    averaged, last = task.model.state_dict(), recorder.weights[-1]
    drawn = [name for name in averaged if name.endswith("projection")]
    assert len(drawn) == 4
    for name in drawn:
        assert averaged[name].dtype == torch.float32
        assert torch.equal(averaged[name], last[name])
        assert not torch.equal(last[name], recorder.weights[0][name])
    assert not torch.equal(averaged["head.weight"], last["head.weight"])
