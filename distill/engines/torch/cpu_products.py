"""Models that decode on a CPU: their weights laid out once as its kernels read them.

torch's own product reads a weight [out, in] as it lies, and for 2 to 16 tokens that takes two to three times as long as
the weight's bytes take to arrive: a step that verifies five tokens costs two of one. From the layout that oneDNN
chooses, all of them take about as long as one. These are the operators that torch.compile uses where weights are
frozen; without compiling, they are called here.

oneDNN also compiles and keeps a primitive for each number of rows of any other product. Batches of changing size are
therefore filled up with rows of zeros (`filled`), so that hours of work need only a few primitives.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import psutil
import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from distill.engines.torch.kept import KeptHead
from distill.engines.torch.layers import (
    ACTIVATIONS,
    COMBINED,
    Product,
    copy_of,
    hooked,
    in_few_operators,
    is_of_family,
    with_layers,
)
from distill.errors import DataError

FEW = 8  # tokens that the layout is chosen for; up to 16 were measured to do well in it
MIN_VALUES = 2**14  # numbers of a weight: for smaller ones, a kernel for each number of tokens takes longer to make
DTYPES = (torch.float32, torch.bfloat16)
SHARE = 0.5  # of the free memory: the most that laid-out weights may take
ROWS = 64  # a number of rows is filled up to a multiple of so many
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # relative to the largest of a product that both make
GROUP = 32  # numbers of a weight's row that share a scale and a zero in 4 bits
BLOCK = 16  # rows of a weight that the 4-bit kernel takes together

Bits = Literal["int8", "int4"]  # what the weights of a draft may be rounded to

NAMES = {"silu": ("swish", ""), "gelu_pytorch_tanh": ("gelu", "tanh")}  # of ACTIVATIONS in oneDNN, with the variant

# ── Products ──


class PrepackedLinear(torch.nn.Module):
    """x [..., in] · weightᵀ + bias as `torch.nn.functional.linear`, from a weight laid out once; for inference.

    What follows a product is part of it: an activation, or another tensor [..., out] that is added or multiplied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        super().__init__()
        # Not a buffer: its layout is opaque, and nothing may save, move or count it.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW)
        self._bias = None if bias is None else bias.detach()
        name, variant = NAMES[activation] if activation else ("none", "")
        self._after: tuple[str, list[Any], str] = name, [], variant

    def forward(self, x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        """[..., out] of [..., in]."""
        operator = torch.ops.mkldnn._linear_pointwise
        if other is None:
            product: Tensor = operator.default(x, self._weight, self._bias, *self._after)
        else:
            product = operator.binary(x, other, self._weight, self._bias, how)
        return product


class RoundedLinear(torch.nn.Module):
    """`PrepackedLinear` from a weight rounded to 8 bits a row, or to 4 bits with a scale and a zero for each GROUP.

    Its kernels read a quarter to a half of the bytes, in rows of a multiple of GROUP numbers.
    """

    def __init__(self, bits: Bits, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> None:
        super().__init__()
        self.rows, columns = weight.shape
        assert columns % GROUP == 0, columns  # other widths are read beyond their end
        exact = pad(weight.detach().float(), (0, 0, 0, -self.rows % BLOCK))
        if bits == "int8":
            scale = exact.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
            held = (exact / scale[:, None]).round().to(torch.int8), scale.to(weight.dtype)
        else:
            groups = exact.unflatten(1, (-1, GROUP))
            low, high = groups.aminmax(dim=-1)
            scale = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
            levels = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).int().flatten(1)
            both = torch.stack((scale, low + 8 * scale), -1).transpose(0, 1).contiguous()  # level 8 stands for the zero
            held = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1), both.to(weight.dtype)
        self._bits, (self._weight, self._scales) = bits, held
        self._bias = None if bias is None else bias.detach()
        self._activation = ACTIVATIONS[activation] if activation else None

    def forward(self, x: Tensor, other: Tensor | None = None, how: str = "add") -> Tensor:
        """[..., out] of [..., in]."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if self._bits == "int8":
            product = torch._weight_int8pack_mm(flat, self._weight, self._scales)
        else:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self._weight, GROUP, self._scales)
        product = product[:, : self.rows].reshape(*x.shape[:-1], self.rows)
        if self._bias is not None:
            product = product + self._bias
        if self._activation is not None:
            product = self._activation(product)
        return product if other is None else COMBINED[how](product, other)


def works(dtype: torch.dtype, product: Product = PrepackedLinear) -> bool:
    """Whether this build and processor multiply so, which one product beside torch's own shows."""
    if dtype not in DTYPES or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    numbers = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=numbers).to(dtype)
    x, bias = torch.randn(1, 3, 32, generator=numbers).to(dtype), torch.randn(48, generator=numbers).to(dtype)
    expected = linear(x, weight, bias)
    try:
        found = product(weight, bias)(x)
    except (AttributeError, RuntimeError):  # a build without these operators; any other fault is one of ours
        return False
    # Half a level of 15 in a range of about four deviations is 4 % of a weight: a tenth of the largest product.
    allowed = CLOSE[dtype] if product is PrepackedLinear else 0.2
    return float((found - expected).abs().max()) <= allowed * float(expected.abs().max())


# ── Models ──


def prepacked(model: Any) -> tuple[Any, str]:
    """A copy of a model of transformers that decodes with prepacked layers, and why it has none (then: the model).

    The copy shares everything else, so that `model` itself stays what it was. It holds the weights of the time of this
    call. The reason is empty where this build has no such kernels, and elsewhere than on a CPU, where nothing is
    packed, but the layers are computed in few operators.
    """
    dtype, layers = _layers_on_cpu(model)
    if dtype is None:
        return in_few_operators(model), ""
    if not layers or not works(dtype):
        return model, ""
    size = sum(module.weight.numel() * module.weight.element_size() for module in layers.values())
    free = psutil.virtual_memory().available
    if size > SHARE * free:
        return model, (
            f"linear layers are not prepacked: that takes {size / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free"
        )
    return _with_products(model, layers, PrepackedLinear), ""


def rounded(model: Any, bits: Bits, name: str) -> Any:
    """A copy of a draft as of `prepacked`, with the weights of its linear layers rounded to `bits`.

    DataError where it cannot be: elsewhere than on a CPU, in a build or a type without such kernels, for weights whose
    rows they do not take, and for a model without plain linear layers.
    """
    dtype, layers = _layers_on_cpu(model)
    product = functools.partial(RoundedLinear, bits)
    widths = [module.weight.shape[1] for module in layers.values() if module.weight.shape[1] % GROUP]
    if dtype is None:
        reason = "its weights are not all of one type and on a CPU"
    elif not layers:
        reason = "it has no linear layers of plain numbers"
    elif widths:
        reason = f"torch's kernels take rows of a multiple of {GROUP} numbers, and some of its have {widths[0]}"
    elif not works(dtype, product):
        reason = (
            f"this build of torch does not multiply {str(dtype).removeprefix('torch.')} by {bits} on this processor"
        )
    else:
        return _with_products(model, layers, product)
    raise DataError(f"{name}: draft_weights {bits} is not possible: {reason}", "leave draft_weights out")


def _layers_on_cpu(model: Any) -> tuple[torch.dtype | None, dict[str, Any]]:
    """The type of a model's weights (None: several, or elsewhere than on a CPU) and its plain linear layers."""
    kinds = {(weight.device.type, weight.dtype) for weight in model.parameters() if weight.dim() > 1}
    ((device, dtype),) = kinds if len(kinds) == 1 else [("several", None)]
    if device != "cpu":
        return None, {}
    return dtype, {name: module for name, module in model.named_modules() if _replaceable(module)}


def _replaceable(module: Any) -> bool:
    """Plain linear layers only: adapted and quantised ones, and those that others hook into, compute something else."""
    if type(module) not in (torch.nn.Linear, KeptHead) or hooked(module):
        return False
    return bool(module.weight.numel() >= MIN_VALUES)


def _with_products(model: Any, layers: dict[str, Any], product: Product) -> Any:
    """A copy of a model whose linear `layers`, by name, multiply by `product`; it shares all other tensors."""
    few, prepared = is_of_family(model, layers), copy_of(model)
    for name, module in layers.items():
        if few and name.startswith("model.layers."):
            continue
        inner = product(module.weight, getattr(module, "bias", None))
        if isinstance(module, KeptHead):
            prepared.get_submodule(name).product = inner
        else:
            prepared.set_submodule(name, inner)
    return with_layers(prepared, model, product) if few else prepared


# ── Batches of changing size ──


def filled_count(count: int, tensor: Tensor) -> int:
    """The rows that `count` of them become where this tensor is: on an accelerator as many."""
    return -(-count // ROWS) * ROWS if tensor.device.type == "cpu" else count


def filled(rows: Tensor) -> Tensor:
    """Rows [N, H] with zeros after them, up to `filled_count`."""
    return pad(rows, (0, 0, 0, filled_count(len(rows), rows) - len(rows)))
