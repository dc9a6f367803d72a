"""From logits to the law that is sampled. The same object serves answers, losses, evaluation and verification.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distill.recipe import SamplerSettings


@dataclass(frozen=True)
class Sampler:
    """Temperature, then top-k, top-p and min-p, in that order; 0, 0, 1 and 0 switch them off.

    Temperature 0 is greedy: all mass on the first largest logit, the others have no say.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, settings: SamplerSettings) -> Sampler:
        """The sampler that a recipe's section describes."""
        return cls(settings.temperature, settings.top_k, settings.top_p, settings.min_p)

    def law(self, logits: Tensor) -> Tensor:
        """Probabilities [N, V] in fp32 (fp64 if the logits are) of the next token, from logits [N, V]."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            # Ties with the k-th are kept, so that the law does not depend on the order of equal logits.
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -math.inf)
        if self.top_p < 1:
            values, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
            # A token stays while the mass before it is still below top_p; the first one always stays.
            dropped = values.cumsum(-1) - values >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -math.inf)
        if self.min_p > 0:
            floor = logits.max(-1, keepdim=True).values + math.log(self.min_p)
            logits = logits.masked_fill(logits < floor, -math.inf)
        return logits.softmax(-1)

    def describe(self) -> dict[str, float]:
        """The settings, for tables and manifests."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
