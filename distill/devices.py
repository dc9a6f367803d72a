"""The devices that torch computes on, every accelerator that it has (`torch.accelerator`) and the processor; and the
processes that share the work.

What differs between kinds of devices stands here and nowhere else. torch is imported with the first use.
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
AHEAD = 3  # numbers that `read_ahead` reads before they are asked for
Item = TypeVar("Item")


# ── Which there are ──


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is torch's accelerator where there is one, else the CPU.

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
    """All accelerators of this machine, which are of one kind; none before something has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or (kind := torch.accelerator.current_accelerator(check_available=True)) is None:
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def device_name(device: torch.device) -> str:
    """The accelerator's name as its driver gives it, such as `NVIDIA H100 80GB HBM3`; that of its kind without one."""
    import torch

    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device.index or 0)) if name is not None else device.type.upper()


def allow_short_products(device: torch.device) -> None:
    """Let products in float32 take TF32 (10 bits of a mantissa) on devices of CUDA and ROCm that have it."""
    import torch

    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True


def make_current(device: torch.device) -> None:
    """Let libraries that know no numbers of devices use this one."""
    import torch

    if device.type != CPU and device.index is not None:
        torch.accelerator.set_device_index(device)


def torch_build() -> str | None:
    """The version of ROCm, CUDA or oneAPI that torch was built for; None for the CPU (and Apple's devices)."""
    import torch

    return torch.version.hip or torch.version.cuda or torch.version.xpu


def llama_option() -> str | None:
    """The option with which llama.cpp is compiled for this machine's accelerators; None without one that it knows."""
    torch = sys.modules.get("torch")
    kinds = {"cuda": "-DGGML_HIP=on" if torch and torch.version.hip else "-DGGML_CUDA=on", "xpu": "-DGGML_SYCL=on"}
    return next((kinds.get(device.type) for device in accelerators()), None)


# ── What they can ──


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether an accelerator has instructions for bfloat16; False where its module of torch does not say."""
    import torch

    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if supported is None:
        return False
    try:
        return bool(supported(including_emulation=False))
    except TypeError:  # of makers whose devices emulate nothing
        return bool(supported())


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in fp64; MPS and some GPUs of Intel do not."""
    import torch

    if device.type == CPU:
        return True
    try:
        return torch.float64 in torch.accelerator.get_device_capability(device)["supported_dtypes"]
    except (RuntimeError, ValueError):  # its maker lists no types, or it is no accelerator (`meta`)
        return True


def float64_device(device: torch.device) -> torch.device:
    """Where the fp64 numbers of a device are: there, or on the CPU where it has none."""
    import torch

    return device if has_float64(device) else torch.device(CPU)


def as_float64(values: Tensor) -> Tensor:
    """The values in fp64, see `float64_device`."""
    return values.to(float64_device(values.device)).double()


@functools.cache
def has_pinned_memory(kind: str) -> bool:
    """Whether devices of a kind take memory of the host without a wait if it is pinned."""
    import torch

    if kind in (CPU, "mps"):  # Apple's devices share the host's memory
        return False
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def read_ahead(read: Callable[[int], Item], end: int, device: torch.device) -> Callable[[int], Item]:
    """`read` for numbers below `end`. One thread reads the AHEAD numbers that follow the one that is asked for, so that
    a caller that counts upward finds them ready. Errors of `read` are raised when its number is asked for."""
    # The thread pins memory, for which some makers' libraries need the device of the process.
    pool = ThreadPoolExecutor(1, "distill-reader", make_current, (device,))
    waiting: dict[int, Future[Item]] = {}

    def get(number: int) -> Item:
        for following in range(number, min(number + 1 + AHEAD, end)):
            if following not in waiting:
                waiting[following] = pool.submit(read, following)
        return waiting.pop(number).result()

    return get


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; a copy from pinned memory does not wait."""
    return tensor.to(device, non_blocking=tensor.is_pinned())


def records_graphs(device: torch.device) -> bool:
    """Whether torch.compile records graphs of launches (CUDA, ROCm); the next replay of one overwrites its output."""
    return device.type == "cuda"


def begin_replay(device: torch.device) -> None:
    """Tell torch that the outputs of graphs that were replayed on this device may be overwritten."""
    import torch

    if records_graphs(device):
        torch.compiler.cudagraph_mark_step_begin()


# ── Memory and time ──

# How allocators word it where the type of the exception does not tell.
MEMORY_FAULTS = ("out of memory", "not enough memory", "can't allocate memory", "Unable to allocate", "ALLOC_FAILED")


class OutOfMemory(RunError):
    """Memory ran out; the message has advice."""


def memory_ran_out(error: BaseException | None) -> bool:
    """Whether an error says that the host or a device has no memory left."""
    torch = sys.modules.get("torch")
    kinds = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or any(word in str(error) for word in MEMORY_FAULTS)


@contextlib.contextmanager
def memory_explained(advice: Callable[..., tuple[str, str]], *subject: Any) -> Iterator[None]:
    """Turn errors for exhausted memory into an OutOfMemory with the pair that `advice(*subject)` returns.

    The pair is (during which work, what to do now). `advice` is called only then; of nested ones, the innermost counts.
    Loaders report every error as a damaged file, so the causes of our own errors are examined too.
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
    """Peak bytes allocated on an accelerator, else the process's peak resident size."""
    if device.type != CPU:
        import torch

        return int(torch.accelerator.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of one accelerator; None if its backend does not say."""
    import torch

    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except (RuntimeError, ValueError):  # no such count in this backend, or a device that is not the current accelerator
        return None


def free_memory() -> dict[int | str, int] | None:
    """Free bytes of each accelerator by its number, and of the host (`cpu`); None where the devices do not say."""
    import psutil

    free: dict[int | str, int] = {}
    for device in accelerators():
        found = free_bytes(device)
        if found is None:
            return None
        free[device.index] = found
    return free | {CPU: psutil.virtual_memory().available}  # last: layers are placed in this order


def take_peaks() -> int:
    """Bytes that all accelerators together reserved at their peaks since the last call."""
    total = 0
    for device in accelerators():
        torch: Any = sys.modules["torch"]
        total += int(torch.accelerator.max_memory_reserved(device))
        torch.accelerator.reset_peak_memory_stats(device)
    return total


def synchronise(device: torch.device) -> None:
    """Wait until a device has done everything that it was asked to do, for a clock to be read."""
    import torch

    if device.type != CPU:
        with contextlib.suppress(ValueError):  # `meta` is no accelerator
            torch.accelerator.synchronize(device)


# ── The processes that `accelerate launch` or `torchrun` started for one command; without them there is one ──

# A process that finishes early waits for the others' batches and shards, which may take hours. When one dies, the
# launcher ends the others.
PATIENCE = datetime.timedelta(days=1)

# What `accelerate launch` sets to spread the weights of a model over processes. Training copies them to each process.
SPREADING = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}


def _state() -> Any:
    """accelerate's state, None in a process that was not launched with others."""
    if "WORLD_SIZE" not in os.environ:
        return None
    for name, kind in SPREADING.items():
        if os.environ.get(name, "").lower() == "true":
            hint = "launch with recipes/accelerate/ddp.yaml, or with torchrun: each process then holds the whole draft"
            raise RunError(f"the processes were launched for {kind}, which spreads weights: distill does not", hint)
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


def barrier() -> None:
    """Wait until every process has called this."""
    state = _state()
    if state is not None:
        state.wait_for_everyone()


def end_process() -> None:
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


def process_share(work: Sequence[Item], part: tuple[int, int], what: str, setting: str) -> list[Item]:
    """Every `count`-th item from number `index` on, of `part` = (index, count): the parts cover the work once.

    Raises RunError where there are more processes than items (`what`, as many as `setting` makes of the work).
    """
    index, count = part
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
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]
