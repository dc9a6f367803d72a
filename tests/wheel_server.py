"""A llama-server out of the wheel `xllamacpp`, for tests: the program's own options on the command line, no compiler.

`program(folder)` writes one to be started. The wheel's server takes settings from Python alone, so the options that
`distill` gives a llama-server are read here; others are refused by name, in the program's words.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

INSTALLED = importlib.util.find_spec("xllamacpp") is not None
Setter = Callable[[Any, str], None]


def program(folder: Path) -> Path:
    """The program `wheel-server` in a folder."""
    path = folder / "wheel-server"
    found = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from wheel_server import main; main()"
    path.write_text(f"#!{sys.executable}\n{found}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def _set(path: str, convert: Callable[[str], Any]) -> Setter:
    """Sets the attribute at a dotted path below CommonParams."""
    *parents, name = path.split(".")

    def put(params: Any, value: str) -> None:
        for parent in parents:
            params = getattr(params, parent)
        setattr(params, name, convert(value))

    return put


def _one_of(enumeration: str, prefix: str, names: dict[str, str] | None = None) -> Callable[[str], Any]:
    """A value of one of the wheel's enumerations, by llama.cpp's word for it."""

    def convert(value: str) -> Any:
        import xllamacpp

        member = (names or {}).get(value, value).upper().replace("-", "_").replace("+", "_")
        found = getattr(getattr(xllamacpp, enumeration), prefix + member, None)
        if found is None:
            raise ValueError(value)
        return found

    return convert


def _threads(path: str) -> Setter:
    """Threads of single tokens, and of batches, which have as many unless an option of theirs follows."""
    one, many = _set(f"{path}.n_threads", int), _set(f"{path}_batch.n_threads", int)
    return lambda params, value: (one(params, value), many(params, value))[0]


def _types(params: Any, value: str) -> None:
    kind = _one_of("common_speculative_type", "COMMON_SPECULATIVE_TYPE_")
    params.speculative.types = [kind(name) for name in value.split(",")]


def _sampling(params: Any, value: str) -> None:
    if value not in ("greedy", "probabilistic"):
        raise ValueError(value)
    params.speculative.draft.probabilistic = value == "probabilistic"


_CACHE = _one_of("ggml_type", "GGML_TYPE_")
_FLASH = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
OPTIONS: dict[str, Setter] = {
    "-m": _set("model.path", str),
    "-md": _set("speculative.draft.mparams.path", str),
    "--host": lambda params, value: setattr(params, "hostnames", [value]),
    "--port": _set("port", int),
    "--parallel": _set("n_parallel", int),
    "--ctx-size": _set("n_ctx", int),
    "--cache-ram": _set("cache_ram_mib", int),
    "--threads": _threads("cpuparams"),
    "--threads-batch": _set("cpuparams_batch.n_threads", int),
    "--ubatch-size": _set("n_ubatch", int),
    "--batch-size": _set("n_batch", int),
    "--n-gpu-layers": _set("n_gpu_layers", int),
    "--flash-attn": _set("flash_attn_type", _one_of("llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_", names=_FLASH)),
    "--cache-type-k": _set("cache_type_k", _CACHE),
    "--cache-type-v": _set("cache_type_v", _CACHE),
    "--load-mode": _set("load_mode", _one_of("llama_load_mode", "LLAMA_LOAD_MODE_")),
    "--chat-template": _set("chat_template", str),
    "--spec-type": _types,
    "--lookup-cache-static": _set("speculative.ngram_cache.lookup_cache_static", str),
    "--spec-draft-sampling": _sampling,
    "--spec-draft-n-max": _set("speculative.draft.n_max", int),
    "--spec-draft-n-min": _set("speculative.draft.n_min", int),
    "--spec-draft-p-min": _set("speculative.draft.p_min", float),
    "--spec-draft-ngl": _set("speculative.draft.n_gpu_layers", int),
    "--spec-draft-threads": _threads("speculative.draft.cpuparams"),
    "--spec-draft-threads-batch": _set("speculative.draft.cpuparams_batch.n_threads", int),
    "--spec-draft-type-k": _set("speculative.draft.cache_type_k", _CACHE),
    "--spec-draft-type-v": _set("speculative.draft.cache_type_v", _CACHE),
}
ALIASES = {"-ctkd": "--spec-draft-type-k", "-ctvd": "--spec-draft-type-v", "-ctk": "--cache-type-k"}
ALIASES |= {"-ctv": "--cache-type-v", "-ub": "--ubatch-size", "-b": "--batch-size", "-t": "--threads"}
ALIASES |= {"-kvu": "--kv-unified", "-no-kvu": "--no-kv-unified"}
ALIASES |= {"--cache-type-k-draft": "--spec-draft-type-k", "--cache-type-v-draft": "--spec-draft-type-v"}
FLAGS: dict[str, Callable[[Any], None]] = {
    "--metrics": lambda params: setattr(params, "endpoint_metrics", True),
    "--no-ui": lambda params: setattr(params, "ui", False),
    "--kv-unified": lambda params: setattr(params, "kv_unified", True),
    "--no-kv-unified": lambda params: setattr(params, "kv_unified", False),
}


def apply(params: Any, arguments: Sequence[str]) -> None:
    """Set what the arguments say; ValueError, in llama-server's words, for one that is unknown or has no such value."""
    rest = list(arguments)
    while rest:
        given = rest.pop(0)
        name = ALIASES.get(given, given)
        option = OPTIONS.get(name)
        if name in FLAGS:
            FLAGS[name](params)
        elif option is None:
            raise ValueError(f"invalid argument: {given}")
        elif not rest:
            raise ValueError(f"expected value for argument {given}")
        else:
            value = rest.pop(0)
            try:
                option(params, value)
            except (ValueError, OverflowError):
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
