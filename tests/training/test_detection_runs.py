"""Detection in real processes: killed and gone on with, and several that score together."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ..data.test_scenes import CAT, write_voc
from ..tasks.test_detection import configuration
from .conftest import equal, held_out, scores_in, softmaxfree, two_processes, weights
from .test_kills import interrupted

pytestmark = pytest.mark.slow


def test_a_detection_run_that_was_killed_ends_as_one_never_stopped(tmp_path: Path) -> None:
    config = configuration(tmp_path, "mask_rcnn")
    options = ["--save_every=2", "--seed_everything=5", "--trainer.limit_train_batches=7",
               "--trainer.limit_val_batches=1", "--data.num_workers=2",
               "--data.color_jitter=0.3"]  # fmt: skip
    command: list[str | Path] = ["fit", "--config", config, *options]
    whole = softmaxfree(*command, "--out", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    cut = [*command, "--out", "cut", "--checkpoint", "last"]
    code, _ = interrupted(cut, tmp_path, 3, signal.SIGKILL)
    assert code == -signal.SIGKILL
    done = softmaxfree(*cut, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("state_dict", "current_model_state"):
        assert equal(
            weights(tmp_path / "whole/last.ckpt", name), weights(tmp_path / "cut/last.ckpt", name)
        )
    assert held_out(done.stdout) == held_out(whole.stdout)


def test_two_processes_find_and_score_what_one_does(tmp_path: Path) -> None:
    """Five images: one of the processes has padding in place of a sixth."""
    for split, count in (("train", 2), ("val", 5)):
        write_voc(tmp_path / "voc", split, *[[CAT]] * count)
    rng = np.random.default_rng(0)
    for path in (tmp_path / "voc/JPEGImages").iterdir():
        Image.fromarray(rng.integers(0, 256, (10, 20, 3), dtype=np.uint8)).save(path)
    data = {"name": "voc", "root": str(tmp_path / "voc"), "val_split": "val"}
    config = configuration(tmp_path, "retinanet", **data)
    options = ["--model.num_classes=1", "--trainer.limit_val_batches=1.0"]
    trained = softmaxfree("fit", "--config", config, "--out", "run", *options, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr

    score = ["validate", "--checkpoint", "run/last.ckpt", "--data.root", data["root"],
             "--model.results"]  # fmt: skip
    alone = softmaxfree(*score, "one.json", cwd=tmp_path)
    together = two_processes(*score, "two.json", cwd=tmp_path)
    assert together.returncode == 0, together.stderr
    found = [json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json")]
    assert {entry["image_id"] for entry in found[0]} == {1, 2, 3, 4, 5}
    one, two = (sorted(map(json.dumps, results)) for results in found)
    assert one == two
    assert scores_in(alone.stdout) == scores_in(together.stdout) != []
