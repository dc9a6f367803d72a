"""Load a target and a draft that decode together, in PyTorch or llama.cpp, and decode many texts at once.

Legend: R rows, A of them that take tokens in a call, n tokens of a call, q the most that one row takes, S slots of the
cache, H heads of keys and values, D their width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from distill.devices import pick_device
from distill.engines.ends import target_ends
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.model import Model
from distill.engines.torch.equality import (
    LENGTH,
    decoded_in_pieces,
    decoded_in_trees,
    difference,
    own_logits,
    random_ids,
    require_equal_to_transformers,
)
from distill.engines.torch.hugging_face import (
    context_length,
    encode_text,
    load_config,
    load_model,
    load_target,
    load_tokenizer,
    local_folder,
    logits_of,
    real_tokens,
    settled_type,
    text_folder,
)
from distill.engines.torch.model import (
    RecurrentTorchModel,
    TorchModel,
    layer_masks,
    mask_refusal,
    model_name,
    send,
    state_refusal,
)
from distill.engines.torch.products import (
    FORMS,
    MAX_DRAFTED,
    MIN_WEIGHTS,
    TEXT,
    Bits,
    Weights,
    best_weights,
    kernel_fault,
    kernel_version,
    load_in_bits,
    pack,
)
from distill.engines.torch.static import SlotCache, StaticTorchModel, refusal
from distill.errors import DataError, RecipeError
from distill.files import cache_folder, digest, digests_of, file_digests, is_gguf, read_result, remember
from distill.gguf.families import FAMILIES
from distill.gguf.head import open_head, type_name
from distill.gguf.importing import one_engine
from distill.gguf.library import GgufFile, require_possible
from distill.gguf.writer import export_gguf, target_gguf
from distill.machine import machine, thread_count, version_of
from distill.progress import note, warn, warn_once
from distill.recipe import Gguf, GgufOptions, PyTorch, Recipe, Target
from distill.vocabulary.vocabulary import Vocabulary, with_opening

GROWING = PyTorch()  # These settings decode with a cache that grows, as in transformers.
BATCH = 512  # llama.cpp takes at most this many tokens in a call.
# Smallest share of a file's weights with a kernel for their bits. With a smaller share, the weights that are held in
# bfloat16 take most of a step.
MIN_KERNEL_SHARE = 0.9


@dataclass(frozen=True)
class LoadedPair(contextlib.AbstractContextManager["LoadedPair"]):
    """Both models, ready to decode. If no draft was asked for, the draft is the target itself.

    `ends` are the ids that end a text, and `text_ends` the texts that end it (`target_ends`). `tokenizer` and
    `hugging_face` (target, draft) are the objects of transformers, or None for GGUF files. `pytorch` says how they
    decode. `options` are the settings with which the models were loaded, or None for models that were loaded elsewhere.
    `costs` keeps the costs of rounds, see `configured.pair_costs`. A pair used as a context closes its models.
    """

    backend: Literal["pytorch", "gguf", "ik"]
    reference: str
    target: Model
    draft: Model
    ends: list[int]
    tokenizer: Any = None
    hugging_face: tuple[Any, Any] | None = None
    pytorch: PyTorch = GROWING
    options: Mapping[str, Any] | None = None
    text_ends: tuple[str, ...] = ()
    costs: dict[int, Any] = field(default_factory=dict, init=False, compare=False)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Return the target's vocabulary, read from its Hugging Face folder."""
        return Vocabulary.read(text_folder(self.reference))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token. Ids without a token have no bytes."""
        if isinstance(self.target, GgufModel):
            return self.target.file.detokenize([token])
        return self.vocabulary.text_bytes([token])

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without the tokens that end it. Bytes that are not UTF-8 become U+FFFD."""
        text = b"".join(self.token_bytes(token) for token in tokens if token not in self.ends)
        return text.decode("utf-8", errors="replace")

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that the target continues. Raise DataError for an empty text."""
        return encode_prompt(self.reference, text)

    def close(self) -> None:
        """Free both models."""
        self.draft.close()
        if self.target is not self.draft:
            self.target.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def load_pair(
    target: Target,
    draft: str | None = None,
    *,
    device: str = "auto",
    tokens: int | None = None,
    nodes: int = 0,
    threads: int | None = None,
    gguf: Gguf | None = None,
    pytorch: PyTorch = GROWING,
) -> LoadedPair:
    """Load two Hugging Face folders (or hub names), or two GGUF files. If `draft` is None, load only the target.

    If one model is a GGUF file and the other a folder, the file is imported and both decode in PyTorch. Files decode in
    PyTorch with their own bits if `pytorch` says so. The draft of a folder is loaded in the target's type.

    `tokens` is the length of the context. None stands for the target's own context with GGUF files, and for an unknown
    length with a static cache. No model gets a longer context than it was made for. The other options are for GGUF
    files: `nodes` is the maximum number of nodes of a tree, `gguf` holds llama.cpp's options for each model, and
    `threads` is the number of CPU threads if `gguf` names none.

    Raises RecipeError for options that are not possible. Raises DataError for a model that cannot be loaded, or that
    cannot decode in this way.
    """
    target, pytorch = settled_decoding(target, draft, pytorch, device)
    _require_files(target, draft, pytorch)
    if draft is not None:
        target_reference, draft = one_engine(target.model, draft, pytorch.in_bits)
        target = target.model_copy(update={"model": target_reference})
    if is_gguf(target.model) and not pytorch.in_bits:
        if pytorch != GROWING:
            raise RecipeError(
                f"{target.model} runs in llama.cpp; static, compile, draft_device, draft_weights and "
                "prepack are settings of PyTorch, which decodes files with target_weights: file"
            )
        return _load_files(target.model, draft, tokens, nodes, threads, gguf or Gguf())
    options = target.model_dump(mode="json", include={"dtype", "quantise", "shard"}) | pytorch.model_dump(mode="json")
    options |= {"target": target.model, "draft": draft, "device": device}
    target_device = pick_device(device)
    draft_device = target_device if pytorch.draft_device is None else pick_device(pytorch.draft_device)
    target_model = load_big(target, target_device, pytorch)
    if draft is not None and pytorch.draft_weights == "file":
        draft_model = load_in_bits(draft, draft_device)
    else:
        draft_model = None if draft is None else load_model(draft, target.dtype, draft_device)
    tokenizer = load_tokenizer(target.model)
    pair = pair_of_models(target.model, target_model, draft_model, tokenizer, pytorch, tokens)
    pair = replace(pair, options=options)
    return with_best_weights(pair) if draft is not None and pytorch.draft_weights == "auto" else pair


@dataclass(frozen=True)
class Opening:
    """The settings with which a pair is loaded.

    Folders and hub names decode in PyTorch as `pytorch` says. GGUF files decode in llama.cpp with the options `gguf`.
    `draft` may be None if no draft is used.
    """

    target: Target
    draft: str | None
    device: str = "auto"
    threads: int | None = None
    gguf: Gguf = field(default_factory=Gguf)
    pytorch: PyTorch = GROWING

    def load(self, tokens: int | None = None, nodes: int = 0, alone: bool = False) -> LoadedPair:
        """Load the pair with `load_pair`. If `alone` is true, load only the target."""
        options: dict[str, Any] = {"threads": self.threads, "gguf": self.gguf, "pytorch": self.pytorch}
        draft = None if alone else self.draft
        return load_pair(self.target, draft, device=self.device, tokens=tokens, nodes=nodes, **options)


def settled_decoding(
    target: Target, draft: str | None, pytorch: PyTorch, device: str = "auto"
) -> tuple[Target, PyTorch]:
    """Resolve `target_weights: auto` and print the choice to stderr.

    Return the target with a decoding dtype, and the resolved settings. A GGUF file decodes in its own bits if
    its draft decodes in PyTorch, and if this CPU has kernels for most of the file's weights. A step then takes as long
    as reading the weights from memory. Other models keep `auto`, which has no effect on them.
    """
    target = target.model_copy(update={"dtype": settled_type(target.dtype, pick_device(device), target.model)})
    draft_in_pytorch = draft is not None and (not is_gguf(draft) or pytorch.draft_weights == "file")
    if pytorch.target_weights == "auto" and is_gguf(target.model) and draft_in_pytorch:
        head = open_head(Path(target.model))
        sizes = {name: math.prod(shape) for name, shape in head.shapes.items() if len(shape) > 1}
        if (total := sum(sizes.values())) >= MIN_WEIGHTS:
            packed = sum(size for name, size in sizes.items() if type_name(head.kinds[name]).upper() in FORMS)
            reason = _reason_against_bits(target, pytorch, device, packed / total)
            kind = f"{target.dtype}: {reason}" if reason else f"its own bits ({packed / total:.0%} have a kernel)"
            warn_once(f"target_weights auto: {target.model} decodes in {kind}")
            pytorch = pytorch.model_copy(update={} if reason else {"target_weights": "file"})
    dtype = "bfloat16" if pytorch.target_weights == "file" else target.dtype
    return target.model_copy(update={"dtype": dtype}), pytorch


def _reason_against_bits(target: Target, pytorch: PyTorch, device: str, share: float) -> str:
    """Return why `target_weights: auto` does not decode a file in its own bits. Empty if it does."""
    if target.quantise or target.shard or pytorch.compile:
        return "quantise, shard and compile take no file's bits"
    if share < MIN_KERNEL_SHARE:
        return f"{share:.0%} of its weights have a kernel for their bits"
    if (target_device := pick_device(device)).type != "cpu":
        return f"its bits have a kernel for a CPU, and this is {target_device}"
    return kernel_fault()


def _require_files(target: Target, draft: str | None, pytorch: PyTorch) -> None:
    """Raise RecipeError if a model in a file's bits is no GGUF file, or if the target is also quantised or sharded."""
    for role, model in (("target", target.model), ("draft", draft)):
        if getattr(pytorch, f"{role}_weights") == "file" and model is not None and not is_gguf(model):
            hint = f"leave {role}_weights out"
            raise RecipeError(f"{role}_weights: file is for a GGUF file, and {model} is none", hint)
    if pytorch.target_weights == "file" and (target.quantise or target.shard):
        raise RecipeError("target_weights: file goes with neither target.quantise nor target.shard", "choose one")


def load_big(target: Target, device: torch.device, pytorch: PyTorch) -> Any:
    """Load a target as `pytorch` says, in its file's bits or with `load_target`."""
    _require_files(target, None, pytorch)
    return load_in_bits(target.model, device) if pytorch.target_weights == "file" else load_target(target, device)


def torch_decoder(
    model: Any,
    vocabulary: int | None = None,
    pytorch: PyTorch = GROWING,
    tokens: int | None = None,
    is_draft: bool = False,
) -> Model:
    """Return a model of transformers that decodes as `pytorch` says. Raise DataError if it cannot.

    Ids from `vocabulary` on are padding. `tokens` is the expected number of tokens of a text.
    """
    if is_draft and pytorch.draft_weights in ("int8", "int4"):
        return growing_decoder(pack(model, pytorch.draft_weights), vocabulary, prepack=False)
    if not pytorch.static:
        return growing_decoder(model, vocabulary, pytorch.prepack)
    packed = pack(model) if pytorch.prepack and not pytorch.compile else model  # Compiled steps choose their layouts.
    return StaticTorchModel(packed, vocabulary, size=tokens, compiled=pytorch.compile)


def growing_decoder(model: Any, vocabulary: int | None = None, prepack: bool = True) -> TorchModel:
    """Return `torch_decoder` with a growing cache and without compilation, which suits counting or timing steps."""
    compared = require_equal_to_transformers(model, "decoding", _decoding_fault)
    packed = pack(model) if prepack else model
    if state_refusal(type(model), model.config) is not None:
        return RecurrentTorchModel(packed, vocabulary)
    if getattr(packed.base_model, "in_one_call", None) is not None:  # A step in one call writes to slots.
        return StaticTorchModel(packed, vocabulary, on_device=False)
    decoder = TorchModel(packed, vocabulary)
    if not compared or model.config.model_type not in FAMILIES:  # The tests cover the FAMILIES.
        decoder.require_equal()
    return decoder


def _decoding_fault(model: Any) -> str:
    """Return where a small model's decoding differs from transformers, which reads the text whole. Empty if nowhere.

    The text is decoded with a growing cache, with slots, in prepacked layers, in trees, and in a batch.
    """
    if state_refusal(type(model), model.config) is not None:
        return ""  # `RecurrentTorchModel` compares the model itself.
    ids = random_ids(model, min(LENGTH, context_length(model.config) or LENGTH))
    other, expected = random_ids(model, len(ids), seed=1), own_logits(model, ids)
    decoders = {"with a growing cache": TorchModel(model), "in prepacked layers": TorchModel(pack(model))}
    if refusal(model) is None:
        decoders["with slots"] = StaticTorchModel(model)
    for words, decoder in decoders.items():
        if fault := difference(decoded_in_pieces(decoder, ids), expected, words):
            return fault
        trees = decoded_in_trees(decoder, ids, other) if decoder.max_leaves else expected
        if fault := difference(trees, expected, f"{words}, in trees"):
            return fault
    rows = with_rows(decoders["with a growing cache"], 2)
    if rows is None:
        return ""
    first_logits = []
    for at in range(0, len(ids) - 5, 5):  # The other text is two tokens ahead.
        first, second = ids[at : at + 5], other[at + 2 * (at > 0) : at + 7]
        logits = rows.extend([*first, *second], [len(first), len(second)]).full()
        first_logits.append(logits[: len(first)])
    decoded = torch.cat(first_logits)
    return difference(decoded, expected[: len(decoded)], "in rows of different lengths")


def with_rows(model: Model, rows: int) -> Model | None:
    """Return a model of `rows` texts with the weights of a PyTorch model of one text, prepacked if those are.

    None if the model cannot decode texts of different lengths together.
    """
    if isinstance(model, StaticTorchModel) and model.steps_on_device:
        return StaticTorchModel(model.model, model.vocabulary_size, rows, model.size)
    if isinstance(model, TorchModel) and model.steps_on_device and refusal(model.model) is None:
        return StaticTorchModel(model.model, model.vocabulary_size, rows)
    try:
        return BatchedTorchModel(model.model, rows, model.vocabulary_size) if isinstance(model, TorchModel) else None
    except (ValueError, DataError):  # Windows, and states that belong to a single text, raise these.
        return None


def require_rows(model: Model, rows: int) -> Model:
    """Return `with_rows`. Raise DataError for a model that decodes one text at a time."""
    if (shared := with_rows(model, rows)) is None:
        raise DataError(
            f"this model decodes one text at a time, and {rows} at once are asked for",
            "choose a Hugging Face model with attention layers alone, decoded in PyTorch, or leave --at-once out",
        )
    return shared


def pair_of_models(
    reference: str, target: Any, draft: Any, tokenizer: Any, pytorch: PyTorch = GROWING, tokens: int | None = None
) -> LoadedPair:
    """Return the pair of two loaded models of transformers. `reference` names the folder of the vocabulary."""
    vocabulary = real_tokens(target.config, tokenizer)
    decoder = torch_decoder(target, vocabulary, pytorch, tokens)
    drafter = decoder if draft is None else torch_decoder(draft, vocabulary, pytorch, tokens, is_draft=True)
    ends, models = target_ends(reference, tokenizer), (target, target if draft is None else draft)
    return LoadedPair(
        "pytorch", reference, decoder, drafter, ends.ids, tokenizer, models, pytorch, text_ends=ends.texts
    )


def with_best_weights(pair: LoadedPair) -> LoadedPair:
    """Return the loaded pair with the draft weights that `draft_weights: auto` chooses.

    The first command runs both models to measure them, and says so on stderr. The choice is kept for later commands
    with the same models, machine and threads.
    """
    assert pair.hugging_face is not None and pair.options is not None
    chosen, model = None, pair.hugging_face[1]
    if not pair.pytorch.static and model.device.type == "cpu" and model.num_parameters() >= MIN_WEIGHTS:
        chosen = _chosen_weights(pair)
    if chosen is not None:
        pair.draft.close()
        draft = growing_decoder(pack(model, chosen), pair.target.vocabulary_size, prepack=False)
        pair = replace(pair, draft=draft)
    pytorch = pair.pytorch.model_copy(update={"draft_weights": chosen})
    return replace(pair, pytorch=pytorch, options={**(pair.options or {}), "draft_weights": chosen})


def _chosen_weights(pair: LoadedPair) -> Bits | None:
    """Return the fastest weights for a draft, measured once for these models, machine and threads."""
    assert pair.hugging_face is not None and pair.options is not None
    model, options = pair.hugging_face[1], pair.options
    files = [_content(str(options[role])) for role in ("target", "draft")]
    kinds = options["dtype"], options["target_weights"], kernel_version()
    conditions = [files, version_of("torch"), machine()["cpu"], torch.get_num_threads(), *kinds]
    place = cache_folder("weights") / f"{digest(conditions)}.json"
    try:
        return read_result(place, Weights).chosen
    except DataError:
        pass
    note("draft_weights auto: the draft is timed in its own type, in 8 and in 4 bits; once for this pair and machine")
    candidates: dict[Bits | None, Model] = {None: pair.draft}
    for bits in get_args(Bits):
        with contextlib.suppress(DataError):  # Some types, widths and builds have no such kernels.
            candidates[bits] = growing_decoder(pack(model, bits), pair.target.vocabulary_size, prepack=False)
    room = min(decoder.capacity for decoder in (pair.target, *candidates.values())) - MAX_DRAFTED
    best = best_weights(pair.target, candidates, encode_text(pair.tokenizer, TEXT)[:room])
    if best.words:
        warn(best.words)
    remember(place, asdict(best))
    return best.chosen


def _load_files(
    target: str, draft: str | None, tokens: int | None, nodes: int, threads: int | None, gguf: Gguf
) -> LoadedPair:
    context = tokens or context_of(target) or BATCH

    def load(reference: str, options: GgufOptions) -> GgufModel:
        size = max(min(context, context_of(reference) or context), nodes + 2)
        batch = max(BATCH, nodes + 2)
        return GgufModel(reference, context=size, batch=batch, threads=threads, max_leaves=nodes, options=options)

    for reference, options in ((target, gguf.target), *([] if draft is None else [(draft, gguf.of("draft"))])):
        require_possible(open_head(Path(reference)), options)  # Both are checked before any weights are read.
    target_model = load(target, gguf.target)
    try:
        draft_model = target_model if draft is None else load(draft, gguf.of("draft"))
    except BaseException:
        target_model.close()
        raise
    backend: Literal["ik", "gguf"] = "ik" if gguf.target.library == "ik" else "gguf"
    loaded_with = gguf.model_dump(mode="json") | {"target": target, "draft": draft, "threads": thread_count(threads)}
    ends = target_ends(target)
    return LoadedPair(backend, target, target_model, draft_model, ends.ids, options=loaded_with, text_ends=ends.texts)


def _content(reference: str) -> dict[str, str]:
    """Return digests of the files that define a model: the parts of a GGUF file, or config.json and the weights."""
    if is_gguf(reference):
        return file_digests(reference) or {}
    files = sorted(Path(local_folder(reference)).iterdir())
    defining = [file for file in files if file.name == "config.json" or file.suffix == ".safetensors"]
    return digests_of({file.name: file for file in defining})


def context_of(reference: str) -> int | None:
    """Return the number of tokens that a text of a model may have (`context_length`), without reading its weights.

    None if the model's file does not say.
    """
    if is_gguf(reference):
        return open_head(Path(reference)).context
    return context_length(load_config(reference))


MIN_PROMPT_TOKENS = 8  # A context must leave room for a prompt of this many tokens.


def room_for_prompts(target: str, draft: str | None, further: int) -> int:
    """Return the maximum tokens of a prompt if both contexts must have room for `further` tokens.

    If the draft's context is shorter than the target's, stderr says so. Raises RecipeError if no prompt has room. No
    weights are read.
    """
    target_context, draft_context = context_of(target), None if draft is None else context_of(draft)
    shortest = min((length for length in (target_context, draft_context) if length is not None), default=2**31)
    of_draft = f" of the draft {draft}" if draft_context == shortest != target_context else ""
    room = shortest - further
    if room < MIN_PROMPT_TOKENS:
        raise RecipeError(
            f"--tokens leave {max(room, 0)} tokens of the context of {shortest}{of_draft} for a prompt", "give fewer"
        )
    if of_draft:
        warn_once(f"the context{of_draft} is {shortest} tokens: prompts of more than {room} are cut or left out")
    return room


def encode_prompt(reference: str, text: str) -> list[int]:
    """Return the token ids of a text without reading the model's weights. Raise DataError for an empty text."""
    if is_gguf(reference):
        with contextlib.closing(GgufFile(Path(reference), vocabulary_only=True)) as file:
            ids = with_opening(file.tokenize(text, parse_special=True), file.opening)
    else:
        ids = encode_text(load_tokenizer(reference), text)
    if not text:
        raise DataError("the prompt is empty", "give some text to continue")
    return ids


def target_file(recipe: Recipe, place: Path, backend: str = "gguf") -> Path:
    """Return the target's own GGUF file, or write a file of the backend's type to `place`."""
    given = None if ":" in backend else target_gguf(recipe)
    kind = recipe.speedup.files.get(backend, recipe.speedup.outtype)
    return given or export_gguf(local_folder(recipe.target.model), place, kind).path


# ── Many texts at once: rows of different lengths, and every row gets the logits that it would get alone ──


class _RowCache(SlotCache):
    """Slots for several rows. A step writes only the slots of its tokens.

    Other rows stay as they are. No mask ever shows the remains of a failed call.
    """

    active: Tensor | None  # [A]. None means that all rows take tokens.
    # For each of the n tokens: its row among the R, its slot, its entry among the A, and its column among the q.
    places: tuple[Tensor, Tensor, Tensor, Tensor]
    rows: int

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store a step's keys and values [A, H, q, D]. Return all that the A rows hold so far, [A, H, shown, D]."""
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(*(part[:1].expand(self.rows, -1, -1, -1) for part in (keys, values)))
        # The layers of a sharded model lie on several devices.
        rows, slots, entries, columns = (place.to(keys.device) for place in self.places)
        layer.keys[rows, :, slots] = keys[entries, :, columns]  # [n, H, D]
        layer.values[rows, :, slots] = values[entries, :, columns]
        used = layer.keys[:, :, : self.shown], layer.values[:, :, : self.shown]
        if self.active is None:
            return used
        active = self.active.to(keys.device)
        return used[0].index_select(0, active), used[1].index_select(0, active)


class BatchedTorchModel(StaticTorchModel):
    """A Hugging Face model that decodes R texts of different lengths together. It takes chains, but no trees.

    A row that takes no token in a call is left out of the call. Nothing is compiled, because shapes follow the texts.
    Raises ValueError for a model that takes no mask of ours.
    """

    cache_kind = _RowCache

    def __init__(self, model: Any, rows: int, vocabulary: int | None = None) -> None:
        super().__init__(model, vocabulary, rows, size=1)  # The cache grows with the texts.
        self._cache.rows = rows
        self.max_leaves, self.steps_on_device = 0, False

    @staticmethod
    def _require_layers(model: Any) -> None:
        if (reason := state_refusal(type(model), model.config)) is not None:
            raise ValueError(f"rows of different lengths cannot be decoded together: {reason}")
        if (reason := mask_refusal(model.config)) is not None:
            raise ValueError(f"{model_name(model)} decodes its prompts one by one: {reason}")

    def _read(self, texts: Sequence[Sequence[int]], wanted: Sequence[tuple[int, int]]) -> Tensor:
        """Return logits [n, V] after the `wanted` tokens, each given as a row and the token's number in its text.

        All rows end in the last column, so that the logits after their last tokens are one column of the batch.
        """
        active, longest = [row for row, text in enumerate(texts) if text], max(map(len, texts))
        entry = {row: place for place, row in enumerate(active)}
        first = {row: longest - len(texts[row]) for row in active}  # column of a row's first token
        places = [
            (row, self._lengths[row] + i, entry[row], first[row] + i) for row in active for i in range(len(texts[row]))
        ]
        rows, slots, entries, columns = send(list(zip(*places, strict=True)), self.device)
        ids = torch.zeros(len(active), longest, dtype=torch.long, device=self.device)
        ids[entries, columns] = send([token for text in texts for token in text], self.device)
        ends = [self._lengths[row] + len(texts[row]) for row in active]
        # Columns left of a row's tokens are padding, and their output is never read. They attend to slot 0, because a
        # softmax over no slots gives NaN.
        before = torch.arange(longest, device=self.device) - longest
        positions = (send(ends, self.device)[:, None] + before).clamp(min=0)  # [A, q]
        self._reserve(max(ends))
        held = torch.arange(max(ends), device=self.device)
        self._cache.shown, self._cache.places = max(ends), (rows, slots, entries, columns)
        self._cache.active = None if len(active) == self.rows else send(active, self.device)
        kept_columns = sorted({first[row] + number for row, number in wanted})
        logits = logits_of(
            self.model,
            1 if kept_columns == [longest - 1] else send(kept_columns, self.device),
            input_ids=ids,
            attention_mask=layer_masks(self.model, held <= positions[..., None], positions, held),
            position_ids=positions,
            past_key_values=self._cache,
        )[..., : self.vocabulary_size]
        index_of = {column: index for index, column in enumerate(kept_columns)}
        entries_wanted = send([entry[row] for row, _ in wanted], self.device)
        return logits[entries_wanted, send([index_of[first[row] + number] for row, number in wanted], self.device)]
