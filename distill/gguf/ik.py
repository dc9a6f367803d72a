"""ik_llama.cpp, a fork of llama.cpp with faster kernels for CPUs, under the names of llama.cpp's functions.

Its library computes; a file's tokenizer, and grammars over it, stay llama.cpp's. The structures come from the package
`ik-llama-cpp-python`, which declares those of the library that it carries; the functions that it leaves out are
declared here, from its llama.h.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from distill.errors import DataError
from distill.gguf.head import FileHead
from distill.machine import install_extra

REPACKED = {0, 8}  # ggml's numbers of f32 and q8_0
_Handle, _Int = ctypes.c_void_p, ctypes.c_int32
# Same name in both libraries, and what the package does not declare.
_DECLARED = (
    *("llama_backend_init", "llama_model_default_params", "llama_context_default_params", "llama_model_load_from_file"),
    *("llama_init_from_model", "llama_free", "llama_n_ubatch", "llama_batch_init", "llama_batch_free", "llama_decode"),
)
_UNDECLARED: dict[str, tuple[list[Any], Any]] = {
    "llama_n_ctx": ([_Handle], ctypes.c_uint32),
    "llama_n_batch": ([_Handle], ctypes.c_uint32),
    "llama_get_logits": ([_Handle], ctypes.POINTER(ctypes.c_float)),
    "llama_kv_cache_seq_rm": ([_Handle, _Int, _Int, _Int], ctypes.c_bool),
    "llama_kv_cache_seq_cp": ([_Handle, _Int, _Int, _Int, _Int], None),
    "llama_kv_cache_defrag": ([_Handle], None),
    "llama_model_is_recurrent": ([_Handle], ctypes.c_bool),
    "llama_model_is_hybrid": ([_Handle], ctypes.c_bool),
}
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@cache
def ik_library(remember: Callable[[int, bytes, Any], None]) -> Any:
    """The library, initialised, its log given to `remember(level, text, user data)`; DataError without the package.

    Cached for good, because the log callback must outlive every call into the library.
    """
    try:
        declared: Any = importlib.import_module("ik_llama_cpp._ctypes_api")
    except ImportError as error:
        raise DataError(f"library ik needs ik-llama-cpp-python ({error})", install_extra("ik")) from None
    raw = declared._lib
    functions = {name: getattr(declared, name) for name in _DECLARED}
    for name, (arguments, result) in _UNDECLARED.items():
        functions[name] = raw[name]
        functions[name].argtypes, functions[name].restype = arguments, result
    raw.llama_log_set.argtypes, raw.llama_log_set.restype = [_LOG, ctypes.c_void_p], None
    callback = _LOG(remember)
    raw.llama_log_set(callback, None)
    library = SimpleNamespace(
        **functions,
        callback=callback,
        llama_model_free=declared.llama_free_model,
        llama_get_memory=lambda context: context,  # the cache is reached through its context
        llama_memory_seq_rm=functions["llama_kv_cache_seq_rm"],
        llama_memory_seq_cp=functions["llama_kv_cache_seq_cp"],
    )
    library.llama_backend_init()
    return library


def repacks(head: FileHead) -> bool:
    """Whether a file's weights are laid out anew for steps of several tokens.

    Types of four bits and K types then differ between one token and two (KL 0.0005 to 0.05 on SmolLM2); q8_0 does not.
    """
    return set(head.kinds.values()) <= REPACKED
