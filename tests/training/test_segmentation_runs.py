"""Segmentation in real processes: several that score together."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ..tasks.test_segmentation import configuration
from .conftest import scores_in, softmaxfree, two_processes


@pytest.mark.slow
def test_two_processes_score_what_one_does(tmp_path: Path) -> None:
    """Five images of three sizes: one of the processes has padding in place of a sixth."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 2), ("val", 5)):
        for number in range(count):
            side = 64 + 32 * (number % 3)
            for folder, shape, highest in (("images", (64, side, 3), 256),
                                           ("labels", (64, side), 11)):  # fmt: skip
                path = tmp_path / "pairs" / folder / split / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, highest, shape, dtype=np.uint8)).save(path)
    data = ["--data.name=folders", "--data.root=pairs", "--data.image_folder=images/{split}",
            "--data.label_folder=labels/{split}", "--data.val_split=val",
            f"--data.classes=[{','.join('abcdefghijk')}]"]  # fmt: skip
    trained = softmaxfree(
        "fit", "--config", configuration(tmp_path), "--out", "run", *data,
        "--trainer.limit_val_batches=1.0", cwd=tmp_path,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr

    score = ["validate", "--checkpoint", "run/last.ckpt"]
    alone = softmaxfree(*score, cwd=tmp_path)
    together = two_processes(*score, cwd=tmp_path)
    assert together.returncode == 0, together.stderr
    assert scores_in(alone.stdout) == scores_in(together.stdout) != []
