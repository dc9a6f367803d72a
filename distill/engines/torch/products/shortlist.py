"""The head of a rounded draft over a large vocabulary: exact logits for the likeliest tokens, −∞ for all others.

Rough logits of all tokens select the likeliest. A rough logit is the product of two factors of rank r, a fifth of the
numbers of a hidden state (low-rank heads alone: SlimSpec, arXiv 2605.10453). The factors fit the logits best on hidden
states of texts that the draft writes. The verifier stays exact, because a draft may propose from any distribution that
it states.

Legend: V vocabulary, H hidden, r rank, n hidden states, K tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from distill.engines.torch.products.kernel import library, require_read
from distill.engines.torch.products.packed import PackedLinear, PackedWeight
from distill.sampler import largest

MIN_VOCABULARY = 2**16  # The whole head of a smaller vocabulary is as fast.
TOKENS = 512  # K
TEXTS, TEXT_TOKENS = 16, 16  # texts that the draft writes, and their length
DRAWN_FROM = 64  # Each token of these texts is drawn from this many of the likeliest.
RIDGE = 0.1  # of the mean square of a hidden state's numbers
WEIGHED_ROWS = 2**14  # rows of the head that weigh the errors of the factors


class ShortlistHead(torch.nn.Module):
    """x [..., H] · weightᵀ + bias [..., V] in bfloat16 for about K tokens of each row, −∞ for the others."""

    def __init__(self, weight: Tensor, bias: Tensor | None, states: Tensor) -> None:
        super().__init__()
        self._weight, self._bias = weight.detach().contiguous(), None if bias is None else bias.detach().contiguous()
        if weight.shape[1] % 32:
            raise ValueError(f"the kernel takes rows of a multiple of 32 numbers, got {weight.shape[1]}")
        require_read("a head", self._weight, weight.shape)
        if self._bias is not None:
            require_read("its bias", self._bias, weight.shape[:1])
        narrow, wide = factors(self._weight, states)
        self._narrow, self._rough = narrow, PackedLinear(PackedWeight.rounded(wide, 4), bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] for hidden states [..., H]."""
        x, (rows, columns) = hidden.flatten(0, -2).contiguous(), self._weight.shape
        rough, out = self._rough(linear(x, self._narrow)), torch.empty(len(x), rows, dtype=torch.bfloat16)
        require_read("hidden states", x, (len(x), columns))
        require_read("rough logits", rough, (len(x), rows))
        tensors = rough, x, self._weight, self._bias
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        sizes = len(x), rows, columns, TOKENS, torch.get_num_threads()
        library().distill_shortlist(*addresses, *sizes, out.data_ptr())
        return out.view(*hidden.shape[:-1], rows)

    def __deepcopy__(self, _: Any) -> ShortlistHead:
        return self


def factors(weight: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors [r, H] and [V, r] of a weight [V, H] with the least square error over states [n, H]."""
    states, columns = states.float(), weight.shape[1]
    rank = -(-columns // 160) * 32
    square = states.T @ states / len(states)
    square.diagonal().add_(RIDGE * square.diagonal().mean())
    sizes, axes = torch.linalg.eigh(square)
    root, inverse = (axes * sizes.sqrt()) @ axes.T, (axes / sizes.sqrt()) @ axes.T
    some = weight[:: max(len(weight) // WEIGHED_ROWS, 1)].float() @ root
    best = torch.linalg.eigh(some.T @ some)[1][:, -rank:]
    wide = torch.cat([part.float() @ (root @ best) for part in weight.split(WEIGHED_ROWS)])
    return (best.T @ inverse).to(weight.dtype), wide.to(weight.dtype)


@torch.inference_mode()
def own_states(model: Any) -> Tensor:
    """Return hidden states [n, H] before the head, of texts that a model writes after random first tokens."""
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (TEXTS, 1), generator=numbers)
    cache, states = None, []
    for _ in range(TEXT_TOKENS):
        output = model.base_model(ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        states.append(output.last_hidden_state[:, -1])
        likely, tokens = largest(model.lm_head(states[-1]), DRAWN_FROM)
        ids = tokens.gather(1, likely.float().softmax(-1).multinomial(1, generator=numbers))
    return torch.cat(states)
