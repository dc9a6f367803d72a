"""Models whose linear layers multiply by the fastest products of this machine."""

from __future__ import annotations

import functools
from typing import Any

import psutil
import torch
from torch import Tensor

from distill.devices import CPU
from distill.engines.torch.hugging_face import KeptHead
from distill.engines.torch.model import model_name
from distill.engines.torch.products.layers import copy_of, hooked, is_of_family, with_layers
from distill.engines.torch.products.linear import (
    GROUP,
    Bits,
    MakeProduct,
    PlainLinear,
    PrepackedLinear,
    rounded_linear,
    works,
)
from distill.engines.torch.products.packed import PackedLinear, PackedWeight, kernel_fault
from distill.engines.torch.products.shortlist import MIN_VOCABULARY, ShortlistHead, own_states
from distill.errors import DataError
from distill.progress import warn

MIN_VALUES = 2**14  # numbers of a weight. For smaller weights, making a primitive for each row count takes longer.
MEMORY_SHARE = 0.5  # of the free memory, which prepacked weights may take


def pack(model: Any, bits: Bits | None = None) -> Any:
    """Return a copy of a model of transformers with the fastest products, or the model if there are none.

    The copy shares all other tensors with the model, and holds the weights of the time of this call. The kernel is
    compiled, tried and compared with known values before it is used. If that fails, torch's operators are used.

    - Without `bits`, dense weights on a CPU get oneDNN's layout, and weights of a file's bits keep the kernel's. If
      memory is short, the model stays as it is, and a line on stderr says so. On an accelerator, only the operators
      around the products become fewer.
    - With `bits`, the linear layers of a draft on a CPU are rounded. The kernel multiplies in bfloat16, and also
      shortens a head over a large vocabulary. torch's operators multiply in other types. DataError if a model cannot be
      rounded (`_rounding_refusal`).
    """
    dtype, layers = _layers_on_cpu(model)
    if bits is not None:
        if reason := _rounding_refusal(dtype, layers, bits):
            what = f"{model_name(model)}: draft_weights {bits} is not possible: {reason}"
            raise DataError(what, "leave draft_weights out")
        if dtype == torch.bfloat16 and not kernel_fault():
            return _rounded_by_kernel(model, layers, bits)
        return _with_products(model, layers, functools.partial(rounded_linear, bits))
    if dtype is None:
        return _in_few_operators(model)
    dense = [module.weight for module in layers.values() if isinstance(module.weight, Tensor)]
    if not layers or (dense and not works(dtype)):
        return model
    size = sum(weight.numel() * weight.element_size() for weight in dense)
    free = psutil.virtual_memory().available
    if size > MEMORY_SHARE * free:
        warn(
            f"{model_name(model)}: linear layers are not prepacked, because that takes {size / 1e9:.1f} GB more, and "
            f"{free / 1e9:.1f} GB are free"
        )
        return model
    return _with_products(model, layers, _fastest)


def _fastest(weight: Any, bias: Tensor | None, activation: str | None = None) -> torch.nn.Module:
    """Return the product of a weight in memory, or of one in the kernel's layout."""
    kind = PackedLinear if isinstance(weight, PackedWeight) else PrepackedLinear
    return kind(weight, bias, activation)


def _in_few_operators(model: Any) -> Any:
    """Return a copy of a model on an accelerator whose layers are computed in few operators, if they can be."""
    layers = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    kinds = {(weight.device, weight.dtype) for weight in model.parameters() if weight.dim() > 1}
    few = len(kinds) == 1 and is_of_family(model, layers)
    return with_layers(copy_of(model), model, PlainLinear) if few else model


def _rounded_by_kernel(model: Any, layers: dict[str, Any], bits: Bits) -> Any:
    """Return a copy of a draft whose linear `layers` are rounded to the kernel's layout, and a large head shortened."""
    rounded, short, head = copy_of(model), None, layers.get("lm_head")
    known = is_of_family(model, layers) and getattr(head, "cap", None) is None
    if known and head is not None and len(head.weight) >= MIN_VOCABULARY:
        short = ShortlistHead(head.weight, getattr(head, "bias", None), own_states(model))
    for place, module in layers.items():
        own = rounded.get_submodule(place)
        if module is head and short is not None and not isinstance(own, KeptHead):
            rounded.lm_head = short
            continue
        weight = PackedWeight.rounded(module.weight, 8 if bits == "int8" else 4)
        if isinstance(own, KeptHead):
            del own.weight  # It is one of the tensors that a module saves and moves.
            own.weight = weight
        else:
            rounded.set_submodule(place, PackedLinear(weight, module.bias))
    rounded = pack(rounded)
    if short is not None and isinstance(head, KeptHead):
        rounded.lm_head.product = short
    return rounded


def _rounding_refusal(dtype: torch.dtype | None, layers: dict[str, Any], bits: Bits) -> str:
    """Return the reason why the linear layers of a model cannot be rounded; empty if they can.

    `dtype` and `layers` are those of `_layers_on_cpu`.
    """
    if dtype is None:
        return "its weights are not all of one type and on a CPU"
    if not layers:
        return "it has no linear layers of plain numbers"
    if widths := [module.weight.shape[1] for module in layers.values() if module.weight.shape[1] % GROUP]:
        return f"torch's kernels take rows of a multiple of {GROUP} numbers, and some of its have {widths[0]}"
    if works(dtype, functools.partial(rounded_linear, bits)):
        return ""
    return f"this build of torch does not multiply {str(dtype).removeprefix('torch.')} by {bits} on this processor"


def _layers_on_cpu(model: Any) -> tuple[torch.dtype | None, dict[str, Any]]:
    """Return the type of a model's weights and its plain linear layers by name.

    The type is None if the weights have several types, or do not all lie on a CPU.
    """
    kinds = {(weight.device.type, weight.dtype) for weight in model.parameters() if weight.dim() > 1}
    ((device, dtype),) = kinds if len(kinds) == 1 else [("several", None)]
    if device != CPU:
        return None, {}
    return dtype, {name: module for name, module in model.named_modules() if _replaceable(module)}


def _replaceable(module: Any) -> bool:
    """Whether a module is a plain linear layer. Adapted, quantised and hooked layers compute something else."""
    plain = type(module) in (torch.nn.Linear, KeptHead, PackedLinear) and not hooked(module)
    return plain and module.weight.shape.numel() >= MIN_VALUES


def _with_products(model: Any, layers: dict[str, Any], product: MakeProduct) -> Any:
    """Return a copy of a model whose linear `layers`, by name, multiply by `product`. Other tensors are shared."""
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
