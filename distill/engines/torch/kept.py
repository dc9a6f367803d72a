"""Trimmed heads: a draft proposes only the kept tokens; its folder still holds the full head.

`kept_tokens.json` beside the weights lists the kept ids. Our loader computes only their logits and gives the others
−inf; plain transformers and llama.cpp ignore the file and use the full head. Legend: V vocabulary, K kept tokens, H
hidden.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError
from distill.files import has_form, read_object, write_json

FILE = "kept_tokens.json"
CAP = "final_logit_softcapping"


def write_kept(folder: Path, kept: list[int], vocabulary: int, metadata: dict[str, Any]) -> None:
    """Write kept_tokens.json: `kept` ids, ascending, of `vocabulary` rows; `metadata` records how they were chosen."""
    write_json(folder / FILE, {"format": 1, "vocabulary": vocabulary, "kept": kept, **metadata})


def read_kept(folder: Path) -> dict[str, Any] | None:
    """kept_tokens.json of a model folder, None where there is none; raises DataError when it is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    hint = f"delete it to use the full head, or trim {folder} again"
    content = read_object(path, hint)
    if not has_form(content, {"kept": [int], "vocabulary": int}):
        raise DataError(f"{path} is damaged: `kept` must be a list of ids, `vocabulary` a number", hint)
    kept, size = content["kept"], content["vocabulary"]
    if not kept or not all(a < b for a, b in itertools.pairwise(kept)) or kept[0] < 0 or kept[-1] >= size:
        raise DataError(f"{path} is damaged: the kept ids are not ascending ids of the vocabulary", hint)
    return content


class KeptHead(torch.nn.Module):
    """A head that multiplies only the kept rows [K, H] and spreads the result over V columns, −inf elsewhere."""

    kept: Tensor
    weight: Tensor

    def __init__(self, head: torch.nn.Linear, kept: Tensor, cap: float | None = None) -> None:
        super().__init__()
        self.cap = cap  # of the logits, which would make −inf a number if it were applied behind this head
        self.rows = head.weight.shape[0]
        self.product: torch.nn.Module | None = None  # what multiplies instead of torch's own product
        self.register_buffer("kept", kept.to(head.weight.device), persistent=False)
        self.register_buffer("weight", head.weight.detach()[kept.to(head.weight.device)].clone(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H]."""
        if self.product is not None:
            kept_logits = self.product(hidden)
        else:
            kept_logits = torch.nn.functional.linear(hidden, self.weight)
        if self.cap is not None:
            kept_logits = self.cap * torch.tanh(kept_logits / self.cap)
        logits = kept_logits.new_full((*kept_logits.shape[:-1], self.rows), -torch.inf)
        return logits.index_copy_(-1, self.kept, kept_logits)


def trim_head(model: Any, kept: Sequence[int]) -> Any:
    """Let a loaded model compute only the kept tokens' logits; for inference, since such a model cannot be saved."""
    rows = model.lm_head.weight.shape[0]
    if kept[-1] >= rows:
        raise DataError(f"{FILE} keeps token {kept[-1]}, the head has {rows} rows", "trim this folder again")
    cap = getattr(model.config, CAP, None)
    model.lm_head = KeptHead(model.lm_head, torch.tensor(kept), cap)
    if cap is not None:
        setattr(model.config, CAP, None)
    return model


@contextlib.contextmanager
def trimmed_head(model: Any, kept: Sequence[int]) -> Iterator[Any]:
    """Within the block, the model with its head trimmed as by `trim_head`."""
    head, cap = model.lm_head, getattr(model.config, CAP, None)
    try:
        yield trim_head(model, kept)
    finally:
        model.lm_head = head
        if cap is not None:
            setattr(model.config, CAP, cap)
