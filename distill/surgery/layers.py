"""Parts of a decoder by family, the choice of layers and neurons that stay, and the removal of the others.

Every operation of this room finds the parts of a model here. Legend: L layers, n layers dropped, T positions, F neurons
of an MLP, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distill.engines.torch.blocks import Packed, hidden_states
from distill.engines.torch.hugging_face import load_config, local_snapshot
from distill.errors import DataError, RecipeError
from distill.files import is_gguf
from distill.folders import NUMPY_FLOATS, read_header, weight_files
from distill.gguf.families import kinds_of, orders

# ── Parts of a decoder: one entry for each family. Modules and configuration state the rest. ──

# model_type -> the norm between an MLP's output and the residual stream, or None if the output is added directly.
FAMILIES: Mapping[str, str | None] = {
    **dict.fromkeys(("qwen2", "qwen3", "llama", "mistral", "ministral", "ministral3", "smollm3", "seed_oss", "phi3")),
    **dict.fromkeys(("granite", "cohere", "cohere2")),
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4"), "post_feedforward_layernorm"),
    "glm4": "post_mlp_layernorm",
}
# Number of embedding rows -> small models that recipes cut.
DONORS: Mapping[int, Sequence[str]] = {
    49_152: ("HuggingFaceTB/SmolLM2-135M-Instruct",),
    128_256: ("meta-llama/Llama-3.2-1B-Instruct",),
    151_936: ("Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-0.5B-Instruct"),
    152_064: ("Qwen/Qwen2.5-0.5B-Instruct",),
    262_144: ("google/gemma-3-270m-it",),
}
NOT_BY_LAYER = ("architectures", "_id", "_ids")  # Lists with these endings may have L entries by chance.


def require_supported(config: Any) -> None:
    """Raise DataError for a configuration of a family that cannot be cut. The hint names donors with its vocabulary."""
    if config.model_type in FAMILIES:
        return
    inner = config.get_text_config()
    rows = int(getattr(inner, "vocab_size", None) or 0)
    if inner is not config and inner.model_type in FAMILIES:
        hint = f"save its language model, a {inner.model_type}, as a separate folder and name that folder"
    elif rows in DONORS:
        names = " or ".join(DONORS[rows])
        hint = f"choose a donor with the same {rows} rows, such as {names}; `distill check` compares the tokens"
    else:
        hint = "choose a small donor with its tokenizer, or any with cut.transplant"
    raise DataError(
        f"surgery on architecture `{config.model_type}` is not supported", f"{hint}; supported: {', '.join(FAMILIES)}"
    )


# Where a folder states that its weights are quantised: the keys of transformers (GPTQ, AWQ, FP8, bitsandbytes), of MLX
# and of older compressed-tensors, and the file of NVIDIA's ModelOpt.
QUANTISED_KEYS, QUANTISED_FILE = ("quantization_config", "quantization", "compression_config"), "hf_quant_config.json"


def require_floats(reference: str) -> None:
    """Raise DataError for a donor with quantised weights, as stated in its config.json or the headers of its files."""
    if is_gguf(reference):
        return  # A GGUF file is imported as floats.
    config, folder = load_config(reference), local_snapshot(reference)
    values = (getattr(config, key, None) for key in QUANTISED_KEYS)
    named = next((value for value in values if value is not None), None)
    how = named.get("quant_method") or named.get("mode") if isinstance(named, dict) else None
    if named is None and folder is not None and (folder / QUANTISED_FILE).is_file():
        named = how = QUANTISED_FILE
    if named is None and folder is not None:
        files = [file for file in weight_files(folder) if file.is_file()]
        matrices = (tensor for file in files for tensor in read_header(file).values() if len(tensor.shape) > 1)
        named = how = next((matrix.dtype for matrix in matrices if matrix.dtype not in NUMPY_FLOATS), None)
    if named is not None:
        raise DataError(
            f"the weights of {reference} are quantised{f' ({how})' if how else ''}, but a donor is cut and trained",
            "name the model that it was quantised from, in float32, bfloat16 or float16",
        )


def layers_of(model: Any) -> Any:
    """Return the layers of a model, in order. Raises DataError for an architecture that cannot be cut."""
    require_supported(model.config)
    return model.base_model.layers


def put_layers(model: Any, layers: Sequence[Any]) -> None:
    """Give a model these layers, and renumber the `layer_idx` by which caches address them."""
    model.base_model.layers = layers if isinstance(layers, torch.nn.ModuleList) else torch.nn.ModuleList(layers)
    for position, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position


def layer_settings(config: Any, kept: Sequence[int]) -> dict[str, Any]:
    """Return a configuration's values that depend on its layers, for a model with only the `kept` ones (ascending).

    A list belongs to the layers if it has one entry for each of them.
    """
    count = config.num_hidden_layers
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    settings: dict[str, Any] = {
        name: [value[index] for index in kept] for name, value in lists.items() if not name.endswith(NOT_BY_LAYER)
    }
    if getattr(config, "max_window_layers", None) is not None:
        settings["max_window_layers"] = sum(1 for index in kept if index < config.max_window_layers)
    return settings | {"num_hidden_layers": len(kept)}


def set_layers(config: Any, settings: Mapping[str, Any]) -> None:
    """Store the result of `layer_settings` in a configuration."""
    for name, value in settings.items():
        setattr(config, name, value)


def gate_and_up(layer: Any) -> list[tuple[Any, slice]]:
    """Return an MLP's gate and up projections, each with its row slice. One fused Linear can hold both."""
    mlp = layer.mlp
    if hasattr(mlp, "gate_up_proj"):
        neurons = mlp.down_proj.in_features
        return [(mlp.gate_up_proj, slice(0, neurons)), (mlp.gate_up_proj, slice(neurons, 2 * neurons))]
    return [(mlp.gate_proj, slice(None)), (mlp.up_proj, slice(None))]


def take(module: Any, index: Tensor, dim: int) -> None:
    """Keep some outputs (dim 0, with their biases) or inputs (dim 1, with the whole bias) of a Linear."""
    weight = module.weight.detach().index_select(dim, index)
    module.weight = torch.nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    module.out_features, module.in_features = weight.shape
    if dim == 0 and module.bias is not None:
        bias = module.bias.detach().index_select(0, index)
        module.bias = torch.nn.Parameter(bias, requires_grad=module.bias.requires_grad)


def take_neurons(layer: Any, kept: Sequence[int]) -> None:
    """Keep some neurons (ascending) of a layer's MLP, in place."""
    mlp = layer.mlp
    neurons, index = mlp.down_proj.in_features, torch.tensor(kept, device=mlp.down_proj.weight.device)
    if len(kept) == neurons:
        return
    rows: dict[Any, list[Tensor]] = {}
    for linear, place in gate_and_up(layer):
        rows.setdefault(linear, []).append(index + (place.start or 0))
    for linear, places in rows.items():
        take(linear, torch.cat(places), 0)
    take(mlp.down_proj, index, 1)
    if hasattr(mlp, "intermediate_size"):
        mlp.intermediate_size = len(kept)


def written_shares(model: Any, layer: Any, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors between the MLP's output for neurons [T, F] and the residual stream, by position and channel.

    Positions are [T, 1]. Channels are [H], and infinite if a channel is not written. A norm between the two divides by
    the root mean square of the output, which is treated as a constant.
    """
    name, down = FAMILIES[model.config.model_type], layer.mlp.down_proj
    channels = torch.full((down.out_features,), float(getattr(layer, "residual_multiplier", 1.0)), device=a.device)
    positions = torch.ones(len(a), 1, device=a.device)
    if name is not None:
        norm = getattr(layer, name)
        channels *= norm(torch.ones_like(norm.weight)).float()
        positions = down(a).float().square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
    return positions, channels.masked_fill(channels == 0, torch.inf)


# ── Measurements of a loaded model on text: the influence of its layers, and the inputs of its MLPs ──
# Packed blocks pass through the model. Documents do not attend to each other, and only positions with a token count.
# Sums are kept in fp32 or better on the model's device. Legend: L layers, n blocks, S positions, T tokens of one batch,
# H hidden, F neurons of an MLP.

Watch = tuple[Any, Callable[[Tensor], None]]  # a module, and the function that gets its inputs
BATCH = 4  # blocks per forward pass


def has_token(documents: Tensor) -> Tensor:
    """Return the positions [n, S] that hold a token."""
    return documents >= 0


@contextmanager
def watching(watches: Sequence[Watch]) -> Iterator[None]:
    """Within the context, call each function with the first input of its module at every forward pass."""

    def hook(see: Callable[[Tensor], None], _module: Any, arguments: tuple[Tensor, ...]) -> None:
        see(arguments[0])

    with ExitStack() as hooks:
        for module, see in watches:
            hooks.enter_context(module.register_forward_pre_hook(partial(hook, see)))
        yield


def parts_of(model: Any, blocks: Packed) -> list[Packed]:
    """Split the blocks into batches on the model's device."""
    return blocks.to(next(model.parameters()).device).batches(BATCH)


@torch.no_grad()
def observe(model: Any, blocks: Packed, watches: Sequence[Watch]) -> int:
    """Run the model once over the blocks. Each watch gets its module's fp32 inputs [T, ·] at positions with a token.

    Returns the number of these positions.
    """
    used = torch.zeros(0, dtype=torch.bool)

    def see_used(see: Callable[[Tensor], None], values: Tensor) -> None:
        see(values[used].float())

    total = 0
    with watching([(module, partial(see_used, see)) for module, see in watches]):
        for part in parts_of(model, blocks):
            used = has_token(part.documents)
            total += int(used.sum())
            hidden_states(model, part)
    return total


def block_influence(model: Any, blocks: Packed) -> list[float]:
    """Return 1 − mean cosine of each layer's input and output [L] (Men et al. 2024, arXiv 2403.03853)."""
    layers = layers_of(model)
    influence = [0.0] * len(layers)
    units: list[Tensor] = []  # normalised inputs of all layers, then the output of the last layer

    def keep(state: Tensor) -> None:
        units.append(torch.nn.functional.normalize(state, dim=-1))

    def finish(state: Tensor) -> None:
        keep(state)
        for index in range(len(layers)):
            # fp32 cosines lose their digits at small angles. The chord |u − v| is exact there.
            chord = (units[index] - units[index + 1]).norm(dim=-1).clamp(max=2)
            influence[index] += float((chord.square() / 2).sum())
        units.clear()

    total = observe(model, blocks, [*((layer, keep) for layer in layers), (model.base_model.norm, finish)])
    return [value / total for value in influence]


@torch.no_grad()
def layer_calls(model: Any, part: Packed) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return the states [n, S, H] that the first layer reads, and the other arguments of each layer's call.

    The arguments include the layer's mask and positions. No layer computes.
    """
    calls: list[tuple[Tensor, dict[str, Any]]] = []

    def see(states: Tensor, **others: Any) -> Tensor:
        calls.append((states, others))
        return states

    layers = layers_of(model)
    try:
        for layer in layers:
            layer.forward = see
        hidden_states(model, part)
    finally:
        for layer in layers:
            del layer.forward
    return calls[0][0], [others for _, others in calls]


# ── Which layers stay, and a model without the others ──


def check_layers(config: Any, keep: int) -> None:
    """Raise RecipeError if a model of this configuration cannot keep `keep` layers."""
    require_supported(config)
    if not 1 <= keep <= config.num_hidden_layers:
        hint = f"ask for 1 to {max(1, config.num_hidden_layers - 1)}; {config.num_hidden_layers} would cut none"
        raise RecipeError(f"{keep} layers should stay, but the donor has {config.num_hidden_layers}", hint)


def choose_layers(model: Any, keep: int, blocks: Packed) -> tuple[list[int], dict[str, Any]]:
    """Return the layers that stay, ascending, and the reasons as JSON-able details. The model does not change.

    Layers with the least `block_influence` over `blocks` go first. The last and the first layer, which feed the head
    and read the embeddings, go at the end. If the family has layers of different kinds, the remaining order must be
    one that GGUF can state (for Gemma 3: every n-th layer without a window).

    Raises RecipeError for an impossible number. Raises DataError for an unknown architecture and for states that are
    not finite.
    """
    check_layers(model.config, keep)
    count = len(layers_of(model))
    kept, possible = list(range(count)), _possible(model.config, keep)
    influence = block_influence(model, blocks) if keep < count else []
    if not all(map(math.isfinite, influence)):
        raise DataError("the states of the uncut model are not finite", "check the donor's weights")
    for layer in [*sorted(range(1, count - 1), key=lambda i: influence[i]), count - 1, 0] if influence else ():
        left = [i for i in kept if i != layer]
        if len(kept) > keep and possible(left):
            kept = left
    return kept, {"influence": influence, "kept": kept, "dropped": [i for i in range(count) if i not in kept]}


def _possible(config: Any, keep: int) -> Callable[[Sequence[int]], bool]:
    """Return a test whether `keep` of the remaining layers can form an order of kinds that GGUF can state.

    Every choice passes if GGUF cannot state the model's own order.
    """
    kinds, possible = kinds_of(config), list[list[bool]]()
    if kinds and kinds in orders(config.model_type, len(kinds)):
        possible = orders(config.model_type, keep)

    def within(order: Sequence[bool], left: Iterator[bool]) -> bool:
        return all(kind in left for kind in order)

    return lambda left: not possible or any(within(order, iter([kinds[i] for i in left])) for order in possible)


def keep_layers(model: Any, kept: Sequence[int]) -> None:
    """Keep these layers (ascending) in place, with the configuration's entries for them."""
    layers = layers_of(model)
    put_layers(model, [layers[i] for i in kept])
    _set_layers(model, layer_settings(model.config, kept))


def _set_layers(model: Any, settings: dict[str, Any]) -> None:
    set_layers(model.config, settings)
    if hasattr(model.base_model, "has_sliding_layers"):
        model.base_model.has_sliding_layers = "sliding_attention" in model.config.layer_types


# ── Narrower MLPs: which neurons stay ──
# A neuron is a row of gate and of up, and a column of down_proj. Legend: L layers, T tokens, F neurons, a [T, F] the
# inputs of down_proj.

NEURON_MULTIPLE = 32  # GGUF's quantised types store rows in blocks of 32.


def check_width(config: Any, width: int) -> None:
    """Raise RecipeError if an MLP cannot be cut to `width`. Possible are its own width and smaller multiples of 32."""
    require_supported(config)
    full = config.intermediate_size
    possible = [*range(NEURON_MULTIPLE, full, NEURON_MULTIPLE), full]
    if width not in possible:
        near = sorted(sorted(possible, key=lambda w: abs(w - width))[:2])
        raise RecipeError(
            f"an MLP of {full} neurons cannot be cut to {width}",
            f"ask for {full} or a smaller multiple of {NEURON_MULTIPLE} (better 256): {' or '.join(map(str, near))}",
        )


def neuron_scores(model: Any, blocks: Packed) -> list[Tensor]:
    """Return E|a|·‖down column‖ [F] of each layer: the mean length of what each neuron adds to the residual stream."""
    downs = [layer.mlp.down_proj for layer in layers_of(model)]
    sums = [torch.zeros(down.in_features, device=down.weight.device) for down in downs]

    def add(total: Tensor, a: Tensor) -> None:
        total.add_(a.abs().sum(0))

    watches = [(down, partial(add, total)) for down, total in zip(downs, sums, strict=True)]
    count = observe(model, blocks, watches)
    columns = [down.weight.detach().float().norm(dim=0) for down in downs]
    return [total / count * column for total, column in zip(sums, columns, strict=True)]


def choose_neurons(model: Any, blocks: Packed, width: int) -> tuple[list[list[int]], list[float]]:
    """Return the `width` neurons with the largest scores of each layer, ascending, and their share of its total score.

    Raises RecipeError for an impossible width (see `check_width`).
    """
    check_width(model.config, width)
    neurons, shares = [], []
    for layer_scores in neuron_scores(model, blocks):
        scores = layer_scores.cpu()  # Some devices sort no integers.
        kept = scores.sort(descending=True, stable=True).indices[:width].sort().values
        mass = float(scores.sum())
        neurons.append(kept.tolist())
        shares.append(float(scores[kept].sum()) / mass if mass else 1.0)
    return neurons, shares


@torch.no_grad()
def cut_parts(model: Any, kept: Sequence[int], neurons: Sequence[Sequence[int]] | None = None) -> None:
    """Keep these layers (ascending) and, of each of the model's layers, these neurons. In place, without repair."""
    layers = layers_of(model)
    if neurons is not None:
        for index in kept:
            take_neurons(layers[index], neurons[index])
        model.config.intermediate_size = len(neurons[0])
    keep_layers(model, kept)
