"""Stage `draft`: cut a draft from a donor by dropping layers and narrowing its MLPs.

Legend: L layers, n blocks, S positions, H hidden, F neurons of an MLP.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.errors import DataError, RecipeError
from distill.models.hugging_face import describe_model, load_model, load_tokenizer, pick_device
from distill.models.pair import require_pair
from distill.packing import Packed, attention_mask
from distill.recipe import Recipe
from distill.run import Run, write_folder, write_json

SUPPORTED = ("qwen2", "qwen3", "llama", "mistral")


def decoder_layers(model: Any) -> Any:
    """The blocks of a supported model; raises DataError for an architecture that cannot be cut."""
    if model.config.model_type not in SUPPORTED:
        raise DataError(
            f"cutting architecture `{model.config.model_type}` is not supported", f"supported: {', '.join(SUPPORTED)}"
        )
    return model.model.layers


@torch.inference_mode()
def score(model: Any, blocks: Packed, batch: int = 4) -> tuple[list[float], list[Tensor]]:
    """One pass over the blocks: the influence of each layer and the score of each MLP neuron.

    Influence [L] is 1 − mean cosine of a block's input and output (Men et al. 2024). A neuron's score, [F] per layer,
    is E[a²]·‖W_down column‖²: the mean square it adds to the residual stream, a being the input of down_proj. Only
    positions that hold tokens count.
    """
    layers = decoder_layers(model)
    device = next(model.parameters()).device
    cosine = torch.zeros(len(layers), dtype=torch.float64)
    squares = [torch.zeros(layer.mlp.down_proj.in_features, dtype=torch.float64) for layer in layers]
    used = torch.zeros(0, dtype=torch.bool)

    def watch_block(index: int) -> Any:
        def hook(_module: Any, arguments: tuple[Tensor, ...], output: Any) -> None:
            before, after = arguments[0], output[0] if isinstance(output, tuple) else output
            similarity = torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
            cosine[index] += similarity.cpu()[used].double().sum()

        return hook

    def watch_mlp(index: int) -> Any:
        def hook(_module: Any, arguments: tuple[Tensor, ...]) -> None:
            squares[index].add_(arguments[0].float().square().cpu()[used].double().sum(0))

        return hook

    handles = [layer.register_forward_hook(watch_block(i)) for i, layer in enumerate(layers)]
    handles += [layer.mlp.down_proj.register_forward_pre_hook(watch_mlp(i)) for i, layer in enumerate(layers)]
    total = 0
    try:
        for start in range(0, len(blocks), batch):
            part = blocks.take(slice(start, start + batch))
            used = part.documents >= 0
            total += int(used.sum())
            model.model(
                input_ids=part.ids.long().to(device),
                position_ids=part.positions.long().to(device),
                attention_mask=attention_mask(part.documents.to(device)),
                use_cache=False,
            )
    finally:
        for handle in handles:
            handle.remove()
    neurons = [
        square / total * layer.mlp.down_proj.weight.double().square().sum(0).cpu()
        for square, layer in zip(squares, layers, strict=True)
    ]
    return (1 - cosine / total).tolist(), neurons


def choose_layers(influence: list[float], keep: int, rule: str) -> list[int]:
    """Indices of the layers that stay, in order.

    `last-but-one` drops the n layers before the last; `influence` drops the n least influential, the first and the last
    excepted (they read the embeddings and feed the head).
    """
    count = len(influence)
    drop = count - keep
    if rule == "last-but-one":
        return [i for i in range(count) if not count - 1 - drop <= i < count - 1] if keep > 1 else [count - 1]
    inner = sorted(range(1, count - 1), key=lambda i: influence[i])
    dropped = set(inner[:drop])
    if drop > len(inner):  # only one layer stays: the first
        dropped |= {count - 1}
    return [i for i in range(count) if i not in dropped]


def keep_layers(model: Any, kept: list[int]) -> None:
    """Keep those layers in place, and cut every per-layer entry of the configuration with them."""
    layers = decoder_layers(model)
    config = model.config
    model.model.layers = torch.nn.ModuleList([layers[i] for i in kept])
    for position, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = position
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    if getattr(config, "max_window_layers", None) is not None:
        config.max_window_layers = sum(1 for i in kept if i < config.max_window_layers)
    config.num_hidden_layers = len(kept)


def narrow_mlp(model: Any, neurons: list[list[int]]) -> None:
    """Keep those neurons of each layer's MLP (equally many per layer), in their order."""
    for layer, kept in zip(decoder_layers(model), neurons, strict=True):
        index = torch.tensor(kept, device=layer.mlp.down_proj.weight.device)
        for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            linear = getattr(layer.mlp, name)
            linear.weight = torch.nn.Parameter(linear.weight.detach().index_select(dim, index).clone())
            if dim == 0:
                linear.out_features = len(kept)
                if linear.bias is not None:
                    linear.bias = torch.nn.Parameter(linear.bias.detach().index_select(0, index).clone())
            else:
                linear.in_features = len(kept)
    model.config.intermediate_size = len(neurons[0])


def check_cut(recipe: Recipe, layers: int, width: int) -> None:
    """Raise RecipeError for a cut that the donor does not allow."""
    if recipe.draft.layers > layers:
        raise RecipeError(
            f"draft.layers is {recipe.draft.layers}, but the donor has {layers}", f"ask for 1 to {layers}"
        )
    wanted = recipe.draft.mlp_width
    if wanted is not None and (wanted > width or wanted % 32):
        raise RecipeError(
            f"draft.mlp_width is {wanted}; it must be a multiple of 32 and at most the donor's {width}",
            f"for instance {max(32, min(width, wanted) // 32 * 32)}",
        )


def donor_reference(recipe: Recipe) -> str:
    """What the draft is cut from."""
    return recipe.target.model if recipe.draft.donor == "target" else recipe.draft.donor


def draft(recipe: Recipe, run: Run) -> list[Path]:
    """Cut the donor and write init/, which `from_pretrained` loads, with the target's tokenizer and cut.json."""
    reference = donor_reference(recipe)
    if reference != recipe.target.model:
        require_pair(recipe.target.model, reference)
    model = load_model(reference, "float32", pick_device(recipe.device))
    donor = describe_model(reference, model)
    check_cut(recipe, donor["layers"], donor["mlp"])
    blocks = Packed.load(run.path("corpus", "text-selection.safetensors"))
    influence, scores = score(model, blocks.take(slice(0, recipe.draft.score_blocks)))
    kept = choose_layers(influence, recipe.draft.layers, recipe.draft.layer_rule)
    keep_layers(model, kept)
    share = 1.0
    width = recipe.draft.mlp_width
    if width is not None and width < donor["mlp"]:
        # Scores were collected in the uncut donor; neurons are ranked within their own layer.
        chosen = [scores[i].topk(width).indices.sort().values.tolist() for i in kept]
        share = sum(float(scores[i][c].sum() / scores[i].sum()) for i, c in zip(kept, chosen, strict=True)) / len(kept)
        narrow_mlp(model, chosen)
    tokenizer = load_tokenizer(recipe.target.model)
    sizes = describe_model("init", model)
    run.say(
        f"  kept layers {kept} of {donor['layers']}, MLP {donor['mlp']} -> {sizes['mlp']} "
        f"({share:.1%} of the score), {donor['parameters'] / 1e6:.2f}M -> {sizes['parameters'] / 1e6:.2f}M parameters"
    )

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        report = {"donor": donor, "draft": sizes, "kept_layers": kept, "influence": influence, "mlp_score_kept": share}
        write_json(folder / "cut.json", report)

    write_folder(run.path("init"), save)
    return [run.path("init")]
