"""`softmaxfree COMMAND ...`: a table of commands; each is imported when it runs."""

import io
import re
import signal
import sys
from argparse import ArgumentError
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from . import __version__
from .errors import UserError, check_words, reader_has_left, visible
from .imports import needs
from .usage import unknown_command, usage_error
from .words import call, help_of


class Command(NamedTuple):
    """A function that stands beside its work; its signature and docstring make the options."""

    target: str
    """`module:function` of this package."""
    help: str
    extra: str = ""
    """The extra of this package that the function's module needs, as in `softmaxfree[train]`."""
    parses: bool = False
    """Whether the function parses the command line itself."""


Commands = dict[str, "Command | Group"]


class Group(NamedTuple):
    """Commands of one kind, such as `softmaxfree bench ...`."""

    help: str
    commands: Commands


COMMANDS: Commands = {
    "fit": Command("training.command:fit", "train a model; by default on digits", "train", True),
    "validate": Command("training.command:validate", "score a checkpoint", "train", True),
    "test": Command("training.command:test", "score it on the test split", "train", True),
    "predict": Command("tasks.predict:predict", "say what is on images", "train", True),
    "runs": Command("training.runs:runs", "compare finished training runs", "train", True),
    "models": Command("lab.bench.family:models", "list every backbone and its cost"),
    "build": Command("ops.backends.native:build", "compile the optional code for this CPU"),
    "doctor": Command("lab.bench.doctor:doctor", "check this machine and say what it does best"),
    "convert": Command("models.convert:convert_released", "write any weights as safetensors"),
    "export": Command("deploy:export_checked", "export a trained model to ONNX or torch.export"),
    "reproduce": Command(
        "lab.reproduce.reproduce:reproduce", "test claims of the paper", "train", True
    ),
    "explore": Command("lab.explore.page:explore", "look into attention in the browser"),
    "figures": Group(
        "draw the paper's figures from any model and images",
        {
            "newton": Command("lab.figures.newton:draw_newton", "convergence of inverses"),
            "spectrum": Command("lab.figures.spectrum:draw_spectrum", "eigenvalues"),
            "heatmap": Command("lab.figures.heatmap:draw_heatmap", "what a patch attends to"),
            "resolution": Command("lab.figures.resolution:draw_resolution", "accuracy by size"),
            "memory": Command("lab.figures.cost:draw_memory", "memory by tokens"),
            "throughput": Command("lab.figures.cost:draw_throughput", "time by tokens"),
        },
    ),
    "bench": Group(
        "measure speed and memory",
        {
            "attention": Command("lab.bench.attention:bench_attention", "attentions alone"),
            "models": Command("lab.bench.models:bench_models", "whole backbones"),
            "detection": Command("lab.bench.detection:bench_detection", "detectors"),
            "segmentation": Command("lab.bench.segmentation:bench_segmentation", "UperNet"),
            "speed": Command("lab.bench.speed:bench_speed", "what is promised about speed"),
            "memory": Command("lab.bench.attention:bench_memory", "memory of layers in training"),
            "sequences": Command("lab.bench.sequences:bench_sequences", "long sequences"),
            "lra": Command("lab.bench.lra:bench_lra", "the Long Range Arena"),
            "training": Command("lab.bench.training:bench_training", "training steps"),
        },
    ),
}


def main(arguments: list[str] | None = None) -> None:
    """Runs a command. A mistake of the user's is one line, a bug keeps its traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be in UTF-8
    traceback = "--traceback" in arguments
    arguments = [word for word in arguments if word != "--traceback"]
    try:
        try:
            run_command(check_words(arguments))
        finally:
            sys.stdout.flush()
    except UserError as error:
        if traceback:
            raise
        lines = [visible(line) for line in str(error).split("\n")]
        print("softmaxfree: error:", "\n".join(lines), file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        if not reader_has_left():
            raise
        raise SystemExit(128 + signal.SIGPIPE) from None


def run_command(words: list[str]) -> None:
    """Finds the command that the first words name, and runs it with the rest."""
    program, commands = ["softmaxfree"], COMMANDS
    while words and words[0] in commands:
        found = commands[words[0]]
        program, words = [*program, words[0]], words[1:]
        if isinstance(found, Command):
            if {"-h", "--help"} & set(words):
                print(help_of(program[1:]), end="")
            else:
                _call(found, words, " ".join(program))
            return
        commands = found.commands
    if words == ["--version"]:
        print("softmaxfree", __version__)
        return
    if words and words[0] not in ("-h", "--help"):
        raise unknown_command(" ".join(program), words[0], commands)
    print(f"usage: {' '.join(program)} COMMAND ...\n")
    width = max(map(len, commands))
    print("\n".join(f"  {name:{width}}  {entry.help}" for name, entry in commands.items()))
    print("\nCOMMAND --help explains one; --traceback shows where an error comes from; --version.")


def _call(command: Command, words: list[str], program: str) -> None:
    module, name = command.target.split(":")
    with needs(command.extra, program):
        function: Callable[..., Any] = getattr(import_module(f"softmaxfree.{module}"), name)
    try:
        written = function(words) if command.parses else call(function, words, program)
    except ArgumentError as error:
        options = re.findall(r"--(\w+)", help_of(program.split()[1:]))
        raise usage_error(str(error), options) from error
    if isinstance(written, Path):
        print(f"written: {written}")
