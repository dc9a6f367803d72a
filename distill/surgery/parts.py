"""Where the parts of a decoder lie: a line for each family, and what its modules and its configuration say themselves.

Every operation of this room asks here. Legend: L layers, T positions, F neurons of an MLP, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError

# By model_type, the norm that an MLP's output passes before it is added to the stream; none: it is added as it is.
FAMILIES: Mapping[str, str | None] = {
    **dict.fromkeys(("qwen2", "qwen3", "llama", "mistral", "ministral", "ministral3", "smollm3", "seed_oss", "phi3")),
    **dict.fromkeys(("granite", "cohere", "cohere2")),
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4"), "post_feedforward_layernorm"),
    "glm4": "post_mlp_layernorm",
}
# Small models that recipes cut, by the rows of their embeddings.
DONORS: Mapping[int, Sequence[str]] = {
    49_152: ("HuggingFaceTB/SmolLM2-135M-Instruct",),
    128_256: ("meta-llama/Llama-3.2-1B-Instruct",),
    151_936: ("Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-0.5B-Instruct"),
    152_064: ("Qwen/Qwen2.5-0.5B-Instruct",),
    262_144: ("google/gemma-3-270m-it",),
}
NOT_BY_LAYER = ("architectures", "_id", "_ids")  # how names of lists end that may happen to have L entries


def require_supported(config: Any) -> None:
    """Raise DataError, with donors that have its vocabulary, for a configuration of a family that cannot be cut."""
    if config.model_type in FAMILIES:
        return
    inner = config.get_text_config()
    rows = int(getattr(inner, "vocab_size", None) or 0)
    if inner is not config and inner.model_type in FAMILIES:
        hint = f"save its language model, a {inner.model_type}, as a folder of its own and name that"
    elif rows in DONORS:
        hint = (
            f"choose a donor of {rows} rows as it has, such as {' or '.join(DONORS[rows])}; check compares the tokens"
        )
    else:
        hint = "choose a small donor with its tokenizer, or any with cut.transplant"
    raise DataError(
        f"surgery on architecture `{config.model_type}` is not supported",
        f"{hint}; supported: {', '.join(FAMILIES)}",
    )


def layers_of(model: Any) -> Any:
    """The blocks of a model, in order; raises DataError for an architecture that cannot be cut."""
    require_supported(model.config)
    return model.base_model.layers


def put_layers(model: Any, layers: Sequence[Any]) -> None:
    """Give a model those blocks; caches address them by `layer_idx`, which is numbered anew."""
    model.base_model.layers = layers if isinstance(layers, torch.nn.ModuleList) else torch.nn.ModuleList(layers)
    for position, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position


def layer_settings(config: Any, kept: Sequence[int]) -> dict[str, Any]:
    """The values of a configuration that depend on its layers, of a model with the `kept` ones (ascending) alone.

    Lists with an entry for each layer are told by their length.
    """
    count = config.num_hidden_layers
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    found: dict[str, Any] = {
        name: [value[index] for index in kept] for name, value in lists.items() if not name.endswith(NOT_BY_LAYER)
    }
    if getattr(config, "max_window_layers", None) is not None:
        found["max_window_layers"] = sum(1 for index in kept if index < config.max_window_layers)
    return found | {"num_hidden_layers": len(kept)}


def set_layers(config: Any, settings: Mapping[str, Any]) -> None:
    """Put `layer_settings` into a configuration."""
    for name, value in settings.items():
        setattr(config, name, value)


def gate_and_up(layer: Any) -> list[tuple[Any, slice]]:
    """The linear layers that an MLP's neurons read by, gate and up, each with its rows: those of one may be halves."""
    mlp = layer.mlp
    if hasattr(mlp, "gate_up_proj"):
        neurons = mlp.down_proj.in_features
        return [(mlp.gate_up_proj, slice(0, neurons)), (mlp.gate_up_proj, slice(neurons, 2 * neurons))]
    return [(mlp.gate_proj, slice(None)), (mlp.up_proj, slice(None))]


def take(module: Any, index: Tensor, dim: int) -> None:
    """Keep those outputs (dim 0, with their biases) or inputs (dim 1; the bias stays) of a Linear."""
    weight = module.weight.detach().index_select(dim, index)
    module.weight = torch.nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    module.out_features, module.in_features = weight.shape
    if dim == 0 and module.bias is not None:
        bias = module.bias.detach().index_select(0, index)
        module.bias = torch.nn.Parameter(bias, requires_grad=module.bias.requires_grad)


def take_neurons(layer: Any, kept: Sequence[int]) -> None:
    """Keep those neurons (ascending) of a layer's MLP, in place."""
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
    """What the MLP's output for neurons [T, F] is multiplied by on its way into the stream: by position [T, 1] and by
    channel [H], infinite where a channel is not written.

    A norm divides by the root mean square of the output; it is taken to stay as it is.
    """
    name, down = FAMILIES[model.config.model_type], layer.mlp.down_proj
    channels = torch.full((down.out_features,), float(getattr(layer, "residual_multiplier", 1.0)), device=a.device)
    positions = torch.ones(len(a), 1, device=a.device)
    if name is not None:
        norm = getattr(layer, name)
        channels *= norm(torch.ones_like(norm.weight)).float()
        positions = down(a).float().square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
    return positions, channels.masked_fill(channels == 0, torch.inf)
