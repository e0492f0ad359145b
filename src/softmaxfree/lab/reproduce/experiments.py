"""The paper's claims, and the contestants whose runs can show them."""

from typing import NamedTuple

from .. import paper
from .contestants import PAPER, Budget


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
    budget: Budget = PAPER

    @property
    def contestants(self) -> list[str]:
        return list(dict.fromkeys(name for claim in self.claims for name in claim[:2]))


def _over(one: float, other: float) -> str:
    return f"{one} over {other}"


def _at_side(side: int) -> str:
    softpp, soft = (paper.RESOLUTION[name][side] for name in ("softpp", "soft"))
    return f"{_over(softpp, soft)} at {side / 224:.1f}x"


def _with_landmarks(m: int) -> str:
    best, other = (paper.LANDMARKS[number]["top1"] for number in (49, m))
    return f"{best} at 49 over {other} at {m}"


def _linearisation(suffix: str = "") -> tuple[Claim, ...]:
    top1 = {name: row["top1"] for name, row in paper.LINEARISATION.items()}
    return tuple(
        Claim(ours + suffix, other + suffix, _over(top1[ours], top1[other]))
        for ours in ("softpp", "soft")
        for other in ("softmax", "linformer", "performer", "nystromformer")
    )


_TOP1 = {name: row["top1"] for name, row in paper.SAMPLERS.items()}

PAPERS: dict[str, Experiment] = {
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
            Claim(f"softpp{suffix}", f"soft{suffix}", _at_side(side), f"accuracy@{size}")
            for size, side in ((48, 384), (64, 512))
            for suffix in ("", ", 16 landmarks")
        ),
    ),
    "tied": Experiment(
        "Queries and keys of one projection",
        (
            *(Claim(name, f"{name}, tied", _over(*top1)) for name, top1 in paper.TIED.items()),
            Claim("softmax", "softmax, tied", "no number"),
        ),
    ),
    "landmarks": Experiment(
        "The number of landmarks",
        tuple(
            Claim("softpp, 16 landmarks", f"softpp, {m} landmarks", _with_landmarks(papers))
            for m, papers in ((4, 36), (64, 81))
        ),
    ),
    "samplers": Experiment(
        "Where landmarks come from",
        tuple(
            Claim("softpp", f"softpp, {other}", _over(_TOP1["conv"], _TOP1[sampler]))
            for sampler, other in zip(
                ("avg", "random", "biased"), ("averages", "random tokens", "first tokens")
            )
        ),
    ),
    "architecture": Experiment(
        "The pyramid and its parts",
        (
            Claim("softpp", "softpp, no pyramid", _over(*paper.ARCHITECTURE["pyramid"])),
            Claim(
                "softpp, no pyramid",
                "ViT",
                _over(paper.ARCHITECTURE["pyramid"][1], paper.DEIT_SMALL),
            ),
            Claim("softpp", "softpp, no overlap", _over(*paper.ARCHITECTURE["overlap"])),
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
        "Beyond the paper, at equal cost: one change alone",
        tuple(
            Claim(changed, "softpp", "not in it")
            for changed in (
                "softpp, pre-norm",
                "softpp, position by convolution",
                "softpp, gated",
                "softpp, value kernels by channel",
                "softpp, more landmarks",
                "softpp, plain landmarks",
            )
        ),
    ),
}
"""By the names on the command line."""
