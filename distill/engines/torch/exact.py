"""A GGUF file read in float32: its matrices are dequantised as a pass needs them, a part of one at a time, so that no
folder is written and the memory of a layer is enough. What other ways to decode the file are compared with.

Legend: B texts, S positions, R rows of a matrix, C columns, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from distill.engines.torch.hugging_face import load_config, quiet
from distill.gguf.fields import configuration
from distill.gguf.head import open_head
from distill.gguf.importing import FileTensor, rotary_factors, sources
from distill.progress import Progress


class _FileLinear(torch.nn.Module):
    """x [..., C] · weightᵀ + bias in float32 with a weight that stays in its file."""

    def __init__(self, source: FileTensor, bias: Tensor | None, progress: Progress) -> None:
        super().__init__()
        self._source, self._bias, self._progress = source, bias, progress

    def forward(self, x: Tensor) -> Tensor:
        """[..., R] of [..., C]."""
        product = torch.cat([x @ torch.from_numpy(part).T for part in self._source.parts()], -1)
        self._progress.step()
        return product if self._bias is None else product + self._bias


@torch.inference_mode()
def exact_logits(reference: str, ids: Tensor) -> Tensor:
    """Logits [B, S, V] of a GGUF file's model in float32, after each token of `ids` [B, S]; texts of fewer tokens are
    filled at their end. DataError for a file that cannot be imported."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config, head = load_config(reference), open_head(Path(reference))
    tensors = sources(head, configuration(head, rotary_factors(head)))
    tensors = {"lm_head.weight": tensors["model.embed_tokens.weight"]} | tensors
    with init_empty_weights(), quiet():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    places = dict(model.named_modules())
    linear = [name for name in tensors if type(places[name.rpartition(".")[0]]) is torch.nn.Linear]
    progress = Progress("the file in float32", sum(name.endswith(".weight") for name in linear), brief=True)

    def values(name: str) -> Tensor:
        return torch.cat([torch.from_numpy(part) for part in tensors[name].parts()]).view(tensors[name].shape)

    for name, source in tensors.items():
        place, _, own = name.rpartition(".")
        if name not in linear:
            setattr(places[place], own, torch.nn.Parameter(values(name), requires_grad=False))
        elif own == "weight":
            bias = values(f"{place}.bias") if f"{place}.bias" in tensors else None
            model.set_submodule(place, _FileLinear(source, bias, progress))
    logits: Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return logits
