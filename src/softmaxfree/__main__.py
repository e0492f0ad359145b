"""`python -m softmaxfree`, which is what torchrun takes."""

from .cli import main

main()
