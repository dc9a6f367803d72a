"""Measure this project on an accelerator, with the tables that docs/benchmarks.md has for CPUs only.

    python scripts/gpu_check.py --to gpu/                  # all parts in turn; after a kill, the same command continues
    python scripts/gpu_check.py --to gpu/ --part 7b        # one part; each ends within --minutes
    python scripts/gpu_check.py --to gpu/ --table          # the tables of the results so far, by device
    python scripts/gpu_check.py --to toy/ --toy            # tiny sizes on any device or the CPU, to see that it works

No network is needed. A missing package is named: torch, transformers, accelerate, pydantic and psutil are needed. gguf
and typer are needed for SmolLM2's own file, but not for a folder that `distill import-gguf` made of it. `pipeline`
needs every package that distill needs.

There are two pairs. `smollm2` comes from scripts/smollm2.txt or --smollm2. `7b` is the demo target, grown to a real
model's cost without changing its text (scripts/grow_target.py). Its head is padded to 151,936 rows, and its draft is
grown to 0.5B. Without --smollm2-draft and --draft, the target's outer layers draft without training. Acceptance is then
low, and only the costs are meaningful.

The part with a pair's name measures the growing cache, the static cache, and transformers' generation, plain and
assisted. The other parts of a pair are `-compiled`, `-batches` and `-batches-compiled`. Rounds of one text stay on the
device. The host takes part in each step of a batch. Part `bits` times products with the 4 bits of a GGUF file. Part
`training` is the output of benchmarks/steps.py. Part `pipeline` is `distill train` over the pair `7b`, with the time of
each stage and without a time limit. Measurements that failed or had no time are named, and the next call repeats them.

Legend: T(m) seconds of the target's step of m tokens, D(m) of the draft's, τ tokens a round.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import io
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

try:
    import torch
    from benchmarks import steps
    from grow_target import grow

    from distill.decoding.batch import OneRow, at_once
    from distill.decoding.costs import measure_steps
    from distill.decoding.decode import Decoded, decode_text, plain
    from distill.decoding.drafters import ModelDrafter
    from distill.decoding.lengths import Fixed
    from distill.decoding.ngrams import NGramTable, count_ngrams
    from distill.decoding.rules import GREEDY, Rules
    from distill.decoding.table_drafter import TableDrafter
    from distill.decoding.trees import TreeDrafter
    from distill.devices import CPU, accelerators, device_name, peak_memory_bytes, pick_device, synchronise, take_peaks
    from distill.engines.torch.hugging_face import encode, load_model, load_tokenizer, real_tokens
    from distill.engines.torch.model import TorchModel
    from distill.engines.torch.products import FourBitLinear, has_four_bits
    from distill.engines.torch.static import StaticTorchModel
    from distill.errors import RunError
    from distill.files import write_json
    from distill.machine import machine
    from distill.surgery.layers import layer_settings, put_layers
    from distill.tables import Block, Cell, Row, Table, document
except ModuleNotFoundError as error:
    sys.exit(f"gpu_check needs the package {error.name}, which is not installed: carry its wheel, or pip install it")

ROWS = 151_936  # rows of Qwen's head
SIZES = {"7b": ((14, 7e9), (4, 5e8)), "toy": ((1, 0), (1, 0))}  # target and draft: multiple of the width, parameters
LENGTHS = (2, 4, 8)
COUNTS = (1, 2, 3, 5, 9, 17, 33)  # tokens m of T(m)
BATCHES = (2, 4, 8, 16, 32)
MODES = ("", "-compiled", "-batches", "-batches-compiled")
PROMPT = 64  # tokens of a prompt
RULES = Rules(GREEDY, "greedy")
Measured = dict[str, Any]


class Part:
    """The results of a part, in a file that is written after each configuration, and the part's time limit."""

    def __init__(self, path: Path, options: Any) -> None:
        self.path, self.options, self.end = path, options, time.monotonic() + 60 * options.minutes
        self.found: Measured = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
        self.rows, self.finished = self.found["rows"], self.found.get("finished", False)
        self.found |= {"left_out": [], "finished": False}

    def save(self, **more: Any) -> None:
        """Write the file."""
        self.found |= more
        write_json(self.path, self.found)

    def add(self, name: str, engine: str, measure: Callable[[], Measured], at_once: int = 1) -> None:
        """Add a row with the result of `measure`, unless it exists. On failure, or without time, add its name."""
        if any((row["engine"], row["configuration"], row["at_once"]) == (engine, name, at_once) for row in self.rows):
            return
        label = f"{engine}: {name}, {at_once} at once"
        if time.monotonic() > self.end:
            self.found["left_out"].append(f"{label}: no time")
            return
        try:
            self.rows.append({"configuration": name, "engine": engine, "at_once": at_once, **measure()})
        except Exception as error:  # The other configurations are measured anyway.
            self.found["left_out"].append(f"{label}: {type(error).__name__}: {error}".splitlines()[0])
        print(f"  {label}", file=sys.stderr, flush=True)
        self.save()

    def decode(self, name: str, engine: str, decode_all: Callable[[], list[Decoded]], at_once: int = 1) -> None:
        """Add a row with the speed at which these texts are decoded."""
        self.add(name, engine, partial(timed, self.options.device, decode_all), at_once)


def grown(model: Any, size: tuple[int, float], rows: int, options: Any) -> Any:
    """Return the model at a multiple of its width, with layers for its parameters, and its head padded to `rows`."""
    tile, parameters = size
    config = model.config
    width = config.hidden_size * tile
    # Weights of a layer: queries and outputs, keys and values, the three matrices of the MLP.
    shared = config.num_key_value_heads / config.num_attention_heads
    layer = width**2 * (2 + 2 * shared) + 3 * width * config.intermediate_size * tile
    layers = max(config.num_hidden_layers, round((parameters - rows * width) / layer))
    with torch.device(options.device):
        larger = grow(model.to(options.device), tile, layers).to(options.dtype)
        larger.resize_token_embeddings(max(rows, config.vocab_size), mean_resizing=False)
    larger.eval()
    larger.get_input_embeddings().weight.data[config.vocab_size :] = 0
    return larger


def outer_layers(model: Any) -> Any:
    """Return a model of the first and the last layer."""
    cut, kept = copy.deepcopy(model), [0, model.config.num_hidden_layers - 1]
    put_layers(cut, [cut.base_model.layers[place] for place in kept])
    for name, value in {**layer_settings(model.config, kept), "num_hidden_layers": 2}.items():
        setattr(cut.config, name, value)
    return cut


def timed(device: torch.device, decode_all: Callable[[], list[Decoded]]) -> Measured:
    """Return tokens/s after the prompts, tokens per round and acceptance rate of the texts. A first call warms up."""

    def now() -> float:
        synchronise(device)
        return time.perf_counter()

    take_peaks()
    decode_all()
    started = now()
    texts = decode_all()
    seconds = now() - started
    rounds = [r for text in texts for r in text.rounds]
    drafted = sum(r.drafted for r in rounds)
    tokens = sum(len(text.tokens) for text in texts)
    return {
        "tokens_per_second": (tokens - len(texts)) / max(seconds - sum(text.prefill_seconds for text in texts), 1e-9),
        "tokens_per_round": sum(r.accepted + 1 for r in rounds) / len(rounds) if rounds else None,
        "acceptance": sum(r.accepted for r in rounds) / drafted if drafted else None,
        "peak_bytes": peak_memory_bytes(device) if accelerators() else None,
        "texts": [text.tokens for text in texts],
    }


def packaged() -> Path:
    """Return SmolLM2's file in its package."""
    from distill.cli.check import smollm2_file

    file = smollm2_file()
    if file is None:
        raise RunError("SmolLM2 is not here", "install scripts/smollm2.txt, or give its file or folder (--smollm2)")
    return file


class Pair:
    """Target and draft, and prompts. The n-gram table counts the target's texts after the other prompts."""

    def __init__(self, name: str, options: Any) -> None:
        self.options, on_cpu = options, torch.device(CPU)
        if name == "smollm2":
            reference, type_name = str(options.smollm2 or packaged()), str(options.dtype).removeprefix("torch.")
            self.target = load_model(reference, type_name, options.device)
            given = options.smollm2_draft
            self.draft = load_model(str(given), type_name, options.device) if given else outer_layers(self.target)
        else:
            reference, given = str(ROOT / "data" / "demo-target"), options.draft
            small, rows = load_model(reference, "float32", on_cpu), 0 if name == "toy" else ROWS
            cut = load_model(str(given), "float32", on_cpu) if given else outer_layers(small)
            self.draft = grown(cut, SIZES[name][1], rows, options)
            self.target = grown(small, SIZES[name][0], rows, options)
        self.tokenizer = load_tokenizer(reference)
        self.vocabulary = real_tokens(self.target.config, self.tokenizer)
        texts = [
            encode(self.tokenizer, path.read_text("utf-8")) for path in sorted((ROOT / "data" / "test").glob("*.py"))
        ]
        texts = [text for text in texts if len(text) >= 2 * PROMPT]
        self.prompts = [text[:PROMPT] for text in texts[: options.prompts]]
        self.others = [text[PROMPT : 2 * PROMPT] for text in texts[: 1 if options.toy else None]]
        counts = {role: sum(p.numel() for p in getattr(self, role).parameters()) for role in ("target", "draft")}
        self.counted: NGramTable | None = None
        self.about = {"pair": name, "trained_draft": given is not None, "parameters": counts}

    def engines(self, kind: str, rows: int = 1) -> list[Any]:
        """Return target and draft as models of an engine."""
        models = (self.target, self.draft)
        if kind == "growing":
            return [TorchModel(model, self.vocabulary) for model in models]
        size, compiled = PROMPT + self.options.tokens, kind == "compiled"
        return [StaticTorchModel(model, self.vocabulary, rows=rows, size=size, compiled=compiled) for model in models]

    def table(self, target: Any) -> NGramTable:
        """Return n-grams of the target's own texts after the other prompts. They are decoded once."""
        if self.counted is None:
            texts = [plain(target, other, self.options.tokens).tokens for other in self.others]
            self.counted = NGramTable(count_ngrams(texts), {})
        return self.counted

    def save(self, folder: Path) -> None:
        """Write both models to folders `target` and `draft`, as `distill train` reads them."""
        for role in ("target", "draft"):
            getattr(self, role).save_pretrained(folder / role)
            self.tokenizer.save_pretrained(folder / role)


def measure_alone(part: Part, pair: Pair, kind: str) -> None:
    """Measure one text after another with one engine: plain, chains, a tree, a table, and the costs of steps."""
    big, small = pair.engines(kind)
    tokens, drawn = part.options.tokens, RULES.random

    def decode(drafter: Any) -> list[Decoded]:
        return [decode_text(big, drafter, prompt, tokens, RULES) for prompt in pair.prompts]

    part.decode("plain", kind, lambda: [plain(big, prompt, tokens) for prompt in pair.prompts])
    for length in LENGTHS:
        part.decode(f"γ = {length}", kind, partial(decode, ModelDrafter(small, Fixed(length), GREEDY, drawn)))
    part.decode("tree of 8", kind, partial(decode, TreeDrafter(small, GREEDY, drawn, 8, rule=Fixed(4))))
    part.decode("table, tree of 8", kind, partial(decode, TableDrafter(pair.table(big), 8, 4)))
    for name, model, counts in (("T(m)", big, COUNTS), ("D(m)", small, COUNTS[:2])):
        part.add(name, kind, partial(costs, model, counts, 2 if part.options.toy else 10))
    big.close()
    small.close()


def costs(model: Any, counts: tuple[int, ...], repeats: int) -> Measured:
    """Return median seconds of a model's steps after a prompt."""
    return {"steps": measure_steps(model, counts, PROMPT, repeats)}


def measure_batches(part: Part, pair: Pair, kind: str) -> None:
    """Measure several texts at once, with 0 and 4 drafted tokens per round. The host takes part in each step."""
    for count in BATCHES[: 1 if part.options.toy else None]:
        big, small = pair.engines(kind, count)
        asked = (pair.prompts * count)[:count], part.options.tokens, RULES
        for length in (0, 4):
            name = f"γ = {length}" if length else "plain"
            part.decode(name, kind, partial(together, big, small, *asked, length), count)
        big.close()
        small.close()


def together(big: Any, small: Any, prompts: list[list[int]], tokens: int, rules: Rules, length: int) -> list[Decoded]:
    """Decode texts of one batch. Its prompts are read together, so their seconds count once."""
    texts = []
    for row, prompt in enumerate(prompts):
        drafter = ModelDrafter(OneRow(small, row), Fixed(length), GREEDY, rules.random)
        texts.append(partial(decode_text, OneRow(big, row), drafter, prompt, tokens, rules))
    decoded = at_once(texts, (small, big))
    for later in decoded[1:]:
        later.prefill_seconds = 0.0
    return decoded


def measure_transformers(part: Part, pair: Pair) -> None:
    """Measure transformers' own generation, plain and assisted by the draft. Its time includes the prompts."""

    def generate(**more: Any) -> list[Decoded]:
        texts = []
        for prompt in pair.prompts:
            ids = torch.tensor([prompt], device=pair.target.device)
            count = {"max_new_tokens": part.options.tokens, "min_new_tokens": part.options.tokens}
            with torch.inference_mode():
                mask = torch.ones_like(ids)
                made = pair.target.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **count, **more)
            texts.append(Decoded(made[0, len(prompt) :].tolist()))
        return texts

    settings = pair.draft.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = 4, "constant"
    settings.assistant_confidence_threshold = 0.0
    part.decode("plain", "transformers", generate)
    part.decode("assisted, γ = 4", "transformers", lambda: generate(assistant_model=pair.draft))


def decoding(name: str, mode: str, part: Part) -> None:
    """Measure a part of a pair."""
    pair = Pair(name, part.options)
    part.save(**pair.about)
    kind = "compiled" if mode.endswith("compiled") else "static"
    if mode.startswith("-batches"):
        measure_batches(part, pair, kind)
        return
    if not mode:
        measure_alone(part, pair, "growing")
    measure_alone(part, pair, kind)
    if not mode:
        measure_transformers(part, pair)


def training(part: Part) -> None:
    """Record the output of benchmarks/steps.py."""
    small = ("--shape", "small", "--blocks", "1", "--block", "64", "--repeats", "1", "--kinds", "compact")
    asked = ["--device", str(part.options.device), *(small if part.options.toy else ())]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        steps.main(asked)
    part.save(command=" ".join(["benchmarks/steps.py", *asked]), printed=printed.getvalue())


# A whole draft learns from exact distributions. The toy's rate of 4e-3 is for a draft of its own width.
PIPELINE = [
    *("answers.prompts=256", "answers.new_tokens=128", "target.dtype=auto"),
    *("cut.layers=null", "cut.mlp_width=null", "cut.allow_full_size=true"),
    *("train.steps=40", "train.rate=5e-4", "train.dtype=auto", "eval.prompts=16", "export.outtypes=[]"),
    *("speedup.backends=[pytorch]", "speedup.prompts=4", "speedup.new_tokens=64", "speedup.lengths=[4]"),
]
SMALL = ["answers.prompts=16", "answers.new_tokens=32", "train.steps=2", "eval.prompts=4", "speedup.prompts=2"]


def pipeline(name: str, part: Part) -> None:
    """Run `distill train` on a pair, and record the seconds of each stage and the report's table of speeds."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pair = Pair(name, part.options)
        part.save(target=pair.about["parameters"]["target"], draft=pair.about["parameters"]["draft"])
        pair.save(folder)
        del pair
        free(part.options.device)  # The other process needs the memory.
        models = [f"target.model={folder / 'target'}", f"cut.donor={folder / 'draft'}"]
        asked = [*PIPELINE, *(SMALL if part.options.toy else ()), *models]
        command = [sys.executable, "-m", "distill", "train", str(ROOT / "recipes" / "demo.yaml"), *asked]
        log = part.path.with_suffix(".log")
        with open(log, "w", encoding="utf-8") as output:
            run = partial(subprocess.run, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, check=False)
            status = run([*command, "--runs", scratch]).returncode
        if status:
            raise RunError(f"distill train ended with status {status}", f"read {log}")
        part.save(printed=document(run_blocks(folder / "demo")))


def run_blocks(run: Path) -> list[Block]:
    """Return the seconds of a run's stages, the pace and memory of its training, and its table of speeds."""
    from distill.training.saved import training_steps

    texts = [path.read_text(encoding="utf-8") for path in (run / "stages").glob("*.json")]
    records = sorted(map(json.loads, texts), key=lambda record: record["time"])
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = training_steps(map(json.loads, lines))
    pace = statistics.median(step.tokens_per_second for step in steps)
    peak = max(step.memory_bytes or 0 for step in steps) / 2**30
    return [
        Table(["stage", "seconds"], [[record["stage"], Cell(record["seconds"], ".1f")] for record in records]),
        f"Training: {len(steps)} steps, {pace:.0f} tokens/s, peak memory {peak:.1f} GiB.",
        (run / "speedup.md").read_text(encoding="utf-8").partition("**a round**")[0].rstrip(),
    ]


MATRICES = {"queries": (4096, 4096), "gate and up": (22016, 4096), "down": (4096, 11008), "head": (ROWS, 4096)}
FEW = (1, 2, 4, 8, 16, 128)  # tokens of a product


def bits(part: Part) -> None:
    """Compare a product in a file's 4 bits with torch's own in bfloat16: error and time."""
    device, rows = part.options.device, list[Row]()
    if not has_four_bits(device):
        part.save(printed=f"torch has no operator for 4 bits on {device}")
        return
    for name, (out, width) in ({"toy": (48, 64)} if part.options.toy else MATRICES).items():
        levels = torch.randint(0, 16, (out, width), dtype=torch.uint8, device=device)
        scale = torch.rand(out, width // 32, device=device).bfloat16() * 0.01
        zero = (torch.rand_like(scale) - 0.5) * 0.01
        whole = ((levels.bfloat16() - 8).unflatten(1, (-1, 32)) * scale[..., None] + zero[..., None]).flatten(1)
        product = FourBitLinear(levels, scale, zero)
        x = torch.randn(max(FEW), width, device=device).bfloat16()
        exact = x[:4].float() @ whole.float().T
        error = float((product(x[:4]).float() - exact).norm() / exact.norm())
        for kind, multiply in (("bfloat16", partial(torch.nn.functional.linear, weight=whole)), ("4 bits", product)):
            taken = [1e6 * median_seconds(device, partial(multiply, x[:count])) for count in FEW]
            rows.append([f"{name} [{out}, {width}]", kind, Cell(error, ".1e") if kind == "4 bits" else None, *taken])
    heads = ["matrix", "weights", "error of the product", *(f"{count} tokens, µs" for count in FEW)]
    part.save(printed=document([Table(heads, rows)]))


def median_seconds(device: torch.device, call: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median seconds of a call. Ten calls in a row are timed, so that launching them takes no extra time."""
    taken = []
    for _ in range(repeats):
        synchronise(device)
        started = time.perf_counter()
        for _ in range(10):
            call()
        synchronise(device)
        taken.append((time.perf_counter() - started) / 10)
    return statistics.median(taken)


def parts_of(options: Any) -> dict[str, Callable[[Part], None]]:
    """Return every part by name, in order."""
    pairs, modes = (("toy",), MODES[::2]) if options.toy else (("smollm2", "7b"), MODES)
    decodes = {f"{name}{mode}": partial(decoding, name, mode) for name in pairs for mode in modes}
    return {"bits": bits, **decodes, "training": training, "pipeline": partial(pipeline, pairs[-1])}


def free(device: torch.device) -> None:
    """Free the unused memory of a device."""
    gc.collect()
    if device.type != CPU:
        torch.accelerator.empty_cache()


def driver(device: torch.device) -> str | None:
    """Return the version of the device's driver, from torch or the maker's tool."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    version = getattr(properties(device), "driver_version", None) if properties is not None else None
    tools = ("nvidia-smi --query-gpu=driver_version --format=csv,noheader", "rocm-smi --showdriverversion --csv")
    for tool in tools if version is None and accelerators() else ():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            version = subprocess.run(tool.split(), capture_output=True, text=True, check=True).stdout.split()[-1]
            break
    return version


# ── The tables ──


def tables(folder: Path) -> str:
    """Return the results in the folders of all devices, as Markdown."""
    blocks: list[Block] = []
    for place in sorted({path.parent for path in folder.glob("*/*.json")}):
        parts = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(place.glob("*.json"))}
        blocks += device_blocks(parts)
    return document(blocks)


def device_blocks(parts: dict[str, Measured]) -> list[Block]:
    """Return the tables of one device from its parts by name."""
    first = next(iter(parts.values()))
    computer, packages = first["machine"], ("python", "torch", "transformers")
    versions = [f"{package} {computer[package]}" for package in packages if package in computer]
    driver_version = f", driver {first['driver']}" if first["driver"] else ""
    made_with = f"{first['date']}{driver_version}, {', '.join(versions)}, {computer['cpu']}."
    blocks: list[Block] = [f"## {first['device']}", made_with]
    for pair in dict.fromkeys(part["pair"] for part in parts.values() if "pair" in part):
        blocks += pair_tables([part for part in parts.values() if part.get("pair") == pair])
    if "printed" in parts.get("bits", {}):
        blocks += ["**Products in a file's 4 bits**", parts["bits"]["printed"].rstrip()]
    if "training" in parts and "printed" in parts["training"]:
        blocks += [f"**training**: `{parts['training']['command']}`", parts["training"]["printed"].rstrip()]
    if "printed" in parts.get("pipeline", {}):
        sizes = " and ".join(f"{parts['pipeline'][role] / 1e9:.2f}B" for role in ("target", "draft"))
        blocks += [f"**`distill train`**, target and draft of {sizes} weights", parts["pipeline"]["printed"].rstrip()]
    left_out = [f"{name}: {reason}" for name, part in parts.items() for reason in part["left_out"]]
    return [*blocks, f"Not measured: {'; '.join(left_out)}. Call again."] if left_out else blocks


def pair_tables(parts: list[Measured]) -> list[Block]:
    """Return the tables of a pair, from all its parts: its decoders, and the steps of both models."""
    first, rows = parts[0], sorted((row for part in parts for row in part["rows"]), key=lambda row: row["at_once"])
    sizes = {role: f"{count / 1e9:.2f}B" for role, count in first["parameters"].items()}
    trained = "trained" if first["trained_draft"] else "untrained"
    plains = [row for row in rows if row["configuration"] == "plain"]

    decoders: list[Row] = []
    for row in (row for row in rows if "texts" in row):
        best = max((p["tokens_per_second"] for p in plains if p["at_once"] == row["at_once"]), default=float("nan"))
        same = sum(a == b for a, b in zip(row["texts"], itertools.cycle(plains[0]["texts"]), strict=False))
        speed, peak = row["tokens_per_second"], row["peak_bytes"] and row["peak_bytes"] / 2**30
        decoded = [row["at_once"], row["engine"], row["configuration"], Cell(speed, ".1f"), speed / best]
        drafted = [row["tokens_per_round"], Cell(row["acceptance"], ".3f")]
        decoders.append([*decoded, *drafted, f"{same} of {len(row['texts'])}", peak])
    heads = ["texts at once", "engine", "configuration", "tokens/s", "of the fastest plain", "τ", "acceptance rate"]
    steps = [
        [row["configuration"], row["engine"], *(1e3 * row["steps"].get(str(m), float("nan")) for m in COUNTS)]
        for row in rows
        if "steps" in row
    ]
    return [
        f"**{first['pair']}**: target {sizes['target']}, {trained} draft {sizes['draft']}",
        Table([*heads, "same text", "peak memory, GiB"], decoders),
        Table(["steps, ms", "engine", *(f"m = {m}" for m in COUNTS)], steps),
    ]


def main() -> None:
    """Measure the parts that are missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="folder of results, with a folder per device")
    parser.add_argument("--draft", type=Path, help="a trained draft of the demo target")
    parser.add_argument("--smollm2", type=Path, help="SmolLM2's GGUF file, or a folder that was made of it")
    parser.add_argument("--smollm2-draft", type=Path, help="a trained draft of SmolLM2, as scripts/demo.sh makes it")
    parser.add_argument("--part", action="append", help="measure only this part; may be repeated")
    parser.add_argument("--minutes", type=float, default=7.0, help="a part begins no new configuration after this time")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="tokens decoded after each prompt")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, nothing compiled, also without an accelerator")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    options = parser.parse_args()
    if options.table:
        print(tables(options.to))
        return
    options.device = pick_device("auto")
    if not options.toy and options.device.type == CPU:
        sys.exit("torch sees no accelerator: --toy runs everything at tiny sizes on the CPU")
    for name, folder in (("--draft", options.draft), ("--smollm2-draft", options.smollm2_draft)):
        if folder is not None and not (folder / "config.json").is_file():
            sys.exit(f"{name} {folder} holds no config.json: give the folder draft/ of a run")
    options.dtype = torch.float32 if options.toy else torch.bfloat16
    parts = parts_of(options)
    unknown = sorted(set(options.part or ()) - set(parts))
    if unknown:
        sys.exit(f"there is no part {', '.join(unknown)}; there are {', '.join(parts)}")
    name = device_name(options.device) if options.device.type != CPU else "the CPU"
    place = options.to / re.sub(r"\W+", "-", name).strip("-")
    for asked in options.part or parts:
        part = Part(place / f"{asked}.json", options)
        if part.finished:
            continue
        print(f"{asked} …", file=sys.stderr, flush=True)
        place.mkdir(parents=True, exist_ok=True)
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        part.save(device=name, date=date, driver=driver(options.device), machine=machine())
        try:
            parts[asked](part)
        except Exception as error:  # The other parts are measured anyway.
            part.found["left_out"].append(f"{type(error).__name__}: {error}".splitlines()[0])
        part.save(finished=not part.found["left_out"])
        free(options.device)
    print(tables(options.to))


if __name__ == "__main__":
    main()
