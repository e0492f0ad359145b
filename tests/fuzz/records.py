"""What the cases of the fuzzer came to, for `report.py`: a line of JSON each.

Nothing is written unless SOFTMAXFREE_FUZZ_RECORDS names a file.
"""

import json
import os
from collections.abc import Callable
from functools import wraps
from typing import Any


def record(**row: Any) -> None:
    path = os.environ.get("SOFTMAXFREE_FUZZ_RECORDS")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def recorded(kind: str) -> Callable[[Callable[..., bool]], Callable[..., None]]:
    """Records every case of a test, which returns whether the case was refused."""

    def decorate(test: Callable[..., bool]) -> Callable[..., None]:
        @wraps(test)
        def counted(*arguments: Any, **options: Any) -> None:
            record(kind=kind, dtype="", refused=test(*arguments, **options))

        return counted

    return decorate
