"""Write a larger Qwen2 model with the same function, which decodes real text at the cost of a real model's size.

python scripts/grow_target.py data/demo-target grown --tile 4 --layers 24            # a folder, in float32
python scripts/grow_target.py small-q4_k_m.gguf grown.gguf --tile 2 --layers 38      # a file, in the file's bits
distill speedup grown runs/demo/draft --prompts FILE

The hidden state is tiled r times. RMSNorm stays the same, because the mean square does. A linear layer that reads the
state gets every value r times and divides by r. A layer that writes the state writes r copies. Heads and MLP neurons
are repeated r times, with their output columns divided by r. Added layers have zero o_proj and down_proj.

Quantised weights cannot be divided without rounding. In a GGUF file all matrices are therefore repeated byte by byte,
and the whole hidden state becomes r times as large instead: o_proj and down_proj add r copies of each product, and the
embedding's scales are multiplied by r. RMSNorm removes the factor again if its epsilon is multiplied by r². The norms'
weights are divided by r, because the layers behind them read r copies. If r is a power of two, all of this is exact.

Legend: r tile, H hidden, F MLP width.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from distill.engines.torch.hugging_face import describe_model, load_model, load_tokenizer
from distill.errors import DataError


def grow(model: Any, tile: int, layers: int) -> Any:
    """Return a larger fp32 Qwen2 model with the same logits up to rounding (exact if `tile` is a power of two).

    `tile` multiplies hidden size, heads, KV heads and MLP width. `layers` is the new number of layers. The added layers
    are zero and spread evenly. Raises DataError for another architecture, an untied head or fewer layers.
    """
    config = model.config
    if config.model_type != "qwen2" or not config.tie_word_embeddings:
        raise DataError("only qwen2 models with a tied head can be grown", "give such a model")
    if layers < config.num_hidden_layers:
        raise DataError(
            f"{layers} layers were requested, but the model already has {config.num_hidden_layers}", "request more"
        )
    larger = copy.deepcopy(config)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(larger, name, getattr(config, name) * tile)
    larger.num_hidden_layers = layers
    old = {name: value.detach().float() for name, value in model.state_dict().items()}
    # Original layer i goes to a place that keeps the order and spreads the zero layers evenly.
    places = {i * layers // config.num_hidden_layers: i for i in range(config.num_hidden_layers)}
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


# Where the blocks of a type hold their factors, counted in numbers of two bytes. F32 and F16 are factors throughout.
FACTORS = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q4_K": [0, 1], "Q5_K": [0, 1], "Q6_K": [104]}
ARCHITECTURE = "qwen2"
TABLES = "token_embd", "output"  # one row for each token
TILED = "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv"
EPSILON = "attention.layer_norm_rms_epsilon"


def scaled(tensor: gguf.ReaderTensor, factor: int) -> np.ndarray:
    """Return a tensor's rows with all values multiplied. Raises DataError for a type whose factors are unknown."""
    kind = tensor.tensor_type
    if kind.name in ("F32", "F16"):
        return np.asarray(tensor.data * tensor.data.dtype.type(factor))
    if kind.name not in FACTORS:
        raise DataError(f"{tensor.name} has the type {kind.name}", f"give a file with one of {', '.join(FACTORS)}")
    blocks = np.array(tensor.data).view(np.float16).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1] // 2)
    blocks[:, FACTORS[kind.name]] *= np.float16(factor)
    return np.asarray(blocks.view(np.uint8).reshape(tensor.data.shape))


class GrownFile:
    """A GGUF file of a Qwen2 model, and what `tile` and `layers` make of it, as in `grow`.

    Raises DataError for another architecture, fewer layers, or rows that are no whole number of blocks.
    """

    def __init__(self, source: Path, tile: int, layers: int) -> None:
        self.reader, self.tile, self.layers = gguf.GGUFReader(source), tile, layers
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        fields = {name: field.contents() for name, field in self.reader.fields.items()}
        if (kind := fields["general.architecture"]) != ARCHITECTURE:
            raise DataError(f"{source} is a {kind}: only {ARCHITECTURE} files can be grown", "give such a file")
        if layers < (own := fields[f"{ARCHITECTURE}.block_count"]):
            raise DataError(f"{layers} layers were requested, but the model already has {own}", "request more")
        for name, tensor in self.tensors.items():
            if tensor.shape[0] % gguf.GGML_QUANT_SIZES[tensor.tensor_type][0]:
                raise DataError(f"{name}: a row of {tensor.shape[0]} values is no whole number of blocks", "give F16")
        self.places = {i * layers // own: i for i in range(own)}
        changed = {name: fields[f"{ARCHITECTURE}.{name}"] * tile for name in TILED}
        changed |= {"block_count": layers, EPSILON: fields[f"{ARCHITECTURE}.{EPSILON}"] * tile**2}
        self.fields = fields | {f"{ARCHITECTURE}.{name}": value for name, value in changed.items()}

    def sources(self) -> Iterator[tuple[str, gguf.ReaderTensor, bool]]:
        """Yield each tensor's name, the tensor that it is made of, and whether its layer is added."""
        for name, tensor in self.tensors.items():
            if not name.startswith("blk."):
                yield name, tensor, False
        for place in range(self.layers):
            template = f"blk.{self.places.get(place, 0)}."
            for name, tensor in self.tensors.items():
                if name.startswith(template):
                    yield f"blk.{place}.{name.removeprefix(template)}", tensor, place not in self.places

    def shape(self, name: str, tensor: gguf.ReaderTensor) -> list[int]:
        """Return the grown tensor's shape. Tables of tokens keep their rows."""
        rows, *columns = reversed(tensor.shape.tolist())
        return [rows * (1 if part_of(name) in TABLES else self.tile), *(column * self.tile for column in columns)]

    def content(self, name: str, tensor: gguf.ReaderTensor, added: bool) -> np.ndarray:
        """Return the grown tensor's rows."""
        part, tile = part_of(name), self.tile
        if part.endswith("norm"):
            # A head that is the embedding has the embedding's factor, too.
            twice = part == "output_norm" and "output.weight" not in self.tensors
            return np.tile(tensor.data / np.float32(tile**2 if twice else tile), tile)
        values = scaled(tensor, tile) if part == "token_embd" else tensor.data
        grown = np.tile(values, (1, tile) if part in TABLES else (tile,) * values.ndim)
        return np.zeros_like(grown) if added and part in ("attn_output", "ffn_down") else grown


def part_of(name: str) -> str:
    """Return the part of a layer or model that a tensor belongs to, such as attn_q."""
    return name.split(".")[-2]


def grow_file(source: Path, output: Path, tile: int, layers: int) -> None:
    """Write a larger GGUF file with the same logits and types. One tensor at a time is in memory. See `GrownFile`."""
    grown = GrownFile(source, tile, layers)
    writer = gguf.GGUFWriter(output, ARCHITECTURE)
    for name, field in grown.reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, grown.fields[name], field.types[0], sub_type=inner)
    for name, tensor, _ in grown.sources():
        kind, shape = tensor.tensor_type, grown.shape(name, tensor)
        size, width = gguf.GGML_QUANT_SIZES[kind]
        nbytes = math.prod(shape) // size * width
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor, added in grown.sources():
        writer.write_tensor_data(grown.content(name, tensor, added))
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tile", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    arguments = parser.parse_args()
    if arguments.model.suffix == ".gguf":
        grow_file(arguments.model, arguments.output, arguments.tile, arguments.layers)
        weights = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(arguments.output).tensors)
        print(
            f"{arguments.output}: {weights / 1e9:.2f} billion weights, {arguments.output.stat().st_size / 1e9:.2f} GB"
        )
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
