"""Write a function-preserving enlargement of a Qwen2 folder.

python scripts/grow_target.py data/demo-target grown --tile 4 --layers 24
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from distill.models.hugging_face import describe_model, load_model, load_tokenizer
from distill.surgery.grow import grow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tile", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    arguments = parser.parse_args()
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
