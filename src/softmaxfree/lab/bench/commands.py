"""`softmaxfree bench ...`: measure speed and memory."""

from pathlib import Path
from typing import Literal

from ...errors import UserError
from ...imports import Names, listed, needs
from ..measure import check_machine


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
        device: Device to compute on.
        dtype: Type of tokens and weights.
        against: A .json file of an earlier run to compare with.
    """
    from .attention import run
    from .contestants import Setting

    check_machine(threads, device)
    run(preset, threads, out, memory, contestants, listed(modules), Setting(device, dtype), against)


def bench_speed(out: Path = Path("results")) -> None:
    """Measure what is promised about speed, and say whether it is kept (6 minutes).

    The attention against its matrix products, backbones against Swin-T, ConvNeXt-T and PVTv2,
    one thread and two, memory of training, large images, the start. Prints a table with targets
    and verdicts and writes it as JSON, CSV and Markdown.

    Args:
        out: Folder for the results.
    """
    from .speed import run

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
        device: Device to compute on.
        against: A .json file of an earlier run to compare with.
    """
    from .models import run

    check_machine(threads, device)
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
    from .detection import run

    check_machine(threads)
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
    from .segmentation import run

    check_machine(threads)
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
    from .sequences import run

    check_machine(threads)
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
        tasks: Such as [text,image]; the paper's four if not given, and three with
            --short.
        attentions: Names of attentions, such as [softpp,softmax]; soft, softpp and the paper's
            peers if not given.
        seeds: One run for each; [0] if not given.
        short: Runs of minutes on a CPU in place of the benchmark's hours on a GPU, of listops,
            text and image: fewer steps, shorter sequences, a higher learning rate.
        workers: Runs at a time.
        threads: Threads to compute with, in each run.
        runs: Folder of the runs.
        out: Folder for the results.
        modules: Python modules to import first, which register attentions of your own.
        fit: Further arguments of `softmaxfree fit` for all runs, such as
            ["--model.options.num_landmarks=128"].
    """
    with needs("train"):
        from .lra import run

    check_machine(threads)
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
        device: Device to compute on.
        dtype: Type of tokens and weights.
        against: A .json file of an earlier run to compare with.
    """
    from .contestants import Setting
    from .memory import run

    check_machine(threads, device)
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
    check_machine(threads)
    if preset == "steps":
        from .steps import run as run_steps

        run_steps(threads, out, listed(modules), against)
        return
    if against is not None:
        raise UserError("--against compares measured steps; leave it out of a calculation")
    from .training import run as calculate

    calculate(out)
