"""Which layers stay, and a model without the others.

Legend: L layers, n layers dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.data.packing import Packed, hidden_states
from distill.errors import DataError, RecipeError
from distill.files import has_form, read_object, write_json
from distill.gguf.families import kinds_of, orders
from distill.progress import Progress
from distill.surgery.parts import layer_settings, layers_of, put_layers, require_supported, set_layers, take_neurons
from distill.surgery.results import Change, Size

# ── The record of an operation on a model: its sizes and its divergence from the target, before and after ──
# Every operation of this room makes a model folder from a model folder and returns Changes: `transplant.transplant`
# streams files, `cutter.cut_folder` cuts a loaded model.

RECORD = "surgery.json"  # beside the weights: the changes to a folder, oldest first


def size_of(model: Any, kept_vocabulary: int | None = None) -> Size:
    """The sizes of a loaded model; `kept_vocabulary` is the size of a trimmed head."""
    own, head = list(model.parameters()), model.get_output_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in own)
    row, tied = head.shape[1] * head.element_size(), model.get_input_embeddings().weight is head
    return sizes_by(model.config.to_dict(), sum(p.numel() for p in own), total, row, tied, kept_vocabulary)


def sizes_by(
    config: Mapping[str, Any], parameters: int, total: int, row: int, tied: bool, kept_vocabulary: int | None = None
) -> Size:
    """The sizes of a model by its config.json; `total` are the bytes of its weights, `row` those of a token's row."""
    layers, heads, vocabulary = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "vocab_size"))
    kept = vocabulary if kept_vocabulary is None else kept_vocabulary
    return Size(
        parameters=parameters,
        bytes_per_step=total - (vocabulary - kept) * row - (0 if tied else (vocabulary - 1) * row),
        layers=layers,
        hidden=config["hidden_size"],
        mlp=(config["intermediate_size"],) * layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        vocabulary=vocabulary,
        kept_vocabulary=kept,
        tied=tied,
    )


def read_changes(folder: Path) -> list[dict[str, Any]]:
    """The recorded changes of a folder, oldest first; none for a model that no operation made."""
    path = folder / RECORD
    if not path.exists():
        return []
    changes: list[dict[str, Any]] = read_object(path).get("changes", [])
    if not has_form(changes, [dict]):
        raise DataError(f"{path} is damaged: `changes` must be a list of objects", "copy the folder again")
    return changes


def record_change(folder: Path, before: list[dict[str, Any]], *changes: Change) -> None:
    """Write surgery.json: the changes before, and these."""
    write_json(folder / RECORD, {"changes": [*before, *(asdict(change) for change in changes)]})


# ── Measurements of a loaded model on text: the influence of its layers, and the inputs of its MLPs ──
# Every function passes packed blocks through the model, documents apart, and counts only positions that hold a
# token. Sums are kept in fp32 or better on the model's device. Legend: L layers, n blocks, S positions, T tokens of
# one batch, H hidden, F neurons of an MLP.

Watch = tuple[Any, Callable[[Tensor], None]]  # a module, and the function that gets its inputs
BATCH = 4  # blocks of a forward pass


def tokens(documents: Tensor) -> Tensor:
    """Positions [n, S] that hold a token."""
    return documents >= 0


@contextmanager
def watching(watches: Sequence[Watch]) -> Iterator[None]:
    """Within the block, each function is called with the first input of its module at every forward pass."""

    def hook(see: Callable[[Tensor], None], _module: Any, arguments: tuple[Tensor, ...]) -> None:
        see(arguments[0])

    handles = [module.register_forward_pre_hook(partial(hook, see)) for module, see in watches]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def parts_of(model: Any, blocks: Packed) -> list[Packed]:
    """The blocks in batches on the model's device."""
    return blocks.to(next(model.parameters()).device).batches(BATCH)


@torch.no_grad()
def observe(model: Any, blocks: Packed, watches: Sequence[Watch]) -> int:
    """One pass over the blocks; each watch gets its module's inputs [T, ·] in fp32, at the positions with a token.

    Returns the number of these positions.
    """
    used = torch.zeros(0, dtype=torch.bool)

    def see_used(see: Callable[[Tensor], None], values: Tensor) -> None:
        see(values[used].float())

    total = 0
    with watching([(module, partial(see_used, see)) for module, see in watches]):
        for part in parts_of(model, blocks):
            used = tokens(part.documents)
            total += int(used.sum())
            hidden_states(model, part)
    return total


def block_influence(model: Any, blocks: Packed) -> list[float]:
    """1 − mean cosine of each layer's input and output, [L] (block influence, Men et al. 2024, arXiv 2403.03853)."""
    layers = layers_of(model)
    influence = [0.0] * len(layers)
    units: list[Tensor] = []  # along the states that the layers read, and at last along the last one's output

    def keep(state: Tensor) -> None:
        units.append(torch.nn.functional.normalize(state, dim=-1))

    def finish(state: Tensor) -> None:
        keep(state)
        for index in range(len(layers)):
            # By the chord |u − v|, exact at small angles, where cosines of fp32 vectors lose their digits.
            chord = (units[index] - units[index + 1]).norm(dim=-1).clamp(max=2)
            influence[index] += float((chord.square() / 2).sum())
        units.clear()

    total = observe(model, blocks, [*((layer, keep) for layer in layers), (model.base_model.norm, finish)])
    return [value / total for value in influence]


@torch.no_grad()
def layer_calls(model: Any, part: Packed) -> list[tuple[Tensor, dict[str, Any]]]:
    """What each layer is called with in a pass over a batch of blocks: the states [n, S, H], and the other arguments,
    such as its own kind of mask and of positions."""
    calls: list[tuple[Tensor, dict[str, Any]]] = []

    def see(_module: Any, arguments: tuple[Tensor, ...], others: dict[str, Any]) -> None:
        calls.append((arguments[0], others))

    handles = [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in layers_of(model)]
    try:
        hidden_states(model, part)
    finally:
        for handle in handles:
            handle.remove()
    return calls


# ── Which layers stay, and a model without the others ──

Loss = Callable[[Any], float]


def check_layers(config: Any, keep: int) -> None:
    """Raise RecipeError when a model of this configuration cannot keep `keep` layers."""
    require_supported(config)
    if not 1 <= keep <= config.num_hidden_layers:
        raise RecipeError(
            f"{keep} layers are to be kept, but the donor has {config.num_hidden_layers}",
            f"ask for 1 to {max(1, config.num_hidden_layers - 1)}; {config.num_hidden_layers} would cut none",
        )


def parse_layers(text: str, count: int) -> list[int]:
    """Layers, ascending and counted from 0, given as ranges and single indices: "14-21", "3,7" or "0-2,9".

    Raises RecipeError for an entry that is no layer of `count`, for a layer given twice, and for all layers at once.
    """
    layers: list[int] = []
    for piece in text.split(","):
        ends = [int(end) if end.strip().isdecimal() else -1 for end in piece.split("-")]
        if len(ends) > 2 or min(ends) < 0 or ends[0] > ends[-1]:
            raise RecipeError(f"`{piece}` names no layers", 'write indices and ranges, lower end first: "3,7,14-21"')
        if ends[-1] >= count:
            raise RecipeError(f"`{piece}`: there is no layer {ends[-1]}", f"the layers are 0 to {count - 1}")
        layers += range(ends[0], ends[-1] + 1)
    twice = sorted({i for i in layers if layers.count(i) > 1})
    if twice:
        raise RecipeError(f"layers named twice: {', '.join(map(str, twice))}", "name each layer once")
    if len(layers) == count:
        raise RecipeError(f"all {count} layers would be dropped", "leave at least one")
    return sorted(layers)


def choose_layers(
    model: Any, keep: int | None, rule: str, *, blocks: Packed, loss: Loss, drop: str | None = None
) -> tuple[list[int], dict[str, Any]]:
    """The layers that stay, ascending, and a report of why; the model is left as it was.

    With n = L − keep:
    last-but-one  drops the n layers before the last (all but the last when n = L − 1).
    influence     drops the n of least block influence over `blocks`, the first and the last excepted, which read the
                  embeddings and feed the head; when one layer is kept it is the first. Men et al. 2024.
    greedy        removes, n times, the layer without which `loss(model)` is lowest: L + (L − 1) + … evaluations on the
                  model with that layer out of its list; no weights are copied. The first of equals goes.
    explicit      drops the layers in `drop` (see parse_layers), whatever `keep` is.

    Layers of different kinds stay in an order that GGUF can state: of Gemma 3, every n-th without a window.

    Raises RecipeError for a number or for layers that are not possible; DataError for an unknown architecture.
    """
    count = len(layers_of(model))
    report: dict[str, Any] = {"rule": rule, "layers": count}
    dropped: Sequence[int]
    if rule == "explicit":
        assert drop is not None
        dropped = parse_layers(drop, count)
    else:
        assert keep is not None
        check_layers(model.config, keep)
        possible = _possible(model.config, keep)
        if rule == "last-but-one":
            dropped = range(keep - 1, count - 1)
        elif rule == "greedy":
            steps, evaluations = _greedy(model, count - keep, loss, possible)
            report |= {"evaluations": evaluations, "steps": steps}
            dropped = [step["removed"] for step in steps]
        else:
            assert rule == "influence", rule
            report["influence"] = influence = block_influence(model, blocks)
            dropped = []
            for layer in [*sorted(range(1, count - 1), key=lambda i: influence[i]), count - 1, 0]:
                if len(dropped) < count - keep and possible([i for i in range(count) if i not in [*dropped, layer]]):
                    dropped = [*dropped, layer]
    kept = [i for i in range(count) if i not in dropped]
    return kept, {**report, "kept": kept, "dropped": sorted(dropped)}


def _possible(config: Any, keep: int) -> Callable[[Sequence[int]], bool]:
    """Whether `keep` of some layers of a model can be in an order of kinds, windows or positions, that GGUF states; any
    layers can where the model's own order cannot."""
    kinds, possible = kinds_of(config), list[list[bool]]()
    if kinds and kinds in orders(config.model_type, len(kinds)):
        possible = orders(config.model_type, keep)

    def within(order: Sequence[bool], left: Iterator[bool]) -> bool:
        return all(one in left for one in order)

    return lambda left: not possible or any(within(order, iter([kinds[i] for i in left])) for order in possible)


def _greedy(
    model: Any, drop: int, loss: Loss, possible: Callable[[Sequence[int]], bool]
) -> tuple[list[dict[str, Any]], int]:
    """The layers removed one after the other, each with the loss without it; how many losses were evaluated."""
    kept, steps, evaluations = list(range(len(layers_of(model)))), [], 0
    progress = Progress("layers: losses without one", sum(len(kept) - gone for gone in range(drop)), brief=True)
    for _ in range(drop):
        losses: dict[int, float] = {}
        for candidate in kept:
            left = [i for i in kept if i != candidate]
            if possible(left):
                with only_layers(model, left):
                    value = float(loss(model))
                losses[candidate] = value if math.isfinite(value) else math.inf
            progress.step()
        evaluations += len(losses)
        best = min(losses, key=lambda i: losses[i])
        if losses[best] == math.inf:
            raise DataError(f"without any of layers {kept} the loss is not finite", "check the donor's weights")
        kept.remove(best)
        steps.append({"removed": best, "loss": losses[best]})
    return steps, evaluations


@contextmanager
def only_layers(model: Any, kept: Sequence[int]) -> Iterator[None]:
    """Within the block, the model has only those layers; afterwards all of them again. No weights are copied."""
    layers = layers_of(model)
    settings = {name: getattr(model.config, name) for name in layer_settings(model.config, kept)}
    keep_layers(model, kept)
    try:
        yield
    finally:
        put_layers(model, layers)
        _set_layers(model, settings)


def keep_layers(model: Any, kept: Sequence[int]) -> None:
    """Keep those layers (ascending) in place, and cut every per-layer entry of the configuration with them."""
    layers = layers_of(model)
    put_layers(model, [layers[i] for i in kept])
    _set_layers(model, layer_settings(model.config, kept))


def _set_layers(model: Any, settings: dict[str, Any]) -> None:
    set_layers(model.config, settings)
    if hasattr(model.base_model, "has_sliding_layers"):
        model.base_model.has_sliding_layers = "sliding_attention" in model.config.layer_types


# ── Narrower MLPs: which neurons stay ──
# A neuron is a row of gate and of up and a column of down_proj. Legend: L layers, T tokens, F neurons, a [T,
# F] the inputs of down_proj.

MULTIPLE = 32  # of neurons: GGUF's quantised types store rows in blocks of 32


def check_width(config: Any, width: int) -> None:
    """Raise RecipeError when an MLP of this configuration cannot be cut to `width`: its own, or a multiple below it."""
    require_supported(config)
    full = config.intermediate_size
    possible = [*range(MULTIPLE, full, MULTIPLE), full]
    if width not in possible:
        near = sorted(sorted(possible, key=lambda w: abs(w - width))[:2])
        raise RecipeError(
            f"an MLP of {full} neurons cannot be cut to {width}",
            f"ask for a multiple of {MULTIPLE} (better 256) below {full}, or all: {' or '.join(map(str, near))}",
        )


def neuron_scores(model: Any, blocks: Packed) -> list[Tensor]:
    """E[a²]·‖down column‖² [F] of each layer's neurons: the mean square that each adds to the residual stream."""
    downs = [layer.mlp.down_proj for layer in layers_of(model)]
    squares = [torch.zeros(down.in_features, device=down.weight.device) for down in downs]

    def add(total: Tensor, a: Tensor) -> None:
        total.add_(a.square().sum(0))

    watches = [(down, partial(add, total)) for down, total in zip(downs, squares, strict=True)]
    count = observe(model, blocks, watches)
    columns = [down.weight.detach().float().square().sum(0) for down in downs]
    return [total / count * column for total, column in zip(squares, columns, strict=True)]


def narrow(model: Any, blocks: Packed, width: int) -> dict[str, Any]:
    """Keep `width` neurons of every layer's MLP, those of largest score in their order; the model is changed in place.

    Returns JSON-able details: neurons kept per layer, and the share of its score they hold. Raises RecipeError for a
    width that is not possible (see check_width).
    """
    check_width(model.config, width)
    neurons, shares = [], []
    for scores in (one.cpu() for one in neuron_scores(model, blocks)):  # some devices sort no integers
        kept = scores.sort(descending=True, stable=True).indices[:width].sort().values
        mass = float(scores.sum())
        neurons.append(kept.tolist())
        shares.append(float(scores[kept].sum()) / mass if mass else 1.0)
    keep_neurons(model, neurons)
    return {"widths": [width] * len(neurons), "neurons": neurons, "score_kept": shares}


def keep_neurons(model: Any, neurons: Sequence[Sequence[int]]) -> None:
    """Keep those neurons of each layer's MLP (equally many, ascending); the model is changed in place."""
    for layer, kept in zip(layers_of(model), neurons, strict=True):
        take_neurons(layer, kept)
    model.config.intermediate_size = len(neurons[0])
