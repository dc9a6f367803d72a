"""Measure how near rounds come to their bound, and to other decoders: tokens/s against τ ÷ (T(n + 1) + n·D).

    python scripts/benchmarks/engine.py runs/demo --to engine.json                      # all cases; resumes by case
    python scripts/benchmarks/engine.py runs/demo --to engine.json --llama-bin DIR     # beside llama-speculative-simple
    python scripts/benchmarks/engine.py runs/demo --to engine.json --case gguf-145M-demo --lengths 2,4

A case is an engine, the target's size and a pair. The size is the run's own, or it is grown without changing the
target's text. The pair `demo` has the run's draft. In the pair `same` the target drafts for itself, and every token is
accepted. Decoding is greedy and continues after end tokens. T(n + 1) and D come from bare rounds, which make the same
calls of both models in the same order and at the same depth. Nothing is read or decided between these calls. Bare
rounds are timed directly after each text, with n one-token draft steps.

`peer` divides our tokens/s by those of another decoder, which takes turns with ours. For PyTorch it is transformers'
assisted generation, and the prompt counts. For GGUF it is llama-speculative-simple with the same files, prompt and
length, and the prompt does not count. All figures are medians over texts.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from beside_llama_cpp import simple, simple_command
from grow_target import grow

from distill.data.samples import read_prompts
from distill.decoding.decode import Decoded, decode_text
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Fixed
from distill.decoding.rules import GREEDY, Rules
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.loaded import torch_decoder
from distill.engines.model import Model
from distill.engines.torch.hugging_face import load_model, load_tokenizer
from distill.files import read_json, write_json
from distill.gguf.writer import export_gguf
from distill.machine import machine
from distill.recipe import load_recipe
from distill.run import Run
from distill.tables import Cell, Row, Table, document

SIZES = {"own": None, "145M": (4, 12)}  # tile and layers of the grown demo target
ENGINES, PAIRS = ("gguf", "pytorch"), ("same", "demo")
CAPACITY = 512
BARE = 12  # bare rounds after a text


@dataclass
class Case:
    """Both models of a case, and what its peer needs."""

    target: Model
    draft: Model
    hugging_face: tuple[Any, Any] | None = None
    files: tuple[Path, Path] | None = None


@contextmanager
def opened(run: Run, name: str, scratch: Path, threads: int) -> Iterator[Case]:
    """Open the models of a case. Grown models are written to `scratch` once."""
    engine, size, pair = name.split("-")
    recipe = load_recipe(run.path("config.yaml"))
    device = torch.device("cpu")
    draft_folder, grown = run.path("draft"), SIZES[size]

    def target() -> Any:
        model = load_model(recipe.target.model, "float32", device)
        return model if grown is None else grow(model, *grown).eval()

    if engine == "pytorch":
        big = target()
        small = copy.deepcopy(big) if pair == "same" else load_model(str(draft_folder), "float32", device)
        case = Case(torch_decoder(big), torch_decoder(small), (big, small))
    else:
        file = scratch / f"target-{size}.gguf"
        if not file.exists():
            folder = scratch / size
            target().save_pretrained(folder)
            load_tokenizer(recipe.target.model).save_pretrained(folder)
            export_gguf(folder, file, "f16")
        other = scratch / "draft.gguf"
        if not other.exists():
            export_gguf(draft_folder, other, "f16")
        files = (file, file if pair == "same" else other)
        models = [GgufModel(path, context=CAPACITY, threads=threads) for path in files]
        case = Case(models[0], models[1], None, files)
    try:
        yield case
    finally:
        case.target.close()
        case.draft.close()


def bare_round(target: Model, draft: Model, context: Sequence[int], length: int) -> float:
    """Return the mean seconds of the calls of a round, and of nothing else, on the last tokens of `context`.

    A mean is compared because the seconds of texts are sums, so that a busy moment counts in both.
    """
    depth = len(context) - length - 1
    tokens = list(context[depth:])
    for model in (target, draft):
        shared = min(model.lengths[0], depth)
        model.rollback([shared])
        if shared < depth:
            model.extend(context[shared:depth], want=[depth - shared - 1])
    seconds = []
    for _ in range(BARE):
        target.rollback([depth])
        draft.rollback([depth])
        started = time.perf_counter()
        for token in tokens[:length]:
            draft.extend([token], want=[0])
        target.extend(tokens)
        seconds.append(time.perf_counter() - started)
    return statistics.fmean(seconds)


def speculate(target: Model, draft: Model, prompt: Sequence[int], length: int, tokens: int) -> Decoded:
    """Return a greedy text, decoded with rounds of `length` drafted tokens."""
    rules = Rules()
    return decode_text(target, ModelDrafter(draft, Fixed(length), GREEDY, rules.random), prompt, tokens, rules)


def assisted(models: tuple[Any, Any], prompt: Sequence[int], length: int, tokens: int) -> float:
    """Return the seconds of transformers' assisted generation, prompt included."""
    big, small = models
    small.generation_config.num_assistant_tokens = length
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0.0
    ids = torch.tensor([list(prompt)])
    started = time.perf_counter()
    with torch.inference_mode():
        big.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            assistant_model=small,
        )
    return time.perf_counter() - started


def over_peer(case: Case, prompt: Sequence[int], decoded: Decoded, length: int, options: Any) -> float | None:
    """Return our speed on a prompt over that of the other decoder, or None if there is none."""
    if case.hugging_face is not None:
        seconds = assisted(case.hugging_face, prompt, length, options.tokens)
        return len(decoded.tokens) / (decoded.prefill_seconds + decoded.seconds) * seconds / options.tokens
    if options.llama_bin is None:
        return None
    assert case.files is not None and isinstance(case.target, GgufModel)
    binary = options.llama_bin / "llama-speculative-simple"
    command = simple_command(binary, case.files, length, options.tokens, CAPACITY, options.threads)
    text = case.target.file.detokenize(prompt).decode("utf-8", "replace")
    tokens, seconds, _ = simple([*command, "-fa", "off", "--ignore-eos"], text)
    return (len(decoded.tokens) - 1) / decoded.seconds * seconds / tokens


def share_of_bound(result: Decoded, bare_seconds: float, length: int) -> tuple[float, float]:
    """Return tokens of a full-length round, and the share of such rounds' seconds that bare rounds take."""
    whole = [r for r in result.rounds if r.drafted == length]
    seconds = sum(r.seconds for r in whole)
    return sum(r.accepted + 1 for r in whole) / len(whole), len(whole) * bare_seconds / seconds


def measure(case: Case, prompts: Sequence[list[int]], options: Any) -> dict[str, Any]:
    """Return medians over texts, by length. The lengths are measured in mixed order."""
    lengths = options.lengths
    figures: dict[int, list[tuple[float, float, float | None]]] = {length: [] for length in lengths}
    for repeat in range(options.repeats + 1):  # The first one warms up.
        prompt, turn = prompts[repeat % len(prompts)], repeat % len(lengths)
        for length in [*lengths[turn:], *lengths[:turn]]:
            decoded = speculate(case.target, case.draft, prompt, length, options.tokens)
            half = [*prompt, *decoded.tokens][: len(prompt) + options.tokens // 2 + length]
            bare = bare_round(case.target, case.draft, half, length)
            peer = over_peer(case, prompt, decoded, length, options)
            if repeat:
                figures[length].append((*share_of_bound(decoded, bare, length), peer))
        print(f"  {repeat} of {options.repeats}", file=sys.stderr, flush=True)
    return {
        str(length): [None if None in column else statistics.median(column) for column in zip(*texts, strict=True)]
        for length, texts in figures.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="JSON file of the results; finished cases are kept")
    parser.add_argument("--case", action="append", help="such as gguf-145M-demo; repeatable (default: all)")
    parser.add_argument(
        "--lengths", default="1,2,3,4,5,6,7,8", type=lambda text: [int(length) for length in text.split(",")]
    )
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-speculative-simple")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = options.run.resolve()
    run = Run(folder, load_recipe(folder / "config.yaml"))
    prompts = [sample.prompt[: options.prompt_tokens] for sample in read_prompts(run, "test")]
    prompts = [prompt for prompt in prompts if len(prompt) == options.prompt_tokens]
    names = options.case or [f"{e}-{s}-{p}" for e in ENGINES for s in SIZES for p in PAIRS]
    results = read_json(options.to, {"cases": dict}) if options.to.exists() else {"cases": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for name in (name for name in names if name not in results["cases"]):
            print(name, file=sys.stderr, flush=True)
            with opened(run, name, Path(scratch), options.threads) as case:
                results["cases"][name] = measure(case, prompts, options)
            write_json(options.to, results | {"machine": machine(), "command": sys.argv})
    rows: list[Row] = [
        [*name.split("-"), length, Cell(tau), Cell(share, ".3f"), Cell(peer)]
        for name, case in results["cases"].items()
        for length, (tau, share, peer) in case.items()
    ]
    print(document([Table(["engine", "target", "pair", "n", "τ", "share of the bound", "peer"], rows)]))


if __name__ == "__main__":
    main()
