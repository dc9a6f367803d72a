"""llama.cpp through the low-level API of llama-cpp-python: loaded once, without its log, with its last errors kept."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections import deque
from functools import cache
from typing import Any

from distill.errors import DataError
from distill.packages import COMPILE_LLAMA, WITHOUT_AMX, install_extra
from distill.progress import is_verbose

LOG_LEVEL_ERROR, LOG_LEVEL_CONTINUED = 4, 5
ERRORS: deque[str] = deque(maxlen=4)
AMX = "AMX_INT8"
NOT_BESIDE_PYTORCH = "llama.cpp was compiled with AMX, whose tiles PyTorch's products in bfloat16 take from it"


def compiled_with(module: Any) -> list[str]:
    """What a llama_cpp module was compiled with, by llama.cpp's names, such as AVX2."""
    parts = module.llama_print_system_info().decode("utf-8", "replace").split("|")
    return [part.rpartition(":")[2].split("=")[0].strip() for part in parts if part.strip().endswith("= 1")]


@cache
def library() -> Any:
    """The llama_cpp module, quiet and initialised; DataError when it is not installed, or was compiled with AMX.

    Cached for good, because the log callback must outlive every call into the library.
    """
    # Without this a failed assertion inside ggml starts a debugger before it aborts.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        module: Any = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise DataError(f"GGUF needs llama-cpp-python ({error})", hint=install_extra("llama")) from None

    if AMX in compiled_with(module):
        raise DataError(NOT_BESIDE_PYTORCH, f"compile it without: {WITHOUT_AMX} {COMPILE_LLAMA}")
    level_before = [0]

    def remember(level: int, text: bytes, _user_data: Any) -> None:
        if level == LOG_LEVEL_CONTINUED:
            level = level_before[0]
        level_before[0] = level
        line = text.decode("utf-8", "replace").strip()
        if level == LOG_LEVEL_ERROR and line:
            ERRORS.append(line)
        if line and is_verbose():
            print(f"llama.cpp: {line}", file=sys.stderr)

    module.distill_log_callback = module.llama_log_callback(remember)
    module.llama_log_set(module.distill_log_callback, ctypes.c_void_p(0))
    module.llama_backend_init()
    return module


def last_errors() -> str:
    """llama.cpp's error messages since ERRORS was cleared."""
    return "; ".join(ERRORS) or "llama.cpp gave no reason"
