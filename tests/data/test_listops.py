"""Nested lists of digits: their values, how they are drawn and read."""

import os
import random
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from softmaxfree.data import listops
from softmaxfree.data.listops import WORDS, encode, evaluate, generate, read_row

OPERATORS = ["[MIN", "[MAX", "[MED", "[SM"]


def lists_of(expression: str) -> list[tuple[int, int]]:
    """Depth, counted from 1, and number of arguments of every list."""
    found, arguments = [], [0]
    for word in expression.split():
        if word == "]":
            found.append((len(arguments) - 1, arguments.pop()))
        else:
            arguments[-1] += 1
            if word in OPERATORS:
                arguments.append(0)
    assert arguments == [1]
    return found


def length_by_recursion(rng: random.Random, depth: int = 1) -> int:
    """Of an expression as the benchmark draws it, the obvious way."""
    if depth == 10 or rng.random() > 0.25:
        return 1
    return 2 + sum(length_by_recursion(rng, depth + 1) for _ in range(rng.randint(2, 10)))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("[MIN 2 9 [MAX 4 7 ] 0 ]", 0),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[SM 6 5 9 0 ]", 0),
        ("( ( ( ( ( [SM 6 ) 5 ) 9 ) 0 ) ] )", 0),
        ("( ( ( [MED ( ( ( [MAX 2 ) 5 ) ] ) ) 8 ) ] )", 6),
        ("[MED 3 ]", 3),
        ("[MED 9 1 4 ]", 4),
        ("[MED 9 1 4 5 ]", 4),  # of 4.5, rounded down
        (" [MED 0 1 ]\n", 0),
    ],
)
def test_expressions_have_their_values(expression: str, value: int) -> None:
    assert evaluate(expression) == value


def test_nesting_may_be_deep() -> None:
    assert evaluate("[SM 1 " * 20_003 + "0 " + "] " * 20_003) == 3


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("", "'' has 0 values: give one digit or one closed list"),
        ("1 2", "'1 2' has 2 values"),
        ("[MIN 1 2", "leaves 1 lists open: give one digit or one closed list"),
        ("[MIN 1 ] ]", r"closes a list that was not opened: write lists as \[MIN 2 9 \]"),
        ("[MIN 1 [MAX ] ]", "closes an empty list"),
        ("[ADD 1 2 ]", r"has the word '\[ADD': those of ListOps are 0 1 .* \[SM \] and parenth"),
        ("[MIN 1 12 ]", "has the word '12'"),
        ("[MIN 1 2]", r"has the word '2\]': .* with spaces between them"),
        ("[MIN " + "1 " * 99, r"'\[MIN 1 1 .{40,50}\.\.\.' leaves"),
    ],
)
def test_what_is_no_expression_is_refused(expression: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        evaluate(expression)
    assert "\n" not in str(caught.value)


def test_words_are_numbered_from_1() -> None:
    assert encode("( ( [MIN 0 ) ] )") == [11, 1, 15]
    assert encode(" ".join(WORDS)) == list(range(1, 16))
    with pytest.raises(ValueError, match="has the word 'X'"):
        encode("[MIN 0 X")


def test_generated_expressions_keep_to_the_benchmarks_bounds() -> None:
    depths, arguments, words = Counter[int](), Counter[int](), Counter[str]()
    lengths = []
    for index in range(250):
        expression, value = generate(0, "train", index)
        assert value == evaluate(expression)
        lengths.append(len(expression.split()))
        words.update(expression.split())
        for depth, count in lists_of(expression):
            depths[depth] += 1
            arguments[count] += 1
    assert 500 < min(lengths) < 540
    assert 1800 < max(lengths) < 2000
    assert set(depths) == set(range(1, 10))  # digits are at most at depth 10
    assert set(arguments) == set(range(2, 11))
    for group in (OPERATORS, WORDS[:10]):  # all as likely
        total = sum(words[word] for word in group)
        for word in group:
            assert words[word] == pytest.approx(total / len(group), rel=0.05)
    rng = random.Random(0)
    expected = [length_by_recursion(rng) for _ in range(3000)]
    assert mean(lengths) == pytest.approx(mean(n for n in expected if 500 < n < 2000), abs=120)


def test_a_quarter_of_the_places_holds_a_list_of_2_to_10() -> None:
    drawn = [generate(0, "val", index, 0, 100_000)[0] for index in range(2000)]
    lists = [lists_of(expression) for expression in drawn]
    assert sum(map(bool, lists)) / 2000 == pytest.approx(0.25, abs=0.03)
    roots = [found[-1][1] for found in lists if found]
    assert Counter(roots).keys() == set(range(2, 11))
    assert mean(roots) == pytest.approx(6, abs=0.4)
    inner = sum(depth == 2 for found in lists for depth, _ in found)
    assert inner / sum(roots) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(("max_depth", "max_args"), [(1, 5), (2, 2), (4, 3)])
def test_depth_and_arguments_may_be_chosen(max_depth: int, max_args: int) -> None:
    bounds = {"min_length": 0, "max_length": 200, "max_depth": max_depth, "max_args": max_args}
    found = [pair for n in range(300) for pair in lists_of(generate(0, "test", n, **bounds)[0])]
    assert max((depth for depth, _ in found), default=0) == max_depth - 1
    assert max((count for _, count in found), default=max_args) == max_args


def test_expressions_follow_from_seed_split_and_index() -> None:
    state = random.getstate()
    samples = [generate(*key) for key in ((0, "train", 0), (1, "train", 0), (0, "val", 0))]
    samples += [generate(0, "test", 0), generate(0, "train", 1)]
    assert len(set(samples)) == 5
    random.seed(5)
    assert generate(0, "train", 0) == samples[0]
    random.setstate(state)
    generate(0, "train", 0)
    assert random.getstate() == state
    # A stream that changes would change the data set: this one is pinned.
    assert generate(0, "train", 0, 3, 12) == ("[MIN 3 4 0 9 3 9 7 9 9 ]", 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"split": "dev"}, "ListOps has no split 'dev': take one of train, val, test"),
        ({"max_args": 1}, "operators have 2 arguments or more, but max_args is 1"),
        (
            {"max_depth": 2},
            "no expression of more than 500 and fewer than 2000 words was found in 50 draws of at "
            "most 2 levels and 10 arguments: widen the bounds",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    options: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listops, "_DRAWS", 50)
    with pytest.raises(ValueError, match=sentence):
        generate(**{"seed": 0, "split": "train", "index": 0, **options})


def test_lines_of_the_benchmarks_files_are_read() -> None:
    assert read_row("( ( [MIN 1 ) ] )\t1\r\n") == ("( ( [MIN 1 ) ] )", 1)
    for row in ("[MIN 1 ]", "[MIN 1 ]\t10", "1\t[MIN 1 ]"):
        with pytest.raises(ValueError, match="is not an expression, a tab and a digit: check the"):
            read_row(row)


def test_the_published_labels_are_reproduced() -> None:
    file = Path(os.environ.get("SOFTMAXFREE_DATA", "")) / "listops_spinn/test_d20s.tsv"
    if not file.is_file():
        pytest.skip("listops_spinn is not in the folder that SOFTMAXFREE_DATA names")
    rows = [line.split("\t") for line in file.read_text().splitlines()]
    assert len(rows) == 10_000
    assert all(evaluate(expression) == int(value) for value, expression in rows)
