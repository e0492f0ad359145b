"""What may end the process is tried in another one."""

import os
import resource
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

MOST_BYTES = 2 * 2**30
"""That the process may take, beside what it begins with."""


def exit_code(call: Callable[[], object]) -> int:
    """Of a copy of this process that makes a call: 0 if it returns, negative for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and later, of threads
        process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    status = 1
    try:
        taken = Path("/proc/self/statm")
        if taken.exists():
            limit = int(taken.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MOST_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        call()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
