"""Train the demo target and donor on the Python standard library of the running interpreter.

    python scripts/make_demo_models.py target          # hours on 2 cores; kill and rerun at will
    python scripts/make_demo_models.py donor
    python scripts/make_demo_models.py text            # only rewrite data/validation and data/test

The models learn only from the train split. The validation and test files are copied to data/, and no model or tokenizer
sees them. Checkpoints go to .demo_models/, finished folders to data/.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from distill.data.sources import split_of  # noqa: E402
from distill.folders import pin_tokenizer  # noqa: E402

# Qwen2's pre-tokenizer, as published in its tokenizer.json. GPT-2's is the byte-level default of `tokenizers`.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXCLUDED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "turtledemo", "__pycache__", "__phello__"}
DATA_TABLES = {"encodings", "pydoc_data"}  # generated tables, not code
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BLOCK, BATCH = 512, 8  # tokens per block, blocks per step
SPLIT_FRACTIONS = {"validation": 0.04, "test": 0.04}


@dataclass(frozen=True)
class DemoModel:
    """Sizes of a model, its tokenizer's rule, and the length and rate of its training."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    pre_tokenizer: str
    tokens: int
    rate: float


MODELS = {
    "target": DemoModel(256, 6, 4, 2, 768, 4096, "qwen2", 5_000_000, 4e-3),
    "donor": DemoModel(256, 3, 4, 2, 512, 3072, "gpt2", 3_000_000, 4e-3),
}


def read_sources() -> dict[str, dict[str, str]]:
    """Return documents by split, then by module path."""
    documents: dict[str, dict[str, str]] = {"train": {}, "validation": {}, "test": {}}
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if (EXCLUDED_FOLDERS | DATA_TABLES) & set(name.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            documents[split_of(name.as_posix(), **SPLIT_FRACTIONS)][name.as_posix()] = text
    return documents


def write_held_out_text(documents: dict[str, dict[str, str]]) -> None:
    for split in ("validation", "test"):
        folder = ROOT / "data" / split
        for name, text in documents[split].items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def train_tokenizer(made: DemoModel, texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    if made.pre_tokenizer == "qwen2":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=made.vocabulary - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIALS[0], pad_token=SPECIALS[0], clean_up_tokenization_spaces=False
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIALS[1:]})
    return fast


def build_model(made: DemoModel, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    end = tokenizer.convert_tokens_to_ids(SPECIALS[0])
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=made.hidden,
        intermediate_size=made.mlp,
        num_hidden_layers=made.layers,
        num_attention_heads=made.heads,
        num_key_value_heads=made.kv_heads,
        max_position_embeddings=BLOCK,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        initializer_range=0.02,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


def pack(tokenizer: PreTrainedTokenizerFast, texts: list[str], seed: int) -> torch.Tensor:
    """Return blocks [n, BLOCK + 1] of shuffled documents joined by the end token."""
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    end = tokenizer.convert_tokens_to_ids(SPECIALS[0])
    ids: list[int] = []
    for index in order:
        ids += tokenizer(texts[index])["input_ids"] + [end]
    # Each epoch has another phase, so that block borders fall elsewhere.
    ids = ids[random.Random(seed + 1).randrange(BLOCK) :]
    count = (len(ids) - 1) // BLOCK
    flat = torch.tensor(ids[: count * BLOCK + 1])
    return torch.stack([flat[i * BLOCK : i * BLOCK + BLOCK + 1] for i in range(count)])


def bits_per_byte(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str], most: int | None = None
) -> float:
    """Return bits per byte of at most `most` blocks of the texts."""
    blocks, total = pack(tokenizer, texts, 0)[:most], 0.0
    model.eval()
    with torch.no_grad():
        for batch in blocks.split(8):
            logits, labels = model(input_ids=batch[:, :-1]).logits.float(), batch[:, 1:].flatten()
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"))
    model.train()
    tokens_per_byte = sum(len(tokenizer(text)["input_ids"]) for text in texts) / sum(len(t.encode()) for t in texts)
    return total / (len(blocks) * BLOCK) / math.log(2) * tokens_per_byte


def save_atomically(state: object, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def train(name: str, made: DemoModel, documents: dict[str, dict[str, str]], arguments: argparse.Namespace) -> None:
    work = ROOT / ".demo_models" / name
    work.mkdir(parents=True, exist_ok=True)
    texts = list(documents["train"].values())
    if (work / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(work)
    else:
        tokenizer = train_tokenizer(made, texts)
        tokenizer.save_pretrained(work)
    model = build_model(made, tokenizer)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    # At this size, Muon reaches a given loss with fewer tokens than AdamW. Embeddings and vectors stay with AdamW.
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=made.rate, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=made.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    validation_texts = list(documents["validation"].values())
    tokens = arguments.tokens or made.tokens
    steps = tokens // (BATCH * BLOCK)
    step, epoch, position = 0, 0, 0
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, epoch, position = state["step"], state["epoch"], state["position"]
        print(f"{name}: resumed at step {step}", flush=True)
    blocks = pack(tokenizer, texts, epoch)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(epoch))
    print(
        f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {len(blocks) * BLOCK / 1e6:.2f}M "
        f"tokens an epoch, {steps} steps",
        flush=True,
    )
    model.train()
    started, since = time.time(), step
    while step < steps:
        if position + BATCH > len(blocks):
            epoch, position = epoch + 1, 0
            blocks = pack(tokenizer, texts, epoch)
            order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(epoch))
        rows = blocks[order[position : position + BATCH]]
        position += BATCH
        warm = min(1.0, (step + 1) / 50)
        # The rate is constant, then linear to zero over the last 30 %. A run can be lengthened from its checkpoint.
        scale = warm * min(1.0, (steps - step) / (0.3 * steps))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = made.rate * scale
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=rows[:, :-1], labels=rows[:, :-1], shift_labels=rows[:, 1:].contiguous()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0:
            speed = (step - since) * BATCH * BLOCK / (time.time() - started)
            eta = (steps - step) * BATCH * BLOCK / speed / 60
            print(f"{name} step {step}/{steps} loss {loss.item():.3f} {speed:.0f} tok/s eta {eta:.0f} min", flush=True)
        if step % 100 == 0 or step == steps:
            bits = bits_per_byte(model, tokenizer, validation_texts, 32)
            print(f"{name} step {step} validation {bits:.4f} bits/byte", flush=True)
            save_atomically(
                {
                    "model": model.state_dict(),
                    "optimizers": [o.state_dict() for o in optimizers],
                    "step": step,
                    "epoch": epoch,
                    "position": position,
                },
                checkpoint,
            )
    finish(name, model, tokenizer, documents, step * BATCH * BLOCK)


def finish(
    name: str,
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: dict[str, dict[str, str]],
    tokens: int,
) -> None:
    model = model.to(torch.bfloat16).eval()
    bits = {
        split: round(bits_per_byte(model.float(), tokenizer, list(documents[split].values())), 4)
        for split in ("validation", "test")
    }
    folder = ROOT / "data" / f"demo-{name}"
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if MODELS[name].pre_tokenizer != "qwen2":
        pin_tokenizer(folder)  # Otherwise AutoTokenizer splits text as Qwen2 does in any qwen2 folder.
    record = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_seen": tokens,
        "bits_per_byte": bits,
        "python": sys.version.split()[0],
        "command": "python scripts/make_demo_models.py " + " ".join(sys.argv[1:]),
    }
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"{name}: {record}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["target", "donor", "text"])
    parser.add_argument("--tokens", type=int, help="tokens to train on (default: the model's own)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    documents = read_sources()
    sizes = {split: sum(len(t.encode()) for t in texts.values()) for split, texts in documents.items()}
    print(f"bytes: {sizes}", flush=True)
    if arguments.what == "text":
        write_held_out_text(documents)
        return
    train(arguments.what, MODELS[arguments.what], documents, arguments)


if __name__ == "__main__":
    main()
