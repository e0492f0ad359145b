"""`softmaxfree explore`: serve the page."""

from pathlib import Path

from ...imports import Names, import_modules, needs


def explore(
    checkpoints: list[Path] | None = None,
    host: str = "127.0.0.1",
    port: int = 7860,
    modules: Names = None,
) -> None:
    """Serve a page for the browser that shows what every patch of an image attends to.

    Two models side by side, every layer and head, at several resolutions; the landmarks, the
    prediction, the convergence of the inverse. Prints the page's address; Ctrl-C ends it.
    Everything stays on this machine: nothing is downloaded or sent.

    Args:
        checkpoints: Checkpoints of runs to choose from, such as [a/last.ckpt,b/last.ckpt], beside
            the embedded models.
        host: Address to listen on; others than 127.0.0.1 let other machines in.
        port: Port to listen on; 0 for any that is free.
        modules: Python modules to import first, which register attentions of your own.
    """
    with needs("explore", "the explorer"):
        from .page import run

    import_modules(modules)
    run(checkpoints, host, port)
