"""Products with the weights of a GGUF file as the file stores them, on CPUs with AVX-512.

A step of few tokens takes as long as its weights take to arrive, so it takes least in the file's own bits. The kernel
(packed.cpp) computes with the file's values, nothing of which is rounded, and bfloat16 activations; it is compiled on
first use, and kept.

Legend: R rows of a weight, C columns, V vocabulary, H hidden.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.devices import CPU
from distill.engines.torch.hugging_face import load_config, quiet
from distill.engines.torch.products import After, FourBitLinear, Norm, has_four_bits
from distill.errors import DataError, RunError
from distill.files import cache_folder, digest, write_atomically
from distill.gguf.fields import configuration
from distill.gguf.head import open_head
from distill.gguf.importing import FileTensor, rotary_factors, sources, unpermuted
from distill.gguf.levels import Levels, levels_of
from distill.machine import cpu_features
from distill.progress import Progress, duration, note, warn

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # as packed.cpp numbers them
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
GROUP_BYTES = {4: 256, 5: 320, 6: 384, 8: 512}  # of 32 columns of a tile
TILE = 16  # rows
PART_VALUES = 2**20  # unpacked at a time
WIDEST_HEAD = 256  # numbers
LONGEST_STEP = 64  # tokens that the layers take in one call; torch's attention reads prompts

# ── The kernel ──

NEEDED = {name: f"-m{name}" for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c")}
FASTER = {"avx512_bf16": "-mavx512bf16"}
SOURCE = Path(__file__).with_name("packed.cpp")
COMPILE_SECONDS = 300


class NoKernel(DataError):
    """There is no kernel here; `what` says why."""


class _Part(ctypes.Structure):
    """packed.cpp's Part."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("levels", "scale", "zero", "scale_byte", "zero_byte", "bias")),
    ]


class _Layer(ctypes.Structure):
    """packed.cpp's Layer."""

    _fields_ = [
        ("parts", ctypes.c_void_p * 4),
        ("counts", ctypes.c_int64 * 4),
        *((name, ctypes.c_void_p) for name in ("norm", "mlp_norm", "query_norm", "key_norm", "keys", "values")),
    ]


SIZES = ("layers", "batch", "columns", "hidden", "inner", "pairs", "groups", "width", "slots", "shown", "threads")


class _Step(ctypes.Structure):
    """packed.cpp's Step."""

    _fields_ = [(name, ctypes.c_int64) for name in SIZES] + [(name, ctypes.c_double) for name in ("epsilon", "scaling")]


@functools.cache
def kernel() -> Any:
    """The compiled kernel; NoKernel where there is none."""
    features = cpu_features() or set()
    if lacking := sorted(NEEDED.keys() - features):
        raise NoKernel(f"this processor has no {lacking[0]}")
    flags = [*NEEDED.values(), *(flag for name, flag in FASTER.items() if name in features)]
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "c++"))), None)
    content = SOURCE.read_text(encoding="utf-8")
    place = cache_folder("kernels") / f"packed-{digest([content, flags])}.so"
    scratch: Path | None = None
    if not place.is_file():
        if compiler is None:
            raise NoKernel("there is no C++ compiler (g++) on this machine")
        started, command = time.monotonic(), [compiler, "-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-w"]

        def build(temporary: Path) -> None:
            run = [*command, *flags, "-x", "c++", str(SOURCE), "-o", str(temporary)]
            subprocess.run(run, check=True, capture_output=True, timeout=COMPILE_SECONDS)

        try:
            try:
                write_atomically(place, build, several=True)
            except RunError as error:  # the cache cannot be written: compiled for this process alone
                warn(f"not kept for later commands: {error.what}")
                scratch = Path(tempfile.mkdtemp(prefix="distill-"))
                place = scratch / place.name
                build(place)
        except (subprocess.SubprocessError, OSError) as error:
            lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines() or [""]
            raise NoKernel(f"{compiler} does not compile {SOURCE.name}: {lines[0] or error}") from None
        note(f"products of packed weights compiled in {duration(time.monotonic() - started)}")
    try:
        found = ctypes.CDLL(str(place))
    except OSError as error:
        raise NoKernel(f"{place} cannot be loaded ({error})") from None
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    number, address = ctypes.c_int64, ctypes.c_void_p
    found.distill_products.argtypes = [address, *[number] * 5, *[address] * 5, ctypes.c_double]
    found.distill_pack.argtypes = [number, address, number, number, address, number]
    found.distill_step.argtypes = [address] * 10
    found.distill_shortlist.argtypes = [*[address] * 4, *[number] * 5, address]
    for name in ("products", "pack", "step", "shortlist"):
        getattr(found, f"distill_{name}").restype = None
    return found


# ── Weights and their products ──


def require_read(what: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> None:
    """Raise ValueError unless a tensor has the shape and type that the kernel reads from its address, on the CPU."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or tensor.device.type != CPU:
        found = f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device.type}"
        raise ValueError(f"the kernel takes {what} {list(shape)} of {dtype} on the cpu, got {found}")


@dataclass(frozen=True)
class _Tiles:
    """A tensor of a file in the kernel's layout: levels, then the scales of `Levels`."""

    kind: str
    rows: int
    tensors: tuple[NDArray[Any] | None, ...]


class PackedWeight:
    """A weight [R, C] in its file's bits: tensors of a file, one's rows after another's."""

    def __init__(self, tiles: Sequence[_Tiles], columns: int) -> None:
        if columns % 32:
            raise ValueError(f"the kernel takes rows of a multiple of 32 numbers, got {columns}")
        self.tiles = tuple(tiles)
        self.shape = torch.Size((sum(one.rows for one in tiles), columns))

    def __deepcopy__(self, _: Any) -> PackedWeight:
        return self  # nothing changes it

    def joined(self, others: Sequence[PackedWeight]) -> PackedWeight:
        """This one's rows, then those of others."""
        return PackedWeight([tiles for one in (self, *others) for tiles in one.tiles], self.shape[1])

    def product(self, bias: Tensor | None, activation: str | None = None, norm: Norm | None = None) -> PackedLinear:
        """What multiplies by it."""
        return PackedLinear(self, bias, activation, norm)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for one in self.tiles for part in one.tensors if part is not None)

    @classmethod
    def rounded(cls, weight: Tensor, bits: int) -> PackedWeight:
        """A weight [R, C] rounded to 8 bits, or to 4 with a zero, by groups of 32 columns: as Q8_0 and Q4_1."""

        def part(rows: slice) -> Levels:
            groups = weight[rows].detach().float().unflatten(1, (-1, 32))
            low, high = groups.aminmax(dim=-1)
            reach = torch.maximum(high, -low) / 127 if bits == 8 else (high - low) / 15
            scale, zero = reach.half(), None if bits == 8 else low.half()
            step = torch.where(scale > 0, scale.float(), 1.0)[..., None]  # as it is multiplied, subnormal or not
            levels = (groups if zero is None else groups - zero.float()[..., None]) / step
            numbers = levels.round().clamp(-127 if bits == 8 else 0, 2 ** (bits - bits // 8) - 1).flatten(1)
            held = numbers.to(torch.int8).numpy().view(np.uint8), scale.numpy(), None if zero is None else zero.numpy()
            return Levels(*held)

        return cls._packed("Q8_0" if bits == 8 else "Q4_1", weight.shape, part)

    @classmethod
    def read(cls, source: FileTensor) -> PackedWeight:
        """A tensor of a file, its rows in Hugging Face's order. DataError for NaN or infinity among its scales."""
        blocks, whole = source.blocks(), bool(source.heads)
        return cls._packed(source.kind.name, source.shape, lambda rows: _levels(source, blocks[rows]), whole)

    @classmethod
    def _packed(
        cls, kind: str, shape: Sequence[int], part: Callable[[slice], Levels], whole: bool = False
    ) -> PackedWeight:
        """A weight of this shape whose rows `part` gives, some at a time unless only the whole is in order."""
        (rows, columns), bits = shape, BITS[kind]
        step = rows if whole else max(PART_VALUES // columns // TILE, 1) * TILE
        size = columns // 32 * GROUP_BYTES[bits]  # of a tile
        packed = np.zeros(-(-rows // TILE) * size + 64, np.uint8)
        packed, scales = packed[-packed.ctypes.data % 64 :][:-64], []  # a register a line
        for first in range(0, rows, step):
            own = part(slice(first, first + step))
            numbers, at = np.ascontiguousarray(own.numbers), packed.ctypes.data + first // TILE * size
            kernel().distill_pack(bits, numbers.ctypes.data, len(numbers), columns, at, 1)
            scales.append([_tiled(one) for one in own[1:]])
        joined = (None if parts[0] is None else np.concatenate(parts) for parts in zip(*scales, strict=True))
        return cls([_Tiles(kind, rows, (packed, *joined))], columns)


def _levels(source: FileTensor, blocks: NDArray[np.uint8]) -> Levels:
    """The levels of rows of a file's tensor; of all of them where these are reordered."""
    own = levels_of(source.kind.name, np.asarray(blocks))
    if not all(np.isfinite(one).all() for one in (own.scale, own.zero) if one is not None):
        raise DataError(f"{source.path}: {source.name} holds NaN or infinity", "copy or convert the file again")
    return Levels._make(one if one is None or not source.heads else unpermuted(one, source.heads) for one in own)


def _tiled(scales: NDArray[Any] | None) -> NDArray[Any] | None:
    """Scales [R, S] as [tiles, S, TILE], with zeros for rows that fill the last tile."""
    if scales is None:
        return None
    whole = np.pad(scales, ((0, -len(scales) % TILE), (0, 0)))
    return np.ascontiguousarray(whole.reshape(-1, TILE, scales.shape[1]).swapaxes(1, 2))


class PackedLinear(After):
    """x [..., C] · weightᵀ + bias by the kernel, in bfloat16, sums in fp32; of the norm of x where that is given."""

    def __init__(
        self, weight: PackedWeight, bias: Tensor | None, activation: str | None = None, norm: Norm | None = None
    ) -> None:
        super().__init__(activation)
        self._norm = None if norm is None else norm.weight.float().contiguous()
        self._epsilon = 0.0 if norm is None else norm.epsilon
        self.weight, self.bias = weight, None if bias is None else bias.detach().bfloat16().contiguous()
        self.out_features, self.in_features = weight.shape
        if self.bias is not None:
            require_read("a bias", self.bias, weight.shape[:1])
        if self._norm is not None:
            require_read("a norm", self._norm, weight.shape[1:], torch.float32)
        self._kernel, first = kernel(), 0
        parts = []
        for one in weight.tiles:
            addresses = [None if part is None else part.ctypes.data for part in one.tensors]
            at = None if self.bias is None else self.bias.data_ptr() + first * self.bias.element_size()
            parts.append(_Part(KINDS.index(one.kind), one.rows, *addresses, at))
            first += one.rows
        self._parts = (_Part * len(parts))(*parts)

    def step(self, layers: Sequence[Any]) -> PackedStep | None:
        """The whole of `Layer`s, of which this is the first product, in one call; None where that cannot be."""
        width = layers[0].width
        whole = all(layer.products and all(type(one) is PackedLinear for one in layer.products) for layer in layers)
        return PackedStep(layers) if whole and width % 32 == 0 and width <= WIDEST_HEAD else None

    def __deepcopy__(self, _: Any) -> PackedLinear:
        return self  # its parts are addresses

    def forward(self, x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        """[..., R] of [..., C]."""
        flat, (rows, columns) = x.to(torch.bfloat16).contiguous(), self.weight.shape
        require_read("an input", flat, (*x.shape[:-1], columns))
        tokens = flat.numel() // columns
        out = torch.empty((*x.shape[:-1], rows), dtype=torch.bfloat16)
        room = torch.empty(tokens * columns * (33 if self._norm is not None else 17) // 32, dtype=torch.int32)
        added = None if other is None or how != "add" or self._activation is not None else other.contiguous()
        if added is not None:
            require_read("what is added", added, out.shape)
        addresses = [None if one is None else one.data_ptr() for one in (flat, room, out, added, self._norm)]
        sizes = len(self._parts), tokens, columns, rows, torch.get_num_threads()
        self._kernel.distill_products(self._parts, *sizes, *addresses, self._epsilon)
        return out if added is not None else self.after(out, other, how)


class PackedStep:
    """The decoder layers of a model for a step of few tokens, in one call: around its products, torch's own operators
    take as long as half of them.

    The layers are `Layer`s of packed products alone.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        first = layers[0]
        self._products = [layer.products for layer in layers]
        self._norms = [
            [None if one is None else one.weight.float().contiguous() for one in layer.norms] for layer in layers
        ]
        self._layers = (_Layer * len(layers))()
        for own, products, norms in zip(self._layers, self._products, self._norms, strict=True):
            for place, product in enumerate(products):
                own.parts[place], own.counts[place] = ctypes.addressof(product._parts), len(product._parts)
            own.norm, own.mlp_norm, own.query_norm, own.key_norm = (None if n is None else n.data_ptr() for n in norms)
        inputs, output, _, down = self._products[0]
        self._inner, self._hidden, self._read = down.in_features, output.out_features, output.in_features
        self._states = max(inputs.out_features, 2 * self._inner)
        self._epsilon, self._scaling = first.norms[0].epsilon, first.scaling
        self._pairs, self._groups, self._width = first.pairs, first.groups, first.width
        self._kernel = kernel()

    def __deepcopy__(self, _: Any) -> PackedStep:
        return self

    def takes(self, hidden: Tensor, mask: Tensor | None, cache: Any) -> bool:
        """Whether it computes this call: few tokens, after others, in a cache of slots."""
        few = hidden.shape[0] * hidden.shape[1] <= LONGEST_STEP and hidden.dtype == torch.bfloat16
        slots = getattr(cache, "slots", None)
        return few and mask is not None and slots is not None and all(one.is_initialized for one in cache.layers)

    def __call__(self, hidden: Tensor, mask: Tensor, cache: Any, cosines: Tensor, sines: Tensor) -> Tensor:
        """Hidden states [B, m, H] of hidden states; see `Layer.forward`."""
        (batch, columns, _), shown = hidden.shape, mask.shape[-1]
        tokens, heads = batch * columns, self._pairs * self._groups
        out, at = hidden.clone(memory_format=torch.contiguous_format), cache.slots.contiguous()
        cosines, sines, mask = (one.expand(batch, *one.shape[1:]).contiguous() for one in (cosines, sines, mask))
        slots = cache.layers[0].keys.shape[2]
        require_read("hidden states", out, (batch, columns, self._hidden))
        for name, table in (("cosines", cosines), ("sines", sines)):
            require_read(name, table, (batch, columns, 1, self._width))
        require_read("a mask", mask, (batch, 1, columns, shown))
        require_read("slots", at, (batch, columns), torch.int64)
        if not 0 <= int(at.min()) <= int(at.max()) < slots or shown > slots:
            raise ValueError(f"slots {at.min()}..{at.max()}, {shown} of them shown, in a cache of {slots}")
        for own, layer in zip(self._layers, cache.layers, strict=True):
            for name, held in (("keys", layer.keys), ("values", layer.values)):
                require_read(name, held, (batch, self._pairs, slots, self._width))
                if not held.is_contiguous():
                    raise ValueError(f"the kernel takes {name} in the order of their shape")
            own.keys, own.values = layer.keys.data_ptr(), layer.values.data_ptr()
        sizes = batch, columns, self._hidden, self._inner, self._pairs, self._groups, self._width, slots, shown
        step = _Step(len(self._layers), *sizes, torch.get_num_threads(), self._epsilon, self._scaling)
        widest = max(self._hidden, self._inner, self._read)
        room = torch.empty(tokens * widest * 33 // 32, dtype=torch.int32)
        states = torch.empty(tokens * (self._states + max(self._read, self._inner)), dtype=torch.bfloat16)
        scores = torch.empty(tokens * heads * (shown + 16))
        tensors = out, cosines, sines, at, mask, room, states, scores
        addresses = (one.data_ptr() for one in tensors)
        self._kernel.distill_step(self._layers, ctypes.byref(step), *addresses)
        return out


class FileEmbedding(torch.nn.Module):
    """Embeddings [V, H] that stay in their file; rows are read and dequantised as texts need them."""

    def __init__(self, source: FileTensor) -> None:
        super().__init__()
        self._source, self._rows = source, source.blocks()
        self.num_embeddings, self.embedding_dim = source.shape
        # Without rows: it tells device and type of a model none of whose weights is a tensor.
        self.weight = torch.nn.Parameter(torch.empty(0, self.embedding_dim, dtype=torch.bfloat16), False)

    def __deepcopy__(self, _: Any) -> FileEmbedding:
        return self

    def forward(self, ids: Tensor) -> Tensor:
        """[..., H] in bfloat16 of ids [...]."""
        import gguf

        rows = np.ascontiguousarray(self._rows[ids.reshape(-1).numpy()]).reshape(ids.numel(), -1)
        values = gguf.quants.dequantize(rows, self._source.kind)
        return torch.from_numpy(values).to(torch.bfloat16).view(*ids.shape, -1)


# ── Models ──


FOUR_BITS = {"Q4_0": 8, "Q4_1": 0, "Q4_K": 0}  # types that torch's operators multiply, and the level of their zero


def _four_bit_linear(source: FileTensor, bias: Tensor | None, device: torch.device) -> FourBitLinear:
    """The product of a tensor of FOUR_BITS by torch's operator; scales and zeros are rounded to bfloat16."""
    own = _levels(source, source.blocks())

    def whole(scale: NDArray[Any] | None, byte: NDArray[Any] | None) -> Tensor:
        if scale is None:
            return torch.zeros(())
        values = scale.astype(np.float32)
        return torch.from_numpy(values if byte is None else values.repeat(8, 1) * byte)

    scale = whole(own.scale, own.scale_byte)
    zero = whole(own.zero, own.zero_byte) + (8 - FOUR_BITS[source.kind.name]) * scale
    numbers = torch.from_numpy(np.ascontiguousarray(own.numbers))
    return FourBitLinear(numbers.to(device), scale.bfloat16().to(device), zero.bfloat16().to(device), bias)


def load_packed(reference: str, device: torch.device | None = None) -> Any:
    """A causal language model of transformers with the weights of a GGUF file in the file's bits, in bfloat16.

    By our kernel, or with a `device` by torch's operators on it, which take 4 bits alone. Tensors of types without a
    kernel are bfloat16; a line on stderr says which. NoKernel where there is none at all, DataError for a file that
    cannot be imported.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    if device is None:
        kernel()
    elif not has_four_bits(device):
        raise NoKernel(f"torch has no operator for 4 bits on {device}")
    kinds = BITS if device is None else FOUR_BITS
    config, head = load_config(reference), open_head(Path(reference))
    tensors = sources(head, configuration(head, rotary_factors(head)))  # a head beside its embeddings is kept, too
    with init_empty_weights(), quiet():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config._name_or_path = reference
    if "lm_head.weight" not in tensors:
        tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"]}

    def values(source: FileTensor) -> Tensor:
        parts = [torch.from_numpy(part).to(device or CPU, torch.bfloat16) for part in source.parts()]
        return torch.cat(parts).view(source.shape)

    progress, places = Progress("tensors", len(tensors), brief=True), dict(model.named_modules())

    def fill(name: str) -> None:
        source, (place, _, own) = tensors[name], name.rpartition(".")
        if name in packed:
            bias = tensors.get(f"{place}.bias")
            shift = None if bias is None else values(bias)
            if device is None:
                model.set_submodule(place, PackedLinear(PackedWeight.read(source), shift))
            else:
                model.set_submodule(place, _four_bit_linear(source, shift, device))
        elif (
            device is None
            and own == "weight"
            and type(places[place]) is torch.nn.Embedding
            and source.kind.name in BITS
        ):
            model.set_submodule(place, FileEmbedding(source))
        else:
            setattr(places[place], own, torch.nn.Parameter(values(source), requires_grad=False))
        progress.step()

    packed = [name for name, one in tensors.items() if one.kind.name in kinds and _is_linear(places, name)]
    if not packed:
        raise NoKernel(f"there are kernels for {', '.join(kinds)}, and none of its weights has such a type")
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, tensors))
    dense = [source for name, source in tensors.items() if len(source.shape) > 1 and source.kind.name not in kinds]
    if dense:
        share = sum(one.values for one in dense) / sum(one.values for one in tensors.values() if len(one.shape) > 1)
        others = ", ".join(sorted({one.kind.name for one in dense}))
        warn(f"{reference}: {share:.0%} of the weights ({others}) have no kernel in the file's bits and are bfloat16")
    if device is not None:
        if tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"] and "lm_head.weight" not in packed:
            model.lm_head.weight = model.get_input_embeddings().weight
        model.to(device)
    return model.eval()


def _is_linear(places: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor is the weight of a plain product."""
    place, _, own = name.rpartition(".")
    return own == "weight" and type(places[place]) is torch.nn.Linear
