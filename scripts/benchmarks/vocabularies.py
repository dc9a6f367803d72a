"""What a vocabulary transplant costs a real model, by the rule for tokens that the donor lacks: bits per byte.

    python scripts/benchmarks/vocabularies.py DONOR --tokenizers ../shared/tokenizers \\
        --english ../shared/prompts/spec-bench.jsonl --code data/test --out vocabularies.jsonl

The donor's rows are mixed into rows for each vocabulary, and the model is measured on texts that it is not healed on:
right after, and after steps of ordinary next-token training on other texts (half of each kind). Peers' rules use the
same donor tokens for every row; ours takes the last one for the input and their mean for the head. Bits
per byte compare models of different vocabularies. Rows of --out that are there are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.engines.torch.hugging_face import load_model, load_tokenizer, local_folder
from distill.files import parse_object
from distill.machine import thread_count
from distill.surgery.subtokens import Mixture, Subtokens, map_subtokens, offsets_of
from distill.vocabulary.vocabulary import Vocabulary

BLOCK = 256  # tokens of a block, measured and trained
ONES = np.float32(1)


def first(found: Subtokens) -> Mixture:
    """Each row is that of the token's first donor token."""
    counts = np.diff(found.offsets)
    ids = found.ids[found.offsets[:-1][counts > 0]]
    return Mixture(offsets_of(counts > 0), ids, np.full(len(ids), ONES))


# By name: the mixtures of the input embedding and of the head.
RULES = {
    "last, front-loaded mean": lambda found: (found.last(), found.front_loaded(0.5)),
    "mean of subtokens": lambda found: (found.front_loaded(1.0), found.front_loaded(1.0)),
    "last subtoken": lambda found: (found.last(), found.last()),
    "first subtoken": lambda found: (first(found), first(found)),
    "ours: last, mean": lambda found: (found.last(), found.front_loaded(1.0)),
    "mean, front-loaded mean": lambda found: (found.front_loaded(1.0), found.front_loaded(0.5)),
}


def mixed(rows: Tensor, mixture: Mixture) -> Tensor:
    """New rows [R, H] from donor rows [D, H]; rows without entries are zero."""
    counts = np.diff(mixture.offsets)
    row_of = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    parts = rows[torch.from_numpy(mixture.ids.astype(np.int64))] * torch.from_numpy(mixture.weights)[:, None]
    return torch.zeros(len(counts), rows.shape[1]).index_add_(0, row_of, parts)


def with_vocabulary(donor: Any, mixtures: tuple[Mixture, Mixture]) -> Any:
    """A copy of the donor with other rows; the head is no longer tied to the embedding."""
    model = copy.deepcopy(donor)
    rows, head = donor.get_input_embeddings().weight.data, donor.get_output_embeddings().weight.data
    size = len(mixtures[0].offsets) - 1
    model.config.tie_word_embeddings = False
    model.set_input_embeddings(torch.nn.Embedding(size, rows.shape[1], _weight=mixed(rows, mixtures[0])))
    output = torch.nn.Linear(rows.shape[1], size, bias=False)
    output.weight = torch.nn.Parameter(mixed(head, mixtures[1]))
    model.set_output_embeddings(output)
    model.config.vocab_size = size
    return model


def texts_of(path: Path) -> list[str]:
    """The texts of a folder's files, or of the records of a jsonl file (its `turns` or `text`)."""
    if path.is_dir():
        return [file.read_text(encoding="utf-8") for file in sorted(path.rglob("*.py"))]
    return ["\n".join(record.get("turns") or [record["text"]]) for record in records_of(path)]


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a jsonl file."""
    for line in path.read_bytes().splitlines():
        record = parse_object(line)
        assert isinstance(record, dict), record
        yield record


def blocks_of(tokenizer: Any, texts: list[str], most: int) -> tuple[Tensor, float]:
    """Up to `most` blocks [N, BLOCK] of the texts joined, and the bytes that a token of them stands for."""
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
    """Mean over all but the first token of each block."""
    total = 0.0
    for block in blocks.split(1):
        total += float(model(input_ids=block, labels=block).loss) * (BLOCK - 1)
    return total / (len(blocks) * (BLOCK - 1)) / math.log(2) / bytes_per_token


def heal(model: Any, blocks: Tensor, steps: int, rate: float) -> Iterator[int]:
    """Train all weights for `steps` steps of one block in turn; yields the number of each step that is done."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10)
        block = blocks[step % len(blocks)][None]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=block, labels=block).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield step + 1
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("donor")
    parser.add_argument("--tokenizers", type=Path, required=True)
    parser.add_argument("--names", default="qwen2.5,llama-3,deepseek-llm")
    parser.add_argument("--rules", default=",".join(RULES).replace(", ", "; "), help="separated by commas, `;` within")
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--code", type=Path, required=True)
    parser.add_argument(
        "--heal", default="", help="numbers of healing steps after which it is measured, such as 50,200"
    )
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--blocks", type=int, default=40, help="blocks measured of each kind of text")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(thread_count(None))
    heals = sorted(map(int, filter(None, options.heal.split(","))))
    donor = load_model(options.donor, "float32", torch.device("cpu"))
    kinds = {name: texts_of(getattr(options, name)) for name in ("english", "code")}
    held = {name: texts[1::2] for name, texts in kinds.items()}
    given = [text for pair in zip(*(texts[::2] for texts in kinds.values()), strict=False) for text in pair]
    rows = records_of(options.out) if options.out.exists() else ()
    done = {(row["vocabulary"], row["rule"], row["steps"]) for row in rows}

    def record(vocabulary: str, rule: str, steps: int, model: Any, tokenizer: Any, seconds: float) -> None:
        torch.manual_seed(0)
        found = {
            name: bits_per_byte(model, *blocks_of(tokenizer, texts, options.blocks)) for name, texts in held.items()
        }
        row = {"vocabulary": vocabulary, "rule": rule, "steps": steps, **found, "seconds": round(seconds, 1)}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    if ("donor's own", "", 0) not in done:
        record("donor's own", "", 0, donor, load_tokenizer(options.donor), 0.0)
    own = Vocabulary.read(local_folder(options.donor))
    for name in options.names.split(","):
        place = options.tokenizers / name
        tokenizer = _tokenizer(place)
        found = map_subtokens(own, Vocabulary.read(place))
        for rule in (one.replace("; ", ", ") for one in options.rules.split(",")):
            if all((name, rule, steps) in done for steps in (0, *heals)):
                continue
            model, started = with_vocabulary(donor, RULES[rule](found)), time.monotonic()
            if (name, rule, 0) not in done:
                record(name, rule, 0, model, tokenizer, 0.0)
            if not heals:
                continue
            blocks, _ = blocks_of(tokenizer, given, heals[-1])
            torch.manual_seed(0)
            for step in heal(model, blocks, heals[-1], options.rate):
                if step in heals:
                    model.eval()
                    record(name, rule, step, model, tokenizer, time.monotonic() - started)
                    model.train()


def _tokenizer(place: Path) -> Any:
    """A folder that holds a tokenizer alone."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"), clean_up_tokenization_spaces=False)


if __name__ == "__main__":
    main()
