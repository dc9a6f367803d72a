"""Which layers stay, and a model without the others.

Legend: L layers, n layers dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from distill.errors import DataError, RecipeError
from distill.packing import Packed
from distill.progress import Progress
from distill.surgery.change import decoder_layers, require_supported
from distill.surgery.observe import block_influence

Loss = Callable[[Any], float]


def check_layers(config: Any, keep: int) -> None:
    """Raise RecipeError when a model of this configuration cannot keep `keep` layers."""
    require_supported(config.model_type)
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

    Raises RecipeError for a number or for layers that are not possible; DataError for an unknown architecture.
    """
    count = len(decoder_layers(model))
    report: dict[str, Any] = {"rule": rule, "layers": count}
    dropped: Sequence[int]
    if rule == "explicit":
        assert drop is not None
        dropped = parse_layers(drop, count)
    else:
        assert keep is not None
        check_layers(model.config, keep)
        if rule == "last-but-one":
            dropped = range(keep - 1, count - 1)
        elif rule == "greedy":
            steps = _greedy(model, count - keep, loss)
            report |= {"evaluations": sum(range(keep + 1, count + 1)), "steps": steps}
            dropped = [step["removed"] for step in steps]
        else:
            assert rule == "influence", rule
            report["influence"] = influence = block_influence(model, blocks)
            dropped = [*sorted(range(1, count - 1), key=lambda i: influence[i]), count - 1][: count - keep]
    kept = [i for i in range(count) if i not in dropped]
    return kept, {**report, "kept": kept, "dropped": sorted(dropped)}


def _greedy(model: Any, drop: int, loss: Loss) -> list[dict[str, Any]]:
    """The layers removed one after the other, each with the loss without it."""
    kept, steps = list(range(len(decoder_layers(model)))), []
    evaluations = sum(len(kept) - removed for removed in range(drop))
    progress = Progress("layers: losses without one", evaluations, brief=True)
    for _ in range(drop):
        losses: dict[int, float] = {}
        for candidate in kept:
            with only_layers(model, [i for i in kept if i != candidate]):
                value = float(loss(model))
            losses[candidate] = value if math.isfinite(value) else math.inf
            progress.step()
        best = min(losses, key=lambda i: losses[i])
        if losses[best] == math.inf:
            raise DataError(f"without any of layers {kept} the loss is not finite", "check the donor's weights")
        kept.remove(best)
        steps.append({"removed": best, "loss": losses[best]})
    return steps


@contextmanager
def only_layers(model: Any, kept: Sequence[int]) -> Iterator[None]:
    """Within the block, the model has only those layers; afterwards all of them again. No weights are copied."""
    layers, config = model.model.layers, model.config
    names = ("layer_types", "max_window_layers", "num_hidden_layers")
    settings = {name: getattr(config, name) for name in names if hasattr(config, name)}
    sliding = getattr(model.model, "has_sliding_layers", None)
    keep_layers(model, kept)
    try:
        yield
    finally:
        model.model.layers = layers
        for position, layer in enumerate(layers):
            layer.self_attn.layer_idx = position
        for name, value in settings.items():
            setattr(config, name, value)
        if sliding is not None:
            model.model.has_sliding_layers = sliding


def keep_layers(model: Any, kept: Sequence[int]) -> None:
    """Keep those layers (ascending) in place, and cut every per-layer entry of the configuration with them.

    The cache addresses layers by `layer_idx`, which is renumbered. Raises RecipeError for layers that do not exist.
    """
    layers, config = decoder_layers(model), model.config
    if not kept or list(kept) != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= len(layers):
        raise RecipeError(f"layers {list(kept)} cannot be kept", f"name some of 0 to {len(layers) - 1}, ascending")
    model.model.layers = torch.nn.ModuleList([layers[i] for i in kept])
    for position, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = position
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    if getattr(config, "max_window_layers", None) is not None:
        config.max_window_layers = sum(1 for i in kept if i < config.max_window_layers)
    config.num_hidden_layers = len(kept)
    if hasattr(model.model, "has_sliding_layers"):
        model.model.has_sliding_layers = "sliding_attention" in config.layer_types
