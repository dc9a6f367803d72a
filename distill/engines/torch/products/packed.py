"""Weights in the kernel's layout, and the products with them, on CPUs with AVX-512.

A step of few tokens takes as long as reading the weights from memory. Therefore a step is fastest in the bits of the
GGUF file. The kernel computes with the file's values without rounding them, and with activations in bfloat16.

Legend: R rows of a weight, C columns, n tokens, V vocabulary, H hidden, B rows of a batch, m tokens of a call, D width
of a head, S scales of a row.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.engines.torch.products.kernel import (
    FORMS,
    GROUP_BYTES,
    GROUP_COLUMNS,
    TILE_ROWS,
    LayerParts,
    NoKernel,
    Part,
    Step,
    library,
    require_read,
)
from distill.engines.torch.products.linear import CLOSE, Norm, Product
from distill.errors import DataError
from distill.gguf.importing import FileTensor, unpermuted
from distill.gguf.levels import Levels, levels_of

KINDS = tuple(FORMS)
PART_VALUES = 2**20  # values that are unpacked at a time
WIDEST_HEAD = 256  # numbers of a head, at most
LONGEST_STEP = 64  # tokens that the layers take in one call. torch's attention reads prompts.
TRIED_BLOCKS, TRIED_COLUMNS, TRIED_ROWS, TRIED_TOKENS = 2048, 256, 20, 9  # of a trial product


@dataclass(frozen=True)
class Tiles:
    """A tensor of a file in the kernel's layout: its levels, then the scales of `Levels`, [tiles, S, TILE_ROWS] each.

    Raises ValueError for arrays that the kernel would read in another form or beyond their ends.
    """

    kind: str
    rows: int
    columns: int
    arrays: tuple[NDArray[Any] | None, ...]

    def __post_init__(self) -> None:
        form, count = FORMS[self.kind], -(-self.rows // TILE_ROWS)
        halves = self.columns // (256 if form.has_bytes else GROUP_COLUMNS)
        bytes_of = self.columns // form.group if form.has_bytes else 0
        sizes = [count * self.columns // GROUP_COLUMNS * GROUP_BYTES[form.bits]]
        sizes += [2 * count * TILE_ROWS * size for size in (halves, halves * form.has_zero)]
        sizes += [count * TILE_ROWS * size for size in (bytes_of, bytes_of * form.has_zero)]
        actual = [0 if array is None else array.nbytes for array in self.arrays]
        if self.columns % (256 if form.has_bytes else GROUP_COLUMNS):
            needed = 256 if form.has_bytes else GROUP_COLUMNS
            raise ValueError(f"the kernel takes rows of a multiple of {needed} numbers, got {self.columns}")
        if actual != sizes or not all(array.flags.c_contiguous for array in self.arrays if array is not None):
            raise ValueError(f"the kernel takes {self.kind} tiles of {sizes} bytes, got {actual}")


class PackedWeight:
    """A weight [R, C] in the kernel's layout: one or more tensors, whose rows stand one after another."""

    def __init__(self, tiles: Sequence[Tiles]) -> None:
        columns = {part.columns for part in tiles}
        if len(columns) != 1:
            raise ValueError(f"the rows of one weight have different lengths: {sorted(columns)}")
        self.tiles = tuple(tiles)
        self.shape = torch.Size((sum(part.rows for part in tiles), *columns))

    def __deepcopy__(self, _: Any) -> PackedWeight:
        return self  # It never changes.

    def joined(self, others: Sequence[PackedWeight]) -> PackedWeight:
        """Return the rows of this weight followed by those of others."""
        return PackedWeight([tiles for weight in (self, *others) for tiles in weight.tiles])

    @classmethod
    def rounded(cls, weight: Tensor, bits: int) -> PackedWeight:
        """Round a weight [R, C] by groups of 32 columns: to 8 bits as in Q8_0, or to 4 bits with a zero as in Q4_1."""

        def part(rows: slice) -> Levels:
            groups = weight[rows].detach().float().unflatten(1, (-1, GROUP_COLUMNS))
            low, high = groups.aminmax(dim=-1)
            reach = torch.maximum(high, -low) / 127 if bits == 8 else (high - low) / 15
            scale, zero = reach.half(), None if bits == 8 else low.half()
            step = torch.where(scale > 0, scale.float(), 1.0)[..., None]  # the rounded scale, which multiplies later
            levels = (groups if zero is None else groups - zero.float()[..., None]) / step
            numbers = levels.round().clamp(-127 if bits == 8 else 0, 2 ** (bits - bits // 8) - 1).flatten(1)
            numpy_zero = None if zero is None else zero.numpy()
            return Levels(numbers.to(torch.int8).numpy().view(np.uint8), scale.numpy(), numpy_zero)

        return cls.of_levels("Q8_0" if bits == 8 else "Q4_1", weight.shape, part)

    @classmethod
    def read(cls, source: FileTensor) -> PackedWeight:
        """Read a tensor of a file, with rows in Hugging Face's order. DataError for NaN or infinity in its scales."""
        blocks, whole = source.blocks(), bool(source.heads)
        return cls.of_levels(source.kind.name, source.shape, lambda rows: file_levels(source, blocks[rows]), whole)

    @classmethod
    def of_levels(
        cls, kind: str, shape: Sequence[int], part: Callable[[slice], Levels], whole: bool = False
    ) -> PackedWeight:
        """Pack a weight [R, C] whose levels `part` gives for a range of rows. `whole` asks for all rows at once."""
        (rows, columns), bits = shape, FORMS[kind].bits
        if columns % GROUP_COLUMNS:
            raise ValueError(f"the kernel takes rows of a multiple of {GROUP_COLUMNS} numbers, got {columns}")
        step = rows if whole else max(PART_VALUES // columns // TILE_ROWS, 1) * TILE_ROWS
        size = columns // GROUP_COLUMNS * GROUP_BYTES[bits]  # of a tile
        total, scales = -(-rows // TILE_ROWS) * size, []
        packed = np.zeros(total + 64, np.uint8)
        packed = packed[-packed.ctypes.data % 64 :][:total]  # aligned to a register
        for first in range(0, rows, step):
            levels = part(slice(first, first + step))
            numbers, at = np.ascontiguousarray(levels.numbers), packed.ctypes.data + first // TILE_ROWS * size
            if numbers.shape != (min(step, rows - first), columns) or numbers.dtype != np.uint8:
                raise ValueError(f"the kernel packs bytes of {columns} columns, got {numbers.dtype} {numbers.shape}")
            library().distill_pack(bits, numbers.ctypes.data, len(numbers), columns, at, 1)
            scales.append([_tiled(array) for array in levels[1:]])
        joined = (None if parts[0] is None else np.concatenate(parts) for parts in zip(*scales, strict=True))
        return cls([Tiles(kind, rows, columns, (packed, *joined))])


def file_levels(source: FileTensor, blocks: NDArray[np.uint8]) -> Levels:
    """Return the levels of rows of a file's tensor. A tensor whose rows are reordered is given whole.

    DataError for NaN or infinity in its scales.
    """
    levels = levels_of(source.kind.name, np.asarray(blocks))
    if not all(np.isfinite(array).all() for array in (levels.scale, levels.zero) if array is not None):
        raise DataError(f"{source.path}: {source.name} holds NaN or infinity", "copy or convert the file again")
    heads = source.heads
    return Levels._make(array if array is None or not heads else unpermuted(array, heads) for array in levels)


def _tiled(scales: NDArray[Any] | None) -> NDArray[Any] | None:
    """Return scales [R, S] as [tiles, S, TILE_ROWS]. Rows that fill the last tile have zeros."""
    if scales is None:
        return None
    whole = np.pad(scales, ((0, -len(scales) % TILE_ROWS), (0, 0)))
    return np.ascontiguousarray(whole.reshape(-1, TILE_ROWS, scales.shape[1]).swapaxes(1, 2))


class PackedLinear(Product):
    """x [..., C] · weightᵀ + bias by the kernel, in bfloat16 with sums in fp32. With `norm`, x is normed first."""

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
        self._kernel, first = library(), 0
        parts = []
        for tiles in weight.tiles:
            addresses = [None if array is None else array.ctypes.data for array in tiles.arrays]
            at = None if self.bias is None else self.bias.data_ptr() + first * self.bias.element_size()
            parts.append(Part(KINDS.index(tiles.kind), tiles.rows, *addresses, at))
            first += tiles.rows
        self.parts = (Part * len(parts))(*parts)

    def __deepcopy__(self, _: Any) -> PackedLinear:
        return self  # Its parts are addresses.

    def forward(self, x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        flat, (rows, columns) = x.to(torch.bfloat16).contiguous(), self.weight.shape
        require_read("an input", flat, (*x.shape[:-1], columns))
        tokens = flat.numel() // columns
        out = torch.empty((*x.shape[:-1], rows), dtype=torch.bfloat16)
        room = torch.empty(tokens * columns * (33 if self._norm is not None else 17) // 32, dtype=torch.int32)
        added = None if other is None or how != "add" or self._activation is not None else other.contiguous()
        if added is not None:
            require_read("an added tensor", added, out.shape)
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in (flat, room, out, added, self._norm)]
        sizes = len(self.parts), tokens, columns, rows, torch.get_num_threads()
        self._kernel.distill_products(self.parts, *sizes, *addresses, self._epsilon)
        return out if added is not None else self.combined(out, other, how)


@functools.cache
def kernel_fault() -> str:
    """Return the reason why the kernel is not used on this machine; an empty text if it is used.

    The kernel is compiled on the first call. One product of each type is then compared with the values of the gguf
    package.
    """
    try:
        library()
    except NoKernel as error:
        return error.what
    wrong = [kind for kind in KINDS if not _multiplies(kind)]
    return f"the compiled kernel multiplies {', '.join(wrong)} wrongly" if wrong else ""


def require_kernel() -> None:
    """Raise NoKernel if the kernel is not used on this machine."""
    if fault := kernel_fault():
        raise NoKernel(fault)


def _multiplies(kind: str) -> bool:
    """Whether the kernel multiplies random blocks of a type correctly, up to the rounding of bfloat16."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 256, (TRIED_BLOCKS, size), np.uint8)
    with np.errstate(all="ignore"):  # Some random scales are infinite.
        largest = np.abs(gguf.quants.dequantize(blocks, number)).max(-1)
        blocks = blocks[(largest > 0.01) & (largest < 1)][: TRIED_ROWS * TRIED_COLUMNS // block]
    rows = blocks.reshape(TRIED_ROWS, -1, size)
    values = torch.from_numpy(gguf.quants.dequantize(rows.reshape(TRIED_ROWS, -1), number))
    weight = PackedWeight.of_levels(kind, values.shape, lambda part: levels_of(kind, rows[part]))
    x = torch.randn(TRIED_TOKENS, TRIED_COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected, actual = x.float() @ values.T, PackedLinear(weight, None)(x).float()
    return bool((actual - expected).abs().max() <= CLOSE[torch.bfloat16] * expected.abs().max())


class PackedStep:
    """The decoder layers of a model for a step of few tokens, in one call of the kernel.

    Around the products, torch's operators take half as long as the products themselves. `layers` are `Layer`s whose
    products are all `PackedLinear`, see `takes_layers`. Raises ValueError for layers of different sizes.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        first, self._kernel = layers[0], library()
        self._products = [layer.products for layer in layers]
        self._norms = [
            [None if norm is None else norm.weight.float().contiguous() for norm in layer.norms] for layer in layers
        ]
        inputs, output, _, down = self._products[0]
        self._inner, self._hidden, self._read = down.in_features, output.out_features, output.in_features
        self._states = max(inputs.out_features, 2 * self._inner)
        self._epsilon, self._scaling = first.norms[0].epsilon, first.scaling
        self._pairs, self._groups, self._width = first.pairs, first.groups, first.width
        heads, hidden = self._pairs * self._groups, self._hidden
        shapes = [((heads + 2 * self._pairs) * self._width, hidden), (hidden, heads * self._width)]
        shapes += [(2 * self._inner, hidden), (hidden, self._inner)]
        self._layers = (LayerParts * len(layers))()
        for own, products, norms in zip(self._layers, self._products, self._norms, strict=True):
            if [(part.out_features, part.in_features) for part in products] != shapes:
                raise ValueError(f"the kernel takes layers whose weights are {shapes}")
            for norm, size in zip(norms, (hidden, hidden, self._width, self._width), strict=True):
                if norm is not None:
                    require_read("a norm", norm, (size,), torch.float32)
            for place, product in enumerate(products):
                own.parts[place], own.counts[place] = ctypes.addressof(product.parts), len(product.parts)
            own.norm, own.mlp_norm, own.query_norm, own.key_norm = (
                None if norm is None else norm.data_ptr() for norm in norms
            )

    def __deepcopy__(self, _: Any) -> PackedStep:
        return self

    @staticmethod
    def takes_layers(layers: Sequence[Any]) -> bool:
        """Whether one call can compute `Layer`s: by the kernel's products alone, of the same sizes in all layers."""
        width, sizes = layers[0].width, {tuple(part.weight.shape for part in layer.products) for layer in layers}
        return len(sizes) == 1 and () not in sizes and width % 32 == 0 and width <= WIDEST_HEAD

    def takes(self, hidden: Tensor, mask: Tensor | None, cache: Any) -> bool:
        """Whether one call can compute a step: few tokens, after others, in a cache of slots."""
        few = hidden.shape[0] * hidden.shape[1] <= LONGEST_STEP and hidden.dtype == torch.bfloat16
        slots = getattr(cache, "slots", None)
        return few and mask is not None and slots is not None and all(layer.is_initialized for layer in cache.layers)

    def __call__(self, hidden: Tensor, mask: Tensor, cache: Any, cosines: Tensor, sines: Tensor) -> Tensor:
        """Return hidden states [B, m, H] for hidden states, as `Layer.forward` does."""
        (batch, columns, _), shown = hidden.shape, mask.shape[-1]
        tokens, heads = batch * columns, self._pairs * self._groups
        out, at = hidden.clone(memory_format=torch.contiguous_format), cache.slots.contiguous()
        cosines, sines, mask = (
            tensor.expand(batch, *tensor.shape[1:]).contiguous() for tensor in (cosines, sines, mask)
        )
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
            own.keys, own.values = layer.keys.data_ptr(), layer.values.data_ptr()
        sizes = batch, columns, self._hidden, self._inner, self._pairs, self._groups, self._width, slots, shown
        step = Step(len(self._layers), *sizes, torch.get_num_threads(), self._epsilon, self._scaling)
        widest = max(self._hidden, self._inner, self._read)
        room = torch.empty(tokens * widest * 33 // 32, dtype=torch.int32)
        states = torch.empty(tokens * (self._states + max(self._read, self._inner)), dtype=torch.bfloat16)
        scores = torch.empty(tokens * heads * (shown + 16))
        tensors = out, cosines, sines, at, mask, room, states, scores
        addresses = (tensor.data_ptr() for tensor in tensors)
        self._kernel.distill_step(self._layers, ctypes.byref(step), *addresses)
        return out


class FileEmbedding(torch.nn.Module):
    """Embeddings [V, H] that stay in their file. Rows are read and dequantised when texts need them."""

    def __init__(self, source: FileTensor) -> None:
        super().__init__()
        self._source, self._rows = source, source.blocks()
        self.num_embeddings, self.embedding_dim = source.shape
        # The parameter has no rows. It states the device and the type of a model that has no other tensors.
        self.weight = torch.nn.Parameter(torch.empty(0, self.embedding_dim, dtype=torch.bfloat16), False)

    def __deepcopy__(self, _: Any) -> FileEmbedding:
        return self

    def forward(self, ids: Tensor) -> Tensor:
        import gguf

        rows = np.ascontiguousarray(self._rows[ids.reshape(-1).numpy()]).reshape(ids.numel(), -1)
        values = gguf.quants.dequantize(rows, self._source.kind)
        return torch.from_numpy(values).to(torch.bfloat16).view(*ids.shape, -1)
