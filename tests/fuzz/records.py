"""What the cases of the fuzzer came to, for `report.py`: a line of JSON each.

Nothing is written unless SOFTMAXFREE_FUZZ_RECORDS names a file.
"""

import json
import os
from typing import Any


def record(**row: Any) -> None:
    path = os.environ.get("SOFTMAXFREE_FUZZ_RECORDS")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
