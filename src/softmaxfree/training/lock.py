"""One run at a time in a folder."""

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from ..errors import UserError, user_file


class RunLock:
    """Held by the process that writes to a run's folder, until it ends in whatever way.

    The lock is the process's own: loader workers that outlive it for a moment do not have it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / ".lock"
        with user_file(path, "write"):
            folder.mkdir(parents=True, exist_ok=True)
            self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if not stat.S_ISREG(os.fstat(self.handle).st_mode):
            os.close(self.handle)
            raise UserError(f"{path} is a pipe or a device, not a file: remove it")
        try:
            fcntl.lockf(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self.handle, 200).decode(errors="replace")
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            os.close(self.handle)
            raise UserError(
                f"{folder} is being written to by another run ({ascii(holder)[1:-1]}): "
                "wait for its end, or give another folder with --out"
            ) from error
        os.ftruncate(self.handle, 0)
        os.write(self.handle, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def release(self) -> None:
        os.close(self.handle)
