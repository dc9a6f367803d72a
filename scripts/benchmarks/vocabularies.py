"""Measure what a vocabulary transplant costs a real model, by the rule for tokens that the donor lacks: bits per byte.

    python scripts/benchmarks/vocabularies.py DONOR --tokenizers ../shared/tokenizers \\
        --english ../shared/prompts/spec-bench.jsonl --code data/test --out vocabularies.jsonl

The donor's rows are mixed into rows for each vocabulary. The model is then measured on half of the texts, without
training. Other rules use the same donor tokens for every row. Our rule takes the last one for the input and their mean
for the head. Bits per byte compare models of different vocabularies. Rows that --out has are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.engines.torch.hugging_face import load_model, load_tokenizer, local_folder
from distill.machine import thread_count
from distill.surgery.vocabulary import Mixture, map_subtokens, mixed_rows
from distill.vocabulary.vocabulary import Vocabulary

BLOCK = 256  # tokens of a block


# Each rule returns the mixtures of the input embedding and of the head.
RULES = {
    "mean of subtokens": lambda mapped: (mapped.mean(), mapped.mean()),
    "last subtoken": lambda mapped: (mapped.last(), mapped.last()),
    "ours: last, mean": lambda mapped: (mapped.last(), mapped.mean()),
}


def with_vocabulary(donor: Any, mixtures: tuple[Mixture, Mixture]) -> Any:
    """Return a copy of the donor with other rows. The head is no longer tied to the embedding."""
    model = copy.deepcopy(donor)
    matrices = [layer.weight.data for layer in (donor.get_input_embeddings(), donor.get_output_embeddings())]
    size = len(mixtures[0].offsets) - 1
    rows, head = (mixed_rows(*both, 0, size, torch.float32) for both in zip(matrices, mixtures, strict=True))
    model.config.tie_word_embeddings = False
    model.set_input_embeddings(torch.nn.Embedding(size, rows.shape[1], _weight=rows))
    output = torch.nn.Linear(rows.shape[1], size, bias=False)
    output.weight = torch.nn.Parameter(head)
    model.set_output_embeddings(output)
    model.config.vocab_size = size
    return model


def texts_of(path: Path) -> list[str]:
    """Return the texts of a folder's files, or of the records of a jsonl file (its `turns` or `text`)."""
    if path.is_dir():
        return [file.read_text(encoding="utf-8") for file in sorted(path.rglob("*.py"))]
    return ["\n".join(record.get("turns") or [record["text"]]) for record in records_of(path)]


def records_of(path: Path) -> list[dict[str, Any]]:
    """Return the records of a jsonl file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def blocks_of(tokenizer: Any, texts: list[str], most: int) -> tuple[Tensor, float]:
    """Return up to `most` blocks [N, BLOCK] of the joined texts, and the bytes per token."""
    ids: list[int] = []
    size = 0
    for text in texts:
        if len(ids) >= most * BLOCK:
            break
        new = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids, size = ids + new, size + len(text.encode())
    count = min(most, len(ids) // BLOCK)
    return torch.tensor(ids[: count * BLOCK]).view(count, BLOCK), size / len(ids)


@torch.inference_mode()
def bits_per_byte(model: Any, blocks: Tensor, bytes_per_token: float) -> float:
    """Return the mean over all but the first token of each block."""
    total = 0.0
    for block in blocks.split(1):
        total += float(model(input_ids=block, labels=block).loss) * (BLOCK - 1)
    return total / (len(blocks) * (BLOCK - 1)) / math.log(2) / bytes_per_token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("donor")
    parser.add_argument("--tokenizers", type=Path, required=True)
    parser.add_argument("--names", default="qwen2.5,llama-3")
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=40, help="blocks measured of each kind of text")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(thread_count(None))
    donor = load_model(options.donor, "float32", torch.device("cpu"))
    held = {name: texts_of(getattr(options, name))[1::2] for name in ("english", "code")}
    done = {(row["vocabulary"], row["rule"]) for row in (records_of(options.out) if options.out.exists() else ())}

    def record(vocabulary: str, rule: str, model: Any, tokenizer: Any) -> None:
        measured = {
            name: bits_per_byte(model, *blocks_of(tokenizer, texts, options.blocks)) for name, texts in held.items()
        }
        row = {"vocabulary": vocabulary, "rule": rule, **measured}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    if ("donor's own", "") not in done:
        record("donor's own", "", donor, load_tokenizer(options.donor))
    donor_vocabulary = Vocabulary.read(local_folder(options.donor))
    for name in options.names.split(","):
        place = options.tokenizers / name
        mapped = map_subtokens(donor_vocabulary, Vocabulary.read(place))
        for rule in (rule for rule in RULES if (name, rule) not in done):
            record(name, rule, with_vocabulary(donor, RULES[rule](mapped)), _tokenizer(place))


def _tokenizer(place: Path) -> Any:
    """Load the tokenizer of a folder that holds nothing else."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"), clean_up_tokenization_spaces=False)


if __name__ == "__main__":
    main()
