"""Token sequences packed into blocks whose document borders attention and losses respect; and their forward pass.

Legend: n blocks, S positions per block.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from distill.data.samples import SEEN, repetition
from distill.devices import copied, records_graphs
from distill.engines.torch.equality import LENGTH, difference, own_logits, random_ids, require_equal_to_transformers
from distill.engines.torch.hugging_face import context_length
from distill.engines.torch.model import in_window, layer_kinds, mask_refusal, state_refusal

READ = 1024  # blocks that are read at once where all are
PADDING = -1  # document number of positions that hold no token


@dataclass(frozen=True)
class Packed:
    """Blocks of documents.

    ids [n, S]; documents [n, S], numbered within the block, -1 at padding; mask [n, S], true where the distribution of
    the *next* token counts; that token is at the next position. first [n] is the number of each block's first document
    among all documents: document d of block b has number first[b] + d, also where it continues in the next block. None
    where nobody needs it. Blocks on an accelerator have the `places` and the `host` documents of those that they were
    copied from, because asking the device for either would wait for it.
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
        """[n, S], from 0 in each document."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        begins = self.documents != self.documents.roll(1, 1)
        begins[:, 0] = True
        return places - (places * begins).cummax(1).values

    @property
    def scored(self) -> Tensor:
        """The scored positions of each block [n]."""
        return self.mask.sum(1)

    def scored_places(self) -> Tensor:
        """The scored positions [N], in order, as places among all n · S positions."""
        return self.mask.flatten().nonzero().squeeze(-1) if self.places is None else self.places

    def take(self, index: Tensor | slice) -> Packed:
        """The blocks at `index`; in memory, where these are mapped from a file."""
        first = None if self.first is None else self.first[index]
        return Packed(self.ids[index], self.documents[index].int(), self.mask[index], first)

    def batches(self, size: int) -> list[Packed]:
        """The blocks in order, up to `size` of them at a time."""
        return [self.take(slice(start, start + size)) for start in range(0, len(self), size)]

    def to(self, device: torch.device) -> Packed:
        """The same blocks on a device, where their documents have no numbers among all; of `pinned` ones the copies do
        not wait."""
        ids, documents, mask, places = (
            copied(tensor, device) for tensor in (*self.tensors().values(), self.scored_places())
        )
        return Packed(ids, documents, mask, places=places, host=self.documents)

    def pinned(self) -> Packed:
        """The same blocks of the host in pinned memory, with their `places`."""
        tensors = (*self.tensors().values(), self.scored_places())
        ids, documents, mask, places = (tensor.pin_memory() for tensor in tensors)
        return Packed(ids, documents, mask, places=places)

    def labels(self) -> Tensor:
        """The next token [n, S]; meaningless where `mask` is false."""
        return torch.roll(self.ids, -1, dims=1)

    def number(self, block: int, document: int) -> int:
        """The number of a block's document among all."""
        assert self.first is not None, "these blocks do not number their documents"
        return int(self.first[block]) + document

    def tensors(self) -> dict[str, Tensor]:
        """As named tensors, for safetensors files; without `first`, which training does not read."""
        return {"ids": self.ids, "documents": self.documents, "mask": self.mask}

    def save(self, path: Path, numbered: bool = False) -> None:
        """Write a safetensors file; `numbered`: with `first`."""
        more = {"first": self.first} if numbered and self.first is not None else {}
        save_file({name: value.contiguous() for name, value in {**self.tensors(), **more}.items()}, str(path))

    @classmethod
    def load(cls, path: Path) -> Packed:
        """Read what `save` wrote."""
        return cls(**load_file(str(path)))


# The tokens of a sequence that are scored: all from an index on, or those of spans (first, behind the last).
Scored = int | Sequence[tuple[int, int]]
Text = tuple[Sequence[int] | Any, Scored]  # ids, a list or an array, and those that are scored


def pack(sequences: Iterable[Text], block: int, split_long: bool, opening: Sequence[int] = ()) -> Packed:
    """Pack sequences, in the order given, into blocks of `block` positions.

    A sequence's first token is never scored. With `split_long` one that does not fit continues in the next block as a
    new document, which begins with `opening` (a text's bos), and is scored from an index on; otherwise it moves there
    whole, and must be no longer than a block.
    """
    rows: list[list[Text]] = []
    begun = []  # the number of each row's first document
    room = 0
    for number, (ids, scored) in enumerate(sequence for sequence in sequences if len(sequence[0])):
        start = 0
        while start < len(ids):
            left = len(ids) - start
            if room < 2 or (left > room and not split_long):
                assert split_long or left <= block, "a sequence is longer than a block"
                rows.append([])
                begun.append(number)
                room = block
            before = list(opening) if start else []
            piece = [*before, *ids[start : start + room - len(before)]] if split_long else ids
            rows[-1].append((piece, len(before) + max(1, scored - start) if isinstance(scored, int) else scored))
            room -= len(piece)
            start += len(piece) - len(before)
    return pack_rows(rows, block, begun)


def pack_rows(rows: Sequence[Sequence[Text]], block: int, first: Sequence[int]) -> Packed:
    """Blocks of these sequences each, whole; `first` numbers the first of each."""
    n = len(rows)
    ids = numpy.zeros((n, block), numpy.int32)
    documents = numpy.full((n, block), PADDING, numpy.int32)
    mask = numpy.zeros((n, block), bool)
    for index, row in enumerate(rows):
        at = 0
        for document, (piece, scored) in enumerate(row):
            end = at + len(piece)
            ids[index, at:end] = piece
            documents[index, at:end] = document
            for start, behind in [(scored, len(piece))] if isinstance(scored, int) else scored:
                mask[index, at + max(1, start) - 1 : at + behind - 1] = True
            at = end
    packed = Packed(torch.from_numpy(ids), torch.from_numpy(documents), torch.from_numpy(mask))
    return replace(packed, first=torch.tensor(first, dtype=torch.int64))


@dataclass(frozen=True)
class Deferred:
    """`count` blocks that are made where they are taken: `read` makes those of some numbers, `counted` the scored
    positions of each [n]."""

    count: int
    read: Callable[[list[int]], Packed]
    counted: Callable[[], Tensor]

    def __len__(self) -> int:
        return self.count

    @property
    def scored(self) -> Tensor:
        """As of Packed."""
        return self.counted()

    def take(self, index: Tensor | slice) -> Packed:
        """As of Packed."""
        return self.read(torch.arange(self.count)[index].tolist())

    def before(self, text: Packed) -> Deferred:
        """These blocks, and those of a text behind them; taken in ascending order, and their documents not numbered."""

        def read(numbers: list[int]) -> Packed:
            own = bisect_left(numbers, self.count)
            parts = self.read(numbers[:own]), text.take(torch.tensor(numbers[own:], dtype=torch.int64) - self.count)
            return concatenate([replace(part, first=None) for part in parts if len(part)] or [text.take(slice(0, 0))])

        return Deferred(self.count + len(text), read, lambda: torch.cat([self.scored, text.scored]))


Blocks = Packed | Deferred


def token_ids(blocks: Blocks, vocabulary: int) -> Tensor:
    """The ids that occur in blocks, ascending."""
    seen = torch.zeros(vocabulary, dtype=torch.bool)
    for start in range(0, len(blocks), READ):
        seen[blocks.take(slice(start, start + READ)).ids.long()] = True
    return seen.nonzero().squeeze(-1)


def scored_documents(blocks: Packed) -> Iterator[tuple[int, int, Tensor]]:
    """Each document that has scored positions: its block's index, its number there and those positions [S], boolean."""
    for block in range(len(blocks)):
        for number in blocks.documents[block][blocks.mask[block]].unique().tolist():
            yield block, number, blocks.mask[block] & (blocks.documents[block] == number)


def repeated_next(blocks: Packed) -> Tensor:
    """Of each scored position [N], in order, whether the token that it predicts is repeated in its document."""
    found = torch.zeros_like(blocks.mask)
    for block, document, _ in scored_documents(blocks):
        own = (blocks.documents[block] == document).nonzero()[:, 0]
        labels = repetition(blocks.ids[block][own].tolist())
        found[block][own[:-1]] = torch.tensor([label == SEEN for label in labels[1:]], dtype=torch.bool)
    return found[blocks.mask]


def fitted_rows(lengths: Sequence[int], block: int) -> list[list[int]]:
    """Whole sequences in blocks that they fill nearly: the longest first, each into the fullest block that still has
    room, of equal ones the first (best fit decreasing)."""
    rooms: list[tuple[int, int]] = []  # of the blocks begun: positions left, number; ascending
    rows: list[list[int]] = []
    order: list[int] = numpy.argsort(-numpy.asarray(lengths, int), kind="stable").tolist()
    for index in order:
        at = bisect_left(rooms, (lengths[index], 0))
        room, row = rooms.pop(at) if at < len(rooms) else (block, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        if room - lengths[index] >= lengths[order[-1]]:  # else nothing fits any more
            insort(rooms, (room - lengths[index], row))
    return rows


Turn = tuple[Any, Any]  # the ids of a prompt and of its answer, lists or arrays


def joined_turns(count: int, turn: Callable[[int], Turn]) -> list[list[int]]:
    """Numbers of answers in their order, put together where the next one's prompt begins with all that came before, as
    the turns of a conversation do whose template keeps what was said: the last one's text holds all of them."""
    texts: list[list[int]] = []
    before, answer = (), ()  # of the last one
    for number in range(count):
        prompt, following = turn(number)
        end = len(before) + len(answer)
        goes_on = len(answer) and end <= len(prompt) and numpy.array_equal(prompt[len(before) : end], answer)
        if goes_on and numpy.array_equal(prompt[: len(before)], before):
            texts[-1].append(number)
        else:
            texts.append([number])
        before, answer = prompt, following
    return texts


def planned(turns: Callable[[int], Turn], count: int, block: int) -> tuple[Deferred, list[list[list[int]]]]:
    """Blocks of `count` answers behind their prompts, which are not scored; and the numbers of the answers that each
    document of each block holds, in order."""
    texts = joined_turns(count, turns)
    rows = fitted_rows([sum(map(len, turns(own[-1]))) for own in texts], block)
    ordered = [[texts[one] for one in row] for row in rows]
    first = [*accumulate(map(len, rows), initial=0)]

    def text(own: list[int]) -> Text:
        parts = [turns(one) for one in own]
        return numpy.concatenate(parts[-1]), [(len(prompt), len(prompt) + len(answer)) for prompt, answer in parts]

    def read(numbers: list[int]) -> Packed:
        return pack_rows([[*map(text, ordered[one])] for one in numbers], block, [first[one] for one in numbers])

    def counted() -> Tensor:
        counts = [len(answer) - (not len(prompt)) for prompt, answer in map(turns, range(count))]
        return torch.tensor([sum(counts[one] for own in row for one in own) for row in ordered], dtype=torch.int64)

    return Deferred(len(rows), read, counted), ordered


def concatenate(parts: list[Packed]) -> Packed:
    """The blocks of several packs of the same width, in order; numbered on from pack to pack where all are."""
    columns = zip(*(part.tensors().values() for part in parts), strict=True)
    joined = Packed(*map(torch.cat, columns))
    first: list[Tensor] = []
    start = 0
    for part in parts:
        if part.first is None:
            return joined
        first.append(part.first + start)
        if len(part):
            start += int(part.first[-1]) + int(part.documents[-1].max()) + 1
    return replace(joined, first=torch.cat(first))


def attention_mask(documents: Tensor) -> Tensor:
    """Boolean [n, 1, S, S], true where a position may attend: to itself and earlier ones of the same document.

    Explicit, because packed position ids alone isolate documents only on some paths of transformers. Padding positions
    attend to themselves, so that no softmax is empty.
    """
    width = documents.shape[1]
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    causal = torch.ones(width, width, dtype=torch.bool, device=documents.device).tril()
    return (same & causal).unsqueeze(1)


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order [count] in which an epoch visits the blocks: a pure function, so that a resume can seek."""
    mixed = int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:7], "big")
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed))


# ── The forward pass, in which documents do not attend to each other ──
# A mask costs S × S cells, and torch keeps a copy in fp32 per layer for the backward pass. On a GPU, where a kernel can
# be compiled for it, its place is taken by a block mask of FlexAttention, which skips what is masked whole; on a CPU,
# and in long blocks elsewhere, by a list of segments, and each document attends to itself alone: memory and work grow
# with S. transformers hands both to its attention function as it hands over a mask; under the name `sdpa` stands ours,
# which takes all three. Any other attention function refuses a mask of integers, so that no model can read it as a mask
# by mistake.
# Legend: n blocks, S positions per block, H hidden, h heads, d their size, W positions of a window.

LONG = 2048  # positions of a block from which on documents attend one by one on an accelerator without a kernel
NARROWEST = 16  # numbers of a head that FlexAttention's kernels take


def packed_inputs(model: Any, blocks: Packed) -> dict[str, Any]:
    """The keyword arguments of a forward pass over blocks, on the model's device; positions start at 0 in each
    document."""
    device = model.get_input_embeddings().weight.device
    return {
        "input_ids": blocks.ids.long().to(device),
        "position_ids": blocks.positions.long().to(device),
        "attention_mask": separation(model, blocks.documents, device, blocks.host),
        "use_cache": False,
    }


def separation(model: Any, documents: Tensor, device: torch.device, host: Tensor | None = None) -> Any:
    """What keeps the documents [n, S] apart, in the place of an attention mask: masks, block masks or lists of
    segments; a dict where kinds of layers differ. `host` are the same documents, on the host."""
    config, blocked = model.config.get_text_config(), takes_block_masks(model, device)
    unmasked = blocked or documents.shape[1] >= masked_below(device)
    if not unmasked or config._attn_implementation != "sdpa":
        return document_masks(model, documents.to(device))
    register(getattr(model.base_model, "_compiled_call_impl", None) is not None)
    found, listed = {}, documents if host is None else host
    for kind in sorted(layer_kinds(config)):
        window = config.sliding_window if kind == "sliding_attention" else None
        found[kind] = block_mask(documents.to(device), window) if blocked else document_segments(listed, window)
    return found if len(found) > 1 else next(iter(found.values()))


def takes_block_masks(model: Any, device: torch.device) -> bool:
    """Whether torch compiles FlexAttention's kernels for this model: on one GPU with Triton, in 16 bits, without
    dropout and with heads that are not too narrow."""
    if not records_graphs(device) or find_spec("triton") is None:
        return False
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    short = torch.is_autocast_enabled(device.type) or model.dtype.itemsize == 2
    alone = len(set(getattr(model, "hf_device_map", {}).values())) < 2
    return short and alone and size >= NARROWEST and not getattr(config, "attention_dropout", 0)


def block_mask(documents: Tensor, window: int | None) -> Any:
    """FlexAttention's mask of documents [n, S], on their device: of windows where one is given, else causal."""
    from torch.nn.attention.flex_attention import create_block_mask

    width = documents.shape[1]

    def visible(block: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < (window or width)) & (documents[block, query] == documents[block, key])

    return create_block_mask(visible, len(documents), None, width, width, documents.device)


def masked_below(device: torch.device) -> int:
    """The positions of a block below which one product with a mask is quicker than documents one by one; on a CPU it
    never is."""
    return 0 if device.type == "cpu" else LONG


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

    Models that take no mask of ours, such as those whose recurrent state would run on from one document into the next,
    read each document alone.
    """
    config = model.config.get_text_config()
    if mask_refusal(config) is None and state_refusal(type(model), config) is None:
        if not hasattr(model, "_packed_as_alone"):
            model._packed_as_alone = True  # asked once, and not of the small model itself
            require_equal_to_transformers(model, "a packed block", _packing_fault)
        return getattr(module(**packed_inputs(model, blocks)), name)
    device, lines = model.get_input_embeddings().weight.device, []
    for line in range(len(blocks)):
        lengths = blocks.documents[line].unique_consecutive(return_counts=True)[1].tolist()
        parts = blocks.ids[line].long().to(device).split(lengths)
        read = [getattr(module(input_ids=ids[None], use_cache=False), name)[0] for ids in parts]
        lines.append(torch.cat(read))
    return torch.stack(lines)


def _packing_fault(model: Any) -> str:
    """Where a small model reads a document in a block otherwise than alone, behind a longer one and before another."""
    longest = min(LENGTH, context_length(model.config) or LENGTH)
    model._packed_as_alone = True
    texts = [random_ids(model, size, seed) for seed, size in enumerate((longest, 13, 5))]
    documents = [(numpy.array(ids), [(1, len(ids))]) for ids in texts]
    blocks = pack_rows([documents], sum(map(len, texts)) + 2, [0])
    with torch.inference_mode():
        together, at = packed_logits(model, blocks)[0], 0
        for number, ids in enumerate(texts, 1):
            words = f"in document {number} of a block"
            if fault := difference(together[at : at + len(ids)], own_logits(model, ids), words):
                return fault
            at += len(ids)
    return ""


def document_masks(model: Any, documents: Tensor) -> Any:
    """The attention mask [n, 1, S, S] that keeps documents apart; a dict of masks where kinds of layers differ.

    `documents` [n, S] as in Packed. transformers applies an explicit mask as it is, so the configuration's sliding
    windows are put into the mask here. The mask is boolean, true where a position may attend; for eager attention,
    which adds the mask to its scores, it is 0 there. For models that take masks (`mask_refusal`).
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
    """The documents of blocks [n, S] in the place of a mask, and the padding between them: int32 [1, 1, K, 2] of length
    and window, block by block.

    A window of 0 is none, PADDING marks padding; otherwise a position attends to that many, itself included.
    """
    spans: list[tuple[int, int]] = []
    for row in documents.cpu():
        numbers, lengths = row.unique_consecutive(return_counts=True)
        windows = [PADDING if number == PADDING else window or 0 for number in numbers.tolist()]
        spans += zip(lengths.tolist(), windows, strict=True)
    return torch.tensor(spans, dtype=torch.int32).view(1, 1, -1, 2)


@cache
def register(compiled: bool) -> None:
    """Let the attention function that transformers calls `sdpa` take block masks, and segments in the place of a mask;
    those end the graphs of `compiled` models, which are quicker so than with masks."""
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

    Zeros in padding. A CPU computes in fp32, in which its kernels are quicker than in narrower types.
    """
    shared, kind = query.shape[1] // key.shape[1], value.dtype
    cpu = query.device.type == "cpu"
    if cpu:
        query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
    elif shared > 1:
        # Not on every device and for every type has torch a kernel for fewer key heads that needs no S × S scores.
        key, value, shared = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1), 1
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "enable_gqa": shared > 1}
    spans = segments.flatten(0, 2).tolist()
    # Split once: the gradient of each of many slices would be a tensor of the whole batch's size.
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
    """A document [1, h, S, d] longer than the window, W queries at a time, through masks of W × 2 W cells."""
    outputs = []
    for start in range(0, query.shape[2], window):
        end, first = min(start + window, query.shape[2]), max(0, start - window + 1)
        at, of = torch.arange(start, end).unsqueeze(1), torch.arange(first, end).unsqueeze(0)
        near = ((of <= at) & (of > at - window)).to(query.device)
        part, seen = query[:, :, start:end], (slice(None), slice(None), slice(first, end))
        outputs.append(scaled_dot_product_attention(part, key[seen], value[seen], attn_mask=near, **options))
    return torch.cat(outputs, 2)
