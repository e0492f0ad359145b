"""The words of a command line."""

from itertools import groupby


def with_lists(words: list[str]) -> list[str]:
    """Several words after an option as one list: --sizes 16 32 is --sizes [16,32].

    Only for commands whose words all belong to options.
    """
    found: list[str] = []
    for is_option, group in groupby(words, lambda word: word.startswith("--")):
        values = list(group)
        found += values if is_option or len(values) == 1 else [f"[{','.join(values)}]"]
    return found
