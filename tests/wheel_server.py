"""A llama-server out of the wheel `xllamacpp`, for tests: the program's own options on the command line, no compiler.

`program(folder)` writes one to be started. The wheel's server takes settings from Python alone, so the options that
`distill` gives a llama-server are read here; others are refused by name, in the program's words.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

INSTALLED = importlib.util.find_spec("xllamacpp") is not None
# The attributes below CommonParams that an option sets, each with a value of its own type.
OPTIONS = {
    "-m": ["model.path"],
    "-md": ["speculative.draft.mparams.path"],
    "--host": ["hostnames"],
    "--port": ["port"],
    "--parallel": ["n_parallel"],
    "--ctx-size": ["n_ctx"],
    "--cache-ram": ["cache_ram_mib"],
    # Of single tokens, and of batches, which have as many unless an option of theirs follows.
    "--threads": ["cpuparams.n_threads", "cpuparams_batch.n_threads"],
    "--threads-batch": ["cpuparams_batch.n_threads"],
    "--ubatch-size": ["n_ubatch"],
    "--n-gpu-layers": ["n_gpu_layers"],
    "--flash-attn": ["flash_attn_type"],
    "--cache-type-k": ["cache_type_k"],
    "--cache-type-v": ["cache_type_v"],
    "--load-mode": ["load_mode"],
    "--chat-template": ["chat_template"],
    "--spec-type": ["speculative.types"],
    "--lookup-cache-static": ["speculative.ngram_cache.lookup_cache_static"],
    "--spec-draft-sampling": ["speculative.draft.probabilistic"],
    "--spec-draft-n-max": ["speculative.draft.n_max"],
    "--spec-draft-n-min": ["speculative.draft.n_min"],
    "--spec-draft-p-min": ["speculative.draft.p_min"],
    "--spec-draft-ngl": ["speculative.draft.n_gpu_layers"],
    "--spec-draft-threads": ["speculative.draft.cpuparams.n_threads", "speculative.draft.cpuparams_batch.n_threads"],
    "--spec-draft-threads-batch": ["speculative.draft.cpuparams_batch.n_threads"],
    "--spec-draft-type-k": ["speculative.draft.cache_type_k"],
    "--spec-draft-type-v": ["speculative.draft.cache_type_v"],
}
ALIASES = {"-ctkd": "--spec-draft-type-k"}
FLAGS = {
    "--metrics": ("endpoint_metrics", True),
    "--no-ui": ("ui", False),
    "--kv-unified": ("kv_unified", True),
    "--no-kv-unified": ("kv_unified", False),
}
WORDS: dict[str, Any] = {
    "on": "ENABLED",
    "off": "DISABLED",
    "greedy": False,
    "probabilistic": True,
}  # as Python has them


def program(folder: Path) -> Path:
    """The program `wheel-server` in a folder."""
    path = folder / "wheel-server"
    found = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from wheel_server import main; main()"
    path.write_text(f"#!{sys.executable}\n{found}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def like(before: Any, value: str) -> Any:
    """A value of the type of the one before; KeyError or ValueError where there is none."""
    if isinstance(before, list):
        return [like(before[0], one) for one in value.split(",")]
    if isinstance(before, Enum):
        end = "_" + WORDS.get(value, value).upper().replace("-", "_").replace("+", "_")
        return {name: member for name, member in type(before).__members__.items() if name.endswith(end)}.popitem()[1]
    return WORDS[value] if isinstance(before, bool) else type(before)(value)


def put(params: Any, path: str, value: str | bool) -> None:
    """Set the attribute at a dotted path."""
    *parents, name = path.split(".")
    for parent in parents:
        params = getattr(params, parent)
    setattr(params, name, value if isinstance(value, bool) else like(getattr(params, name), value))


def apply(params: Any, arguments: Sequence[str]) -> None:
    """Set what the arguments say; ValueError, in llama-server's words, for one that is unknown or has no such value."""
    rest = list(arguments)
    while rest:
        given = rest.pop(0)
        name = ALIASES.get(given, given)
        if name in FLAGS:
            put(params, *FLAGS[name])
        elif name not in OPTIONS:
            raise ValueError(f"invalid argument: {given}")
        elif not rest:
            raise ValueError(f"expected value for argument {given}")
        else:
            value = rest.pop(0)
            try:
                for path in OPTIONS[name]:
                    put(params, path, value)
            except (KeyError, ValueError, OverflowError):
                raise ValueError(f"error while handling argument {given}: {value}") from None


def main() -> None:
    """Serve until a signal ends the process."""
    if "--help" in sys.argv:
        print("\n".join([*OPTIONS, *FLAGS]))
        return
    import xllamacpp

    params = xllamacpp.CommonParams()
    try:
        apply(params, sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        sys.exit(f"error: failed to load model: {error}")
    while server is not None:
        time.sleep(3600)  # its threads serve; a signal ends the process
