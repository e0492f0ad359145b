"""One vocabulary for the options of all commands."""

import re
from argparse import Action, _SubParsersAction
from collections.abc import Iterator

import pytest
from jsonargparse import ArgumentParser

from softmaxfree.files import recipe
from softmaxfree.training.arguments import _lists
from softmaxfree.words import HELP, with_lists

from .help_texts import BY_HAND, all_commands, help_of, parser_of

WORDS: dict[str, str | tuple[str, ...]] = {
    "against": "A .json file of an earlier run",
    "all": "Run all experiments",
    "attention": "Attention",
    "attentions": "Names of attentions",
    "checkpoint": ("Trained weights", "Weights to score", "Run to go on with"),
    "checkpoints": "Trained weights",
    "config": "Path to a configuration file",
    "contestants": "Names of attentions",
    "device": "Device to compute on.",
    "dtype": "Type of tokens and weights.",
    "fit": "Further arguments of `softmaxfree fit`",
    "folders": "Folders of runs",
    "host": "Address to listen on",
    "images": "Image files",
    "inverse": "How the landmark matrix is inverted",
    "layer": "Layer",
    "memory": "Measure memory too",
    "model": "Name of a backbone",
    "modules": "Python modules to import first, which register attentions of your own.",
    "names": "Names of experiments.",
    "num_classes": "Width of the logits",
    "out": "Folder for",
    "page": "File to write",
    "place": "Place of the patch",
    "port": "Port to listen on",
    "preset": "",  # each benchmark has its own, with times
    "print_config": "Print the configuration",
    "results": "Folder with",
    "root": "Folder with",
    "runs": "Folder of the runs.",
    "save_every": "Steps between checkpoints.",
    "seed_everything": "Seed of all randomness.",
    "seeds": "Seeds",
    "short": "Runs of minutes",
    "size": "Side of images in pixels",
    "sizes": "Sides of images in pixels",
    "source": "A run's folder or checkpoint",
    "split": "Part of it to test on.",
    "target": "The .",
    "tasks": "Names of tasks",
    "threads": "Threads to compute with",
    "threshold": "Lowest score of an object",
    "traced_size": "Side of the image that the model is traced with",
    "top": "Number of classes to show",
    "weights": "Trained weights",
    "workers": "Runs at a time.",
}
"""Every word on the command line, and how its help begins in every command that has it."""
TYPES = {
    "checkpoint": {"Path", "str"},  # fit takes `last` too
    "checkpoints": {"listPath"},
    "images": {"listPath", ""},  # predict takes file names that are not in UTF-8
    "out": {"Path"},
    "page": {"Path"},
    "size": {"int"},
    "threads": {"int"},
}
"""The types that a word may have, without brackets and None."""


def options(parser: ArgumentParser, command: str) -> Iterator[Action]:
    """Options and positional words."""
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):  # Lightning's, with one subcommand
            yield from action.choices[command]._actions
        else:
            yield action


@pytest.mark.parametrize("words", list(all_commands()), ids=" ".join)
def test_every_command_uses_the_same_words_and_prints_its_help(words: tuple[str, ...]) -> None:
    parser = parser_of(words)
    for option in options(parser, words[0]):
        if option.dest.split(".")[0] in ("help", "trainer", "data") or (
            words[0] in ("fit", "validate", "test") and option.dest.split(".")[0] == "model"
        ):
            continue  # the three parts of a run's configuration have arguments of their own
        name, text = option.dest, option.help or ""
        assert name in WORDS, f"{name} is a new word: choose one of WORDS, or add it there"
        assert text.startswith(WORDS[name]), f"the help of {name} begins otherwise: {text}"
        if name in TYPES:
            kind = getattr(option, "_typehint", option.type)
            found = re.sub(r"typing\.|pathlib\.|Optional|None|[|\[\] ]|<class|>|'", "", str(kind))
            assert found in TYPES[name], f"{name} is of type {found}"
    if words[0] not in BY_HAND:
        told = (HELP / f"{'-'.join(words)}.txt").read_text()
        assert told == help_of(parser), "run `python -m tests.help_texts`"
    else:
        shown = re.findall(
            r"^  --(?!config)(\S+) (\S+(?: \S+)*)", (HELP / f"{words[0]}.txt").read_text(), re.M
        )
        digits = f"--config={recipe('digits/softpp_nano.yaml')}"
        given = [word for option, value in shown for word in (f"--{option}", *value.split())]
        parser.parse_args([digits, *with_lists(given, _lists())])
