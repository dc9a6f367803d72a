"""Linear layers of models that decode on a CPU, their weights laid out once as oneDNN's kernels read them.

torch's own product reads a weight [out, in] as it lies, and for 2 to 16 tokens that takes two to three times as long as
the weight's bytes take to arrive: a step that verifies five tokens costs two of one. From the layout that oneDNN
chooses, all of them take about as long as one. These are the operators that torch.compile uses where weights are
frozen; without compiling, they are called here.

oneDNN also compiles and keeps a primitive for each number of rows of any other product. Batches of changing size are
therefore filled up with rows of zeros (`filled`), so that hours of work need only a few primitives.
"""

from __future__ import annotations

import copy
from typing import Any

import psutil
import torch
from torch import Tensor

from distill.engines.torch.hugging_face import KeptHead

FEW = 8  # tokens that the layout is chosen for; up to 16 were measured to do well in it
MIN_VALUES = 2**14  # numbers of a weight: for smaller ones, a kernel for each number of tokens takes longer to make
DTYPES = (torch.float32, torch.bfloat16)
SHARE = 0.5  # of the free memory: the most that laid-out weights may take
ROWS = 64  # a number of rows is filled up to a multiple of so many
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # relative to the largest of a product that both make


class PrepackedLinear(torch.nn.Module):
    """x [..., in] · weightᵀ + bias as `torch.nn.functional.linear`, from a weight laid out once; for inference."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # Not a buffer: its layout is opaque, and nothing may save, move or count it.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] of [..., in]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


def works(dtype: torch.dtype) -> bool:
    """Whether this build and processor multiply so, which one product beside torch's own shows."""
    if dtype not in DTYPES or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    numbers = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=numbers).to(dtype)
    x, bias = torch.randn(1, 3, 32, generator=numbers).to(dtype), torch.randn(48, generator=numbers).to(dtype)
    expected = torch.nn.functional.linear(x, weight, bias)
    try:
        product = PrepackedLinear(weight, bias)(x)
    except (AttributeError, RuntimeError):  # a build without these operators; any other fault is one of ours
        return False
    return float((product - expected).abs().max()) <= CLOSE[dtype] * float(expected.abs().max())


def prepacked(model: Any) -> tuple[Any, str]:
    """A copy of a model of transformers that decodes with prepacked layers, and why it has none (then: the model).

    The copy shares everything else, so that `model` itself stays what it was. It holds the weights of the time of this
    call. The reason is empty where the model runs elsewhere than on a CPU, or this build has no such kernels.
    """
    weights = [*model.parameters()]
    kinds = {(weight.device.type, weight.dtype) for weight in weights if weight.dim() > 1}
    if len(kinds) != 1:
        return model, ""
    ((device, dtype),) = kinds
    layers = {name: module for name, module in model.named_modules() if _replaceable(module)}
    if device != "cpu" or not layers or not works(dtype):
        return model, ""
    size = sum(module.weight.numel() * module.weight.element_size() for module in layers.values())
    free = psutil.virtual_memory().available
    if size > SHARE * free:
        return model, (
            f"linear layers are not prepacked: that takes {size / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free"
        )
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*weights, *model.buffers())}
    prepared = copy.deepcopy(model, shared)
    for name, module in layers.items():
        inner = PrepackedLinear(module.weight, getattr(module, "bias", None))
        if isinstance(module, KeptHead):
            prepared.get_submodule(name).product = inner
        else:
            parent, _, own = name.rpartition(".")
            setattr(prepared.get_submodule(parent), own, inner)
    return prepared, ""


def _replaceable(module: Any) -> bool:
    """Plain linear layers only: adapted and quantised ones, and those that others hook into, compute something else."""
    if type(module) not in (torch.nn.Linear, KeptHead) or module._forward_hooks or module._forward_pre_hooks:
        return False
    return bool(module.weight.numel() >= MIN_VALUES)


def filled_count(count: int, tensor: Tensor) -> int:
    """The rows that `count` of them become where this tensor is: on an accelerator as many."""
    return -(-count // ROWS) * ROWS if tensor.device.type == "cpu" else count


def filled(rows: Tensor) -> Tensor:
    """Rows [N, H] with zeros after them, up to `filled_count`."""
    return torch.nn.functional.pad(rows, (0, 0, 0, filled_count(len(rows), rows) - len(rows)))
