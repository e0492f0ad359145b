"""Real image folders, made of the handwritten digits."""

from pathlib import Path

from softmaxfree.data.sources import Digits


def write_digits(root: Path, train: int = 60, val: int = 23, classes: int = 10) -> Path:
    """root/{train,val}/DIGIT/NUMBER.png, with at least one image of every class."""
    for split, count in (("train", train), ("val", val)):
        source = Digits(split)
        written = dict.fromkeys(range(classes), 0)
        for index in range(len(source)):
            image, digit = source.load(index)
            if digit >= classes or written[digit] >= -(-count // classes):
                continue
            if sum(written.values()) >= count and written[digit]:
                continue
            path = root / split / str(digit) / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
            written[digit] += 1
    return root
