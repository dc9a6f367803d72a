"""The devices that torch computes on (every `torch.accelerator`, and the processor), and processes that share the work.

Everything that differs between kinds of devices is here and nowhere else. torch is imported at the first use.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from distill.errors import DistillError, RunError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CPU = "cpu"
AHEAD = 3  # `read_ahead` reads this many numbers before they are requested.
Item = TypeVar("Item")


# ── Which devices exist ──


def pick_device(name: str) -> torch.device:
    """Return the device called `name`. `auto` is torch's accelerator, or the CPU if there is none.

    Raises RunError for a device that cannot be used.
    """
    import torch

    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device(CPU)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"device `{name}` cannot be used: {str(error).splitlines()[0]}", "try device=auto") from error
    return device


def accelerators() -> list[torch.device]:
    """Return all accelerators of this machine, which are of one kind. Empty before torch is imported."""
    torch = sys.modules.get("torch")
    if torch is None or (kind := torch.accelerator.current_accelerator(check_available=True)) is None:
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def device_name(device: torch.device) -> str:
    """Return the accelerator's name from its driver, such as `NVIDIA H100 80GB HBM3`, or the name of its kind."""
    import torch

    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device.index or 0)) if name is not None else device.type.upper()


def allow_short_products(device: torch.device) -> None:
    """Let fp32 products use TF32 (10 bits of a mantissa) on CUDA and ROCm devices that have it."""
    import torch

    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True


def make_current(device: torch.device) -> None:
    """Make this the current device, for libraries that do not take device numbers."""
    import torch

    if device.type != CPU and device.index is not None:
        torch.accelerator.set_device_index(device)


def torch_build() -> str | None:
    """Return the version of ROCm, CUDA or oneAPI that torch was built for. None for the CPU and Apple's devices."""
    import torch

    return torch.version.hip or torch.version.cuda or torch.version.xpu


def llama_option() -> str | None:
    """Return the option that compiles llama.cpp for this machine's accelerators. None if it does not support them."""
    torch = sys.modules.get("torch")
    kinds = {"cuda": "-DGGML_HIP=on" if torch and torch.version.hip else "-DGGML_CUDA=on", "xpu": "-DGGML_SYCL=on"}
    return next((kinds.get(device.type) for device in accelerators()), None)


# ── What devices can do ──


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether an accelerator has instructions for bfloat16. False if its torch module does not say."""
    import torch

    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if supported is None:
        return False
    try:
        return bool(supported(including_emulation=False))
    except TypeError:  # Some makers' modules take no argument, because their devices emulate nothing.
        return bool(supported())


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in fp64. MPS and some Intel GPUs do not."""
    import torch

    if device.type == CPU:
        return True
    try:
        return torch.float64 in torch.accelerator.get_device_capability(device)["supported_dtypes"]
    except (RuntimeError, ValueError):  # The maker lists no dtypes, or the device is not an accelerator (`meta`).
        return True


def float64_device(device: torch.device) -> torch.device:
    """Return the device for the fp64 numbers of a device: itself, or the CPU if it has no fp64."""
    import torch

    return device if has_float64(device) else torch.device(CPU)


def as_float64(values: Tensor) -> Tensor:
    """Return the values in fp64, on `float64_device`."""
    return values.to(float64_device(values.device)).double()


@functools.cache
def has_pinned_memory(kind: str) -> bool:
    """Whether copies from pinned host memory to devices of this kind do not wait."""
    import torch

    if kind in (CPU, "mps"):  # Apple's devices share the host's memory.
        return False
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def read_ahead(read: Callable[[int], Item], end: int, device: torch.device) -> Callable[[int], Item]:
    """Wrap `read` for numbers below `end`, so that a thread reads the AHEAD numbers after the requested one.

    A caller that counts upward finds them ready. Errors of `read` are raised when its number is requested.
    """
    # The thread pins memory. Some makers' libraries need the current device for that.
    pool = ThreadPoolExecutor(1, "distill-reader", make_current, (device,))
    waiting: dict[int, Future[Item]] = {}

    def get(number: int) -> Item:
        for following in range(number, min(number + 1 + AHEAD, end)):
            if following not in waiting:
                waiting[following] = pool.submit(read, following)
        return waiting.pop(number).result()

    return get


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. A copy from pinned memory does not wait."""
    return tensor.to(device, non_blocking=tensor.is_pinned())


def records_graphs(device: torch.device) -> bool:
    """Whether torch.compile records graphs of launches (CUDA, ROCm). The next replay overwrites a graph's output."""
    return device.type == "cuda"


def begin_replay(device: torch.device) -> None:
    """Tell torch that it may overwrite the outputs of graphs that were replayed on this device."""
    import torch

    if records_graphs(device):
        torch.compiler.cudagraph_mark_step_begin()


# ── Memory and time ──

# Allocators use these words if the type of the exception does not show the fault.
MEMORY_FAULTS = ("out of memory", "not enough memory", "can't allocate memory", "Unable to allocate", "ALLOC_FAILED")


class OutOfMemory(RunError):
    """Memory ran out. The message has advice."""


def memory_ran_out(error: BaseException | None) -> bool:
    """Whether an error means that the host or a device has no memory left."""
    torch = sys.modules.get("torch")
    kinds = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or any(word in str(error) for word in MEMORY_FAULTS)


@contextlib.contextmanager
def memory_explained(advice: Callable[..., tuple[str, str]], *subject: Any) -> Iterator[None]:
    """Turn errors for exhausted memory into OutOfMemory, with the pair that `advice(*subject)` returns.

    The pair is (during which work, what to do now). `advice` is called only if memory ran out. If contexts are nested,
    the innermost counts. Loaders report every error as a damaged file, so causes of our own errors are examined too.
    """
    try:
        yield
    except OutOfMemory:
        raise
    except (DistillError, RuntimeError, MemoryError) as error:
        cause = error.__cause__ if isinstance(error, DistillError) else error
        if not memory_ran_out(cause):
            raise
        doing, hint = advice(*subject)
        first = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise OutOfMemory(f"memory ran out {doing}: {first}", hint) from error


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes allocated on an accelerator, or the process's peak resident size for the CPU."""
    if device.type != CPU:
        import torch

        return int(torch.accelerator.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows has no such module.
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of one accelerator. None if its backend does not say."""
    import torch

    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except (RuntimeError, ValueError):  # The backend has no such count, or the device is not the current accelerator.
        return None


def free_memory() -> dict[int | str, int] | None:
    """Return free bytes of each accelerator by its number, and of the host (`cpu`). None if the devices do not say."""
    import psutil

    free: dict[int | str, int] = {}
    for device in accelerators():
        available = free_bytes(device)
        if available is None:
            return None
        free[device.index] = available
    return free | {CPU: psutil.virtual_memory().available}  # The CPU is last, because layers are placed in this order.


def take_peaks() -> int:
    """Return the peak bytes that all accelerators together reserved since the last call."""
    total = 0
    for device in accelerators():
        torch: Any = sys.modules["torch"]
        total += int(torch.accelerator.max_memory_reserved(device))
        torch.accelerator.reset_peak_memory_stats(device)
    return total


def synchronise(device: torch.device) -> None:
    """Wait until a device has finished all its work, before a clock is read."""
    import torch

    if device.type != CPU:
        with contextlib.suppress(ValueError):  # `meta` is not an accelerator.
            torch.accelerator.synchronize(device)


# ── Processes that `accelerate launch` or `torchrun` started for one command. Without them there is one process. ──

# A process that finishes early waits for the others' batches and shards, which may take hours. If one process dies, the
# launcher ends the others.
PATIENCE = datetime.timedelta(days=1)

# `accelerate launch` sets these to spread a model's weights over processes. Training copies them to each process.
SPREADING = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}


def _state() -> Any:
    """Return accelerate's state, or None in a process that was not launched with others."""
    if "WORLD_SIZE" not in os.environ:
        return None
    for name, kind in SPREADING.items():
        if os.environ.get(name, "").lower() == "true":
            hint = "launch with recipes/accelerate/ddp.yaml, or with torchrun: each process then holds the whole draft"
            raise RunError(f"the processes were launched for {kind}, which spreads weights; distill does not", hint)
    import torch
    from accelerate import PartialState

    if PartialState._shared_state:  # The state exists. Its first use decided how the processes join.
        return PartialState()
    # Without accelerators, accelerate joins the processes only with cpu=True.
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "t", "on")
    cpu = on_cpu or not torch.accelerator.is_available()
    # accelerate passes the timeout to init_process_group. A single CPU process without a launcher never calls it.
    state = PartialState(cpu=cpu, timeout=PATIENCE)
    if state.num_processes < int(os.environ["WORLD_SIZE"]):
        raise RunError(
            f"accelerate does not know {torch.accelerator.current_accelerator()} and cannot join processes on it",
            "start one process, or let them work on the processor (accelerate launch --cpu)",
        )
    return state


def process_index() -> int:
    """Return this process's number, from 0, over all nodes."""
    state = _state()
    return 0 if state is None else int(state.process_index)


def process_count() -> int:
    """Return the number of processes that work together."""
    state = _state()
    return 1 if state is None else int(state.num_processes)


def is_main() -> bool:
    """Whether this process writes the files and messages of all."""
    return process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process. Every process must call this."""
    state = _state()
    if state is None or process_count() == 1:
        return flag
    import torch

    flags = torch.tensor(int(flag), device=state.device)
    torch.distributed.all_reduce(flags)
    return bool(flags)


def barrier() -> None:
    """Wait until every process has called this."""
    state = _state()
    if state is not None:
        state.wait_for_everyone()


def end_process() -> None:
    """End a command of several processes with exit status 0 after the last one has finished. Alone, do nothing.

    The process exits without shutting its interpreter down. During a shutdown, communication threads may abort the
    process (seen under load, with gloo), and the launcher would report a finished job as failed.
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


def process_share(work: Sequence[Item], part: tuple[int, int], what: str, setting: str) -> list[Item]:
    """Return every `count`-th item from number `index` on, for `part` = (index, count). All parts cover the work once.

    Raises RunError if there are more processes than items. `what` names the items, and `setting` decides their number.
    """
    index, count = part
    if count > len(work):
        raise RunError(
            f"{count} processes were started, but there are {len(work)} {what}: some would have nothing to do",
            f"start at most {len(work)} processes, or lower {setting}",
        )
    return list(work[index::count])


def agree(value: Any = None) -> Any:
    """Return the main process's value (anything that pickles) in every process. Every process must call this."""
    if process_count() == 1:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]
