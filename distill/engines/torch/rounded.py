"""A draft rounded to few bits for a CPU, and its head over a large vocabulary.

Such a head computes rough logits of all tokens, exact ones of the likeliest, and −∞ for the others. A rough logit is
the product of two factors of rank r, a fifth of a hidden state's numbers (low-rank heads alone: SlimSpec, arXiv
2605.10453). The factors fit the logits best on hidden states of texts that the draft writes. The verifier stays exact:
a draft may propose from any distribution that it states.

Legend: V vocabulary, H hidden, r rank, n hidden states, K tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from distill.engines.torch.hugging_face import KeptHead
from distill.engines.torch.packed import NoKernel, PackedLinear, PackedWeight, kernel, require_read
from distill.engines.torch.products import (
    Bits,
    copy_of,
    is_of_family,
    plain_layers,
    prepacked,
    rounded,
    rounding_refusal,
)
from distill.sampler import largest

LEAST = 2**16  # tokens: the whole of a smaller head is as fast
TOKENS = 512  # K
ROWS, STEPS, LIKELY = 16, 16, 64  # own texts: their number, their tokens, and how many of the likeliest are drawn from
RIDGE = 0.1  # of the mean square of a hidden state's number
WEIGHED = 2**14  # rows of the head that say what an error costs


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
        """Logits [..., V] of hidden states [..., H]."""
        x, (rows, columns) = hidden.flatten(0, -2).contiguous(), self._weight.shape
        rough, out = self._rough(linear(x, self._narrow)), torch.empty(len(x), rows, dtype=torch.bfloat16)
        require_read("hidden states", x, (len(x), columns))
        require_read("rough logits", rough, (len(x), rows))
        tensors = rough, x, self._weight, self._bias
        addresses = [None if one is None else one.data_ptr() for one in tensors]
        sizes = len(x), rows, columns, TOKENS, torch.get_num_threads()
        kernel().distill_shortlist(*addresses, *sizes, out.data_ptr())
        return out.view(*hidden.shape[:-1], rows)

    def __deepcopy__(self, _: Any) -> ShortlistHead:
        return self


def factors(weight: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """[r, H] and [V, r] whose product stands for a weight [V, H] with the least square error over states [n, H]."""
    states, columns = states.float(), weight.shape[1]
    rank = -(-columns // 160) * 32
    square = states.T @ states / len(states)
    square.diagonal().add_(RIDGE * square.diagonal().mean())
    sizes, axes = torch.linalg.eigh(square)
    root, inverse = (axes * sizes.sqrt()) @ axes.T, (axes / sizes.sqrt()) @ axes.T
    some = weight[:: max(len(weight) // WEIGHED, 1)].float() @ root
    best = torch.linalg.eigh(some.T @ some)[1][:, -rank:]
    wide = torch.cat([part.float() @ (root @ best) for part in weight.split(WEIGHED)])
    return (best.T @ inverse).to(weight.dtype), wide.to(weight.dtype)


@torch.inference_mode()
def own_states(model: Any) -> Tensor:
    """Hidden states [n, H] before the head, of texts that a model writes from tokens drawn at random."""
    numbers = torch.Generator().manual_seed(0)
    ids, cache, found = torch.randint(0, model.config.vocab_size, (ROWS, 1), generator=numbers), None, []
    for _ in range(STEPS):
        made = model.base_model(ids, past_key_values=cache, use_cache=True)
        cache, states = made.past_key_values, made.last_hidden_state[:, -1]
        found.append(states)
        likely, tokens = largest(model.lm_head(states), LIKELY)
        ids = tokens.gather(1, likely.float().softmax(-1).multinomial(1, generator=numbers))
    return torch.cat(found)


def rounded_draft(model: Any, bits: Bits, name: str) -> Any:
    """A copy of a draft with its linear layers rounded to `bits`, in the kernel's layout where there is one, and a
    large head as `ShortlistHead`; else in that of torch's own. DataError where it cannot be (`rounding_refusal`)."""
    try:
        kernel()
    except NoKernel:
        return rounded(model, bits, name)
    if model.dtype != torch.bfloat16 or rounding_refusal(model, bits):
        return rounded(model, bits, name)
    prepared, layers, short = copy_of(model), plain_layers(model), None
    head = layers.get("lm_head")
    known = is_of_family(model, layers) and getattr(head, "cap", None) is None
    if known and head is not None and len(head.weight) >= LEAST:
        short = ShortlistHead(head.weight, getattr(head, "bias", None), own_states(model))
    for place, module in layers.items():
        own = prepared.get_submodule(place)
        if module is head and short is not None and not isinstance(own, KeptHead):
            prepared.lm_head = short
            continue
        weight = PackedWeight.rounded(module.weight, 8 if bits == "int8" else 4)
        if isinstance(own, KeptHead):
            del own.weight  # of the tensors that a module saves and moves
            own.weight = weight
        else:
            prepared.set_submodule(place, PackedLinear(weight, module.bias))
    prepared = prepacked(prepared)[0]
    if short is not None and isinstance(head, KeptHead):
        prepared.lm_head.product = short
    return prepared
