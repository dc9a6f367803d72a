"""Models and tokenizers in the Hugging Face format: loading, sizes, and step-by-step decoding with roll-back.

Legend: V vocabulary, n tokens of one call, C committed tokens, N nodes of a pending tree.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError, RunError
from distill.models.base import ROOT, PendingTree, check_call, check_want
from distill.models.torch_logits import TorchLogits
from distill.processes import process_count
from distill.recipe import Target, is_path

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is CUDA (or ROCm), else MPS, else the CPU."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"device `{name}` cannot be used: {str(error).splitlines()[0]}", "try device=auto") from error
    return device


def check_folder(reference: str) -> None:
    """Raise DataError when a reference is a path and no model folder stands there."""
    if is_path(reference) and not (Path(reference) / "config.json").is_file():
        state = "has no config.json" if Path(reference).is_dir() else "does not exist"
        raise DataError(f"model folder {reference} {state}", "give a Hugging Face model folder or a hub name")


def _explained(reference: str, error: Exception) -> DataError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    hint = "check the folder" if is_path(reference) else "check the name and the network, or give a local folder"
    return DataError(f"cannot load {reference}: {first}", hint)


def quantisation(kind: str, dtype: str) -> Any:
    """The bitsandbytes configuration that transformers loads `int8` (LLM.int8) or `int4` (NF4, QLoRA's) weights by.

    Products are computed in `dtype`; the head and the embeddings keep their own type.
    """
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[dtype],
    )


def _require_bitsandbytes(kind: str) -> None:
    from transformers.utils import is_bitsandbytes_available

    if not is_bitsandbytes_available():
        raise RunError(
            f"{kind} weights need the package bitsandbytes, which is not installed, or too old",
            "pip install -U bitsandbytes, or leave the weights as they are (quantise: null)",
        )


def _placement(device: torch.device, shard: bool) -> str | dict[str, torch.device]:
    """What transformers takes as device_map; raises RunError where sharding has nothing to spread a model over."""
    if not shard:
        return {"": device}
    if device.type == "cpu":
        raise RunError("a model is sharded over accelerators, and this run is on the CPU", "set target.shard: false")
    if process_count() > 1:
        raise RunError(
            f"{process_count()} processes would each spread the target over all accelerators",
            "start one process, or set target.shard: false so that each holds the target on its own",
        )
    return "auto"


def load_model(
    reference: str,
    dtype: str,
    device: torch.device,
    trimmed: bool = True,
    quantise: str | None = None,
    shard: bool = False,
) -> Any:
    """A causal language model in evaluation mode; raises DataError when it cannot be loaded.

    A folder with kept_tokens.json speaks those tokens alone, unless `trimmed` is false. For `quantise` see
    `quantisation`; with `shard` the layers are spread over all accelerators, and inputs go to the first one. Raises
    RunError where either is impossible here.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from distill.models.kept import read_kept, trim_head

    check_folder(reference)
    options: dict[str, Any] = {}
    if quantise is not None:
        _require_bitsandbytes(quantise)
        options["quantization_config"] = quantisation(quantise, dtype)
    if quantise is not None or shard:
        options["device_map"] = _placement(device, shard)
    try:
        model = AutoModelForCausalLM.from_pretrained(reference, dtype=DTYPES[dtype], **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise _explained(reference, error) from error
    model = (model if options else model.to(device)).eval()
    kept = read_kept(Path(reference)) if trimmed else None
    return model if kept is None else trim_head(model, kept["kept"])


def load_target(target: Target, device: torch.device) -> Any:
    """The target of a recipe, in its type, quantised or sharded as the recipe says."""
    return load_model(target.model, target.dtype, device, quantise=target.quantise, shard=target.shard)


def load_tokenizer(reference: str) -> Any:
    """The tokenizer of a model; raises DataError when it cannot be loaded."""
    from transformers import AutoTokenizer

    check_folder(reference)
    try:
        return AutoTokenizer.from_pretrained(reference)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _explained(reference, error) from error


def load_config(reference: str) -> Any:
    """The configuration of a model; reads no weights."""
    from transformers import AutoConfig

    check_folder(reference)
    try:
        return AutoConfig.from_pretrained(reference)
    except (OSError, ValueError, KeyError) as error:
        raise _explained(reference, error) from error


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of plain text, without the special tokens a tokenizer may add around it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def end_ids(model_config: Any, tokenizer: Any) -> list[int]:
    """Ids that end a text: the configuration's and the tokenizer's eos."""
    found = model_config.eos_token_id
    ids = set(found if isinstance(found, list) else [] if found is None else [found])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return sorted(ids)


def real_tokens(config: Any, tokenizer: Any) -> int:
    """How many ids stand for tokens: rows of the embeddings beyond them are padding and have no part in any law."""
    return min(int(config.vocab_size), max(tokenizer.get_vocab().values()) + 1)


def describe_model(reference: str, model: Any) -> dict[str, Any]:
    """Sizes of a loaded model, for tables: parameters, layers, widths, vocabulary, bytes."""
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "path": reference,
        "architecture": config.model_type,
        "parameters": parameters,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "mlp": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }


def config_json(folder: Path) -> dict[str, Any]:
    """config.json of a folder as it stands."""
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"{folder}/config.json cannot be read: {error}") from error
    return found


def _shortest_window(config: Any) -> int:
    """The fewest tokens that some layer can look back on; sys.maxsize where every layer sees all."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention", "chunked_attention"]
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    found = [getattr(config, sizes[kind], None) for kind in set(kinds) & set(sizes)]
    return min((int(size) for size in found if size), default=sys.maxsize)


class TorchModel:
    """One sequence decoded by a Hugging Face model with a cache that can be rolled back, and trees of tokens.

    See `distill.models.base.Model`. Its logits equal those of a fresh prefill up to rounding; ids from `vocabulary` on
    are padding and have none. The cache holds the N nodes of a pending tree behind the C committed tokens.
    """

    rows = 1

    def __init__(self, model: Any, vocabulary: int | None = None) -> None:
        from transformers import DynamicCache

        self.model = model
        self.device = next(model.parameters()).device
        self.vocabulary_size: int = min(model.config.vocab_size, vocabulary or model.config.vocab_size)
        self.capacity: int = model.config.max_position_embeddings
        self._new_cache = DynamicCache
        self._cache = DynamicCache()
        self._length = 0
        self._tree = PendingTree()
        self._seen = torch.zeros(0, 0, dtype=torch.bool)  # [N, N], true where a node looks: its path and itself

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of the one row."""
        return [self._length]

    @property
    def max_leaves(self) -> int:
        """No limit, or 0 where a tree's mask would not be the model's own."""
        return sys.maxsize if self._refusal() is None else 0

    def _refusal(self) -> str | None:
        """Why this model takes no trees, if it takes none."""
        kind = self.model.config._attn_implementation
        if kind not in ("sdpa", "eager"):
            return f"trees need the attention implementation sdpa or eager, this model runs {kind}"
        if (window := _shortest_window(self.model.config)) < self.capacity:
            return f"trees need layers that see the whole context of {self.capacity}, some see {window} tokens"
        return None

    @torch.inference_mode()
    def extend(
        self,
        tokens: Sequence[int],
        counts: Sequence[int] | None = None,
        parents: Sequence[int] | None = None,
        want: Sequence[int] | None = None,
    ) -> TorchLogits:
        """Append `tokens`, or hang them into the tree below `parents`; logits for those in `want` (None: all).

        Raises ValueError, with nothing changed, past the capacity, for more than one row, for `want` outside the
        tokens, for a chain below a pending tree, and for a tree in a model that takes none.
        """
        if counts is not None and list(counts) != [len(tokens)]:
            raise ValueError(f"this model keeps one row: counts must be [{len(tokens)}], got {list(counts)}")
        if parents is not None:
            return self._extend_tree(list(tokens), parents, want)
        if self._tree.parents:
            raise ValueError("a tree is pending: keep a path of it or roll back first")
        if not tokens or self._length + len(tokens) > self.capacity:
            raise ValueError(f"{self._length} + {len(tokens)} tokens do not fit a context of {self.capacity}")
        logits = self._forward(tokens, want)
        self._length += len(tokens)
        return logits

    def _extend_tree(self, tokens: list[int], parents: Sequence[int], want: Sequence[int] | None) -> TorchLogits:
        if (refusal := self._refusal()) is not None:
            raise ValueError(refusal)
        check_call(tokens, parents, want, self.vocabulary_size)
        old, tree = len(self._tree), self._tree.grown(parents)
        if self._length + max(tree.depths) > self.capacity:
            raise ValueError(f"{self._length} + {max(tree.depths)} tokens do not fit a context of {self.capacity}")
        seen = torch.zeros(len(tree), len(tree), dtype=torch.bool)
        seen[:old, :old] = self._seen
        for node in range(old, len(tree)):
            if tree.parents[node] != ROOT:
                seen[node] = seen[tree.parents[node]]
            seen[node, node] = True
        # Additive, because eager attention adds whatever mask it is given. [1, 1, n, C + N]
        dtype = self.model.dtype
        mask = torch.zeros(1, 1, len(tokens), self._length + len(tree), dtype=dtype)
        mask[..., self._length :].masked_fill_(~seen[old:], torch.finfo(dtype).min)
        positions = torch.tensor([[self._length + depth - 1 for depth in tree.depths[old:]]], device=self.device)
        logits = self._forward(tokens, want, attention_mask=mask.to(self.device), position_ids=positions)
        self._tree, self._seen = tree, seen
        return logits

    def _forward(self, tokens: Sequence[int], want: Sequence[int] | None, **inputs: Any) -> TorchLogits:
        """Run the model on `tokens`; the cache is as it was when that fails."""
        ids = torch.tensor([list(tokens)], device=self.device)
        keep: int | Tensor = 0
        if want is not None:
            last = list(want) == [len(tokens) - 1]
            if not last:
                check_want(want, len(tokens))
            keep = 1 if last else torch.tensor(list(want), dtype=torch.long, device=self.device)
        try:
            logits = self.model(
                input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=keep, **inputs
            ).logits[0]
        except BaseException:
            self._trim(self._length + len(self._tree))
            raise
        return TorchLogits(logits[:, : self.vocabulary_size])

    def _trim(self, size: int) -> None:
        """Leave the first `size` entries of every layer that has more: a call that failed grew only some of them."""
        if size == 0:
            self._cache = self._new_cache()
            return
        for layer in self._cache.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[..., :size, :], layer.values[..., :size, :]

    @torch.inference_mode()
    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit one path of the pending tree and drop its other nodes; ValueError for no path from the root."""
        path = self._tree.only_path(paths)
        if path != list(range(len(path))):
            start, end = self._length, self._length + len(path)
            index = torch.tensor(path, device=self.device) + start
            for layer in self._cache.layers:
                # The path is read before it is written: index_select copies.
                layer.keys[..., start:end, :] = layer.keys.index_select(-2, index)
                layer.values[..., start:end, :] = layer.values.index_select(-2, index)
        self._drop_tree(len(path))

    def _drop_tree(self, kept: int) -> None:
        """Commit the first `kept` entries behind the committed ones and forget the rest of the tree."""
        self._length += kept
        if len(self._tree) > kept:
            self._trim(self._length)
        self._tree, self._seen = PendingTree(), self._seen[:0, :0]

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop a pending tree and the tokens after the first `lengths[0]`."""
        drop = self._length - lengths[0]
        if drop < 0 or lengths[0] < 0:
            raise ValueError(f"cannot roll back from {self._length} to {lengths[0]} tokens")
        if self._tree.parents:
            self._drop_tree(0)
        if lengths[0] == 0:
            self.reset()
        elif drop:
            # A negative count means "drop that many" in every version we support; a positive one changed meaning.
            self._cache.crop(-drop)
            self._length = lengths[0]

    def reset(self) -> None:
        """Forget everything: the cold cache that every timed prompt starts with."""
        self._cache = self._new_cache()
        self._length = 0
        self._tree, self._seen = PendingTree(), self._seen[:0, :0]

    def close(self) -> None:
        """Free the cache."""
        self.reset()


def local_folder(reference: str) -> Path:
    """The folder of a model: itself when it is a path, else its snapshot in the hub's cache (fetched if need be)."""
    if Path(reference).is_dir():
        return Path(reference)
    check_folder(reference)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(reference))
    except Exception as error:  # the hub client raises many kinds; each means "not to be had"
        raise _explained(reference, error) from error
