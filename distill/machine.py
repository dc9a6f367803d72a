"""Processor, cores, memory and GPU of this machine, and the package versions that figures depend on. No torch here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "datasets", "peft", "accelerate", "gguf", "safetensors", "llama-cpp-python")

MOST_THREADS = 1024  # more crash the libraries that make them


def machine() -> dict[str, Any]:
    """Processor, cores, memory, GPU (if torch is loaded and sees one) and versions."""
    import psutil

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    gpu = None
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        gpu = torch.cuda.get_device_name(0)
    return {
        "cpu": cpu,
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": gpu,
        "platform": platform.platform(),
        "python": platform.python_version(),
        **versions(),
    }


def usable_cores() -> int:
    """Processor cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def versions() -> dict[str, str]:
    """Installed versions of the packages that figures depend on."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
