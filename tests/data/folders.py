"""Real image folders, made of the handwritten digits."""

from pathlib import Path

from softmaxfree.data.sources import Digits


def write_digits(root: Path, train: int = 60, val: int = 23) -> Path:
    """root/{train,val}/DIGIT/NUMBER.png: so many of each, with every digit among them."""
    for split, count in (("train", train), ("val", val)):
        source, missing, written = Digits(split), set(range(10)), 0
        for index in range(len(source)):
            image, digit = source.load(index)
            if digit in missing or count - written > len(missing):
                path = root / split / str(digit) / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path)
                missing.discard(digit)
                written += 1
    return root
