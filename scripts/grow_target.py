"""Write a larger Qwen2 model with the same function, which decodes real text at the cost of a real model's size.

python scripts/grow_target.py data/demo-target grown --tile 4 --layers 24            # a folder, in float32
python scripts/grow_target.py small-q4_k_m.gguf grown.gguf --tile 2 --layers 38      # a file, in the file's bits
distill speedup grown runs/demo/draft --prompts FILE

The hidden state is tiled r times. RMSNorm stays the same, because the mean square does. A linear layer that reads the
state gets every value r times and divides by r. A layer that writes the state writes r copies. Heads and MLP neurons
are repeated r times, with their output columns divided by r. Added layers have zero o_proj and down_proj.

scripts/grow_file.py says how a file is grown.

Legend: r tile, H hidden, F MLP width.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.engines.torch.hugging_face import describe_model, load_model, load_tokenizer
from distill.errors import DataError


def places_of(own: int, layers: int) -> dict[int, int]:
    """Return the original layer at each place that has one, in order. The other places are spread evenly.

    Raises DataError if there are fewer places than original layers.
    """
    if layers < own:
        raise DataError(f"{layers} layers were requested, but the model already has {own}", "request more")
    return {layer * layers // own: layer for layer in range(own)}


def grow(model: Any, tile: int, layers: int) -> Any:
    """Return a larger fp32 Qwen2 model with the same logits up to rounding (exact if `tile` is a power of two).

    `tile` multiplies hidden size, heads, KV heads and MLP width. `layers` is the new number of layers. The added layers
    are zero and spread evenly. Raises DataError for another architecture, an untied head or fewer layers.
    """
    config = model.config
    if config.model_type != "qwen2" or not config.tie_word_embeddings:
        raise DataError("only qwen2 models with a tied head can be grown", "give such a model")
    places = places_of(config.num_hidden_layers, layers)
    larger = copy.deepcopy(config)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(larger, name, getattr(config, name) * tile)
    larger.num_hidden_layers = layers
    old = {name: value.detach().float() for name, value in model.state_dict().items()}
    # The kind of an added layer does not matter.
    larger.layer_types = [config.layer_types[places.get(place, 0)] for place in range(layers)]
    new: dict[str, Tensor] = {"model.embed_tokens.weight": old["model.embed_tokens.weight"].repeat(1, tile)}
    # A tied head reads the tiled state with tiled rows, which gives r times the logit. The final norm divides by r.
    new["model.norm.weight"] = old["model.norm.weight"].repeat(tile) / tile
    for place in range(layers):
        source = places.get(place)
        template = f"model.layers.{source if source is not None else 0}."
        for name, value in old.items():
            if not name.startswith(template):
                continue
            kind = name.removeprefix(template)
            if kind.endswith(("layernorm.weight", ".bias")):
                grown = value.repeat(tile)
            else:  # Both dimensions of a matrix are tiled. Divided by `tile`, it gives the same sum for a tiled input.
                grown = value.repeat(tile, tile) / tile
                if source is None and kind in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                    grown = torch.zeros_like(grown)
            new[f"model.layers.{place}.{kind}"] = grown
    with torch.device("meta"):
        result = type(model)(larger)
    result.load_state_dict(new, strict=False, assign=True)
    result.tie_weights()
    # Buffers (rotary frequencies) were made on the meta device. Make them again on the weights' device.
    result.model.rotary_emb = type(result.model.rotary_emb)(larger)
    missing = [name for name, parameter in result.named_parameters() if parameter.is_meta]
    assert not missing, missing
    return result.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tile", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    arguments = parser.parse_args()
    if arguments.model.suffix == ".gguf":
        from grow_file import grow_file  # The package gguf may be missing where folders are grown.

        grow_file(arguments.model, arguments.output, arguments.tile, arguments.layers)
        print(f"{arguments.output}: {arguments.output.stat().st_size / 1e9:.2f} GB")
        return
    reference = str(arguments.model.resolve())
    small = load_model(reference, "float32", torch.device("cpu"))
    large = grow(small, arguments.tile, arguments.layers)
    ids = torch.randint(small.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        difference = float((small(input_ids=ids).logits - large(input_ids=ids).logits).abs().max())
    large.save_pretrained(arguments.output)
    load_tokenizer(reference).save_pretrained(arguments.output)
    print(
        f"{describe_model(str(arguments.output), large)}\nlargest logit difference on 64 random ids: {difference:.2e}"
    )


if __name__ == "__main__":
    main()
