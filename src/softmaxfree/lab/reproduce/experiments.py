"""The paper's claims, and the contestants whose runs can show them."""

from typing import NamedTuple

from ..paper import LINEARISATION


class Claim(NamedTuple):
    """One contestant scores higher than another."""

    higher: str
    lower: str
    paper: str
    """The paper's numbers, or its words."""
    score: str = "accuracy@32"
    """What is compared; the number is the side of the test images in pixels."""


class Experiment(NamedTuple):
    """Claims that one table answers."""

    title: str
    claims: tuple[Claim, ...]

    @property
    def contestants(self) -> list[str]:
        return list(dict.fromkeys(name for claim in self.claims for name in claim[:2]))


def _linearisation(suffix: str = "") -> tuple[Claim, ...]:
    def top1(name: str) -> str:
        return f"{LINEARISATION[name]['top1']}"

    return tuple(
        Claim(ours + suffix, other + suffix, f"{top1(ours)} over {top1(other)}")
        for ours in ("softpp", "soft")
        for other in ("softmax", "linformer", "performer", "nystromformer")
    )


EXPERIMENTS: dict[str, Experiment] = {
    "linearisation": Experiment(
        "Linear attentions in one architecture, with the value convolution", _linearisation()
    ),
    "linearisation-plain": Experiment(
        "Linear attentions in one architecture, without the value convolution",
        _linearisation(", no value convolution"),
    ),
    "value-convolution": Experiment(
        "The convolution of the values",
        tuple(
            Claim(name, f"{name}, no value convolution", "no number; the release has it")
            for name in ("softpp", "soft", "softmax")
        ),
    ),
    "gaussian": Experiment(
        "Exact Gaussian attention",
        (
            Claim(
                "gaussian, normalised",
                "gaussian, not normalised",
                "exact attention is hard to train, for want of normalisation",
            ),
            Claim("softpp", "gaussian, not normalised", "approximate better than exact"),
            Claim("softpp", "gaussian, normalised", "approximate better than exact"),
        ),
    ),
    "resolution": Experiment(
        "Test images larger than in training",
        tuple(
            Claim(f"softpp{suffix}", f"soft{suffix}", paper, f"accuracy@{size}")
            for size, paper in ((48, "82.6 over 33.7 at 1.7x"), (64, "80.2 over 0.14 at 2.3x"))
            for suffix in ("", ", 16 landmarks")
        ),
    ),
    "tied": Experiment(
        "Queries and keys of one projection",
        (
            Claim("ViT", "ViT, tied", "80.8 over 80.5"),
            Claim("Swin", "Swin, tied", "81.3 over 80.9"),
            Claim("softmax", "softmax, tied", "no number"),
        ),
    ),
    "landmarks": Experiment(
        "The number of landmarks",
        (
            Claim("softpp, 16 landmarks", "softpp, 4 landmarks", "80.9 at 49 over 80.5 at 36"),
            Claim("softpp, 16 landmarks", "softpp, 64 landmarks", "80.9 at 49 over 80.4 at 81"),
        ),
    ),
    "samplers": Experiment(
        "Where landmarks come from",
        (
            Claim("softpp", "softpp, averages", "80.9 over 80.8"),
            Claim("softpp", "softpp, random tokens", "80.9 over 80.8"),
            Claim("softpp", "softpp, first tokens", "80.9 over 79.9"),
        ),
    ),
    "architecture": Experiment(
        "The pyramid and its parts",
        (
            Claim("softpp", "softpp, no pyramid", "82.4 over 80.1"),
            Claim("softpp, no pyramid", "ViT", "80.1 over 79.8"),
            Claim("softpp", "softpp, no overlap", "80.9 over 78.4"),
            Claim("softpp", "softpp, softmax in stage 4", "no number; the release has softmax"),
            Claim("softpp", "softpp, plain landmarks", "no number; the release has both"),
        ),
    ),
    "inverse": Experiment(
        "How the landmark matrix is inverted in training",
        (
            Claim("softpp", "softpp, newton, 20 steps", "no number; ours over the paper's"),
            Claim("softpp", "softpp, backtrack, 20 steps", "no number; ours over the release's"),
            Claim("softpp, newton, 20 steps", "softpp, newton, 5 steps", "20 steps are enough"),
        ),
    ),
    "beyond": Experiment(
        "Beyond the paper, at equal cost: one change alone, then all together",
        tuple(
            Claim(changed, "softpp", "not in it")
            for changed in (
                "softpp, pre-norm",
                "softpp, position by convolution",
                "softpp, gated",
                "softpp, value kernels by channel",
                "softpp, more landmarks",
                "softpp, plain landmarks",
                "softx",
                "softx, what gained alone",
            )
        ),
    ),
}
"""By the names on the command line."""
