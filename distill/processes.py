"""The processes that `accelerate launch` or `torchrun` started for one command; without them there is one."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from distill.errors import RunError

Item = TypeVar("Item")

# A process that is done early waits for the others' batches and shards, which may take hours; one that dies is seen
# by the launcher, which ends the rest.
PATIENCE = datetime.timedelta(days=1)


def _state() -> Any:
    """accelerate's state, None in a process that was not launched with others."""
    if "WORLD_SIZE" not in os.environ:
        return None
    import torch
    from accelerate import PartialState

    if PartialState._shared_state:  # somebody joined before; the first one decides how
        return PartialState()
    # Without accelerators accelerate joins the processes only when it is told that the CPU is meant.
    wanted = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "t", "on")
    cpu = wanted or not torch.accelerator.is_available()
    # accelerate hands the timeout on to init_process_group, which an unlaunched single CPU process does not call.
    return PartialState(cpu=cpu, timeout=PATIENCE)


def process_index() -> int:
    """This process's number, from 0, over all nodes."""
    state = _state()
    return 0 if state is None else int(state.process_index)


def process_count() -> int:
    """How many processes work together."""
    state = _state()
    return 1 if state is None else int(state.num_processes)


def is_main() -> bool:
    """Whether this is the process that writes what is written once."""
    return process_index() == 0


def barrier() -> None:
    """Wait until every process is here."""
    state = _state()
    if state is not None:
        state.wait_for_everyone()


def leave() -> None:
    """End the command where every process has done its work: part from the others and exit with 0; alone, do nothing.

    The threads that talked to the others may abort a process that takes its interpreter down (seen under load, with
    gloo), and the launcher then calls a finished job a failure: so it is not taken down.
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
    """The main process's value (anything that pickles), in every process; each must call it."""
    if process_count() == 1:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]
