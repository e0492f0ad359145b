"""ListOps: nested lists of digits to be evaluated, as in the Long Range Arena."""

import random
from collections.abc import Callable

from ..errors import UserError
from .counters import hash_counters

WORDS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
"""Words of expressions; the parentheses in files are redundant."""

HEADER = "Source\tTarget"
"""The first line of the benchmark's files."""

SPLITS = ("train", "val", "test")

_OPERATOR = 0.25
"""Probability of an operator in place of a digit; the benchmark calls it VALUE_P."""

_DRAWS = 20_000
"""Most attempts to draw an expression of the right length; in the benchmark one in 12 has it."""


def _median(values: list[int]) -> int:
    """Rounded down."""
    ordered, count = sorted(values), len(values)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) // 2


_OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": _median,
    "[SM": lambda values: sum(values) % 10,
}
_NAMES = tuple(_OPERATORS)
_TOKENS = {word: number for number, word in enumerate(WORDS, start=1)}


def encode(expression: str) -> list[int]:
    """Tokens 1 to 15 of an expression, in the order of WORDS; 0 is left for padding."""
    words = _split(expression)
    if not words:
        raise UserError(f"{_shown(expression)} is empty: give a digit or a list as [MIN 2 9 ]")
    return [_TOKENS[word] for word in words]


def evaluate(expression: str) -> int:
    """Value of an expression such as [MIN 2 9 [MAX 4 7 ] 0 ], with or without parentheses.

    MED is the median, rounded down, and SM the sum modulo 10.
    """
    opened: list[tuple[str, list[int]]] = []
    values: list[int] = []  # of the innermost list
    for word in _split(expression):
        if word in _OPERATORS:
            opened.append((word, values))
            values = []
        elif word != "]":
            values.append(int(word))
        elif opened and values:
            operator, outer = opened.pop()
            outer.append(_OPERATORS[operator](values))
            values = outer
        else:
            what = "an empty list" if opened else "a list that was not opened"
            raise UserError(f"{_shown(expression)} closes {what}: write lists as [MIN 2 9 ]")
    if opened or len(values) != 1:
        what = f"leaves {len(opened)} lists open" if opened else f"has {len(values)} values"
        raise UserError(f"{_shown(expression)} {what}: give one digit or one closed list")
    return values[0]


def generate(
    seed: int,
    split: str,
    index: int,
    min_length: int = 500,
    max_length: int = 2000,
    max_depth: int = 10,
    max_args: int = 10,
) -> tuple[str, int]:
    """An expression and its value, a function of (seed, split, index).

    As in the benchmark, each place holds an operator with probability 1/4 (at the last depth never)
    and otherwise a digit; an operator has 2 to max_args arguments; all choices are uniform, and
    expressions of the wrong length are drawn again. The benchmark also drops duplicates, which a
    sample generated alone cannot detect; at these lengths none are expected.

    Args:
        seed: Seed of the data set.
        split: "train", "val" or "test".
        index: Number of the expression in its split.
        min_length: Expressions have more words than this, without parentheses.
        max_length: Expressions have fewer words than this.
        max_depth: Largest depth of a digit; a digit alone has depth 1.
        max_args: Most arguments of an operator.
    """
    if split not in SPLITS:
        raise UserError(f"ListOps has no split {split!r}: take one of {', '.join(SPLITS)}")
    if max_args < 2:
        raise UserError(f"operators have 2 arguments or more, but max_args is {max_args}")
    rng = random.Random(hash_counters(seed, SPLITS.index(split), index))
    for _ in range(_DRAWS):
        words = _draw(rng, max_length, max_depth, max_args)
        if min_length < len(words) < max_length:
            expression = " ".join(words)
            return expression, evaluate(expression)
    raise UserError(
        f"no expression of more than {min_length} and fewer than {max_length} words was found in "
        f"{_DRAWS} draws of at most {max_depth} levels and {max_args} arguments: widen the bounds"
    )


def read_row(row: str) -> tuple[str, int]:
    """The expression and its value in a line of the benchmark's files."""
    expression, tab, value = row.rstrip("\r\n").partition("\t")
    if not tab or value not in WORDS[:10]:
        raise UserError(
            f"the line {_shown(row)} is not an expression, a tab and a digit: check the file"
        )
    return expression, int(value)


def _draw(rng: random.Random, max_length: int, max_depth: int, max_args: int) -> list[str]:
    """Words of a random expression; stops at max_length."""
    words: list[str] = []
    missing: list[int] = []  # missing arguments of the open lists, outermost first
    while len(words) < max_length:
        if len(missing) + 1 < max_depth and rng.random() <= _OPERATOR:
            words.append(_NAMES[int(4 * rng.random())])
            missing.append(2 + int((max_args - 1) * rng.random()))
            continue
        words.append(WORDS[int(10 * rng.random())])
        while missing and missing[-1] == 1:
            missing.pop()
            words.append("]")
        if not missing:
            break
        missing[-1] -= 1
    return words


def _split(expression: str) -> list[str]:
    words = [word for word in expression.split() if word not in ("(", ")")]
    if unknown := next((word for word in words if word not in _TOKENS), None):
        raise UserError(
            f"{_shown(expression)} has the word {unknown!r}: those of ListOps are "
            f"{' '.join(WORDS)} and parentheses, with spaces between them"
        )
    return words


def _shown(text: str) -> str:
    """Quoted and shortened for messages."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
