"""The folder of a run: its name, and the lock that lets one run at a time write to it."""

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from jsonargparse import Namespace

from ..checkpoint_files import holds_run
from ..errors import UserError, user_file
from ..models.weights import trained
from .restart import restarts

LOCK = ".lock"


def folder_of_run(config: Namespace) -> Path:
    """The run's folder, the same for all of its processes."""
    if config.checkpoint and config.checkpoint != "last" and not config.out:
        return Path(config.checkpoint).parent
    by_lightning = "LOCAL_RANK" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    if by_lightning and not config.out and (chosen := os.environ.get("SOFTMAXFREE_RUN")):
        return Path(chosen)  # chosen by the process that started this one
    base = Path(config.out or _name_of_run(config))
    parallel = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))) > 1
    if restarts() and holds_run(base):
        config.checkpoint = "last"
    if config.out or parallel or config.checkpoint or restarts():
        refuse_taken(base, config.checkpoint)
        folder = base
    else:
        numbered = (base.with_name(f"{base.name}-{number}") for number in range(2, 10_000))
        folder = next(path for path in (base, *numbered) if not path.exists())
    os.environ["SOFTMAXFREE_RUN"] = str(folder)
    return folder


def refuse_taken(folder: Path, checkpoint: str | None) -> None:
    """Raises UserError if a folder has a run in it, other than that of the checkpoint."""
    own = checkpoint and (
        checkpoint == "last" or Path(checkpoint).resolve().parent == folder.resolve()
    )
    if holds_run(folder) and not own:
        raise UserError(
            f"{folder} holds a run already: give --checkpoint last to go on with it, "
            "or another folder with --out"
        )


def _name_of_run(config: Namespace) -> str:
    model, data = config.model.init_args, config.data.init_args
    return f"runs/{name_of_model(model)}-{name_of_data(data)}"


def name_of_model(model: Namespace) -> str:
    """The backbone's name, or the attention's for models without a backbone."""
    return str(model.get("backbone") or model.get("attention") or "model")


def start(model: Namespace) -> str | None:
    """The weights that training starts from, as they were named; None for random ones."""
    backbone = str(model.get("backbone"))
    named = backbone if trained(backbone) else None
    fetched = "timm's weights" if (model.get("options") or {}).get("pretrained") else None
    return model.get("init_checkpoint") or named or fetched


def name_of_data(data: Namespace) -> str:
    """The data set's name, or that of its folder."""
    name = str(data.get("name") or "").strip("/").split("/")[-1]
    return name or Path(data.get("root") or "data").resolve().name


class RunLock:
    """Lets one process at a time write to a run's folder.

    The system releases the lock when the process ends, also when it is killed. Loader workers,
    which may outlive the process for a moment, do not inherit it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = path = folder / LOCK
        self.made = [place for place in (folder, *folder.parents) if not place.exists()]
        with user_file(path, "write"):
            folder.mkdir(parents=True, exist_ok=True)
            self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        found = os.fstat(self.handle)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            os.close(self.handle)
            raise UserError(f"{path} is a pipe, a device or a link, not a file: remove it")
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
        """Gives the folder back, or removes it if the run has written nothing to it."""
        if self.made and list(self.made[0].iterdir()) == [self.path]:
            self.path.unlink()
            for place in self.made:
                with suppress(OSError):  # it is not empty
                    place.rmdir()
        os.close(self.handle)


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock of a run's folder."""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    finally:
        os.close(handle)
    return False
