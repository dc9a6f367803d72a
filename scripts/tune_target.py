"""Tune a model by LoRA on prompts with answers, as its owner would. The result is an adapter folder (PEFT).

.venv/bin/python scripts/tune_target.py MODEL EXAMPLES OUT [--steps 10] [--threads 2]

MODEL is a folder or a GGUF file. EXAMPLES is a jsonl file of {"prompt": …, "answer": …}. The defaults (rank 16, all
linear layers, 10 steps of 4 examples at 2e-4) change the form of the answers and little else. After every step,
OUT.part keeps the adapter and the optimizer's state. After a kill, the same command continues from there.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

from distill.engines.torch.hugging_face import load_model, load_tokenizer, local_folder
from distill.gguf.importing import folder_of

LONGEST = 640  # tokens of an example. Longer examples are left out.


def encoded(tokenizer: Any, examples: list[dict[str, str]]) -> list[tuple[list[int], list[int]]]:
    """Return prompt ids and answer ids of the examples that fit, rendered by the model's chat template."""
    pairs = []
    for example in examples:
        messages = [{"role": "user", "content": example["prompt"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = [*tokenizer.encode(example["answer"], add_special_tokens=False), tokenizer.eos_token_id]
        if len(prompt) + len(answer) <= LONGEST:
            pairs.append((list(prompt), answer))
    return pairs


def loss_of(model: Any, batch: list[tuple[list[int], list[int]]], padding: int) -> torch.Tensor:
    """Return the cross-entropy over the answers' tokens. The head is computed only at these positions."""
    longest = max(len(prompt) + len(answer) for prompt, answer in batch)
    rows = [prompt + answer + [padding] * (longest - len(prompt) - len(answer)) for prompt, answer in batch]
    ids = torch.tensor(rows)
    mask = torch.tensor([[1] * (len(p) + len(a)) + [0] * (longest - len(p) - len(a)) for p, a in batch])
    scored = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(batch):
        scored[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
    hidden = model.get_base_model().model(input_ids=ids, attention_mask=mask).last_hidden_state
    logits = model.get_base_model().lm_head(hidden[scored]).float()
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][scored[:, :-1]])


def tune(asked: argparse.Namespace) -> None:
    """Train the adapter and write it. `asked` holds the options."""
    tokenizer = load_tokenizer(asked.model)
    lines = Path(asked.examples).read_text(encoding="utf-8").splitlines()
    pairs = encoded(tokenizer, [json.loads(line) for line in lines if line])
    if len(pairs) < asked.batch:
        sys.exit(f"{asked.examples}: {len(pairs)} examples of at most {LONGEST} tokens, a step takes {asked.batch}")
    random.Random(asked.seed).shuffle(pairs)
    folder = str(folder_of(asked.model) if asked.model.endswith(".gguf") else local_folder(asked.model))
    base = load_model(folder, "bfloat16", torch.device("cpu"))
    base.config.use_cache = False
    torch.manual_seed(asked.seed)
    settings = LoraConfig(r=asked.rank, lora_alpha=2 * asked.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings(action="ignore"):  # PEFT warns about transformers.
        model = get_peft_model(base, settings)
    model.peft_config["default"].base_model_name_or_path = str(Path(asked.model).resolve())
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=asked.rate, weight_decay=0.0)
    state, first = Path(f"{asked.out}.part"), 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        set_peft_model_state_dict(model, saved["adapter"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        print(f"resuming at step {first} of {asked.steps}", file=sys.stderr)
    model.train()
    for step in range(first, asked.steps):
        began = time.monotonic()
        batch = [pairs[(step * asked.batch + number) % len(pairs)] for number in range(asked.batch)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch, tokenizer.eos_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step + 1}/{asked.steps} loss {loss.item():.4f} {time.monotonic() - began:.0f} s", file=sys.stderr)
        unfinished = state.with_name(f"{state.name}.tmp")
        adapter = get_peft_model_state_dict(model, save_embedding_layers=False)
        torch.save({"adapter": adapter, "optimizer": optimizer.state_dict(), "step": step + 1}, unfinished)
        unfinished.rename(state)
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(asked.out, save_embedding_layers=False)
    state.unlink(missing_ok=True)


def main() -> None:
    """Read the options. An existing adapter is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("examples")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    # PEFT writes the settings last, and the state of the training is deleted after them.
    if (Path(asked.out) / "adapter_config.json").is_file() and not Path(f"{asked.out}.part").exists():
        print(f"{asked.out} is there already", file=sys.stderr)
        return
    torch.set_num_threads(asked.threads)
    tune(asked)


if __name__ == "__main__":
    main()
