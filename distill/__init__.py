"""distill: cut, train and measure draft models for speculative decoding."""

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.api import *  # noqa: F403

__version__ = "0.1.0"

# oneDNN, which multiplies for torch on a CPU, keeps a compiled primitive for each shape of a product that it ever met,
# up to 1,024 of them and 2 MB apiece: what runs for hours on batches of many shapes grows by gigabytes. It reads this
# variable before its first product, so it is set here, ahead of every module of the package, and processes started from
# here inherit it. 512 hold what two models need that take 1 to 16 tokens a step; with fewer than needed, every step
# compiles its own (docs/benchmarks.md#training, Memory). A value of the user's counts.
PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
MOST_PRIMITIVES = "512"
if "DNNL_PRIMITIVE_CACHE_CAPACITY" not in os.environ:  # its older name
    os.environ.setdefault(PRIMITIVES, MOST_PRIMITIVES)


def __getattr__(name: str) -> Any:
    """The names of `distill.api`, which loads torch and transformers: only where one of them is asked for."""
    # Python looks a submodule up as an attribute first (`from distill import run`): nothing is loaded for that.
    if name == "__all__" or not (name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}")):
        api = importlib.import_module("distill.api")
        if name == "__all__":
            return api.__all__
        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module 'distill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*importlib.import_module("distill.api").__all__, "__version__"]
