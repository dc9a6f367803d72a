"""A model decoded from a GGUF file without a folder of weights: in the file's bits, or dequantised to float32 in parts.

Legend: B texts, m positions, R rows of a matrix, C columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.devices import CPU
from distill.engines.torch.hugging_face import load_config, load_model, quiet
from distill.engines.torch.products.kernel import FORMS, NoKernel
from distill.engines.torch.products.linear import FourBitLinear, has_four_bits
from distill.engines.torch.products.packed import (
    FileEmbedding,
    PackedLinear,
    PackedWeight,
    file_levels,
    kernel_fault,
    require_kernel,
)
from distill.gguf.fields import configuration
from distill.gguf.head import open_head
from distill.gguf.importing import FileTensor, rotary_factors, sources
from distill.progress import Progress, note, warn

FOUR_BITS = {"Q4_0": 8, "Q4_1": 0, "Q4_K": 0}  # types of torch's 4-bit operator, with the level that stands for zero


def load_in_bits(reference: str, device: torch.device) -> Any:
    """Load a GGUF file's model in the file's bits: by the kernel, by torch's 4-bit operator, or in bfloat16.

    If the kernel is not used, a line on stderr states the reason. DataError for a file that cannot be imported.
    """
    fault = kernel_fault() if device.type == CPU else f"the kernel is for CPUs, and this is {device}"
    if not fault:
        try:
            return load_packed(reference)
        except NoKernel as error:
            fault = error.what
    try:
        model = load_packed(reference, device)
    except NoKernel as error:
        warn(f"{reference} is decoded in bfloat16, not in its own bits: {fault}; {error.what}")
        return load_model(reference, "bfloat16", device)
    note(f"{reference} is decoded in its own bits by torch's operators: {fault}")
    return model


def load_packed(reference: str, device: torch.device | None = None) -> Any:
    """Load a causal language model of transformers with the weights of a GGUF file in the file's bits, in bfloat16.

    Without a `device`, the kernel multiplies. With a `device`, torch's operator multiplies there, in 4 bits only.
    Tensors of other types become bfloat16, and a line on stderr names the types. Raises NoKernel if no tensor can be
    multiplied in its bits, and DataError for a file that cannot be imported.
    """
    if device is None:
        require_kernel()
    elif not has_four_bits(device):
        raise NoKernel(f"torch has no operator for 4 bits on {device}")
    kinds = FORMS if device is None else FOUR_BITS
    model, tensors = _without_weights(reference, torch.bfloat16)
    places = dict(model.named_modules())

    def values(source: FileTensor) -> Tensor:
        parts = [torch.from_numpy(part).to(device or CPU, torch.bfloat16) for part in source.parts()]
        return torch.cat(parts).view(source.shape)

    def fill(name: str) -> None:
        source, (place, _, attribute) = tensors[name], name.rpartition(".")
        embeds = attribute == "weight" and type(places[place]) is torch.nn.Embedding
        if name in packed:
            bias = tensors.get(f"{place}.bias")
            shift = None if bias is None else values(bias)
            if device is None:
                model.set_submodule(place, PackedLinear(PackedWeight.read(source), shift))
            else:
                model.set_submodule(place, four_bit_linear(source, shift, device))
        elif device is None and embeds and source.kind.name in FORMS:
            model.set_submodule(place, FileEmbedding(source))
        else:
            setattr(places[place], attribute, torch.nn.Parameter(values(source), requires_grad=False))
        progress.step()

    packed = [name for name, source in tensors.items() if source.kind.name in kinds and _is_linear(places, name)]
    if not packed:
        raise NoKernel(f"there are kernels for {', '.join(kinds)}, and none of its weights has such a type")
    progress = Progress("tensors", len(tensors), brief=True)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, tensors))
    dense = [source for source in tensors.values() if len(source.shape) > 1 and source.kind.name not in kinds]
    if dense:
        matrices = [source.values for source in tensors.values() if len(source.shape) > 1]
        share, others = sum(source.values for source in dense) / sum(matrices), {source.kind.name for source in dense}
        warn(
            f"{reference}: {share:.0%} of the weights ({', '.join(sorted(others))}) have no kernel in the file's bits "
            "and are bfloat16"
        )
    if device is not None:
        if tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"] and "lm_head.weight" not in packed:
            model.lm_head.weight = model.get_input_embeddings().weight
        model.to(device)
    return model.eval()


def four_bit_linear(source: FileTensor, bias: Tensor | None, device: torch.device) -> FourBitLinear:
    """Return the product of a tensor of FOUR_BITS by torch's operator. Scales and zeros are rounded to bfloat16."""
    levels = file_levels(source, source.blocks())

    def whole(scale: NDArray[Any] | None, byte: NDArray[Any] | None) -> Tensor:
        if scale is None:
            return torch.zeros(())
        values = scale.astype(np.float32)
        return torch.from_numpy(values if byte is None else values.repeat(8, 1) * byte)

    scale = whole(levels.scale, levels.scale_byte)
    zero = whole(levels.zero, levels.zero_byte) + (8 - FOUR_BITS[source.kind.name]) * scale
    numbers = torch.from_numpy(np.ascontiguousarray(levels.numbers))
    return FourBitLinear(numbers.to(device), scale.bfloat16().to(device), zero.bfloat16().to(device), bias)


class _FileLinear(torch.nn.Module):
    """x [..., C] · weightᵀ + bias in float32. The weight stays in its file and is dequantised in parts."""

    def __init__(self, source: FileTensor, bias: Tensor | None, step: Callable[[], object]) -> None:
        super().__init__()
        self._source, self._bias, self._step = source, bias, step

    def forward(self, x: Tensor) -> Tensor:
        product = torch.cat([x @ torch.from_numpy(part).T for part in self._source.parts()], -1)
        self._step()
        return product if self._bias is None else product + self._bias


@torch.inference_mode()
def exact_logits(reference: str, ids: Tensor) -> Tensor:
    """Return a GGUF file's logits [B, m, V] in float32 after each token of `ids` [B, m].

    Other ways to decode the file are compared with these logits. Shorter texts are filled up at their ends. The memory
    of one layer is enough. DataError for a file that cannot be imported.
    """
    model, tensors = _without_weights(reference, torch.float32)
    places = dict(model.named_modules())
    linear = [name for name in tensors if type(places[name.rpartition(".")[0]]) is torch.nn.Linear]
    progress = Progress("the file in float32", sum(name.endswith(".weight") for name in linear), brief=True)

    def values(name: str) -> Tensor:
        return torch.cat([torch.from_numpy(part) for part in tensors[name].parts()]).view(tensors[name].shape)

    for name, source in tensors.items():
        place, _, attribute = name.rpartition(".")
        if name not in linear:
            setattr(places[place], attribute, torch.nn.Parameter(values(name), requires_grad=False))
        elif attribute == "weight":
            bias = values(f"{place}.bias") if f"{place}.bias" in tensors else None
            model.set_submodule(place, _FileLinear(source, bias, progress.step))
    logits: Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return logits


def _without_weights(reference: str, dtype: torch.dtype) -> tuple[Any, dict[str, FileTensor]]:
    """Return a GGUF file's model without weights, and the file's tensors by their Hugging Face names, the head too."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config, head = load_config(reference), open_head(Path(reference))
    tensors = sources(head, configuration(head, rotary_factors(head)))
    with init_empty_weights(), quiet():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config._name_or_path = reference
    return model, {"lm_head.weight": tensors["model.embed_tokens.weight"]} | tensors


def _is_linear(places: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor is the weight of a plain linear layer."""
    place, _, attribute = name.rpartition(".")
    return attribute == "weight" and type(places[place]) is torch.nn.Linear
