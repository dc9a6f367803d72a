"""llama.cpp's library or ik_llama.cpp's: what a build can do, options as parameters, and a file as the library loads
it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import math
import os
import platform
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from distill.errors import DataError, RecipeError
from distill.gguf.head import COPY_AGAIN, FileHead, check_vocabulary, ggml_type, known_type, open_head, type_name
from distill.machine import COMPILE_LLAMA, WITHOUT_AMX, install_extra, thread_count, version_of
from distill.progress import is_verbose, warn_once
from distill.recipe import GgufOptions
from distill.recipe.measuring import NO_DEVICE, ON_CPU
from distill.vocabulary.vocabulary import ids_around

# ── ik_llama.cpp, a fork of llama.cpp with faster kernels for CPUs, under the names of llama.cpp's functions ──
# Its library computes. Tokenizers of files, and grammars, stay with llama.cpp. The package `ik-llama-cpp-python`
# declares the structures of the library that it contains. Functions that it omits are declared here, from llama.h.

REPACKED = {0, 8}  # ggml's numbers for f32 and q8_0
_Handle, _Int = ctypes.c_void_p, ctypes.c_int32
# These functions have the same name in both libraries. The next ones are missing from the package.
_DECLARED = (
    *("llama_backend_init", "llama_model_default_params", "llama_context_default_params", "llama_model_load_from_file"),
    *("llama_init_from_model", "llama_free", "llama_n_ubatch", "llama_batch_init", "llama_batch_free", "llama_decode"),
)
_UNDECLARED: dict[str, tuple[list[Any], Any]] = {
    "llama_print_system_info": ([], ctypes.c_char_p),
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
    """Load and initialise ik_llama.cpp. Its log goes to `remember(level, text, user data)`.

    Raises DataError if the package is missing. The result is cached, because the log callback must outlive all calls.
    """
    try:
        declared: Any = importlib.import_module("ik_llama_cpp._ctypes_api")
    except ImportError as error:
        raise DataError(f"library ik needs ik-llama-cpp-python ({error})", install_extra("ik")) from None
    raw = declared._lib
    _require_sizes(raw, declared)
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
        llama_get_memory=lambda context: context,  # ik_llama.cpp reaches the cache through its context.
        llama_memory_seq_rm=functions["llama_kv_cache_seq_rm"],
        llama_memory_seq_cp=functions["llama_kv_cache_seq_cp"],
    )
    library.llama_backend_init()
    return library


def _require_sizes(raw: Any, declared: Any) -> None:
    """Raise DataError if the package declares a structure with another size than the library fills.

    On x86, a function that returns a structure writes it to an address that is passed before the arguments. Bytes that
    keep two different fillings lie past the structure's end.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    for name, kind, arguments in (
        ("llama_model_default_params", declared.llama_model_params, ()),
        ("llama_context_default_params", declared.llama_context_params, ()),
        ("llama_batch_init", declared.llama_batch, (1, 0, 1)),
    ):
        places = [ctypes.create_string_buffer(bytes([filling]) * 4096, 4096) for filling in (0, 255)]
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[_Int] * len(arguments))((name, raw))
        for place in places:
            function(place, *arguments)
        written = max(at for at in range(4096) if (places[0].raw[at], places[1].raw[at]) != (0, 255)) + 1
        if -(-written // 8) * 8 != ctypes.sizeof(kind):
            raise DataError(
                f"ik-llama-cpp-python {version_of('ik-llama-cpp-python')} declares {kind.__name__} with "
                f"{ctypes.sizeof(kind)} bytes, but its library writes {written}",
                f"install the version that is tested here: {install_extra('ik')}",
            )


def repacks(head: FileHead) -> bool:
    """Whether the library may repack a file's weights for steps of several tokens.

    Repacked types of four bits and K types give other logits for two tokens than for one (KL 0.0005 to 0.05 on
    SmolLM2). q8_0 does not.
    """
    return set(head.kinds.values()) <= REPACKED


# ── llama-cpp-python's low-level API: loaded once, its log silenced, its last errors kept ──

LOG_LEVEL_ERROR, LOG_LEVEL_CONTINUED = 4, 5
UNKNOWN = "unknown model architecture"  # llama.cpp's message
ERRORS: deque[str] = deque(maxlen=4)
AMX = "AMX_INT8"
NOT_BESIDE_PYTORCH = "llama.cpp was compiled with AMX, whose tile configuration PyTorch's bfloat16 products release"


def compiled_with(module: Any) -> list[str]:
    """Return the instruction sets that a llama_cpp module was compiled with, by llama.cpp's names, such as AVX2."""
    parts = module.llama_print_system_info().decode("utf-8", "replace").split("|")
    return [part.rpartition(":")[2].split("=")[0].strip() for part in parts if part.strip().endswith("= 1")]


@cache
def library() -> Any:
    """Load and initialise the llama_cpp module, with its log silenced.

    Raises DataError if the module is missing or was compiled with AMX. The result is cached, because the log callback
    must outlive all calls.
    """
    # By default, a failed assertion inside ggml starts a debugger before it aborts.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        module: Any = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise DataError(f"GGUF needs llama-cpp-python ({error})", hint=install_extra("llama")) from None

    if AMX in compiled_with(module):
        raise DataError(NOT_BESIDE_PYTORCH, f"compile it without: {WITHOUT_AMX} {COMPILE_LLAMA}")
    module.distill_log_callback = module.llama_log_callback(_remember)
    module.llama_log_set(module.distill_log_callback, ctypes.c_void_p(0))
    module.llama_backend_init()
    return module


_level_before = [0]


def _remember(level: int, text: bytes, _user_data: Any) -> None:
    if level == LOG_LEVEL_CONTINUED:
        level = _level_before[0]
    _level_before[0] = level
    line = text.decode("utf-8", "replace").strip()
    if level == LOG_LEVEL_ERROR and line:
        ERRORS.append(line)
    if line and is_verbose():
        print(f"llama.cpp: {line}", file=sys.stderr)


def engine_of(options: GgufOptions) -> Any:
    """Return the library that computes under `options`, by llama.cpp's function names. DataError if it is missing."""
    return ik_library(_remember) if options.library == "ik" else library()


def last_errors() -> str:
    """Return llama.cpp's error messages since ERRORS was cleared."""
    return "; ".join(ERRORS) or "llama.cpp gave no reason"


# ── What the installed build can do, and a model's options as llama.cpp's parameters ──

GPU, INTEGRATED_GPU = 1, 2  # values of ggml's enum ggml_backend_dev_type
BUILD = (
    'build llama-cpp-python for your GPU: CMAKE_ARGS="-DGGML_CUDA=on" (NVIDIA) or "-DGGML_METAL=on" (Apple) before pip '
    "install --force-reinstall --no-cache-dir llama-cpp-python"
)


class Device(NamedTuple):
    """A GPU that llama.cpp can put layers on. `handle` is ggml's."""

    name: str
    description: str
    handle: int


def gpus() -> list[Device]:
    """Return the GPUs that this build of llama.cpp finds, in its order. A build for CPUs finds none."""
    library()  # Loading registers the devices.
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
        functions.append(ggml[symbol])  # Each look-up makes a new object, so that no other user's types change.
        functions[-1].argtypes, functions[-1].restype = types
    count, get, name, description, kind = functions
    handles = [get(index) for index in range(count())]
    return [
        Device(name(handle).decode("utf-8", "replace"), description(handle).decode("utf-8", "replace"), handle)
        for handle in handles
        if kind(handle) in (GPU, INTEGRATED_GPU)
    ]


def describe_build() -> str:
    """Say in one line where this build of llama.cpp computes. DataError if llama-cpp-python is not installed."""
    devices = gpus()
    if devices:
        return "llama.cpp: GPUs " + ", ".join(f"{gpu.name} ({gpu.description})" for gpu in devices)
    if library().llama_supports_gpu_offload():
        return "llama.cpp: built for GPUs, but it finds none on this machine and computes on the CPU"
    return f"llama.cpp: a CPU-only build; for GPU layers, {BUILD}"


def require_build(options: GgufOptions, where: str) -> None:
    """Raise RecipeError, naming `where`, for options that this build of llama.cpp or this machine cannot provide."""
    gpu_settings = {
        "n_gpu_layers": bool(options.n_gpu_layers),
        "device": options.device not in ((), (NO_DEVICE,)),
        "tensor_split": bool(options.tensor_split),
    }
    first = next((name for name, requested in gpu_settings.items() if requested), None)
    if first is not None and options.library == "ik":
        raise RecipeError(f"{where}: {first} with library ik, which computes on the CPU here", "leave one of them out")
    if first is not None:
        _require_gpus(options, f"{where}: {first} {_shown(getattr(options, first))}")


def _shown(value: Any) -> str:
    items = value if isinstance(value, tuple) else (value,)
    return ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)


def _require_gpus(options: GgufOptions, setting: str) -> None:
    devices = gpus()
    if not devices:
        able = library().llama_supports_gpu_offload()
        reason = "finds no GPU on this machine" if able else "is built for CPUs only"
        raise RecipeError(f"{setting}: the installed llama.cpp {reason}", f"leave this option out, or {BUILD}")
    names = [gpu.name for gpu in devices]
    unknown = [name for name in options.device if name not in names]
    if unknown:
        raise RecipeError(f"{setting}: there is no device {unknown[0]}", f"llama.cpp finds {', '.join(names)}")
    used = len(options.device) or len(devices)
    if len(options.tensor_split) > used:
        raise RecipeError(f"{setting}: {len(options.tensor_split)} shares for {used} GPUs")


def require_cache_types(options: GgufOptions, keys: int | None, values: int | None, where: str) -> None:
    """Raise RecipeError if a type's block does not divide the size of a head's keys or values (None: unknown)."""
    import gguf

    for name, size in (("cache_type_k", keys), ("cache_type_v", values)):
        kind = getattr(options, name)
        block = gguf.GGML_QUANT_SIZES[ggml_type(kind)][0]
        if size is not None and size % block:
            hint = f"use a type without blocks for {name}: f16, bf16 or f32"
            what = f"{where}: {name} {kind} stores blocks of {block} values, which do not divide a head of {size}"
            raise RecipeError(what, hint)


def require_possible(head: FileHead, options: GgufOptions) -> None:
    """Raise RecipeError for options that this build, machine or file does not allow. Loads nothing."""
    require_build(options, str(head.path))
    require_cache_types(options, *head.head_sizes, str(head.path))


def model_settings(options: GgufOptions) -> tuple[Any, list[Any]]:
    """Return the library's parameters for a model, and the objects that they point to until the model is loaded."""
    llama = engine_of(options)
    settings, kept = llama.llama_model_default_params(), list[Any]()
    settings.check_tensors = True  # Otherwise damaged weights load without an error.
    if options.library == "ik":
        return settings, kept
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


FLASH_ATTENTION = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}  # option -> llama.cpp's name


def fill_context(settings: Any, options: GgufOptions) -> None:
    """Set the options in a context's parameters. The caller has set `n_batch`."""
    # More threads than cores make llama.cpp many times slower.
    settings.n_threads = thread_count(options.threads)
    settings.n_threads_batch = settings.n_threads if options.threads_batch is None else options.threads_batch
    settings.n_ubatch = min(options.ubatch_size or settings.n_batch, settings.n_batch)
    if options.library == "ik":
        settings.flash_attn = options.flash_attn != "off"
    else:
        settings.flash_attn_type = getattr(library(), f"LLAMA_FLASH_ATTN_TYPE_{FLASH_ATTENTION[options.flash_attn]}")
        settings.kv_unified = settings.n_seq_max > 1
    settings.type_k = ggml_type(options.cache_type_k)
    settings.type_v = ggml_type(options.cache_type_v)


# ── A GGUF file as llama.cpp loads it: its weights, its rows, and its own tokenizer ──
# llama.cpp aborts the process if a file breaks its assumptions. `require_loadable` checks them on the head first: the
# assertions of llama-model.cpp, and those of the graphs of the architectures that this project exports.

MAX_LAYERS, MAX_EXPERTS = 512, 512  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Architectures that rotate every dimension of a head, and whose keys are as wide as values.
ROTATES_ALL = ("llama", "qwen2", "qwen3", "olmo2", "exaone4", "seed_oss", "mistral3", "cohere2")
MIXES_WINDOWS = ("gemma2", "gemma3", "cohere2", "exaone4")


class GgufFile:
    """A loaded file, or with `vocabulary_only` its tokenizer without weights. Methods raise ValueError after `close`.

    `head_rows`: rows of the head. `vocabulary_size`: rows that stand for tokens. `recurrent`: some layers have a
    recurrent state. `model` and `vocabulary` are handles that are valid until `close`. `model` belongs to `engine`, the
    library that computes. `vocabulary` always belongs to `library`, which is llama.cpp's. Raises DataError if a
    library or the file is missing, or the file is damaged or of an unsupported kind. Raises RecipeError for `options`
    that this build or this file does not allow.
    """

    def __init__(self, path: Path, *, vocabulary_only: bool = False, options: GgufOptions = ON_CPU) -> None:
        self.path, self.library, self.engine = path, library(), engine_of(options)
        self.model: Any = None
        self._tokenizer: Any = None  # llama.cpp's copy of the model's vocabulary, if another library computes
        head = open_head(path)
        require_loadable(head)
        require_possible(head, options)
        parameters, kept = model_settings(options)
        if options.library == "ik":
            parameters.repack_tensors = repacks(head)
        parameters.vocab_only = vocabulary_only
        self.model = self._load(self.engine, parameters)
        del kept  # The parameters point into these objects.
        if self.engine is not self.library:
            parameters = self.library.llama_model_default_params()
            parameters.vocab_only = True
            self._tokenizer = self._load(self.library, parameters)
        engine = self.engine
        self.recurrent = bool(engine.llama_model_is_recurrent(self.model) or engine.llama_model_is_hybrid(self.model))
        if self.recurrent and engine is not self.library:
            self.close()
            raise DataError(f"{path} has recurrent layers, which ik_llama.cpp cannot roll back", "leave library out")
        self.vocabulary: Any = self.library.llama_model_get_vocab(self._tokenizer or self.model)
        self.head_rows = int(self.library.llama_vocab_n_tokens(self.vocabulary))
        self.vocabulary_size = self.head_rows - self._padding_rows()
        self.context_length = head.context or sys.maxsize

    @property
    def build(self) -> list[str]:
        """Name the package that computes with its version, and what it was compiled with."""
        package = "llama-cpp-python" if self.engine is self.library else "ik-llama-cpp-python"
        return [f"{package} {version_of(package)}", *compiled_with(self.engine)]

    def _load(self, llama: Any, parameters: Any) -> Any:
        ERRORS.clear()
        model = llama.llama_model_load_from_file(os.fsencode(self.path), parameters)
        if not model:
            self.close()
            if UNKNOWN in last_errors():
                name = "llama-cpp-python" if llama is library() else "ik-llama-cpp-python"
                kind = open_head(self.path).architecture
                what = f"{self.path}: its architecture, {kind!r}, is unknown to the installed {name} {version(name)}"
                raise DataError(what, f"pip install -U {name}, or decode its Hugging Face folder in PyTorch")
            if damaged := re.search(r"tensor '([^']+)' has invalid data", last_errors()):
                head = open_head(self.path)
                kind = type_name(head.kinds[damaged[1]])
                head.refuse(f"{damaged[1]}, a tensor of {kind}, holds values that are not numbers", COPY_AGAIN)
            hint = "check its disk, or export or copy it again"
            raise DataError(f"{self.path} cannot be loaded: {last_errors()}", hint)
        return model

    def _padding_rows(self) -> int:
        """Count rows at the end that stand for no token. Converters name them `[PAD<id>]`, whatever type they give."""
        llama, count = self.library, 0
        for index in range(self.head_rows - 1, -1, -1):
            if llama.llama_vocab_get_text(self.vocabulary, index) != b"[PAD%d]" % index:
                break
            count += 1
        return count

    def tokenize(self, text: str, parse_special: bool = False, add_special: bool = False) -> list[int]:
        """Return llama.cpp's ids for `text`, from the file's tokenizer.

        `parse_special` reads control tokens in the text. `add_special` adds the tokens that the file puts around texts.
        """
        self.require_open()
        data = text.encode("utf-8")
        size = len(data) + 8
        while True:
            ids = (ctypes.c_int32 * size)()
            count = self.library.llama_tokenize(self.vocabulary, data, len(data), ids, size, add_special, parse_special)
            if count >= 0:
                return list(ids[:count])
            size = -count

    @property
    def opening(self) -> list[int]:
        """The ids that the file puts before a text."""
        around = ids_around(self.tokenize("a"), self.tokenize("a", add_special=True))
        return around[0] if around else []

    def detokenize(self, ids: Sequence[int]) -> bytes:
        """Return the exact bytes of `ids`, with special tokens as written. ValueError for ids outside the rows."""
        self.require_open()
        if len(ids) and (min(ids) < 0 or max(ids) >= self.head_rows):
            raise ValueError(f"token ids must lie in [0, {self.head_rows})")
        # llama_detokenize removes some spaces for some tokenizers. Single tokens keep them.
        return b"".join(self._token_bytes(int(token)) for token in ids)

    def _token_bytes(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self.library.llama_token_to_piece(self.vocabulary, token, buffer, size, 0, True)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def require_open(self) -> None:
        """Raise ValueError if the file is closed."""
        if not self.model:
            raise ValueError(f"{self.path} is closed")

    def close(self) -> None:
        """Free the weights. A second call does nothing."""
        if self.model:
            self.engine.llama_model_free(self.model)
        if self._tokenizer:
            self.library.llama_model_free(self._tokenizer)
        self.model = self._tokenizer = None


def require_loadable(head: FileHead) -> None:
    """Raise DataError, naming the key or the type, for a file that llama.cpp cannot load or that would abort it."""
    if (kind := head.text("general.type")) not in (None, "", "model"):
        head.refuse(f"general.type is {kind!r:.40}: this file alone does not decode", "give the model's own file")
    if not head.flag(f"{head.architecture}.attention.causal", True):
        head.refuse_value("attention.causal", "be true, because an encoder does not decode")
    _require_types(head)
    _name_unread(head)
    scaling = head.text(f"{head.architecture}.rope.scaling.type")
    if scaling not in (None, *ROPE_SCALINGS):
        head.refuse_value("rope.scaling.type", f"be one of {', '.join(ROPE_SCALINGS)}")
    head.size("block_count", 1, MAX_LAYERS)
    head.size("embedding_length", 1, 2**20)
    head.size("feed_forward_length", 1, 2**24)
    head.size("context_length", 1, 2**31 - 1)
    head.size("expert_count", 0, MAX_EXPERTS)
    heads, groups = head.size("attention.head_count", 1, 2**16), head.size("attention.head_count_kv", 1, 2**16)
    if heads and groups and heads % groups:
        head.refuse_value("attention.head_count_kv", f"divide attention.head_count, which is {heads}")
    epsilon = head.values.get(f"{head.architecture}.attention.layer_norm_rms_epsilon")
    if epsilon is not None and not (isinstance(epsilon, float) and 0 <= epsilon < math.inf):
        head.refuse_value("attention.layer_norm_rms_epsilon", "be a number of at least 0")
    if (head.size("rope.dimension_count", 0, 2**20) or 0) % 2:
        head.refuse_value("rope.dimension_count", "be even")
    if head.architecture in MIXES_WINDOWS and head.size("attention.sliding_window_pattern", 0, 2**16) == 1:
        head.refuse_value("attention.sliding_window_pattern", "leave a layer with a window: 0, or at least 2")
    size, _ = head.head_sizes
    if head.architecture in ROTATES_ALL and size is not None:
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            if head.size(key, 1, 2**20) not in (None, size):
                head.refuse_value(key, f"be {size}, the size of a head")
        if heads and groups:
            _check_widths(head, heads * size, groups * size)
    check_vocabulary(head)


def _name_unread(head: FileHead) -> None:
    """Warn on stderr about keys of the architecture and tokenizer that llama.cpp ignores. An import refuses them."""
    known = _keys_of_llama(head.architecture)
    spaces = (f"{head.architecture}.", "tokenizer.")
    unread = [key for key in head.values if key.startswith(spaces) and not known.fullmatch(key)]
    if unread:
        more = f" and {len(unread) - 6} more" if len(unread) > 6 else ""
        warn_once(f"warning: {head.path}: llama.cpp has no such keys and ignores them: {', '.join(unread[:6])}{more}")


@cache
def _keys_of_llama(architecture: str) -> re.Pattern[str]:
    """Return a pattern of an architecture's keys that the gguf package declares, and of an older key of llama.cpp."""
    from gguf.constants import Keys

    groups = (vars(group) for group in vars(Keys).values() if isinstance(group, type))
    keys = [key for group in groups for key in group.values() if isinstance(key, str) and "." in key]
    named = (
        re.escape(key).replace(r"\{arch\}", re.escape(architecture)) for key in [*keys, "{arch}.rope.scale_linear"]
    )
    return re.compile("|".join(re.sub(r"\\\{\w+\\\}", r"[\\w-]+", key) for key in named))


def _require_types(head: FileHead) -> None:
    unknown = [name for name, number in head.kinds.items() if not _has_type(number)]
    if unknown:
        names = ", ".join(dict.fromkeys(type_name(head.kinds[name]) for name in unknown))
        head.refuse(
            f"nothing here can load {names} ({len(unknown)} of {len(head.kinds)} tensors, first {unknown[0]})",
            "quantise the model to types of llama.cpp, such as q4_k_m; those of ik_llama.cpp load there alone",
        )
    for name, number in head.kinds.items():
        block, _ = _block(number)
        if head.shapes[name][0] % block:
            row = head.shapes[name][0]
            head.refuse(
                f"{name} is {_name_of(number)}, whose blocks of {block} values do not fill rows of {row}", COPY_AGAIN
            )
    for (name, (path, at)), (following, (same, start)) in itertools.pairwise(head.places.items()):
        block, width = _block(head.kinds[name])
        size = math.prod(head.shapes[name]) // block * width
        align = head.values.get("general.alignment", 32)
        if path == same and start - at != size + -size % align:  # llama.cpp expects tensors without gaps.
            kind = _name_of(head.kinds[name])
            head.refuse(
                f"{name} takes {size} bytes as {kind}, but {following} begins {start - at} bytes after it", COPY_AGAIN
            )


def _name_of(number: int) -> str:
    """Return a type's name. llama.cpp is asked for types that the gguf package does not know."""
    if known_type(number) is None and _has_type(number):
        with contextlib.suppress(DataError):
            return str(_ggml("ggml_type_name", ctypes.c_char_p)(number).decode())
    return type_name(number)


def _ggml(symbol: str, result: Any) -> Any:
    """Return a function of ggml that takes the number of a type. DataError without llama-cpp-python."""
    library()
    function = importlib.import_module("llama_cpp._ggml").libggml[symbol]
    function.argtypes, function.restype = [ctypes.c_int], result
    return function


@cache
def _block(number: int) -> tuple[int, int]:
    """Return the number of values and of bytes in a block of a type for which `_has_type` holds."""
    import gguf

    if (kind := known_type(number)) is not None:
        return gguf.GGML_QUANT_SIZES[kind]
    return _ggml("ggml_blck_size", ctypes.c_int64)(number), _ggml("ggml_type_size", ctypes.c_size_t)(number)


@cache
def _has_type(number: int) -> bool:
    """Whether llama.cpp (or, if it is not installed, the gguf package) knows a type."""
    with contextlib.suppress(DataError):
        count = (
            library().llama_model_quantize_default_params().token_embedding_type
        )  # The default is the number of types.
        return number < count and _ggml("ggml_blck_size", ctypes.c_int64)(number) > 0
    return known_type(number) is not None


def _check_widths(head: FileHead, queries: int, keys: int) -> None:
    """Raise DataError if a projection is not as wide as all heads together."""
    for name, shape in head.shapes.items():
        part = name.split(".")[-2] if name.endswith(".weight") and name.startswith("blk.") else ""
        wide = {"attn_q": queries, "attn_k": keys, "attn_v": keys}.get(part)
        if wide is not None and shape[1:] != [wide]:
            head.refuse(f"{name} is {shape}, but its heads are {wide} wide", COPY_AGAIN)
