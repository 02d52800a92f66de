"""Runs a function on several ranks: threads of this process for most tests, gloo processes as ground truth.

In: a function of (rank, ranks). Out: its results in the order of ranks, or the exceptions it raised.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

Work = Callable[..., Any]


def on_threads(ranks: int, work: Callable[[int, int], Any]) -> list[Any]:
    """Runs `work(rank, ranks)` on threads that share a process group; raises the first exception that is not a consequence."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    store = dist.HashStore()
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            results[rank] = work(rank, ranks)
        except BaseException as error:
            errors[rank] = error
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    try:
        # A rank that draws while another traces would be taken for part of the trace: they share torch's generator.
        with mock.patch("serrate.frontend.trace.random_numbers_refused", lambda generators: nullcontext()):
            threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
                assert not thread.is_alive(), "a rank hangs"
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    for error in errors:
        if error is not None and not isinstance(error, SystemExit):
            raise error
    return results


def on_processes(ranks: int, work: Work, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Runs `work(rank, ranks, *args)`, a function of a module, on gloo processes. A rank's exception is its result, as text."""
    # A server that has imported everything, and has no threads yet, forks the ranks: importing takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["serrate.distributed", "tests.distributed.ranks"])
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        processes = [
            context.Process(target=_process, args=(rank, ranks, rendezvous, timeout, work, args, folder)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout + 60)
        stuck = [process for process in processes if process.is_alive()]
        for process in stuck:
            process.kill()
        assert not stuck, f"{len(stuck)} of {ranks} ranks hang"
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _process(rank: int, ranks: int, rendezvous: str, timeout: float, work: Work, args: tuple[Any, ...], folder: str) -> None:
    torch.set_num_threads(1)
    result: Any
    try:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
        result = work(rank, ranks, *args)
    except Exception as error:
        result = Failure(type(error).__name__, str(error), traceback.format_exc())
    torch.save(result, Path(folder) / f"{rank}.pt")


class Failure:
    """An exception of a rank."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        self.kind, self.message, self.trace = kind, message, trace

    def __repr__(self) -> str:
        return self.trace
