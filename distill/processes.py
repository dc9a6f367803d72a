"""The processes that `accelerate launch` or `torchrun` started for one command; without them there is one."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from distill.errors import RunError

Item = TypeVar("Item")

# A process that finishes early waits for the others' batches and shards, which may take hours. When one dies, the
# launcher ends the others.
PATIENCE = datetime.timedelta(days=1)

# With which `accelerate launch` asks for FSDP. It is kept under a name of our own, because accelerate would shard on
# GPUs alone, and transformers would load no weights in all processes but the first.
ASKED, KEPT = "ACCELERATE_USE_FSDP", "DISTILL_USE_FSDP"
_help: list[Callable[[], None]] = []


def _state() -> Any:
    """accelerate's state, None in a process that was not launched with others."""
    if "WORLD_SIZE" not in os.environ:
        return None
    if ASKED in os.environ:
        os.environ[KEPT] = os.environ.pop(ASKED)
    import torch
    from accelerate import PartialState

    if PartialState._shared_state:  # the state exists already; its first use decided how processes join
        return PartialState()
    # Without accelerators accelerate joins the processes only with cpu=True.
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "t", "on")
    cpu = on_cpu or not torch.accelerator.is_available()
    # accelerate passes the timeout to init_process_group, which a single CPU process without a launcher never calls.
    state = PartialState(cpu=cpu, timeout=PATIENCE)
    if state.num_processes < int(os.environ["WORLD_SIZE"]):
        raise RunError(
            f"accelerate does not join processes on {torch.accelerator.current_accelerator()}, which it does not know",
            "start one process, or let them work on the processor (accelerate launch --cpu)",
        )
    return state


def process_index() -> int:
    """This process's number, from 0, over all nodes."""
    state = _state()
    return 0 if state is None else int(state.process_index)


def process_count() -> int:
    """How many processes work together."""
    state = _state()
    return 1 if state is None else int(state.num_processes)


def shards() -> bool:
    """Whether the processes were launched for FSDP: each holds a part of the models that all work with."""
    return process_count() > 1 and os.environ.get(KEPT, "").lower() == "true"


def is_main() -> bool:
    """Whether this is the process that writes the files and messages of all."""
    return process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process; each process must call this."""
    state = _state()
    if state is None or process_count() == 1:
        return flag
    import torch

    flags = torch.tensor(int(flag), device=state.device)
    torch.distributed.all_reduce(flags)
    return bool(flags)


def help_with(step: Callable[[], None] | None) -> None:
    """From now on a process that waits takes this step with each that others announce by `any_process(True)`: its part
    of a forward pass over a model that all hold in parts. None: no longer."""
    _help[:] = [] if step is None else [step]


def meet() -> None:
    """Wait until no process works on a model in parts any more; without one, return at once."""
    while _help and any_process(False):
        _help[0]()


def barrier() -> None:
    """Wait until every process has called this."""
    state = _state()
    if state is not None:
        meet()
        state.wait_for_everyone()


def leave() -> None:
    """End a command of several processes after the last one finished its work, with exit status 0; alone, do nothing.

    The process exits without shutting its interpreter down: in a shutdown, communication threads may abort the process
    (seen under load, with gloo), and the launcher would report a finished job as failed.
    """
    if "WORLD_SIZE" not in os.environ:
        return
    if "torch" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.barrier()
            distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def share_of(work: Sequence[Item], share: tuple[int, int], what: str, setting: str) -> list[Item]:
    """Every `count`-th item from number `index` on, of `share` = (index, count): the parts cover the work once.

    Raises RunError where there are more processes than items (`what`, as many as `setting` makes of the work).
    """
    index, count = share
    if count > len(work):
        raise RunError(
            f"{count} processes were started, and there are {len(work)} {what}: some would have nothing to do",
            f"start at most {len(work)} processes, or lower {setting}",
        )
    return list(work[index::count])


def agree(value: Any = None) -> Any:
    """The main process's value (anything that pickles), in every process; each process must call this."""
    if process_count() == 1:
        return value
    meet()
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]
