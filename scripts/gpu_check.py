"""What this project does on a GPU: decoding at the cost of 1B, 7B and 14B targets, and training steps, in one table.

    python scripts/gpu_check.py --to gpu/ --draft runs/demo/draft     # all parts, one after another; resumes by part
    python scripts/gpu_check.py --to gpu/ --part decode-7b            # one part; each ends within --minutes
    python scripts/gpu_check.py --to gpu/ --table                     # the table of the parts that are there
    python scripts/gpu_check.py --to toy/ --toy                       # a CPU, in a minute: to see that it works

Needs no network and no llama.cpp. The demo target is grown to the cost of a real one (scripts/grow_target.py: its text
stays the same), its head padded to 151,936 rows; the draft is grown to .5B in the same way. Without --draft the demo
target's first and last layer, untrained, take its place: acceptance is then low, and only the costs mean anything.

Parts: `bandwidth` (bytes a second of a copy: a step cannot take less than its weights' bytes over it), `decode-1b`,
`decode-7b`, `decode-14b` (the growing and the static cache, compiled or not; plain, speculative, trees, batches;
transformers' own assisted generation beside them), `head-loss` and `training` (benchmarks/training.py and
benchmarks/steps.py, what they print). A configuration that --minutes have no time for is listed as left out.

Legend: T(m) seconds of the target's step of m tokens, D of the draft's, τ tokens a round.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from grow_target import grow

from distill.decoding.batch import decode_batch, plain_batch
from distill.decoding.costs import measure_steps
from distill.decoding.decode import Decoded, decode_text, plain
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Fixed
from distill.decoding.rules import GREEDY, Rules
from distill.decoding.trees import TreeDrafter
from distill.engines.torch.hugging_face import encode, load_model, load_tokenizer, real_tokens
from distill.engines.torch.model import TorchModel
from distill.engines.torch.static import StaticTorchModel
from distill.files import write_json
from distill.machine import machine

ROOT = Path(__file__).resolve().parent.parent
ROWS = 151_936  # of Qwen's head
SIZES = {"1b": (8, 1e9), "7b": (14, 7e9), "14b": (20, 14e9)}  # times the demo target's width; parameters
DRAFT_SIZE = 4, 5e8
LENGTHS = (2, 4, 8)
BATCHES = (4, 16)
Measured = dict[str, Any]


class Clock:
    """Whether a part has time left for another configuration."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.left_out: list[str] = []

    def allows(self, name: str) -> bool:
        """Whether there is time; the name of what there was no time for is kept."""
        if time.monotonic() < self.end:
            return True
        self.left_out.append(name)
        return False


def grown(model: Any, tile: int, parameters: float, rows: int, options: Any) -> Any:
    """The model at the width times `tile`, with as many layers as `parameters` take, its head padded to `rows`."""
    config = model.config
    width = config.hidden_size * tile
    # Of a layer: queries and outputs, keys and values, the three matrices of the MLP.
    shared = config.num_key_value_heads / config.num_attention_heads
    layer = width**2 * (2 + 2 * shared) + 3 * width * config.intermediate_size * tile
    layers = max(config.num_hidden_layers, round((parameters - rows * width) / layer))
    with torch.device(options.device):
        larger = grow(model.to(options.device), tile, layers).to(options.dtype)
        larger.resize_token_embeddings(max(rows, config.vocab_size), mean_resizing=False)
    larger.eval()
    weight = larger.get_input_embeddings().weight
    weight.data[config.vocab_size :] = 0
    return larger


def synchronised(device: torch.device) -> float:
    """The time, after all that the device was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(device: torch.device, decode_all: Callable[[], list[Decoded]]) -> Measured:
    """Tokens a second of the texts after their prompts, tokens a round and acceptance; a first call warms up."""
    decode_all()
    started = synchronised(device)
    found = decode_all()
    seconds = synchronised(device) - started
    prompts = sum(one.prefill_seconds for one in found)
    rounds = [r for one in found for r in one.rounds]
    drafted = sum(r.drafted for r in rounds)
    tokens = sum(len(one.tokens) for one in found)
    return {
        "tokens_per_second": (tokens - len(found)) / max(seconds - prompts, 1e-9),
        "with_prompts": tokens / seconds,
        "tokens_per_round": sum(r.accepted + 1 for r in rounds) / len(rounds) if rounds else None,
        "acceptance": sum(r.accepted for r in rounds) / drafted if drafted else None,
        "texts": [one.tokens for one in found],
    }


def all_texts(target: Any, drafter: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[Decoded]:
    """Greedy texts, one after another, with a drafter."""
    return [decode_text(target, drafter, prompt, tokens, Rules()) for prompt in prompts]


def measure_pair(target: Any, draft: Any, prompts: list[list[int]], vocabulary: int, options: Any) -> Measured:
    """Every configuration of one grown pair, those of one text first."""
    device, clock, rows = target.device, Clock(options.minutes), []
    rules = Rules(GREEDY, "greedy")

    def add(name: str, engine: str, decode_all: Callable[[], list[Decoded]]) -> None:
        if clock.allows(f"{engine}: {name}"):
            rows.append({"configuration": name, "engine": engine, **timed(device, decode_all)})
            print(f"  {engine}: {name}: {rows[-1]['tokens_per_second']:.1f} tokens/s", file=sys.stderr, flush=True)

    def alone(engine: str, make: Callable[[Any], Any], lengths: Sequence[int]) -> tuple[Any, Any]:
        big, small = make(target), make(draft)
        add("plain", engine, lambda: [plain(big, prompt, options.tokens) for prompt in prompts])
        for length in lengths:
            drafter = ModelDrafter(small, Fixed(length), GREEDY, rules.random)
            add(f"γ = {length}", engine, partial(all_texts, big, drafter, prompts, options.tokens))
        return big, small

    size = max(map(len, prompts)) + options.tokens
    alone("growing cache", lambda model: TorchModel(model, vocabulary), [4])
    big, small = alone("static cache", lambda model: StaticTorchModel(model, vocabulary, size=size), [4])
    tree = TreeDrafter(small, GREEDY, rules.random, 8, depth=4)
    add("tree of 8", "static cache", partial(all_texts, big, tree, prompts, options.tokens))
    big.close()
    small.close()
    found: Measured = {}
    if options.compile:
        compiled = alone(
            "static, compiled", lambda model: StaticTorchModel(model, vocabulary, size=size, compiled=True), LENGTHS
        )
        found["busy"] = {role: busy(one) for role, one in zip(("target", "draft"), compiled, strict=True)}
        steps = [
            measure_steps(model, counts, min(map(len, prompts)), 10, vocabulary)
            for model, counts in zip(compiled, ([1, *(n + 1 for n in LENGTHS)], [1, 2]), strict=True)
        ]
        found["target_step"], found["draft_step"] = ({m: one[0] for m, one in step.items()} for step in steps)
        for one in compiled:
            one.close()
    add_assisted(target, draft, prompts, options, add)
    for batch in BATCHES:
        add_batch(target, draft, (prompts * batch)[:batch], vocabulary, size, options, add)
    weights = {"target": weight_bytes(target), "draft": weight_bytes(draft)}
    reference = next(row["texts"] for row in rows if row["configuration"] == "plain")
    for row in rows:
        texts = row.pop("texts")
        row["same_text"] = sum(a == b for a, b in zip(texts, reference, strict=False)) if texts else None
    return {**found, "rows": rows, "weight_bytes": weights, "left_out": clock.left_out, "prompts": len(prompts)}


def together(found: list[Decoded]) -> list[Decoded]:
    """Texts of one batch: its prompts were read together, so their seconds count once."""
    for one in found[1:]:
        one.prefill_seconds = 0.0
    return found


def weight_bytes(model: Any) -> int:
    """The bytes of a model's weights, a tied head counted once."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def add_batch(
    target: Any, draft: Any, prompts: list[list[int]], vocabulary: int, size: int, options: Any, add: Any
) -> None:
    """Several texts at once, plainly and with four drafted tokens a round."""
    big, small = (
        StaticTorchModel(model, vocabulary, rows=len(prompts), size=size, compiled=options.compile)
        for model in (target, draft)
    )
    engine = "static, compiled" if options.compile else "static cache"
    count, rules = len(prompts), Rules(GREEDY, "greedy")
    add(f"plain, {count} texts", engine, lambda: together(plain_batch(big, prompts, options.tokens, rules)))
    add(f"γ = 4, {count} texts", engine, lambda: together(decode_batch(big, small, prompts, options.tokens, rules, 4)))
    big.close()
    small.close()


def add_assisted(target: Any, draft: Any, prompts: list[list[int]], options: Any, add: Any) -> None:
    """transformers' own generation, plain and assisted by the draft; its prompts are part of its time."""

    def generate(**more: Any) -> list[Decoded]:
        texts = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=target.device)
            with torch.inference_mode():
                made = target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=options.tokens,
                    min_new_tokens=options.tokens,
                    do_sample=False,
                    pad_token_id=0,
                    **more,
                )
            texts.append(Decoded(made[0, len(prompt) :].tolist()))
        return texts

    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    add("plain", "transformers", generate)
    add("assisted, γ = 4", "transformers", lambda: generate(assistant_model=draft))


def busy(model: Any) -> float | None:
    """The share of the time in which kernels run while a model takes 20 steps of one token; None without a GPU."""
    if model.device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    model.extend([1, 2, 3])
    for _ in range(3):
        model.extend([1], want=[0]).argmax()
    started = synchronised(model.device)
    for _ in range(20):
        model.extend([1], want=[0]).argmax()
    wall = synchronised(model.device) - started
    with profile(activities=[ProfilerActivity.CUDA]) as measured:
        for _ in range(20):
            model.extend([1], want=[0]).argmax()
        synchronised(model.device)
    kernels = sum(event.self_device_time_total for event in measured.key_averages()) / 1e6
    model.rollback([0])
    return kernels / wall


def bandwidth(options: Any) -> Measured:
    """Bytes read and written a second by copies of one large tensor: the median of ten."""
    count = 2**20 if options.toy else 2**31
    source = torch.empty(count, dtype=torch.bfloat16, device=options.device)
    target, taken = torch.empty_like(source), []
    for _ in range(11):
        started = synchronised(source.device)
        target.copy_(source)
        taken.append(synchronised(source.device) - started)
    return {"bytes_per_second": 2 * source.numel() * source.element_size() / statistics.median(taken[1:])}


def decoding(size: str, options: Any) -> Measured:
    """A part that decodes with a target of one size."""
    reference = str(ROOT / "data" / "demo-target")
    tokenizer, cpu = load_tokenizer(reference), torch.device("cpu")
    small = load_model(reference, "float32", cpu)
    vocabulary = real_tokens(small.config, tokenizer)
    texts = sorted((ROOT / "data" / "test").glob("*.py"))
    prompts = [encode(tokenizer, path.read_text(encoding="utf-8"))[:64] for path in texts]
    prompts = [prompt for prompt in prompts if len(prompt) == 64][: options.prompts]
    cut = load_model(str(options.draft), "float32", cpu) if options.draft else untrained(small)
    tile, parameters = (1, 0) if options.toy else SIZES[size]
    rows = 0 if options.toy else ROWS
    target = grown(small, tile, parameters, rows, options)
    draft = grown(cut, *((1, 0) if options.toy else DRAFT_SIZE), rows, options)
    counts = {"target": target, "draft": draft}
    counted = {role: sum(p.numel() for p in model.parameters()) for role, model in counts.items()}
    found = measure_pair(target, draft, prompts, vocabulary, options)
    return {"parameters": counted, "trained_draft": options.draft is not None, **found}


def untrained(model: Any) -> Any:
    """The target's first and last layer."""
    import copy

    cut = copy.deepcopy(model)
    cut.model.layers = torch.nn.ModuleList([cut.model.layers[0], cut.model.layers[-1]])
    cut.model.layers[1].self_attn.layer_idx = 1
    cut.config.num_hidden_layers = 2
    cut.config.layer_types = cut.config.layer_types[:1] + cut.config.layer_types[-1:]
    return cut


def printed(script: str, *arguments: str) -> Measured:
    """What another benchmark prints."""
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{script} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return {"command": " ".join([script, *arguments]), "printed": done.stdout}


def parts_of(options: Any) -> dict[str, Callable[[], Measured]]:
    """Every part by name, in order."""
    if options.toy:
        small = ("--tokens", "64", "--hidden", "32", "--vocabulary", "512", "--repeats", "1", "--rounds", "1")
        return {
            "bandwidth": lambda: bandwidth(options),
            "decode-toy": lambda: decoding("toy", options),
            "head-loss": lambda: printed("benchmarks/training.py", *small),
        }
    return {
        "bandwidth": lambda: bandwidth(options),
        **{f"decode-{size}": (lambda size=size: decoding(size, options)) for size in SIZES},
        "head-loss": lambda: printed(
            "benchmarks/training.py", "--device", "cuda", "--dtype", "bfloat16", "--tokens", "8192"
        ),
        "training": lambda: printed("benchmarks/steps.py"),
    }


def table(folder: Path) -> str:
    """The parts that are there, as Markdown."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    lines = []
    rate = found.get("bandwidth", {}).get("bytes_per_second")
    if rate:
        lines += [f"Copies move {rate / 1e9:.0f} GB/s on {found['bandwidth']['device']}.", ""]
    for name, one in found.items():
        if "rows" in one:
            lines += decoding_table(name, one, rate)
        elif "printed" in one:
            lines += [f"**{name}**: `{one['command']}`", "", one["printed"].rstrip(), ""]
    return "\n".join(lines)


def decoding_table(name: str, one: Measured, rate: float | None) -> list[str]:
    """The lines of one part that decodes."""
    plain_rate = max(row["tokens_per_second"] for row in one["rows"] if row["configuration"] == "plain")
    trained = "trained" if one["trained_draft"] else "untrained"
    sizes = {role: f"{count / 1e9:.2f}B" for role, count in one["parameters"].items()}
    lines = [f"**{name}**: target {sizes['target']}, {trained} draft {sizes['draft']}, {one['prompts']} prompts", ""]
    lines += [
        "| engine | configuration | tokens/s | of the fastest plain | τ | acceptance rate | same text |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in one["rows"]:
        tau, acceptance = row["tokens_per_round"], row["acceptance"]
        lines.append(
            f"| {row['engine']} | {row['configuration']} | {row['tokens_per_second']:.1f} | "
            f"{row['tokens_per_second'] / plain_rate:.2f} | {'' if tau is None else f'{tau:.2f}'} | "
            f"{'' if acceptance is None else f'{acceptance:.3f}'} | {row['same_text']} |"
        )
    lines.append("")
    if rate and "target_step" in one:
        bound = one["weight_bytes"]["target"] / (rate / 2)
        own = one["weight_bytes"]["draft"] / (rate / 2)
        taken = ", ".join(f"T({m}) {s * 1e3:.2f} ms = {s / bound:.2f}" for m, s in one["target_step"].items())
        drafts = ", ".join(f"D({m}) {s * 1e3:.2f} ms = {s / own:.2f}" for m, s in one["draft_step"].items())
        lines += [f"Steps, and times the bound of reading the weights once: {taken}; {drafts}.", ""]
    if any(one.get("busy", {}).values()):
        shares = ", ".join(f"{role} {share:.0%}" for role, share in one["busy"].items())
        lines += [f"Share of a step of one token in which kernels run: {shares}.", ""]
    if one["left_out"]:
        lines += [f"Left out for time: {'; '.join(one['left_out'])}.", ""]
    return lines


def main() -> None:
    """Measure the parts that are missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="folder of the results, a JSON file a part")
    parser.add_argument("--draft", type=Path, help="a trained draft of the demo target")
    parser.add_argument("--part", action="append", help="only this one; may be repeated")
    parser.add_argument("--minutes", type=float, default=7.0, help="after which a part begins no new configuration")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="decoded after each prompt")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="as with --toy")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    if options.table:
        print(table(options.to))
        return
    if not options.toy and not torch.cuda.is_available():
        sys.exit("torch sees no GPU: --toy runs everything at tiny sizes on the CPU")
    if options.draft is not None and not (options.draft / "config.json").is_file():
        sys.exit(f"--draft {options.draft} holds no config.json: give the folder draft/ of a run")
    options.device = torch.device("cpu" if options.toy else "cuda")
    options.dtype = torch.float32 if options.toy else torch.bfloat16
    options.compile = options.compile and not options.toy  # minutes, to see nothing more
    parts = parts_of(options)
    unknown = sorted(set(options.part or ()) - set(parts))
    if unknown:
        sys.exit(f"there is no part {', '.join(unknown)}; there are {', '.join(parts)}")
    options.to.mkdir(parents=True, exist_ok=True)
    for name in options.part or parts:
        path = options.to / f"{name}.json"
        if path.exists():
            continue
        print(f"{name} …", file=sys.stderr, flush=True)
        started = time.monotonic()
        found = parts[name]()
        device = torch.cuda.get_device_name(0) if options.device.type == "cuda" else "the CPU"
        write_json(path, {"device": device, "machine": machine(), "seconds": time.monotonic() - started, **found})
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
    print(table(options.to))


if __name__ == "__main__":
    main()
