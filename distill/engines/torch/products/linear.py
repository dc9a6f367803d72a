"""Linear layers for inference: torch's own product, oneDNN's prepacked product, and weights rounded to 8 or 4 bits.

On a CPU, torch's own product reads a weight [R, C] in its stored layout. For 2 to 16 tokens, the product then takes two
to three times as long as reading the weight from memory. In the layout that oneDNN chooses, 1 to 16 tokens take about
the same time. torch.compile uses the same operators for frozen weights.

oneDNN also compiles and keeps a primitive for each number of rows of any other product. `filled` pads batches of
changing size with rows of zeros, so that hours of work need only a few primitives.

Legend: R rows of a weight, C columns, n tokens, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, pad, rms_norm, silu

from distill.devices import CPU

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": functools.partial(gelu, approximate="tanh"),
}
COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "mul": torch.mul}
ONEDNN_NAMES = {"silu": ("swish", ""), "gelu_pytorch_tanh": ("gelu", "tanh")}  # with oneDNN's variant of an activation
LAYOUT_TOKENS = 8  # The prepacked layout is chosen for this many tokens. It also measured well up to 16.
DTYPES = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # allowed differences relative to the largest value of a product
CLOSE_ROUNDED = 0.2  # Half a level of 15 over four deviations is 4 % of a weight, a tenth of the largest product.
GROUP = 32  # columns that share a scale and a zero in 4 bits
BLOCK = 16  # rows that the 4-bit operator takes together
FILLED_ROWS = 64  # Row counts are filled up to a multiple of this.

Bits = Literal["int8", "int4"]  # types to which the weights of a draft may be rounded


class Product(torch.nn.Module):
    """A linear layer followed by an activation, or by the addition or multiplication of another tensor [..., R]."""

    def __init__(self, activation: str | None) -> None:
        super().__init__()
        self._activation = ACTIVATIONS[activation] if activation else None

    def combined(self, product: Tensor, other: Tensor | None, how: str) -> Tensor:
        """Return the result [..., R] for a product [..., R]."""
        if self._activation is not None:
            product = self._activation(product)
        return product if other is None else COMBINED[how](product, other)


MakeProduct = Callable[..., Any]  # from a weight [R, C], its bias [R] or None, and the name of an activation or None


class PlainLinear(Product):
    """x [..., C] · weightᵀ + bias by torch's own product. The weight is shared with the model."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        super().__init__(activation)
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()

    def forward(self, x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        return self.combined(linear(x, self._weight, self._bias), other, how)


class PrepackedLinear(torch.nn.Module):
    """x [..., C] · weightᵀ + bias by oneDNN, from a weight that is laid out once. For inference only.

    The activation, or the addition or multiplication of another tensor [..., R], is part of the operator.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        super().__init__()
        # The layout is opaque, so that the weight must not be saved, moved or counted as a buffer.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LAYOUT_TOKENS)
        self._bias = None if bias is None else bias.detach()
        name, variant = ONEDNN_NAMES[activation] if activation else ("none", "")
        self._epilogue: tuple[str, list[Any], str] = name, [], variant

    def forward(self, x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        operator = torch.ops.mkldnn._linear_pointwise
        if other is None:
            product: Tensor = operator.default(x, self._weight, self._bias, *self._epilogue)
        else:
            product = operator.binary(x, other, self._weight, self._bias, how)
        return product


class FourBitLinear(Product):
    """x [..., C] · weightᵀ + bias by torch's 4-bit operator. For inference only.

    The values of the weight are (level − 8) · scale + zero. Levels [R, C] are bytes from 0 to 15. Scales and zeros
    [R, C / GROUP] have the type of the product, which is bfloat16 on an accelerator. C is a multiple of GROUP.
    """

    def __init__(
        self, levels: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> None:
        super().__init__(activation)
        (self.out_features, self.in_features), self.bias = levels.shape, bias
        assert self.in_features % GROUP == 0, self.in_features  # The operator reads beyond the end of other rows.
        levels, scale, zero = (pad(part, (0, 0, 0, -len(part) % BLOCK)) for part in (levels, scale, zero))
        self._scales = torch.stack((scale, zero), -1).transpose(0, 1).contiguous()
        operators = torch.ops.aten
        self._operator = operators._weight_int4pack_mm_for_cpu
        if levels.device.type == CPU:
            self._weight = operators._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
        else:
            self._operator = operators._weight_int4pack_mm
            tiles = max(tiles for tiles in (2, 4, 8) if levels.shape[1] % (16 * tiles) == 0)  # of 16 columns
            self._weight = operators._convert_weight_to_int4pack(levels[:, ::2] << 4 | levels[:, 1::2], tiles)

    def forward(self, x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        flat = x.reshape(-1, self.in_features).contiguous()
        product = self._operator(flat, self._weight, GROUP, self._scales)
        product = product[:, : self.out_features].reshape(*x.shape[:-1], -1)
        return self.combined(product if self.bias is None else product + self.bias, other, how)


class EightBitLinear(Product):
    """x [..., C] · weightᵀ + bias by torch's 8-bit operator, from rows that are rounded to levels −127 to 127."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        super().__init__(activation)
        self._rows, self._bias = len(weight), None if bias is None else bias.detach()
        assert weight.shape[1] % GROUP == 0, weight.shape  # The operator reads beyond the end of other rows.
        exact = pad(weight.detach().float(), (0, 0, 0, -len(weight) % BLOCK))
        self._scales = (exact.abs().amax(1) / 127).to(weight.dtype)
        self._weight = (exact / _divisor(self._scales)).round().clamp(-127, 127).to(torch.int8)

    def forward(self, x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        product = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]).contiguous(), self._weight, self._scales)
        product = product[:, : self._rows].reshape(*x.shape[:-1], self._rows)
        return self.combined(product if self._bias is None else product + self._bias, other, how)


def rounded_linear(bits: Bits, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Product:
    """Return the linear layer of a weight [R, C] rounded to 8 bits a row, or to 4 bits a group of GROUP columns.

    Its operator reads a quarter to a half of the bytes of the weight.
    """
    if bits == "int8":
        return EightBitLinear(weight, bias, activation)
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / 15).to(weight.dtype)
    zero = (low + 8 * scale.float()).to(weight.dtype)
    levels = ((groups - zero.float()[..., None]) / _divisor(scale) + 8).round().clamp(0, 15).byte().flatten(1)
    return FourBitLinear(levels, scale, zero, None if bias is None else bias.detach(), activation)


def _divisor(scale: Tensor) -> Tensor:
    """Return scales [...] as fp32 [..., 1], with 1 instead of 0. The same rounded scales multiply the levels later."""
    return torch.where(scale > 0, scale.float(), 1.0)[..., None]


def works(dtype: torch.dtype, product: MakeProduct = PrepackedLinear, device: str | torch.device = CPU) -> bool:
    """Whether a kind of product is correct in a type on a device. One small product is compared with torch's own."""
    onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if dtype not in DTYPES or (torch.device(device).type == CPU and not onednn):
        return False
    numbers = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 2 * GROUP, generator=numbers).to(device, dtype) for rows in (48, 3))
    bias = torch.randn(48, generator=numbers).to(device, dtype)
    expected = linear(x, weight, bias)
    try:
        actual = product(weight, bias)(x)
    except (AttributeError, RuntimeError):  # A build without these operators raises these. Other errors are bugs.
        return False
    allowed = CLOSE[dtype] if product is PrepackedLinear else CLOSE_ROUNDED
    return float((actual - expected).abs().max()) <= allowed * float(expected.abs().max())


@functools.cache
def has_four_bits(device: torch.device) -> bool:
    """Whether `FourBitLinear` works in bfloat16 on a device."""
    return works(torch.bfloat16, functools.partial(rounded_linear, "int4"), device)


class Norm(torch.nn.Module):
    """A root-mean-square norm in one operator, for which transformers launches six to eight.

    torch has no such operator for CPUs. There, the layer norm of x and −x together is used: their mean is 0, and their
    variance is the mean square of x.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        shifted = type(norm).__name__.startswith("Gemma")  # Gemma multiplies by 1 + w.
        self.epsilon, self.width = getattr(norm, "variance_epsilon", None) or norm.eps, len(norm.weight)
        self._of_torch = norm.weight.device.type != CPU
        weight = norm.weight.detach()
        if shifted or not self._of_torch:  # 1 + w needs more digits than w.
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + (1 if shifted else 0)
        self.weight = weight  # the factor of the normed x
        self._weight = weight if self._of_torch else torch.cat((weight, torch.zeros_like(weight)))

    def forward(self, x: Tensor) -> Tensor:
        if self._of_torch:
            return rms_norm(x.to(self._weight.dtype), (self.width,), self._weight, self.epsilon).to(x.dtype)
        both = layer_norm(torch.cat((x, -x), -1), (2 * self.width,), self._weight, None, self.epsilon)
        return both[..., : self.width]


# ── Batches of changing size ──


def filled_count(count: int, tensor: Tensor) -> int:
    """Return the number of rows after filling up. Accelerators keep `count`."""
    return -(-count // FILLED_ROWS) * FILLED_ROWS if tensor.device.type == CPU else count


def filled(rows: Tensor) -> Tensor:
    """Return rows [n, H] followed by rows of zeros, `filled_count` rows in all."""
    return pad(rows, (0, 0, 0, filled_count(len(rows), rows) - len(rows)))
