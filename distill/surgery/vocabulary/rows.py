"""The number of rows of embeddings and head: padding rows appended or removed, so that a draft has its target's.

vLLM asks for equal vocab_size of target and draft, padding included, and models of one tokenizer may be padded
differently (Qwen2.5: 151,936 and 152,064 rows).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distill.results.cut_results import Change
from distill.surgery.change import size_of


def match_rows(model: Any, rows: int, real: int) -> list[Change]:
    """Give a loaded model `rows` rows, of which the first `real` hold tokens and stay; the change, if there is one.

    Appended rows are copies of the model's last padding row, or the mean of all tokens' rows: engines that do not mask
    padding then give it no more than a common logit, where a zero row would outrank every negative one.
    """
    config = model.config
    present: int = config.vocab_size
    if present == rows:
        return []
    assert real <= min(present, rows), "a token would lose its row"
    before = size_of(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    for layer in (embedding,) if tied else (embedding, head):
        layer.weight = torch.nn.Parameter(_resized(layer.weight.detach(), rows, real), layer.weight.requires_grad)
    if tied:
        head.weight = embedding.weight
    if getattr(head, "bias", None) is not None:
        head.bias = torch.nn.Parameter(_resized(head.bias.detach(), rows, real), head.bias.requires_grad)
    embedding.num_embeddings = head.out_features = rows
    config.vocab_size = model.vocab_size = model.base_model.vocab_size = rows
    return [Change("rows", before, size_of(model), details={"rows": rows, "donor_rows": present, "tokens": real})]


def _resized(weight: Tensor, rows: int, real: int) -> Tensor:
    """The first rows of a weight [R, …], with padding up to `rows`."""
    if rows <= len(weight):
        return weight[:rows].clone()
    padding = weight[-1] if len(weight) > real else weight[:real].float().mean(0).to(weight.dtype)
    return torch.cat([weight, padding.unsqueeze(0).expand(rows - len(weight), *weight.shape[1:])])
