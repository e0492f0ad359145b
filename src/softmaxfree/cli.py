"""The command line: `softmaxfree COMMAND ...`; each command imports what it needs when it runs."""

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, auto_cli

from .errors import UserError, visible
from .modules import MODULES, Names, import_modules, listed, needs


def bench_attention(
    preset: Literal["paper", "core", "demo", "linear"] = "core",
    threads: int | None = None,
    out: Path = Path("results"),
    memory: bool | None = None,
    contestants: list[str] | None = None,
    modules: Names = None,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    against: Path | None = None,
) -> None:
    """Measure attentions alone: every one of the table, other packages', the released formula.

    Each is first checked against a formula. Prints tables and writes them as JSON, CSV, Markdown
    and a picture. Contestants run in turns in one process, memory is measured in a fresh process
    for each point. Only ratios within one run carry over to other machines. What cannot run at a
    size is said so.

    Args:
        preset: paper: every attention and the packages as layers from 784 to 6,272 tokens
            (4 minutes); core: SOFT++, the released formula and softmax at four sizes that models
            use (4 minutes); demo: softmax and SOFT++ from 784 to 50,176 tokens (1 minute);
            linear: SOFT++ from 3,136 to a million tokens (2 minutes).
        threads: Threads to compute with; the machine's cores if not given. 1 compares best.
        out: Folder for the results.
        memory: Measure memory too; as the preset has it if not given.
        contestants: Names of attentions, such as [softpp,performer]; the preset's if not given.
        modules: Python modules to import first, which register attentions of your own.
        device: Where to compute.
        dtype: Type of tokens and weights.
        against: A .json file of an earlier run to compare with.
    """
    from .bench.attention import run
    from .bench.contestants import Setting

    _check_machine(threads, device)
    run(preset, threads, out, memory, contestants, listed(modules), Setting(device, dtype), against)


def bench_speed(out: Path = Path("results")) -> None:
    """Measure what is promised about speed, and say whether it is kept (6 minutes).

    The attention against its matrix products, backbones against Swin-T, ConvNeXt-T and PVTv2,
    one thread and two, memory of training, large images, the start. Prints a table with targets
    and verdicts and writes it as JSON, CSV and Markdown.

    Args:
        out: Folder for the results.
    """
    from .bench.speed import run

    run(out)


def bench_models(
    preset: Literal["large", "paper", "peers"] = "peers",
    threads: int = 1,
    out: Path = Path("results"),
    modules: Names = None,
    device: Literal["cpu", "cuda"] = "cpu",
    against: Path | None = None,
) -> None:
    """Measure whole backbones against their peers, in inference and in a training step.

    Prints a table and writes it as JSON, CSV and Markdown. Contestants run in turns in one
    process. Only ratios within one run carry over to other machines.

    Args:
        preset: large: one image of 800 x 1333 pixels, time and memory, against
            the released formula (8 minutes); paper: every attention in tiny, with and without the
            value convolution, and the paper's ablations (10 minutes); peers: what one would pick
            instead, from timm, at 224, 512 and 1024 pixels (10 minutes).
        threads: Threads to compute with; 1 compares best.
        out: Folder for the results.
        modules: Python modules to import first, which register attentions of your own.
        device: Where to compute.
        against: A .json file of an earlier run to compare with.
    """
    from .bench.models import run

    _check_machine(threads, device)
    run(preset, threads, out, listed(modules), device, against)


def bench_detection(threads: int = 1, out: Path = Path("results")) -> None:
    """Measure detectors on one image of 800 x 1333 pixels (7 minutes).

    RetinaNet and Mask R-CNN on SOFT++, Swin-T and PVTv2, with untrained weights: parameters,
    multiply-adds, time in turns, memory of a fresh process; and their sizes beside the paper's.
    Prints tables and writes them as JSON, CSV and Markdown. One image takes 7 to 16 seconds, each
    detector four of them.

    Args:
        threads: Threads to compute with; 1 compares best.
        out: Folder for the results.
    """
    from .bench.detection import run

    _check_machine(threads)
    run(threads, out)


def bench_segmentation(threads: int = 1, out: Path = Path("results")) -> None:
    """Measure UperNet on one image of 1024 x 2048 pixels, and count its cost (9 minutes).

    On SOFT++, Swin-T and PVTv2, with untrained weights: time in turns and memory of a fresh
    process, of a window of 768 x 768 pixels and of its backbone alone; on SOFT++-Small of the
    image too, by windows and whole. Parameters and multiply-adds stand beside the paper's.
    Prints tables and writes them as JSON, CSV and Markdown. A window takes 15 seconds.

    Args:
        threads: Threads to compute with; 1 compares best.
        out: Folder for the results.
    """
    from .bench.segmentation import run

    _check_machine(threads)
    run(threads, out)


def bench_sequences(threads: int = 1, out: Path = Path("results"), modules: Names = None) -> None:
    """Measure a training step on long sequences, 1,024 to 16,384 tokens (9 minutes).

    The encoder of the Long Range Arena with every attention, SOFT and SOFT++ with windows of 4
    tokens as in the paper and with 128 tokens: time in turns, memory of a fresh process, and how
    both grow. Prints tables and writes them as JSON, CSV, Markdown and a picture.

    Args:
        threads: Threads to compute with; 1 compares best.
        out: Folder for the results.
        modules: Python modules to import first, which register attentions of your own.
    """
    from .bench.sequences import run

    _check_machine(threads)
    run(threads, out, listed(modules))


def bench_lra(
    tasks: list[Literal["listops", "text", "retrieval", "image", "pathfinder"]] | None = None,
    attentions: list[str] | None = None,
    seeds: list[int] | None = None,
    short: bool = False,
    workers: int = 1,
    threads: int = 1,
    runs: Path = Path("runs/lra"),
    out: Path = Path("results"),
    modules: Names = None,
    fit: list[str] | None = None,
) -> None:
    """Train tasks of the Long Range Arena with several attentions, and print the paper's table.

    One run after the other, each by its recipe in recipes/lra. Stopped and started again, it goes
    on where it was. The tables show accuracy beside the paper's, time and memory of a step, of
    all runs in the folder; they are written as JSON, CSV and Markdown too.

    Args:
        tasks: Such as [text,image]; the paper's four if not given, and those of --short.
        attentions: Such as [softpp,softmax]; soft, softpp and the paper's peers if not given.
        seeds: A run for each; [0] if not given.
        short: Runs of minutes on a CPU in place of the benchmark's hours on a GPU, of listops,
            text and image: fewer steps, shorter sequences, a higher learning rate.
        workers: Runs at a time.
        threads: Threads that each computes with.
        runs: Folder of the runs.
        out: Folder for the results.
        modules: Python modules to import first, which register attentions of your own.
        fit: Further arguments of `softmaxfree fit` for all runs, such as
            ["--model.options.tokens=128"].
    """
    with needs("train"):
        from .bench.lra import run

    _check_machine(threads)
    if workers < 1:
        raise UserError(f"--workers must be at least 1, got {workers}")
    default = ["listops", "text", "image"] if short else ["listops", "text", "retrieval", "image"]
    names = ["softpp", "soft", "softmax", "linformer", "performer", "nystromformer", "reformer"]
    run(
        [*(tasks or default)], attentions or names, seeds or [0], short, workers, threads, runs,
        out, listed(modules), fit or [],
    )  # fmt: skip


def bench_memory(
    threads: int | None = None,
    out: Path = Path("results"),
    contestants: list[str] | None = None,
    modules: Names = None,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    against: Path | None = None,
) -> None:
    """Measure the memory of 12 layers in training from 784 to 6,272 tokens: the paper's figure.

    Every attention of the table and the packages', each point in a fresh process (8 minutes).
    Prints a table with the fitted exponents and writes it as JSON, CSV, Markdown and the figure.

    Args:
        threads: Threads to compute with; the machine's cores if not given.
        out: Folder for the results.
        contestants: Names of attentions, such as [softpp,performer]; all if not given.
        modules: Python modules to import first, which register attentions of your own.
        device: Where to compute.
        dtype: Type of tokens and weights.
        against: A .json file of an earlier run to compare with.
    """
    from .bench.contestants import Setting
    from .bench.memory import run

    _check_machine(threads, device)
    run(threads, out, contestants, listed(modules), Setting(device, dtype), against)


def bench_training(
    preset: Literal["steps", "imagenet"] = "steps",
    threads: int | None = None,
    out: Path = Path("results"),
    modules: Names = None,
    against: Path | None = None,
) -> None:
    """Measure training steps, or calculate what ImageNet training takes.

    Args:
        preset: steps: whole steps, optimiser included, of softpp_nano with every attention
            (1 minute); imagenet: memory and time of the journal's models by calculation
            (2 minutes). Bytes kept for the backward pass are counted exactly, on a CPU; hours
            follow from multiply-adds and an assumed speed of the GPUs, which is printed with
            them. Nothing is trained.
        threads: Threads to compute with; the machine's cores if not given.
        out: Folder for the results.
        modules: Python modules to import first, which register attentions of your own.
        against: A .json file of an earlier run to compare with, for steps.
    """
    _check_machine(threads)
    if preset == "steps":
        from .bench.steps import run as run_steps

        run_steps(threads, out, listed(modules), against)
        return
    if against is not None:
        raise UserError("--against compares measured steps; leave it out of a calculation")
    from .bench.training import run as calculate

    calculate(out)


def runs() -> None:
    """Put finished training runs side by side: time, seed and scores of each."""


def build() -> None:
    """Compile the optional code for this machine's CPU: a few seconds, once.

    It needs g++ or clang++ and is found from then on, in the user's cache. Results are the same
    within rounding. SOFTMAXFREE_NATIVE=0 leaves it out.
    """
    from .ops.native import build as compile_library

    print(f"written: {compile_library()}")


def doctor(out: Path | None = None) -> None:
    """Say what this machine does best, and whether it computes right (half a minute).

    Versions and devices, a self-test against float64, the fastest inverse, number of threads,
    order of memory and precision; and the lines to put into a shell and a config. Ends with an
    error if the self-test fails.

    Args:
        out: File to write what was found to, as JSON.
    """
    from .doctor import run

    if not run(out):
        print(
            "softmaxfree: the self-test failed: do not trust results on this machine",
            file=sys.stderr,
        )
        raise SystemExit(1)


def models(out: Path | None = None) -> None:
    """List every backbone: parameters and multiply-adds, beside the paper's figures.

    Args:
        out: Folder to write the table to, as JSON and Markdown; printed only if not given.
    """
    from .bench.family import run

    run(out)


def convert(source: Path, target: Path, attention: Literal["soft", "softpp"] = "soft") -> None:
    """Turn a released checkpoint into safetensors, and say what it holds.

    Sizes and depths are read from the shapes of its weights; averaged weights (EMA) come first.
    Nothing in the file is run. timm.create_model(..., checkpoint_path=...) takes either file.

    Args:
        source: The authors' .pth file.
        target: The .safetensors file to write.
        attention: Which of the two it was trained as; the weights do not tell.
    """
    from .models.convert import convert as convert_file

    found = convert_file(source, target, attention)
    names = "the authors' names" if found.released else "this package's names"
    print(f"{source}: {found.parameters:,} parameters under {names}")
    for name, value in found.arguments.items():
        print(f"  {name}: {value}")
    known = found.variant
    print(f"  that is {attention}_{known}" if known else "  no registered variant has these sizes")
    print(f"written: {target}; load it with\n  {found.call(attention, target)}")


def export(
    model: str,
    target: Path,
    checkpoint: Path | None = None,
    num_classes: int | None = None,
    size: int | None = None,
    inverse: str | None = None,
    attention: str | None = None,
    modules: Names = None,
) -> None:
    """Export a backbone to ONNX or to torch.export's format, for images of any size.

    Batch, height and width stay open, from 33 pixels on (17 for nano, 61 for the released models,
    whose bottleneck leaves remainders out). The file is then run, an .onnx one by onnxruntime, at
    three other sizes, one of them odd, and compared with the model. Takes one to five minutes.

    Args:
        model: Name of a backbone, such as softpp_tiny; see `softmaxfree models`.
        target: File to write: .onnx or .pt2.
        checkpoint: Weights to load, .pth or .safetensors; random ones if not given.
        num_classes: Width of the logits; the model's default if not given.
        size: Side of the image that is traced with; the model's own if not given.
        inverse: How the bottleneck matrix is inverted; the model's own way if not given. Weights
            need the one that they were trained with.
        attention: Another attention in the backbone; its own if not given.
        modules: Python modules to import first, which register attentions of your own.
    """
    from .deploy import export_checked

    import_modules(modules)
    export_checked(model, target, checkpoint, num_classes, size, inverse, attention)


def fit() -> None:
    """Train a model; without arguments softpp_nano on handwritten digits, in 2 minutes."""


def validate() -> None:
    """Score a checkpoint on the validation split, at one or several image sizes."""


def test() -> None:
    """Score a checkpoint on the test split."""


def predict() -> None:
    """Say what is on images, with a checkpoint of a run; draw the objects that a detector finds."""


def figures_newton(
    ckpt: Path | None = None,
    images: list[Path] | None = None,
    size: int | None = None,
    out: Path = Path("figures"),
    modules: Names = None,
) -> None:
    """Draw how fast each way of inverting comes to the inverse, stage by stage.

    |A X A - A| / |A| of the bottleneck matrices A of a model against the number of steps, mean and
    range over images, layers and heads, in float64; says how many steps reach 1e-3.

    Args:
        ckpt: A run's last.ckpt, of a classifier with SOFT or SOFT++; the embedded SOFT++ if not
            given.
        images: Files of images, such as [cat.jpg,dog.jpg]; 20 handwritten digits if not given.
        size: Side to resize images to; as in training if not given.
        out: Folder for newton.png, newton.svg and newton.csv.
        modules: Python modules to import first, which register attentions of your own.
    """
    with needs("train", "a figure"):
        from .figures.newton import run

    import_modules(modules)
    run(ckpt, images, size, out)


def figures_spectrum(
    ckpt: Path | None = None,
    images: list[Path] | None = None,
    layer: int | str = 0,
    out: Path = Path("figures"),
    modules: Names = None,
) -> None:
    """Draw the eigenvalues of a bottleneck matrix, and how its inverse grows with it.

    Spectral norms of A^+ and of D^-1/2 A^+ D^-1/2 against the number of bottleneck tokens m, from
    49 to 1,024, with the fitted exponents beside the paper's m^2 and m.

    Args:
        ckpt: A run's last.ckpt, of a classifier with SOFT or SOFT++; the embedded SOFT++ if not
            given.
        images: Files of images, such as [cat.jpg,dog.jpg]; 4 handwritten digits if not given.
        layer: Whose tokens: a number in the order in which layers run, or a name.
        out: Folder for spectrum.png, spectrum.svg and spectrum.csv.
        modules: Python modules to import first, which register attentions of your own.
    """
    with needs("train", "a figure"):
        from .figures.spectrum import run

    import_modules(modules)
    run(ckpt, images, layer, out)


def figures_heatmap(
    ckpts: list[Path] | None = None,
    images: list[Path] | None = None,
    place: tuple[float, float] = (0.5, 0.5),
    layer: int | str = 0,
    size: int | None = None,
    out: Path = Path("figures"),
    modules: Names = None,
) -> None:
    """Draw what one patch of an image attends to, for every head of several models.

    A row of heads for each model, overlaid on the image, with a cross at the patch. Only rows of
    the attention matrices are computed.

    Args:
        ckpts: Runs' checkpoints, such as [a/last.ckpt,b/last.ckpt]; the embedded models with
            SOFT++, SOFT, softmax, Performer and Nystromformer if not given.
        images: Files of images, a figure each; a handwritten digit if not given.
        place: Of the patch, from [0,0] at the upper left to [1,1], the height first.
        layer: A number in the order in which layers run, or a name.
        size: Side to resize images to; as in training if not given.
        out: Folder for heatmap-IMAGE.png, .svg and .csv.
        modules: Python modules to import first, which register attentions of your own.
    """
    with needs("train", "a figure"):
        from .figures.heatmap import run

    import_modules(modules)
    run(ckpts, images, place, layer, size, out)


def figures_resolution(
    ckpts: list[Path] | None = None,
    sizes: list[int] | None = None,
    root: str | None = None,
    split: str = "val",
    out: Path = Path("figures"),
    modules: Names = None,
) -> None:
    """Draw accuracy against the size of test images, with the strength of attention below it.

    The strength is |A Z A| of SOFT and SOFT++, see `diagnose`, in units of that at the training
    size: mean and range over the layers. Prints the numbers too. The default takes 2 minutes.

    Args:
        ckpts: Runs' checkpoints, such as [a/last.ckpt,b/last.ckpt]; the embedded models with
            SOFT++, SOFT and softmax if not given.
        sizes: Sides of images; from half of to four times that of training if not given.
        root: Folder with a folder of images for each class; the held-out digits if not given.
        split: Its part that is tested with.
        out: Folder for resolution.png, resolution.svg and resolution.csv.
        modules: Python modules to import first, which register attentions of your own.
    """
    with needs("train", "a figure"):
        from .figures.resolution import run

    import_modules(modules)
    run(ckpts, sizes, root, split, out)


def figures_memory(results: Path = Path("results"), out: Path = Path("figures")) -> None:
    """Draw memory against the number of tokens, and accuracy against parameters.

    Args:
        results: Folder with what `bench memory` and `models` have written.
        out: Folder for memory.png, memory.svg and memory.csv.
    """
    with needs("plots", "a figure"):
        from .figures.cost import run_memory

    run_memory(results, out)


def figures_throughput(results: Path = Path("results"), out: Path = Path("figures")) -> None:
    """Draw time against the number of tokens, and accuracy against images a second.

    Args:
        results: Folder with what `bench attention --preset paper` and `bench models` have written.
        out: Folder for throughput.png, throughput.svg and throughput.csv.
    """
    with needs("plots", "a figure"):
        from .figures.cost import run_throughput

    run_throughput(results, out)


def reproduce() -> None:
    """Test claims of the paper on CIFAR-10, in runs of five minutes on one core each."""


def explore(
    ckpts: list[Path] | None = None,
    host: str = "127.0.0.1",
    port: int = 7860,
    modules: Names = None,
) -> None:
    """Serve a page for the browser that shows what every patch of an image attends to.

    Two models side by side, every layer and head, at several resolutions; the bottleneck, the
    prediction, the convergence of the inverse. Prints the page's address; Ctrl-C ends it.
    Everything stays on this machine: nothing is downloaded or sent.

    Args:
        ckpts: Runs' checkpoints to choose from, such as [a/last.ckpt,b/last.ckpt], beside the
            embedded ones.
        host: Address to listen on; others than 127.0.0.1 let other machines in.
        port: Port to listen on; 0 for any that is free.
        modules: Python modules to import first, which register attentions of your own.
    """
    with needs("explore", "the explorer"):
        from .explore.page import run

    import_modules(modules)
    run(ckpts, host, port)


def _check_machine(threads: int | None, device: str = "cpu") -> None:
    import torch

    if threads is not None and threads < 1:
        raise UserError(f"--threads must be at least 1, got {threads}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was given, but torch finds no GPU; use --device cpu")


COMMANDS: dict[str, Any] = {
    "fit": fit,
    "validate": validate,
    "test": test,
    "predict": predict,
    "runs": runs,
    "models": models,
    "build": build,
    "doctor": doctor,
    "convert": convert,
    "export": export,
    "reproduce": reproduce,
    "explore": explore,
    "figures": {
        "_help": "Draw the paper's figures from any model and images.",
        "newton": figures_newton,
        "spectrum": figures_spectrum,
        "heatmap": figures_heatmap,
        "resolution": figures_resolution,
        "memory": figures_memory,
        "throughput": figures_throughput,
    },
    "bench": {
        "_help": "Measure speed and memory.",
        "attention": bench_attention,
        "models": bench_models,
        "detection": bench_detection,
        "segmentation": bench_segmentation,
        "speed": bench_speed,
        "memory": bench_memory,
        "sequences": bench_sequences,
        "lra": bench_lra,
        "training": bench_training,
    },
}


def _train(arguments: list[str]) -> None:
    with needs("train"):
        from .training.command import run
    run(arguments[0], arguments[1:])


def _predict(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="softmaxfree predict", description=predict.__doc__)
    # Without a type: what is read as one must be in UTF-8, and names of files need not be.
    parser.add_argument("images", nargs="+", help="Files of images.")
    parser.add_argument("--ckpt", type=Path, required=True, help="A run's last.ckpt or best.ckpt.")
    parser.add_argument("--top", type=int | None, help="Classes to show for each image; 5.")
    parser.add_argument(
        "--threshold", type=float | None, help="Score from which an object is shown; 0.5."
    )
    parser.add_argument(
        "--size", type=int | None, help="Side to resize to; as in training if not given."
    )
    parser.add_argument(
        "--out", type=Path | None, help="Folder for pictures of the objects; predictions."
    )
    parser.add_argument("--json", type=Path | None, help="File to write what was found to.")
    parser.add_argument("--modules", type=Names, help=MODULES)
    given = parser.parse_args(arguments[1:])
    with needs("train"):
        from .tasks.predict import run
    import_modules(given.modules)
    images = [Path(name) for name in given.images]
    run(images, given.ckpt, given.top, given.size, given.json, given.threshold, given.out)


def _runs(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="softmaxfree runs", description=runs.__doc__)
    parser.add_argument(
        "folders", nargs="+", type=Path, help="Folders of runs, as fit writes them."
    )
    parser.add_argument(
        "--out",
        type=Path | None,
        help="Where to write the table, without a suffix: as JSON, CSV and Markdown.",
    )
    given = parser.parse_args(arguments[1:])
    with needs("train"):
        from .bench.runs import run
    run(given.folders, given.out)


def _reproduce(arguments: list[str]) -> None:
    with needs("train"):
        from .reproduce.command import TITLES, run
        from .reproduce.page import write_page
    shown = "; ".join(f"{name}: {title.lower()}" for name, title in TITLES.items())
    parser = ArgumentParser(
        prog="softmaxfree reproduce",
        description=f"{reproduce.__doc__} It resumes where it was stopped, shares runs between "
        "experiments, and writes tables, pictures and verdicts with the smallest difference that "
        f"the runs could have shown. Experiments: {shown}.",
    )
    parser.add_argument("names", nargs="*", help="Experiments.")
    parser.add_argument("--all", action="store_true", help="All of them: 9 hours of one core.")
    parser.add_argument("--workers", type=int, default=1, help="Runs at a time; 1.")
    parser.add_argument("--threads", type=int, default=1, help="Threads of each; 1.")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/reproduction"), help="Folder of the runs."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results/reproduction"), help="Folder for the results."
    )
    parser.add_argument(
        "--page", type=Path | None, help="File to write all results in --out to, as Markdown."
    )
    given = parser.parse_args(arguments[1:])
    if unknown := [name for name in given.names if name not in TITLES]:
        raise UserError(f"there is no experiment {unknown[0]!r}; choose among {', '.join(TITLES)}")
    if (given.all and given.names) or not (given.all or given.names or given.page):
        raise UserError("name experiments, or give --all; --help lists them")
    _check_machine(given.threads)
    if given.workers < 1:
        raise UserError(f"--workers must be at least 1, got {given.workers}")
    names = [*TITLES] if given.all else given.names
    run(names, given.workers, given.threads, given.runs, given.out)
    if given.page:
        write_page(given.out, given.page)


PARSERS = {
    "reproduce": _reproduce,
    "fit": _train,
    "validate": _train,
    "test": _train,
    "predict": _predict,
    "runs": _runs,
}
"""Commands that read their arguments themselves."""


def main(arguments: list[str] | None = None) -> None:
    """Runs a command. A mistake of the user's is one line, a bug keeps its traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be in UTF-8
    traceback = "--traceback" in arguments
    arguments = [word for word in arguments if word != "--traceback"]
    try:
        try:
            _run(arguments)
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
        if not _reader_has_left():
            raise
        raise SystemExit(128 + signal.SIGPIPE) from None


def _run(arguments: list[str]) -> None:
    _check_encoding(arguments)
    if arguments and arguments[0] in PARSERS:
        PARSERS[arguments[0]](arguments)
        return
    auto_cli(
        COMMANDS,
        args=arguments or ["--help"],
        prog="softmaxfree",
        description="Softmax-free linear transformers: SOFT and SOFT++. "
        "Add --traceback to any command to see where an error comes from.",
    )


def _check_encoding(arguments: list[str]) -> None:
    """Refuses words that are not UTF-8, which values of options must be; images to predict not."""
    for before, word in zip(["", *arguments], arguments):
        image = arguments[0] == "predict" and not before.startswith("--") and word[:2] != "--"
        if not image and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UserError(
                f"{word} is not in UTF-8, which the arguments of this command must be: rename the "
                "file, or make a link to it with another name"
            )


def _reader_has_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as in `... | head`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return True
    return False


if __name__ == "__main__":
    main()
