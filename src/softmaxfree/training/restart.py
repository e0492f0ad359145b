"""Joins the processes that torchrun has restarted."""

import os

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]


def restarts() -> int:
    """How often torchrun has started the processes of this run again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_after_restart() -> None:
    """Joins the processes of a restart in a process group of their own.

    torchrun's store outlives its processes and still has the addresses of the lost ones, to which
    the new ones would try to connect. Lightning uses a process group that exists already.
    """
    agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not restarts() or not agents_store or dist.is_initialized():
        return
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), processes, is_master=False
    )
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        backend,
        store=PrefixStore(f"restart_{restarts()}", store),
        rank=rank,
        world_size=processes,
    )
