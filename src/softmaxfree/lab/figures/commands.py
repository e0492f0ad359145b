"""`softmaxfree figures ...`: draw the paper's figures from any model and images."""

from pathlib import Path

from ...imports import Names, import_modules, needs


def figures_newton(
    checkpoint: Path | None = None,
    images: list[Path] | None = None,
    size: int | None = None,
    out: Path = Path("figures"),
    modules: Names = None,
) -> None:
    """Draw how fast each way of inverting comes to the inverse, stage by stage.

    |A X A - A| / |A| of the landmark matrices A of a model against the number of steps, mean and
    range over images, layers and heads, in float64; says how many steps reach 1e-3.

    Args:
        checkpoint: Checkpoint of a run that trained a classifier with SOFT or SOFT++; the embedded
            SOFT++ if not given.
        images: Image files, such as [cat.jpg,dog.jpg]; 20 handwritten digits if not given.
        size: Side to resize images to; as in training if not given.
        out: Folder for newton.png, newton.svg and newton.csv.
        modules: Python modules to import first, which register attentions of your own.
    """
    with needs("train", "a figure"):
        from .newton import run

    import_modules(modules)
    run(checkpoint, images, size, out)


def figures_spectrum(
    checkpoint: Path | None = None,
    images: list[Path] | None = None,
    layer: int | str = 0,
    out: Path = Path("figures"),
    modules: Names = None,
) -> None:
    """Draw the eigenvalues of a landmark matrix, and how its inverse grows with it.

    Spectral norms of A^+ and of D^-1/2 A^+ D^-1/2 against the number of landmarks m, from
    49 to 1,024, with the fitted exponents beside the paper's m^2 and m.

    Args:
        checkpoint: Checkpoint of a run that trained a classifier with SOFT or SOFT++; the embedded
            SOFT++ if not given.
        images: Image files, such as [cat.jpg,dog.jpg]; 4 handwritten digits if not given.
        layer: A number in the order in which layers run, or a name.
        out: Folder for spectrum.png, spectrum.svg and spectrum.csv.
        modules: Python modules to import first, which register attentions of your own.
    """
    with needs("train", "a figure"):
        from .spectrum import run

    import_modules(modules)
    run(checkpoint, images, layer, out)


def figures_heatmap(
    checkpoints: list[Path] | None = None,
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
        checkpoints: Checkpoints of runs, such as [a/last.ckpt,b/last.ckpt]; the embedded models
            with SOFT++, SOFT, softmax, Performer and Nystromformer if not given.
        images: Image files, a figure each; a handwritten digit if not given.
        place: The patch, from [0,0] at the upper left to [1,1], the height first.
        layer: A number in the order in which layers run, or a name.
        size: Side to resize images to; as in training if not given.
        out: Folder for heatmap-IMAGE.png, .svg and .csv.
        modules: Python modules to import first, which register attentions of your own.
    """
    with needs("train", "a figure"):
        from .heatmap import run

    import_modules(modules)
    run(checkpoints, images, place, layer, size, out)


def figures_resolution(
    checkpoints: list[Path] | None = None,
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
        checkpoints: Checkpoints of runs, such as [a/last.ckpt,b/last.ckpt]; the embedded models
            with SOFT++, SOFT and softmax if not given.
        sizes: Sides of images; from half of to four times that of training if not given.
        root: Folder with a folder of images for each class; the held-out digits if not given.
        split: The part of the data to test with.
        out: Folder for resolution.png, resolution.svg and resolution.csv.
        modules: Python modules to import first, which register attentions of your own.
    """
    with needs("train", "a figure"):
        from .resolution import run

    import_modules(modules)
    run(checkpoints, sizes, root, split, out)


def figures_memory(results: Path = Path("results"), out: Path = Path("figures")) -> None:
    """Draw memory against the number of tokens, and accuracy against parameters.

    Args:
        results: Folder with what `bench memory` and `models` have written.
        out: Folder for memory.png, memory.svg and memory.csv.
    """
    with needs("plots", "a figure"):
        from .cost import run_memory

    run_memory(results, out)


def figures_throughput(results: Path = Path("results"), out: Path = Path("figures")) -> None:
    """Draw time against the number of tokens, and accuracy against images a second.

    Args:
        results: Folder with what `bench attention --preset paper` and `bench models` have written.
        out: Folder for throughput.png, throughput.svg and throughput.csv.
    """
    with needs("plots", "a figure"):
        from .cost import run_throughput

    run_throughput(results, out)
