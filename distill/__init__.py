"""distill: cut, train and measure draft models for speculative decoding."""

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.api import *  # noqa: F403

__version__ = "0.1.0"

# oneDNN multiplies matrices for torch on a CPU. It keeps a compiled primitive for each shape of a product: up to 1,024
# primitives of 2 MB each, so a process that runs for hours on batches of many shapes grows by gigabytes. oneDNN reads
# this variable before its first product, so it is set here, before any other module is imported. Child processes
# inherit it. 512 primitives are enough for two models that take 1 to 16 tokens a step. With too few, every step
# compiles its own (docs/benchmarks.md#training, Memory). A value that the user set is kept.
PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
MOST_PRIMITIVES = "512"
if "DNNL_PRIMITIVE_CACHE_CAPACITY" not in os.environ:  # the variable's older name
    os.environ.setdefault(PRIMITIVES, MOST_PRIMITIVES)


def __getattr__(name: str) -> Any:
    """Return a name of `distill.api`, which is imported only now, because it loads torch and transformers."""
    # For `from distill import run`, Python looks the submodule up here first. The API is not imported for that.
    if name == "__all__" or not (name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}")):
        api = importlib.import_module("distill.api")
        if name == "__all__":
            return api.__all__
        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module 'distill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*importlib.import_module("distill.api").__all__, "__version__"]
