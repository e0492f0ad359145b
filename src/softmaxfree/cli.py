"""The command line: `softmaxfree COMMAND ...`; each command imports what it needs when it runs."""

import sys
from pathlib import Path
from typing import Any, Literal

from jsonargparse import auto_cli


def bench_attention(
    preset: Literal["core", "demo", "linear"] = "core",
    threads: int | None = None,
    out: Path = Path("results"),
    memory: bool = True,
) -> None:
    """Measure the attention alone, against softmax and against the released formula.

    Prints a table and writes it as JSON, Markdown and a picture. Contestants run in turns in one
    process, memory is measured in a fresh process for each point. Only ratios within one run
    carry over to other machines.

    Args:
        preset: core: SOFT++, the released formula and softmax at four sizes that models use
            (4 minutes); demo: softmax and SOFT++ from 784 to 50,176 tokens (1 minute);
            linear: SOFT++ from 3,136 to a million tokens (2 minutes).
        threads: Threads to compute with; the machine's cores if not given. 1 compares best.
        out: Folder for the results.
        memory: Measure memory too, at 3 seconds a point.
    """
    from .bench.attention import run

    if threads is not None and threads < 1:
        raise ValueError(f"--threads must be at least 1, got {threads}")
    run(preset, threads, out, memory)


COMMANDS: dict[str, Any] = {
    "bench": {"_help": "Measure speed and memory.", "attention": bench_attention},
}


def main(arguments: list[str] | None = None) -> None:
    """Runs a command; an error is one line, with its traceback where --traceback is given."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    traceback = "--traceback" in arguments
    arguments = [word for word in arguments if word != "--traceback"]
    try:
        auto_cli(
            COMMANDS,
            args=arguments or ["--help"],
            prog="softmaxfree",
            description="Softmax-free linear transformers: SOFT and SOFT++. "
            "Add --traceback to any command to see where an error comes from.",
        )
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        if traceback:
            raise
        print(f"softmaxfree: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
