"""The C++ kernel (kernel.cpp): compiled on first use for this processor, and kept in the cache.

The structures mirror those of kernel.cpp, and `FORMS` mirrors its switch over types. Every tensor passes `require_read`
before its address is given to the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from distill.devices import CPU
from distill.errors import DataError, DistillError
from distill.files import cache_folder, digest, write_atomically
from distill.machine import cpu_features
from distill.progress import duration, note, warn

NEEDED = {name: f"-m{name}" for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c")}
FASTER = {"avx512_bf16": "-mavx512bf16"}
SOURCE = Path(__file__).with_name("kernel.cpp")
COMPILE_SECONDS = 120  # A compiler that hangs costs a command this time once.
TILE_ROWS, GROUP_COLUMNS = 16, 32


class Form(NamedTuple):
    """The layout of a type: bits of a level, columns that share a scale, and which scales and zeros there are.

    With `has_bytes`, a scale is a half precision number for 256 columns times a byte for each group of columns.
    """

    bits: int
    group: int = GROUP_COLUMNS
    has_bytes: bool = False
    has_zero: bool = False


FORMS = {  # in the order in which kernel.cpp numbers them
    "Q4_0": Form(4),
    "Q4_1": Form(4, has_zero=True),
    "Q5_0": Form(5),
    "Q5_1": Form(5, has_zero=True),
    "Q8_0": Form(8),
    "Q4_K": Form(4, has_bytes=True, has_zero=True),
    "Q5_K": Form(5, has_bytes=True, has_zero=True),
    "Q6_K": Form(6, group=16, has_bytes=True),
}
GROUP_BYTES = {4: 256, 5: 320, 6: 384, 8: 512}  # of a tile's levels in GROUP_COLUMNS columns


class NoKernel(DataError):
    """No kernel can be used on this machine or for this file; `what` states the reason."""


class Part(ctypes.Structure):
    """kernel.cpp's Part."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("levels", "scale", "zero", "scale_byte", "zero_byte", "bias")),
    ]


class LayerParts(ctypes.Structure):
    """kernel.cpp's Layer."""

    _fields_ = [
        ("parts", ctypes.c_void_p * 4),
        ("counts", ctypes.c_int64 * 4),
        *((name, ctypes.c_void_p) for name in ("norm", "mlp_norm", "query_norm", "key_norm", "keys", "values")),
    ]


SIZES = ("layers", "batch", "columns", "hidden", "inner", "pairs", "groups", "width", "slots", "shown", "threads")


class Step(ctypes.Structure):
    """kernel.cpp's Step."""

    _fields_ = [(name, ctypes.c_int64) for name in SIZES] + [(name, ctypes.c_double) for name in ("epsilon", "scaling")]


def require_read(what: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> None:
    """Raise ValueError unless a tensor has the shape, type, order and device that the kernel reads at its address."""
    right = tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype and tensor.device.type == CPU
    if not right or not tensor.is_contiguous():
        order = "" if tensor.is_contiguous() else " in another order"
        got = f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device.type}{order}"
        raise ValueError(f"the kernel takes {what} {list(shape)} of {dtype} on the cpu, got {got}")


@functools.cache
def kernel_version() -> str:
    """Return a digest of the kernel's source. Results that depend on the kernel are kept under it."""
    return digest(SOURCE.read_text(encoding="utf-8"))


@functools.cache
def _load() -> Any:
    """Return the compiled library, or a text that states why there is none. Both are kept until the process ends."""
    features = cpu_features() or set()
    if lacking := sorted(NEEDED.keys() - features):
        return f"this processor has no {lacking[0]}"
    flags = [*NEEDED.values(), *(flag for name, flag in FASTER.items() if name in features)]
    kept = cache_folder("kernels") / f"packed-{digest([kernel_version(), flags])}.so"
    try:
        if os.path.isfile(kept):  # Path.is_file would raise for a folder that cannot be entered.
            with contextlib.suppress(NoKernel):  # compiled on a machine with other libraries
                return _opened(kept)
        command = [_compiler(), "-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-w", *flags, "-x", "c++"]
        with tempfile.TemporaryDirectory(prefix="distill-", ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / kept.name
            _compile([*command, str(SOURCE), "-o", str(made)])
            try:
                write_atomically(kept, lambda temporary: shutil.copyfile(made, temporary), several=True)
                return _opened(kept)
            except (DistillError, OSError) as error:
                warn(f"the compiled kernel is not kept for later commands: {getattr(error, 'what', error)}")
                return _opened(made)
    except NoKernel as error:
        return error.what
    except OSError as error:  # of temporary files
        return f"{SOURCE.name} cannot be compiled: {error}"


def _compiler() -> str:
    path = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "c++"))), None)
    if path is None:
        raise NoKernel("there is no C++ compiler (g++) on this machine")
    return path


def _compile(command: Sequence[str]) -> None:
    """Run a compiler. Raise NoKernel if it fails or takes longer than COMPILE_SECONDS."""
    started, nothing = time.monotonic(), subprocess.DEVNULL
    with subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE) as process:
        try:
            _, fault = process.communicate(timeout=COMPILE_SECONDS)
        except BaseException as error:
            # The compiler proper is a child of g++. It would keep running, and keep the pipe open.
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                limit = duration(COMPILE_SECONDS)
                raise NoKernel(f"{command[0]} did not compile {SOURCE.name} within {limit}") from None
            raise
    if process.returncode:
        lines = fault.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
        raise NoKernel(f"{command[0]} does not compile {SOURCE.name}: {lines[0]}")
    note(f"products of packed weights compiled in {duration(time.monotonic() - started)}")


def _opened(place: Path) -> Any:
    """Load a library and declare its functions. Raise NoKernel if it cannot be loaded."""
    number, address = ctypes.c_int64, ctypes.c_void_p
    try:
        library = ctypes.CDLL(str(place))
        library.distill_products.argtypes = [address, *[number] * 5, *[address] * 5, ctypes.c_double]
        library.distill_pack.argtypes = [number, address, number, number, address, number]
        library.distill_step.argtypes = [address] * 10
        library.distill_shortlist.argtypes = [*[address] * 4, *[number] * 5, address]
        for name in ("products", "pack", "step", "shortlist"):
            getattr(library, f"distill_{name}").restype = None
    except (OSError, AttributeError) as error:
        raise NoKernel(f"{place} cannot be loaded ({error})") from None
    return library


def library() -> Any:
    """Return the compiled kernel. Raise NoKernel if there is none."""
    loaded = _load()
    if isinstance(loaded, str):
        raise NoKernel(loaded)
    return loaded
