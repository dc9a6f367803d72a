"""What the installed build of llama.cpp can do, and a model's options as llama.cpp's parameters."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, NamedTuple

from distill.errors import RecipeError
from distill.machine import thread_count
from distill.models.gguf.file_head import FileHead
from distill.models.gguf.library import library
from distill.recipe import GgufOptions
from distill.recipe.gguf import NO_DEVICE

GPU, INTEGRATED_GPU = 1, 2  # of ggml's enum ggml_backend_dev_type
BUILD = (
    'build llama-cpp-python for your GPU: CMAKE_ARGS="-DGGML_CUDA=on" (NVIDIA) or "-DGGML_METAL=on" (Apple) before pip '
    "install --force-reinstall --no-cache-dir llama-cpp-python"
)


class Device(NamedTuple):
    """A GPU that llama.cpp can put layers on; `handle` is ggml's."""

    name: str
    description: str
    handle: int


def gpus() -> list[Device]:
    """The GPUs that this build of llama.cpp finds, in its order; none for a build for CPUs."""
    library()  # registers them
    ggml = importlib.import_module("llama_cpp._ggml").libggml
    signatures: dict[str, tuple[list[Any], Any]] = {
        "ggml_backend_dev_count": ([], ctypes.c_size_t),
        "ggml_backend_dev_get": ([ctypes.c_size_t], ctypes.c_void_p),
        "ggml_backend_dev_name": ([ctypes.c_void_p], ctypes.c_char_p),
        "ggml_backend_dev_description": ([ctypes.c_void_p], ctypes.c_char_p),
        "ggml_backend_dev_type": ([ctypes.c_void_p], ctypes.c_int),
    }
    functions = []
    for symbol, types in signatures.items():
        functions.append(ggml[symbol])  # a new object for each look-up, so that nobody else's types are changed
        functions[-1].argtypes, functions[-1].restype = types
    count, get, name, description, kind = functions
    handles = [get(index) for index in range(count())]
    return [
        Device(name(handle).decode("utf-8", "replace"), description(handle).decode("utf-8", "replace"), handle)
        for handle in handles
        if kind(handle) in (GPU, INTEGRATED_GPU)
    ]


def describe_build() -> str:
    """One line: where this build of llama.cpp computes. DataError where llama-cpp-python is not installed."""
    devices = gpus()
    if devices:
        return "llama.cpp: GPUs " + ", ".join(f"{gpu.name} ({gpu.description})" for gpu in devices)
    if library().llama_supports_gpu_offload():
        return "llama.cpp: built for GPUs, and finds none on this machine: it computes on the CPU"
    return f"llama.cpp: a CPU-only build; for GPU layers {BUILD}"


def require_build(options: GgufOptions, where: str) -> None:
    """Raise RecipeError, which names `where`, for options that this build of llama.cpp or this machine lacks."""
    gpu_settings = {
        "n_gpu_layers": bool(options.n_gpu_layers),
        "device": options.device not in ((), (NO_DEVICE,)),
        "tensor_split": bool(options.tensor_split),
    }
    first = next((name for name, requested in gpu_settings.items() if requested), None)
    if first is not None:
        _require_gpus(options, f"{where}: {first} {_shown(getattr(options, first))}")


def _shown(value: Any) -> str:
    items = value if isinstance(value, tuple) else (value,)
    return ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)


def _require_gpus(options: GgufOptions, setting: str) -> None:
    devices = gpus()
    if not devices:
        able = library().llama_supports_gpu_offload()
        reason = "finds no GPU on this machine" if able else "is built for CPUs alone"
        raise RecipeError(f"{setting}: the installed llama.cpp {reason}", f"leave it out, or {BUILD}")
    names = [gpu.name for gpu in devices]
    unknown = [name for name in options.device if name not in names]
    if unknown:
        raise RecipeError(f"{setting}: there is no device {unknown[0]}", f"llama.cpp finds {', '.join(names)}")
    used = len(options.device) or len(devices)
    if len(options.tensor_split) > used:
        raise RecipeError(f"{setting}: {len(options.tensor_split)} shares for {used} GPUs")


def require_cache_types(options: GgufOptions, keys: int | None, values: int | None, where: str) -> None:
    """Raise RecipeError where a type's block does not divide the size of a head's keys or values (None: unknown)."""
    import gguf

    for name, size in (("cache_type_k", keys), ("cache_type_v", values)):
        kind = getattr(options, name)
        block = gguf.GGML_QUANT_SIZES[cache_type(kind)][0]
        if size is not None and size % block:
            raise RecipeError(
                f"{where}: {name} {kind} stores blocks of {block} values, and a head has {size}",
                f"use a type without blocks for {name}: f16, bf16 or f32",
            )


def require_possible(head: FileHead, options: GgufOptions) -> None:
    """Raise RecipeError for options that this build, this machine or this file does not allow; loads nothing."""
    require_build(options, str(head.path))
    require_cache_types(options, *head.head_sizes, str(head.path))


def model_settings(options: GgufOptions) -> tuple[Any, list[Any]]:
    """llama.cpp's parameters of a model, and what they point to, which must live until it is loaded."""
    llama = library()
    settings, kept = llama.llama_model_default_params(), []
    if options.n_gpu_layers is not None:
        settings.n_gpu_layers = options.n_gpu_layers
    if options.device == (NO_DEVICE,):
        settings.n_gpu_layers = 0
    if options.device:
        handles = {gpu.name: gpu.handle for gpu in gpus()}
        used = [handles[name] for name in options.device if name != NO_DEVICE]
        kept.append((ctypes.c_void_p * (len(used) + 1))(*used, None))
        settings.devices = ctypes.cast(kept[-1], ctypes.c_void_p)
    if options.tensor_split:
        shares = (ctypes.c_float * max(llama.llama_max_devices(), len(options.tensor_split)))(*options.tensor_split)
        kept.append(shares)
        settings.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
    return settings, kept


def fill_context(settings: Any, options: GgufOptions) -> None:
    """Give a context's parameters their options; `n_batch` is set before."""
    llama = library()
    # More threads than cores make llama.cpp many times slower.
    settings.n_threads = thread_count(options.threads)
    settings.n_threads_batch = settings.n_threads if options.threads_batch is None else options.threads_batch
    settings.n_ubatch = min(options.ubatch_size or settings.n_batch, settings.n_batch)
    settings.flash_attn_type = {
        "on": llama.LLAMA_FLASH_ATTN_TYPE_ENABLED,
        "off": llama.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        "auto": llama.LLAMA_FLASH_ATTN_TYPE_AUTO,
    }[options.flash_attn]
    settings.type_k = cache_type(options.cache_type_k)
    settings.type_v = cache_type(options.cache_type_v)


def cache_type(name: str) -> Any:
    """A type as ggml numbers it; a member of gguf's enumeration."""
    import gguf

    return gguf.GGMLQuantizationType[name.upper()]
