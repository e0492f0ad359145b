"""The tasks of the Long Range Arena: what they are read from, and the batches made of them."""

import json
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from lightning.pytorch import Trainer
from PIL import Image
from torch import Tensor

from softmaxfree.data import SequenceData, listops
from softmaxfree.data.listops import WORDS, encode, evaluate, generate
from softmaxfree.data.sequence_data import SequenceBatch
from softmaxfree.data.sequence_files import grey
from softmaxfree.data.sequences import PAD, Sequences, open_sequences

RELEASE = "https://storage.googleapis.com/long-range-arena/lra_release.gz"
EXPRESSION = "( ( ( [MIN 4 ) 9 ) ] )"


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def write_listops(root: Path, count: int = 5) -> Path:
    for part in ("train", "val", "test"):
        rows = [f"{EXPRESSION}\t4"] * count
        write(root / f"basic_{part}.tsv", "Source\tTarget", *rows, end="\r\n")
    return root


def write_reviews(root: Path, count: int = 6) -> Path:
    for part in ("train", "test"):
        texts = [{"text": f"{part} {'é' * number}", "label": number % 2} for number in range(count)]
        write(root / f"{part}.jsonl", *map(json.dumps, texts))
    return root


def write_review_files(root: Path, count: int = 3) -> Path:
    for part in ("train", "test"):
        for kind in ("pos", "neg", "unsup"):
            for number in range(count):
                write(root / part / kind / f"{number}_8.txt", f"{part} {kind} {number}", end="")
    return root


def write_papers(root: Path, *pairs: str) -> Path:
    papers = [{"id": f"P{number}", "text": "abc"[: number + 1]} for number in range(3)]
    write(root / "papers.jsonl", *map(json.dumps, papers))
    for part in ("train", "eval", "test"):
        write(root / f"pairs.{part}.tsv", *(pairs or ("1\tP0\tP2", "0\tP1\tP0")))
    return root


def write_pairs(root: Path) -> Path:
    for part in ("train", "eval", "test"):
        rows = [f'1.0\tA\tB\t{part} "a\tb', "0\tA\tC\taé\tc d"]
        write(root / f"new_aan_pairs.{part}.tsv", *rows)
    return root


def write_images(root: Path, train: int = 20, test: int = 4, side: int = 32) -> Path:
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("test", test)):
        for number in range(count):
            path = root / part / ("cat", "dog")[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path)
    return root


def write_cifar(root: Path, count: int = 20) -> Path:
    """torchvision's files, of noise."""
    rng, folder = np.random.default_rng(0), root / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [*"abcdefghij"]}))
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        pixels = rng.integers(0, 256, (count // 5, 3072), dtype=np.uint8)
        entry = {"data": pixels, "labels": [number % 10 for number in range(count // 5)]}
        (folder / name).write_bytes(pickle.dumps(entry))
    return root


def write_contours(root: Path, count: int = 10) -> Path:
    for batch in ("0", "1"):
        (root / "imgs" / batch).mkdir(parents=True)
        rows = []
        for number in range(count):
            values = np.full((32, 32), number, dtype=np.uint8)
            values[0, 0] = 100 * int(batch)
            Image.fromarray(values).save(root / "imgs" / batch / f"sample_{number}.png")
            rows.append(
                f"imgs/{batch} sample_{number}.png {number} {number % 2} 1.0 14 4 2 0.5 1 1"
            )
        write(root / "metadata" / f"{batch}.npy", *rows)
    return root


def all_of(source: Sequences) -> list[tuple[Any, int]]:
    """Tokens as tuples, and classes."""
    samples = []
    for index in range(len(source)):
        tokens, label = source.load(index)
        sequences = [tokens] if isinstance(tokens, Tensor) else tokens
        for sequence in sequences:
            assert sequence.dtype == torch.int64
            assert sequence.ndim == 1
            assert 0 <= sequence.min() <= sequence.max() < source.vocabulary
        assert 0 <= label < source.num_classes == len(source.classes)
        numbers = [tuple(sequence.tolist()) for sequence in sequences]
        samples.append((tuple(numbers) if source.pairs else numbers[0], label))
    return samples


def bytes_of(text: str) -> tuple[int, ...]:
    return tuple(byte + 1 for byte in text.encode())


def test_listops_are_generated_where_there_is_no_folder() -> None:
    lengths = {"train": 96_000, "val": 2000, "test": 2000}
    for part, count in lengths.items():
        source = open_sequences("listops", None, part)
        assert len(source) == count
        assert (source.num_classes, source.vocabulary, source.max_length) == (10, 16, 2000)
        expression, value = generate(0, part, count - 1)
        tokens, label = source.load(count - 1)
        assert isinstance(tokens, Tensor)
        assert (tokens.tolist(), label) == (encode(expression), value)
        assert source.describe(7) == f"listops {part}[7]"
    assert len(open_sequences("listops", None, "train", count=100_000)) == 100_000
    few = open_sequences("listops", None, "train", count=3)
    assert all_of(few) == [
        (tuple(encode(e)), v) for e, v in (generate(0, "train", n) for n in range(3))
    ]


def test_generated_listops_are_as_long_as_asked_for_and_whole() -> None:
    source = open_sequences("listops", None, "train", max_length=200, count=50)
    assert len(source) == 50
    for index in range(50):
        tokens, label = source.load(index)
        assert isinstance(tokens, torch.Tensor)
        assert 50 < len(tokens) < 200
        words = [WORDS[token - 1] for token in tokens.tolist()]
        assert evaluate(" ".join(words)) == label


@pytest.mark.parametrize("inner", ["", "listops-1000", "lra_release/listops-1000"])
def test_listops_are_read_from_the_released_files(inner: str, tmp_path: Path) -> None:
    write_listops(tmp_path / inner)
    for part in ("train", "val", "test"):
        source = open_sequences("listops", str(tmp_path), part)
        assert all_of(source) == [((11, 5, 10, 15), 4)] * 5
        assert source.describe(2) == f"{tmp_path / inner / f'basic_{part}.tsv'}[2]"


def test_reviews_are_read_as_bytes(tmp_path: Path) -> None:
    write_reviews(tmp_path)
    source = open_sequences("text", str(tmp_path), "train")
    assert (source.classes, source.vocabulary) == (["negative", "positive"], 257)
    assert source.max_length == 4000
    assert all_of(source) == [(bytes_of(f"train {'é' * n}"), n % 2) for n in range(6)]
    for part in ("val", "test"):  # the benchmark validates on the test part
        assert all_of(open_sequences("text", str(tmp_path), part))[0] == (bytes_of("test "), 0)


@pytest.mark.parametrize("inner", ["", "aclImdb"])
def test_reviews_may_be_files_of_their_own(inner: str, tmp_path: Path) -> None:
    write_review_files(tmp_path / inner)
    for split, part in (("train", "train"), ("validation", "test"), ("test", "test")):
        source = open_sequences("text", str(tmp_path), split)
        expected = [
            (bytes_of(f"{part} {kind} {number}"), label)
            for label, kind in enumerate(("neg", "pos"))
            for number in range(3)
        ]
        assert all_of(source) == expected
        assert source.describe(3) == str(tmp_path / inner / part / "pos" / "0_8.txt")


def test_pairs_of_papers_are_read_by_their_names(tmp_path: Path) -> None:
    write_papers(tmp_path)
    for split in ("train", "val", "eval", "test"):
        source = open_sequences("retrieval", str(tmp_path), split)
        assert source.pairs
        assert (source.num_classes, source.vocabulary) == (2, 257)
        assert all_of(source) == [
            ((bytes_of("a"), bytes_of("abc")), 1),
            ((bytes_of("ab"), bytes_of("a")), 0),
        ]


@pytest.mark.parametrize("inner", ["", "tsv_data", "lra_release/tsv_data"])
def test_pairs_of_papers_are_read_from_the_released_files(inner: str, tmp_path: Path) -> None:
    write_pairs(tmp_path / inner)
    source = open_sequences("retrieval", str(tmp_path), "val")
    assert all_of(source) == [
        ((bytes_of('eval "a'), bytes_of("b")), 1),
        ((bytes_of("aé"), bytes_of("c d")), 0),
    ]


def test_images_are_their_pixels_in_grey(tmp_path: Path) -> None:
    write_images(tmp_path)
    parts = [open_sequences("image", str(tmp_path), part) for part in ("train", "val", "test")]
    assert [len(part) for part in parts] == [18, 2, 4]
    assert all(part.classes == ["cat", "dog"] for part in parts)
    assert len({part.describe(n) for part in parts for n in range(len(part))}) == 24
    for part in parts:
        assert (part.vocabulary, part.max_length) == (256, 1024)
        for index, (tokens, label) in enumerate(all_of(part)):
            assert f"/{part.classes[label]}/" in part.describe(index)
            with Image.open(part.describe(index)) as image:
                apart = np.array(tokens) - np.asarray(image.convert("L")).flatten()
            assert len(tokens) == 1024
            assert np.abs(apart).max() <= 1


@pytest.mark.parametrize(
    ("colour", "value"),
    [
        ((0, 0, 0), 0),
        ((255, 255, 255), 255),  # 255 * 0.9999 * 255.5 / 255, cut off
        ((255, 0, 0), 76),  # of 76.37
        ((0, 255, 0), 149),  # of 149.98, where Pillow has 150
        ((0, 0, 255), 29),
        ((10, 20, 30), 18),
    ],
)
def test_grey_is_that_of_tensorflow(colour: tuple[int, int, int], value: int) -> None:
    assert set(grey(Image.new("RGB", (32, 32), colour)).tolist()) == {value}


def test_images_may_be_in_torchvisions_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path)
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    parts = [open_sequences("image", str(tmp_path), part) for part in ("train", "val", "test")]
    assert [len(part) for part in parts] == [18, 2, 4]
    assert parts[0].classes == [*"abcdefghij"]
    assert all(len(tokens) == 1024 for tokens, _ in all_of(parts[1]))


@pytest.mark.parametrize(
    "inner",
    ["", "curv_contour_length_14", "lra_release/pathfinder32/curv_contour_length_14"],
)
def test_contours_are_shared_out_after_a_shuffle(inner: str, tmp_path: Path) -> None:
    write_contours(tmp_path / inner)
    parts = [open_sequences("pathfinder", str(tmp_path), part) for part in ("train", "val", "test")]
    assert [len(part) for part in parts] == [16, 2, 2]
    samples = [sample for part in parts for sample in all_of(part)]
    assert Counter(tokens[:2] for tokens, _ in samples) == Counter(
        (first, number) for first in (0, 100) for number in range(10)
    )
    assert all(label == tokens[1] % 2 for tokens, label in samples)
    assert [tokens[1] for tokens, _ in samples] != sorted(tokens[1] for tokens, _ in samples)
    assert parts[0].classes == ["apart", "connected"]
    assert "imgs/" in parts[0].describe(0)


def test_sequences_are_cut_at_the_length_asked_for(tmp_path: Path) -> None:
    write_reviews(tmp_path, 1)
    whole, cut = (open_sequences("text", str(tmp_path), "train", length) for length in (None, 3))
    (tokens, label), (start, same) = whole.load(0), cut.load(0)
    assert isinstance(tokens, Tensor)
    assert isinstance(start, Tensor)
    assert len(tokens) > 3
    assert torch.equal(start, tokens[:3])
    assert label == same
    pair, _ = open_sequences("retrieval", str(write_papers(tmp_path)), "train", 2).load(0)
    assert [len(tokens) for tokens in pair] == [1, 2]


def test_the_first_samples_of_a_fixed_shuffle_can_be_taken(tmp_path: Path) -> None:
    write_reviews(tmp_path, 40)
    whole, some, fewer = (
        open_sequences("text", str(tmp_path), "train", count=count) for count in (None, 20, 10)
    )
    assert (len(whole), len(some), len(fewer)) == (40, 20, 10)
    assert all_of(some)[:10] == all_of(fewer)
    assert set(all_of(some)) < set(all_of(whole))
    assert set(all_of(whole)[:20]) != set(all_of(some))


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (
            "listops",
            lambda root: None,
            "has no basic_train.tsv, nor lra_release/listops-1000/basic_train.tsv; the data of "
            f"listops come from {RELEASE}",
        ),
        (
            "text",
            lambda root: None,
            "has no train, nor aclImdb/train, nor train.jsonl; .* https://ai.stanford.edu/~amaas",
        ),
        ("retrieval", lambda root: None, f"has no new_aan_pairs.train.tsv, nor .*; .* {RELEASE}"),
        ("image", lambda root: None, "has no images in folders .*; .* https://www.cs.toronto.ed"),
        ("pathfinder", lambda root: None, f"has no metadata, nor lra_release/.*; .* {RELEASE}"),
        (
            "listops",
            lambda root: write(root / "basic_train.tsv", f"{EXPRESSION}\t4"),
            r"basic_train.tsv does not start with the line 'Source\\tTarget'",
        ),
        (
            "listops",
            lambda root: write(root / "basic_train.tsv", "Source\tTarget"),
            "listops has no samples in its split 'train'",
        ),
        (
            "listops",
            lambda root: write(root / "basic_train.tsv", "Source\tTarget", "[MIN 1 2\t1\t1"),
            r"basic_train.tsv\[0\] cannot be read: .* is not an expression, a tab and a digit",
        ),
        (
            "text",
            lambda root: write(root / "train.jsonl", '{"text": "a", "label": 2}'),
            r"train.jsonl\[0\] cannot be read: it is not a JSON object with a text and a label",
        ),
        ("text", lambda root: write(root / "train.jsonl", "a"), "it is not JSON: Expecting value"),
        (
            "text",
            lambda root: write(root / "train.jsonl", '{"text": "", "label": 1}'),
            "cannot be read: its text is empty",
        ),
        ("text", lambda root: (root / "train").mkdir(), "text has no samples in its split 'train'"),
        (
            "retrieval",
            lambda root: write_papers(root, "1\tP0\tQ9"),
            r"pairs.train.tsv\[0\] cannot be read: there is no paper Q9 in papers.jsonl",
        ),
        ("retrieval", lambda root: write_papers(root, "1\tP0"), "it has 2 columns, but 3 are exp"),
        ("retrieval", lambda root: write_papers(root, "2\tP0\tP1"), "its class is 2, but 0 or 1"),
        (
            "retrieval",
            lambda root: write(root / "papers.jsonl", '{"id": "P0"}'),
            "line 1 of .*papers.jsonl has no id and text of a paper",
        ),
        (
            "retrieval",
            lambda root: write(root / "new_aan_pairs.train.tsv", "1\tP0\tP1"),
            "it has 3 columns, but 5 are expected",
        ),
        ("image", lambda root: write_images(root, side=8), "it has 8 x 8 pixels, but 32 x 32 are"),
        (
            "pathfinder",
            lambda root: write(root / "metadata/0.npy", "imgs/0 sample_0.png 0 yes"),
            "0.npy has the line 'imgs/0 sample_0.png 0 yes', which does not start with a folder",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_one_sentence(
    name: str, change: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    change(tmp_path)
    with pytest.raises(ValueError, match=sentence) as caught:
        open_sequences(name, str(tmp_path), "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "paths"}, "no task of sequences 'paths': take one of listops, text, retrieval, "),
        ({"split": "extra"}, "listops has no split 'extra': take one of train, val, test"),
        ({"name": "text"}, "needs its folder: give it with --data.root; .* https://ai.stanford"),
        ({"name": "text", "root": "nowhere"}, "there is no folder nowhere.*; the data of text com"),
        ({"max_length": 0}, "the max_length of listops is 0: give 1 or more"),
        ({"count": 0}, "the number of samples of listops is 0"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        open_sequences(**{"name": "listops", "root": None, "split": "train", **options})


def test_more_samples_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"text has 6 samples .* than the 7 asked for: ask for 6"):
        open_sequences("text", str(write_reviews(tmp_path)), "train", count=7)


def made(stage: str = "fit", num_classes: int | None = None, **options: Any) -> SequenceData:
    """Data whose trainer is there, as when it is fitted."""
    usual = {"batch_size": 4, "num_workers": 0, "eval_batch_size": 3}
    data = SequenceData(**(usual | options))
    data.trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    if num_classes is not None:
        data.num_classes = lambda: num_classes  # type: ignore[method-assign]
    data.setup(stage)
    return data


def first(data: SequenceData, part: str = "train") -> SequenceBatch:
    batch: SequenceBatch = next(iter(getattr(data, f"{part}_dataloader")()))
    return batch


def check_padded(tokens: Tensor, mask: Tensor, lengths: list[int], width: int) -> None:
    assert tokens.dtype == torch.int64
    assert mask.dtype == torch.bool
    assert tokens.shape == mask.shape == (len(lengths), width)
    for row, kept, length in zip(tokens, mask, lengths):
        assert (row[length:] == PAD).all()
        assert kept.tolist() == [True] * length + [False] * (width - length)


@pytest.mark.parametrize("pad_to", [None, 2048])
def test_batches_are_padded_to_the_longest_or_as_asked(pad_to: int | None) -> None:
    data = made(pad_to=pad_to)
    assert (data.vocabulary, data.max_length, data.classes) == (16, 2000, [*"0123456789"])
    batch = first(data)
    assert batch.second_tokens is None
    assert batch.second_mask is None
    assert batch.broken == ()
    samples = [generate(0, "train", index) for index in batch.indices.tolist()]
    lengths = [len(expression.split()) for expression, _ in samples]
    check_padded(batch.tokens, batch.mask, lengths, pad_to or max(lengths))
    assert batch.tokens[0, : lengths[0]].tolist() == encode(samples[0][0])
    assert batch.targets.tolist() == [value for _, value in samples]


@pytest.mark.parametrize("pad_to", [None, 64])
def test_pairs_have_a_batch_each(pad_to: int | None, tmp_path: Path) -> None:
    write_papers(tmp_path)
    options = {"name": "retrieval", "root": str(tmp_path), "pad_to": pad_to, "max_length": 60}
    batch = first(made("validate", **options), "val")
    assert batch.second_tokens is not None
    assert batch.second_mask is not None
    check_padded(batch.tokens, batch.mask, [1, 2], pad_to or 2)
    check_padded(batch.second_tokens, batch.second_mask, [3, 1], pad_to or 3)
    assert batch.targets.tolist() == [1, 0]


def test_black_pixels_are_masked_as_in_the_benchmark(tmp_path: Path) -> None:
    write_contours(tmp_path)
    batch = first(made("test", name="pathfinder", root=str(tmp_path)), "test")
    assert batch.tokens.shape == (2, 1024)
    assert torch.equal(batch.mask, batch.tokens > 0)


def test_parts_are_those_asked_for(tmp_path: Path) -> None:
    data = made(train_samples=9, val_samples=5)
    assert (len(data.sources["train"]), len(data.sources["val"])) == (9, 5)
    assert len(made("test", train_samples=9, val_samples=5).sources["test"]) == 2000
    assert sum(len(batch.targets) for batch in data.val_dataloader()) == 5
    write_listops(tmp_path, 8)
    data = made(root=str(tmp_path), train_samples=5, val_split="test")
    assert len(data.sources["train"]) == 5
    assert "basic_test.tsv" in data.sources["val"].describe(0)


def test_the_data_set_does_not_depend_on_the_seed_but_its_order_does() -> None:
    one, other = (made(seed=seed, train_samples=40, val_samples=3) for seed in (0, 1))
    assert all_of(one.sources["val"]) == all_of(other.sources["val"])
    assert first(one).indices.tolist() != first(other).indices.tolist()


def test_workers_give_the_same_batches() -> None:
    state = random.getstate()
    alone, shared = (first(made(num_workers=workers)) for workers in (0, 1))
    assert random.getstate() == state
    assert torch.equal(alone.tokens, shared.tokens)
    assert torch.equal(alone.targets, shared.targets)


def test_what_cannot_be_read_is_named_and_replaced_or_left_out(tmp_path: Path) -> None:
    write_review_files(tmp_path)
    data = made(name="text", root=str(tmp_path), batch_size=6)
    for part in ("train", "test"):
        (tmp_path / part / "neg" / "1_8.txt").unlink()
    batch = first(data)
    assert [path for path, _ in batch.broken] == [str(tmp_path / "train/neg/1_8.txt")]
    assert "No such file" in batch.broken[0][1]
    assert sorted(batch.indices.tolist()) == [0, 2, 2, 3, 4, 5]
    scored = first(data, "val")
    assert scored.targets.tolist() == [0, -1, 0]
    assert scored.mask.any(1).all()  # something to look at, though it does not count
    for path in (tmp_path / "train").rglob("*.txt"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="6 samples cannot be read, among them 20 in a row"):
        first(data)


def test_padding_of_shares_has_no_class(tmp_path: Path) -> None:
    write_papers(tmp_path, *["1\tP0\tP1"] * 4)
    data = made("validate", name="retrieval", root=str(tmp_path))
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        global_rank=1, world_size=3, current_epoch=0, accumulate_grad_batches=1,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )  # fmt: skip
    batch = first(data, "val")
    assert batch.indices.tolist() == [1, -1]
    assert batch.targets.tolist() == [1, -1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "paths"}, "there is no task of sequences 'paths'"),
        (
            {"pad_to": 1024},
            "sequences of up to 2000 tokens cannot be padded to 1024: give --data.pad_to 2000 or",
        ),
        ({"max_length": 0}, "the max_length of listops is 0"),
        ({"num_classes": 2}, r"the data has 10 classes .* give --model.num_classes 10"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        made(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "root", "counts"),
    [
        ("text", "imdb", (10_000, 5000, 5000)),
        ("retrieval", "aan", (4436, 555, 555)),
        ("image", "cifar10", (9000, 1000, 5000)),
    ],
)
def test_real_sequences_are_read(name: str, root: str, counts: tuple[int, ...]) -> None:
    if not (Path(os.environ.get("SOFTMAXFREE_DATA", "")) / root).is_dir():
        pytest.skip(f"{root} is not in the folder that SOFTMAXFREE_DATA names")
    data = made(name=name, root=root, batch_size=128)
    data.setup("test")
    assert tuple(len(data.sources[part]) for part in ("train", "val", "test")) == counts
    batch = first(data)
    assert not batch.broken
    assert batch.tokens.max() < data.vocabulary
    assert 500 < batch.tokens.shape[1] <= data.max_length
    assert set(batch.targets.tolist()) == set(range(len(data.classes or [])))
    assert (batch.second_tokens is not None) == (name == "retrieval")


def test_a_real_review_can_be_read_back() -> None:
    if not (Path(os.environ.get("SOFTMAXFREE_DATA", "")) / "imdb").is_dir():
        pytest.skip("imdb is not in the folder that SOFTMAXFREE_DATA names")
    tokens, label = open_sequences("text", "imdb", "test").load(0)
    assert isinstance(tokens, Tensor)
    assert bytes((tokens - 1).tolist()).startswith(b"I really wanted to like this movie. The prev")
    assert label == 0


def test_expressions_of_the_loader_have_the_values_of_the_evaluator() -> None:
    tokens, label = open_sequences("listops", None, "test").load(11)
    assert isinstance(tokens, Tensor)
    words = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
    assert evaluate(" ".join(words[token - 1] for token in tokens)) == label


@pytest.mark.parametrize("expression", ["", "  ", "( )"])
def test_an_empty_expression_is_no_sample(expression: str, tmp_path: Path) -> None:
    file = write_listops(tmp_path) / "basic_train.tsv"
    write(file, listops.HEADER, f"{EXPRESSION}\t4", f"{expression}\t4")
    source = open_sequences("listops", str(tmp_path), "train")
    with pytest.raises(ValueError, match="is empty: give a digit or a list"):
        source.load(1)


def test_a_line_that_no_sample_has_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = write_listops(tmp_path) / "basic_train.tsv"
    long = "( " * 2**20
    write(file, listops.HEADER, f"{EXPRESSION}\t4", f"{long}\t4")
    with pytest.raises(ValueError, match=r"line 3 of .*basic_train\.tsv has more than 1 MB"):
        open_sequences("listops", str(tmp_path), "train")


def test_a_review_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "[" * 200_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        open_sequences("text", str(tmp_path), "train")


def test_files_of_pathfinder_are_below_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "metadata" / "1.npy", "../../imgs sample_0.png 0 1")
    with pytest.raises(ValueError, match="is no name of a file below"):
        open_sequences("pathfinder", str(tmp_path), "train")
