"""Packed blocks of documents, and the forward pass over them, in which documents do not attend to each other.

A mask costs S × S cells, and torch keeps a copy in fp32 per layer for the backward pass. Two forms replace the mask:

- a block mask of FlexAttention, on a GPU for which torch compiles its kernels: it skips what is masked whole;
- a list of segments, on a CPU and in long blocks on other devices: each document attends to itself alone. Memory and
  work grow with S.

transformers passes both to its attention function as it passes a mask. Our function is registered under the name
`sdpa` and takes all three. Any other attention function refuses a mask of integers, so that no model reads a list of
segments as a mask.

Legend: n blocks, S positions per block, N scored positions, H hidden, V vocabulary, h heads, d their size, W positions
of a window, K segments.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from distill.devices import CPU, copied, records_graphs
from distill.engines.torch.equality import LENGTH, difference, own_logits, random_ids, require_equal_to_transformers
from distill.engines.torch.hugging_face import context_length
from distill.engines.torch.model import in_window, layer_kinds, mask_refusal, state_refusal

PADDING = -1  # document number of positions that hold no token
LONG = 2048  # In blocks of so many positions, documents attend one by one on an accelerator without a kernel.
NARROWEST = 16  # FlexAttention's kernels take heads of at least this size.


@dataclass(frozen=True)
class Packed:
    """Blocks of documents.

    `documents` [n, S] numbers the document of each token within the block, and is PADDING where no token is. `mask`
    [n, S] is true at scored positions: the distribution of the token at the next position counts there. `first` [n]
    is the number of each block's first document among all documents. Document d of block b has the number
    first[b] + d, also if it continues in the next block. `first` is None if nobody needs it.

    Blocks on an accelerator keep `places` and the `host` copy of the documents, because reading either from the device
    would wait for it.
    """

    ids: Tensor
    documents: Tensor
    mask: Tensor
    first: Tensor | None = None
    places: Tensor | None = None  # [N], see `scored_places`
    host: Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def positions(self) -> Tensor:
        """The position of each token in its document [n, S], from 0."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        begins = self.documents != self.documents.roll(1, 1)
        begins[:, 0] = True
        return places - (places * begins).cummax(1).values

    @property
    def scored(self) -> Tensor:
        """The number of scored positions of each block [n]."""
        return self.mask.sum(1)

    def scored_places(self) -> Tensor:
        """The scored positions [N] as indices into all n · S positions, ascending."""
        return self.mask.flatten().nonzero().squeeze(-1) if self.places is None else self.places

    def take(self, index: Tensor | slice) -> Packed:
        """The blocks at `index`, copied into memory."""
        first = None if self.first is None else self.first[index]
        return Packed(self.ids[index], self.documents[index].int(), self.mask[index], first)

    def batches(self, size: int) -> list[Packed]:
        """The blocks in order, up to `size` of them at a time."""
        return [self.take(slice(start, start + size)) for start in range(0, len(self), size)]

    def to(self, device: torch.device) -> Packed:
        """The same blocks on a device, without `first`. Copies of `pinned` blocks do not wait."""
        ids, documents, mask, places = (
            copied(tensor, device) for tensor in (*self.tensors().values(), self.scored_places())
        )
        return Packed(ids, documents, mask, places=places, host=self.documents)

    def pinned(self) -> Packed:
        """The same blocks in pinned memory of the host, with their `places`."""
        tensors = (*self.tensors().values(), self.scored_places())
        ids, documents, mask, places = (tensor.pin_memory() for tensor in tensors)
        return Packed(ids, documents, mask, places=places)

    def labels(self) -> Tensor:
        """The token after each scored position [N]."""
        return self.ids.roll(-1, 1).flatten()[self.scored_places()]

    def number(self, block: int, document: int) -> int:
        """The number of a block's document among all documents."""
        assert self.first is not None, "these blocks do not number their documents"
        return int(self.first[block]) + document

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that safetensors files hold, by name. Training does not read `first`."""
        return {"ids": self.ids, "documents": self.documents, "mask": self.mask}

    def save(self, path: Path, numbered: bool = False) -> None:
        """Write a safetensors file, with `first` if `numbered`."""
        more = {"first": self.first} if numbered and self.first is not None else {}
        save_file({name: value.contiguous() for name, value in {**self.tensors(), **more}.items()}, str(path))

    @classmethod
    def load(cls, path: Path) -> Packed:
        """Read a file that `save` wrote."""
        return cls(**load_file(str(path)))


# ── The forward pass ──


def packed_inputs(model: Any, blocks: Packed) -> dict[str, Any]:
    """The keyword arguments of a forward pass over blocks, on the model's device."""
    device = model.get_input_embeddings().weight.device
    return {
        "input_ids": blocks.ids.long().to(device),
        "position_ids": blocks.positions.long().to(device),
        "attention_mask": separation(model, blocks.documents, device, blocks.host),
        "use_cache": False,
    }


def separation(model: Any, documents: Tensor, device: torch.device, host: Tensor | None = None) -> Any:
    """The argument that keeps the documents [n, S] apart: masks, block masks or lists of segments.

    A dict by kind of layer if the kinds differ. `host` has the same documents on the host.
    """
    config, blocked = model.config.get_text_config(), takes_block_masks(model, device)
    unmasked = blocked or documents.shape[1] >= masked_below(device)
    if not unmasked or config._attn_implementation != "sdpa":
        return document_masks(model, documents.to(device))
    register(getattr(model.base_model, "_compiled_call_impl", None) is not None)
    separations, listed = {}, documents if host is None else host
    for kind, window in layer_windows(model).items():
        separations[kind] = block_mask(documents.to(device), window) if blocked else document_segments(listed, window)
    return separations if len(separations) > 1 else next(iter(separations.values()))


def layer_windows(model: Any) -> dict[str, int | None]:
    """The sliding window of each kind of a model's layers, None for whole attention. Each model is asked once."""
    if not hasattr(model, "_layer_windows"):
        config = model.config.get_text_config()
        kinds = sorted(layer_kinds(config))
        model._layer_windows = {kind: config.sliding_window if kind == "sliding_attention" else None for kind in kinds}
    windows: dict[str, int | None] = model._layer_windows
    return windows


def takes_block_masks(model: Any, device: torch.device) -> bool:
    """Whether torch compiles FlexAttention's kernels for this model.

    They need Triton, all weights on one GPU, products in 16 bits, no dropout, and heads of at least NARROWEST.
    """
    if not records_graphs(device) or find_spec("triton") is None:
        return False
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    short = torch.is_autocast_enabled(device.type) or model.dtype.itemsize == 2
    alone = len(set(getattr(model, "hf_device_map", {}).values())) < 2
    return short and alone and size >= NARROWEST and not getattr(config, "attention_dropout", 0)


def block_mask(documents: Tensor, window: int | None) -> Any:
    """FlexAttention's causal mask of documents [n, S] on their device, within a window if one is given."""
    from torch.nn.attention.flex_attention import create_block_mask

    width = documents.shape[1]

    def visible(block: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < (window or width)) & (documents[block, query] == documents[block, key])

    return create_block_mask(visible, len(documents), None, width, width, documents.device)


def masked_below(device: torch.device) -> int:
    """The length of a block below which one product with a mask is faster than documents one by one; 0 on a CPU."""
    return 0 if device.type == CPU else LONG


def hidden_states(model: Any, blocks: Packed) -> Tensor:
    """The hidden states [n, S, H] after the final norm, on the device of the model's last layer."""
    trunk = model.base_model if model.base_model is not model else model.model  # Llama 4 names its trunk otherwise
    return _over(model, blocks, trunk, "last_hidden_state")


def scored_states(model: Any, blocks: Packed) -> Tensor:
    """The hidden states [N, H] at the scored positions, in order."""
    hidden = hidden_states(model, blocks)
    return hidden.flatten(0, 1).index_select(0, blocks.scored_places().to(hidden.device))


def packed_logits(model: Any, blocks: Packed) -> Tensor:
    """The model's own logits [n, S, V]."""
    return _over(model, blocks, model, "logits")


def _over(model: Any, blocks: Packed, module: Any, name: str) -> Tensor:
    """The output `name` of `module`, the model or its trunk, over blocks.

    A model that takes none of our masks reads each document alone. A model with recurrent states does: its state would
    run on from one document into the next.
    """
    if not hasattr(model, "_takes_blocks"):
        config = model.config.get_text_config()
        model._takes_blocks = mask_refusal(config) is None and state_refusal(type(model), config) is None
    if model._takes_blocks:
        if not hasattr(model, "_checked_in_blocks"):
            model._checked_in_blocks = True
            require_equal_to_transformers(model, "a packed block", packing_fault)
        return getattr(module(**packed_inputs(model, blocks)), name)
    device, lines = model.get_input_embeddings().weight.device, []
    for line in range(len(blocks)):
        lengths = blocks.documents[line].unique_consecutive(return_counts=True)[1].tolist()
        parts = blocks.ids[line].long().to(device).split(lengths)
        read = [getattr(module(input_ids=ids[None], use_cache=False), name)[0] for ids in parts]
        lines.append(torch.cat(read))
    return torch.stack(lines)


def packing_fault(model: Any) -> str:
    """Name the document of a block that a small model reads otherwise than alone; empty if there is none.

    A text crosses from the first block into the second, the second ends with a document, and the third is padded.
    """
    longest = min(LENGTH, context_length(model.config) or LENGTH)
    model._checked_in_blocks = True  # This model serves the check.
    width, crossing = longest + 7, random_ids(model, 13, seed=1)
    middle = [crossing[7:], random_ids(model, 5, seed=2), random_ids(model, width - 11, seed=3)]
    blocks = [[random_ids(model, longest), crossing[:7]], middle, [random_ids(model, 9, seed=4)]]
    ids, documents = torch.zeros(3, width, dtype=torch.long), torch.full((3, width), PADDING, dtype=torch.int32)
    for block, texts in enumerate(blocks):
        numbers = [number for number, text in enumerate(texts) for _ in text]
        ids[block, : len(numbers)] = torch.tensor([*itertools.chain(*texts)])
        documents[block, : len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
    with torch.inference_mode():
        together = packed_logits(model, Packed(ids, documents, documents >= 0))
        for block, texts in enumerate(blocks):
            for number, alone in enumerate(texts):
                words = f"in document {number + 1} of block {block + 1}"
                if fault := difference(together[block][documents[block] == number], own_logits(model, alone), words):
                    return fault
    return ""


def attention_mask(documents: Tensor) -> Tensor:
    """The boolean mask [n, 1, S, S] of the positions that each position of `documents` [n, S] may attend to.

    A position attends to itself and to earlier positions of its document. The mask is explicit, because position ids
    isolate documents only on some paths of transformers. Padding attends to padding, so that no softmax is empty.
    """
    width = documents.shape[1]
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    causal = torch.ones(width, width, dtype=torch.bool, device=documents.device).tril()
    return (same & causal).unsqueeze(1)


def document_masks(model: Any, documents: Tensor) -> Any:
    """The attention mask [n, 1, S, S] of `documents` [n, S]; a dict by kind of layer if the kinds differ.

    transformers applies an explicit mask as it is, so the mask includes the configuration's sliding windows. The mask
    is boolean, true where a position may attend. Eager attention adds the mask to its scores: its mask is 0 there. The
    model must take masks (`mask_refusal`).
    """
    config, whole = model.config.get_text_config(), attention_mask(documents)
    places = torch.arange(documents.shape[1], device=documents.device)
    masks = {}
    for kind in sorted(layer_kinds(config)):
        mask = whole & in_window(kind, config, places[:, None], places)
        if model.config._attn_implementation == "eager":
            added = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device)
            mask = added.masked_fill_(~mask, torch.finfo(model.dtype).min)
        masks[kind] = mask
    return masks if len(masks) > 1 else next(iter(masks.values()))


def document_segments(documents: Tensor, window: int | None) -> Tensor:
    """The length and the window of each document of blocks [n, S], as int32 [1, 1, K, 2] in the place of a mask.

    Padding is a segment with the window PADDING. The window 0 stands for no window. A window W lets a position attend
    to W positions, itself included.
    """
    spans: list[tuple[int, int]] = []
    for row in documents.cpu():
        numbers, lengths = row.unique_consecutive(return_counts=True)
        windows = [PADDING if number == PADDING else window or 0 for number in numbers.tolist()]
        spans += zip(lengths.tolist(), windows, strict=True)
    return torch.tensor(spans, dtype=torch.int32).view(1, 1, -1, 2)


@cache
def register(compiled: bool) -> None:
    """Register an attention function `sdpa` with transformers that takes masks, block masks and segments.

    Segments end the graphs of `compiled` models. Such models are still faster with segments than with masks.
    """
    from transformers import AttentionInterface
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    within: Any = torch.compiler.disable(attend_within) if compiled else attend_within

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        scaling = options.get("scaling")
        if isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.int32:
            return within(query, key, value, attention_mask, scaling, options.get("dropout", 0.0)), None
        if attention_mask is not None and not isinstance(attention_mask, Tensor):
            return flex_attention_forward(module, query, key, value, attention_mask, scaling)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register("sdpa", attention)


def attend_within(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scaling: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Causal attention [n, S, h, d] within each segment; query [n, h, S, d], key and value [n, fewer heads, S, d].

    The result is 0 in padding. A CPU computes in fp32, because its kernels are faster in fp32 than in 16 bits.
    """
    shared, kind = query.shape[1] // key.shape[1], value.dtype
    cpu = query.device.type == CPU
    if cpu:
        query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
    elif shared > 1:
        # Some devices and types have no kernel for fewer key heads that avoids S × S scores.
        key, value, shared = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1), 1
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "enable_gqa": shared > 1}
    spans = segments.flatten(0, 2).tolist()
    # One split replaces many slices: the gradient of each slice would have the size of the whole batch.
    pieces = [x.transpose(1, 2).flatten(0, 1).split([length for length, _ in spans]) for x in (query, key, value)]
    outputs: list[Tensor] = []
    with torch.autocast(query.device.type, enabled=not cpu and torch.is_autocast_enabled(query.device.type)):
        for (length, window), *document in zip(spans, *pieces, strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in document)
            if window == PADDING:
                output = q.new_zeros(1, q.shape[1], length, v.shape[-1])
            elif window == 0 or length <= window:
                output = scaled_dot_product_attention(q, k, v, is_causal=True, **options)
            else:
                output = _windowed(q, k, v, window, options)
            outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs).to(kind).unflatten(0, (len(query), -1))


def _windowed(query: Tensor, key: Tensor, value: Tensor, window: int, options: dict[str, Any]) -> Tensor:
    """Attention of a document [1, h, S, d] longer than the window, W queries at a time, with masks of W × 2 W cells."""
    outputs = []
    for start in range(0, query.shape[2], window):
        end, first = min(start + window, query.shape[2]), max(0, start - window + 1)
        at, of = torch.arange(start, end).unsqueeze(1), torch.arange(first, end).unsqueeze(0)
        near = ((of <= at) & (of > at - window)).to(query.device)
        part, seen = query[:, :, start:end], (slice(None), slice(None), slice(first, end))
        outputs.append(scaled_dot_product_attention(part, key[seen], value[seen], attn_mask=near, **options))
    return torch.cat(outputs, 2)
