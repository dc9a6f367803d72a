"""Time and peak memory of a vocabulary transplant: a donor of Qwen2.5-0.5B's shape, random weights, written in bf16.

    python scripts/benchmarks/transplant.py --tokenizers ../shared/tokenizers --runs 3

Every transplant is a process of its own; its seconds count from start to exit, its memory is the operating system's
peak (resident, mapped files included). The share of copies needs no weights and is printed for every tokenizer found.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from distill.machine import usable_cores
from distill.models.model_files import TOKENIZER_FILES
from distill.surgery.vocabulary.subtokens import describe_subtokens, map_subtokens
from distill.vocabulary import Vocabulary

COMMAND = (
    "import sys; from pathlib import Path; from distill.surgery.vocabulary.transplant import transplant; "
    "transplant(*map(Path, sys.argv[1:4]), dtype='bfloat16')"
)
UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes


def build_donor(folder: Path, tokenizer: Path, layers: int) -> int:
    """Write the donor in float32 and in bfloat16; returns its number of parameters."""
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for name, kind in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model.to(kind).save_pretrained(folder / name)
        for file in TOKENIZER_FILES:
            if (tokenizer / file).is_file():
                shutil.copyfile(tokenizer / file, folder / name / file)
    return parameters


def measure(donor: Path, target: Path, destination: Path) -> tuple[float, int]:
    """Seconds and peak bytes of one transplant in a fresh process, started by a process of its own."""
    start = time.perf_counter()
    child = os.fork()
    if child == 0:  # the peak over children is kept for a process's life: each needs a parent of its own
        done = subprocess.run([sys.executable, "-c", COMMAND, donor, target, destination], stderr=subprocess.DEVNULL)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * UNIT
        destination.with_suffix(".peak").write_text(str(peak))
        os._exit(done.returncode)
    _, status = os.waitpid(child, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"the transplant from {donor} to {target} failed")
    return seconds, int(destination.with_suffix(".peak").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizers", type=Path, default=Path("../shared/tokenizers"))
    parser.add_argument("--donor", default="qwen2.5", help="the donor's tokenizer")
    parser.add_argument("--target", default="llama-3", help="the target's tokenizer")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = build_donor(folder, arguments.tokenizers / arguments.donor, arguments.layers)
        print(f"{parameters / 1e6:.0f}M parameters, {usable_cores()} cores, torch {torch.__version__}\n")
        print("| donor stored in | seconds, each run | peak GB | of the fp32 size |\n|---|---|--:|--:|")
        for stored in ("bfloat16", "float32"):
            timed = [
                measure(folder / stored, arguments.tokenizers / arguments.target, folder / "out")
                for _ in range(arguments.runs)
            ]
            seconds, peak = ", ".join(f"{s:.1f}" for s, _ in timed), max(p for _, p in timed)
            print(f"| {stored} | {seconds} | {peak / 1e9:.2f} | {peak / (4 * parameters):.2f}x |", flush=True)
    donor = Vocabulary.read(arguments.tokenizers / arguments.donor)
    print("\n| target | rows | copies | share | subtokens per other row |\n|---|--:|--:|--:|--:|")
    for path in sorted(path for path in arguments.tokenizers.iterdir() if (path / "tokenizer.json").is_file()):
        target = Vocabulary.read(path)
        found = describe_subtokens(map_subtokens(donor, target), donor, target)
        print(
            f"| {path.name} | {found['rows']:,} | {found['copies']:,} | {found['copy_share']:.1%} "
            f"| {found['subtokens_per_mean']:.2f} |"
        )


if __name__ == "__main__":
    main()
