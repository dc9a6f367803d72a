"""How well `distill plan --hardware` estimates steps: a machine described by made-up models, judged on others.

    python scripts/benchmarks/estimates.py --target TARGET --grown GROWN --real SmolLM2.gguf --threads 2 --out box.yaml
    python scripts/benchmarks/estimates.py --threads 2                      # a random shape of 0.5B alone

The description is that of `distill profile --describe`. With it T(1), T(2), T(4), T(8) and T(16) are estimated from
configurations alone and compared with measured ones: the demo's target, the same grown, a real model, and
Qwen2.5-0.5B's shape with 151,936 tokens.

Steps are taken in PyTorch as `distill profile` takes them. Run it with nothing beside it.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from random_training import random_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distill.benchmark.describe import BYTES, COUNTS, describe_machine
from distill.benchmark.hardware import work_of_config
from distill.machine import machine
from distill.models.hugging_face import load_model
from distill.models.loaded import growing_decoder
from distill.speculative.costs.curve import measure_steps


def measured(model: Any, options: Any) -> dict[int, float]:
    """Median seconds of steps of so many tokens."""
    with torch.inference_mode():
        decoder = growing_decoder(model.eval())
        found = measure_steps(decoder, COUNTS, options.depth, options.repeats, min(model.config.vocab_size, 1000))
    return {m: median for m, (median, _, _) in found.items()}


def made(dtype: str, *shape: Any) -> Any:
    return random_model("Llama", *shape).to(getattr(torch, dtype))


def shapes(options: Any) -> dict[str, Any]:
    """The models that are estimated, by name, each as a function that makes it."""
    found: dict[str, Any] = {}
    if options.target is not None:
        found["the demo's target"] = lambda: load_model(str(options.target), options.dtype, torch.device("cpu"))
    if options.grown is not None:
        found["the same, grown"] = lambda: load_model(str(options.grown), options.dtype, torch.device("cpu"))
    if options.real is not None:
        found["a real model"] = lambda: load_model(str(options.real), options.dtype, torch.device("cpu"))
    found["0.5B, 151,936 tokens"] = lambda: made(options.dtype, 896, 4864, 24, (14, 2), 151_936)
    return found


def main() -> None:
    """Describe, then estimate and measure each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="a small model's folder")
    parser.add_argument("--grown", type=Path, help="the same grown (scripts/grow_target.py)")
    parser.add_argument("--real", type=Path, help="a real model's folder or GGUF file")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the description, for distill plan --hardware")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    box = describe_machine(f"{options.threads} threads, {options.dtype}", options.dtype, torch.device("cpu"))
    text = yaml.safe_dump(box.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True)
    print(f"{text}# {machine()['cpu']}\n")
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    print(
        "| model | " + " | ".join(f"T({m}): estimated, measured, ms" for m in COUNTS) + " | worst ratio | T(m)/T(1) |"
    )
    print("|---|" + "--:|" * (len(COUNTS) + 2))
    for name, make in shapes(options).items():
        model = make()
        work = work_of_config(model.config, BYTES[options.dtype])
        estimated = {m: work.seconds(m, options.depth, box) for m in COUNTS}
        found = measured(model, options)
        cells = [f"{1e3 * estimated[m]:.2f}, {1e3 * found[m]:.2f}" for m in COUNTS]
        ratios = [estimated[m] / found[m] for m in COUNTS]
        relative = [estimated[m] / estimated[1] / (found[m] / found[1]) for m in COUNTS]
        worst, worst_relative = (max(one, key=lambda ratio: max(ratio, 1 / ratio)) for one in (ratios, relative))
        print(f"| {name} | " + " | ".join(cells) + f" | {worst:.2f} | {worst_relative:.2f} |", flush=True)
        del model
        gc.collect()


if __name__ == "__main__":
    main()
