"""How near rounds come to their bound: tokens a second against τ ÷ (T(n + 1) + n·D), and beside other decoders.

    python scripts/benchmarks/engine.py runs/demo --to engine.json                      # all cases; resumes by case
    python scripts/benchmarks/engine.py runs/demo --to engine.json --llama-bin DIR     # beside llama-speculative-simple
    python scripts/benchmarks/engine.py runs/demo --to engine.json --case gguf-145M-demo --lengths 2,4
    python scripts/benchmarks/engine.py runs/demo --to engine.json --part rows --repeats 15   # no peers, no rule

A case is an engine, the size of the target (the run's own, or grown without changing its text) and a pair: `demo`, the
run's draft, or `same`, the target drafting for itself, which is accepted whole. Everything is greedy and goes on behind
end tokens. T(n + 1) and D are bare rounds: the same calls of both models in the same order and at the same depth, with
nothing read or decided between them, timed directly after each text; n draft steps of one token each. After a round
that was accepted whole a draft has two tokens to read, which no decoder can avoid: `with two` counts them.

`predicted` is the speedup over plain decoding that costs of validation prompts, timed between these texts, and the
acceptance by position of a text predict, over the one measured, prompts included: the median over texts. The last row
of a case is the expected-value rule with costs timed before (and, of the run's draft, its calibration): its speed over
plain decoding's, prompts included, texts of --rule-tokens, in turns, with a 95 % interval over texts.

`alone` is the share of the bound that steps of one model repeated by itself give, whose weights stay in cache;
`overhead` is what a round takes beyond the calls of both models; `plain` is the share that plain decoding attains of
1 ÷ T(1); `peer` is our tokens a second, prompt included, over transformers' assisted generation (PyTorch) or over the
decoding of llama-speculative-simple with the same files, prompt and length (GGUF, prompt left out), in turns.

The parts of a case are measured one after another: `rows` (all but what follows, with nothing between their texts, as
machines drift), `peers` and `rule`. A part that is in the file is kept.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grow_target import grow

from distill.data.texts import read_prompts
from distill.decoding.calibration import Calibration, ExpectedValue
from distill.decoding.costs import accepted_by_position, measure_steps
from distill.decoding.decode import Decoded, decode_text, plain
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Fixed, LengthRule
from distill.decoding.round_costs import RoundCostMeter, measure_paid
from distill.decoding.rules import GREEDY, Rules
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.loaded import torch_decoder
from distill.engines.model import Model, Step, Watch
from distill.engines.torch.hugging_face import load_model, load_tokenizer
from distill.files import read_json, write_json
from distill.gguf.writer import export_gguf
from distill.machine import machine
from distill.measuring.calibrate import load_calibrations, validation_prompts
from distill.recipe import load_recipe
from distill.recipe.configuration import CALIBRATION
from distill.run import Run

SIZES = {"own": None, "15M": (2, 6), "145M": (4, 12)}  # tile and layers of the grown demo target
ENGINES, PAIRS = ("gguf", "pytorch"), ("same", "demo")
CAPACITY = 512
CURVE = 12  # m = 1..CURVE of the curves that rounds are compared with
REPEATS = 7  # of their steps
BARE = 12  # bare rounds after a text
PAID = 4  # validation prompts that costs are taken from
Measured = dict[str, Any]
Say = Callable[[str], None]
Prompts = Sequence[list[int]]


@dataclass
class Case:
    """Both models of a case and what its peers need."""

    target: Model
    draft: Model
    hugging_face: tuple[Any, Any] | None = None
    files: tuple[Path, Path] | None = None
    calibration: Calibration = field(default_factory=Calibration)


@dataclass
class Bench:
    """What every part of a case is measured with; costs are taken from the `others`, figures from the `prompts`."""

    case: Case
    prompts: Prompts
    others: Prompts
    options: Any
    say: Say


@contextmanager
def opened(run: Run, name: str, scratch: Path, threads: int) -> Iterator[Case]:
    """The models of a case; grown ones are written to `scratch` once."""
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
            export_gguf(folder, file, "f16", size)
        other = scratch / "draft.gguf"
        if not other.exists():
            export_gguf(draft_folder, other, "f16", "draft")
        files = (file, file if pair == "same" else other)
        models = [GgufModel(path, context=CAPACITY, threads=threads) for path in files]
        case = Case(models[0], models[1], None, files)
    fitted = run.path("speedup", "calibration.json")
    if pair == "demo" and fitted.exists():
        case.calibration = load_calibrations(fitted)[CALIBRATION]
    try:
        yield case
    finally:
        case.target.close()
        case.draft.close()


def bare_round(target: Model, draft: Model, context: Sequence[int], length: int, first: int) -> float:
    """Seconds of the calls of a round, and of nothing else, at the end of `context`, which both have read.

    `first` are the tokens of the first draft step.
    """
    depth = len(context)
    target.rollback([depth])
    draft.rollback([depth + 1 - first])
    tokens = list(context[-length - 1 :])
    started = time.perf_counter()
    draft.extend(tokens[:first], want=[first - 1])
    for token in tokens[1:length]:
        draft.extend([token], want=[0])
    target.extend(tokens)
    return time.perf_counter() - started


def speculate(target: Model, draft: Model, prompt: Sequence[int], rule: LengthRule, tokens: int) -> Decoded:
    """A greedy text with a length rule."""
    rules = Rules()
    return decode_text(target, ModelDrafter(draft, rule, GREEDY, rules.random), prompt, tokens, rules)


def assisted(models: tuple[Any, Any], prompt: Sequence[int], length: int, tokens: int) -> float:
    """Seconds of transformers' assisted generation, prompt included."""
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


def speculative_simple(
    binary: Path, files: tuple[Path, Path], text: str, length: int, tokens: int, threads: int
) -> float | None:
    """Tokens a second that llama-speculative-simple says its decoding made; None where its log does not say."""
    command = [binary, "-m", files[0], "-md", files[1], "-p", text, "-n", tokens, "-c", CAPACITY]
    command += ["--spec-type", "draft-simple", "--spec-draft-n-max", length, "--spec-draft-n-min", 0, "--temp", 0]
    command += ["-t", threads, "--spec-draft-threads", threads, "-fa", "off", "--ignore-eos"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    found = re.search(r"decoded\s+\d+ tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+) t/s", done.stdout + done.stderr)
    return float(found[1]) if found else None


def measure_rule(bench: Bench) -> Measured:
    """The expected-value rule beside plain decoding, prompts included: the median of paired ratios."""
    target, draft, options, prompts = bench.case.target, bench.case.draft, bench.options, bench.prompts
    costs = measure_paid(target, draft, bench.others, options.lengths, 9).step_costs()
    ratios, drafted, tokens = [], 0, options.rule_tokens
    for repeat in range(options.rule_repeats + 1):  # the first one warms up
        prompt = prompts[repeat % len(prompts)]
        tokens = min(options.rule_tokens, CAPACITY - len(prompt) - 1)
        seconds = {}
        for ruled in (True, False) if repeat % 2 else (False, True):
            rule = ExpectedValue(costs, copy.deepcopy(bench.case.calibration))
            one = speculate(target, draft, prompt, rule, tokens) if ruled else plain(target, prompt, tokens)
            seconds[ruled] = one.prefill_seconds + one.seconds
            drafted += sum(r.drafted for r in one.rounds) if repeat else 0
        if repeat:
            ratios.append(seconds[False] / seconds[True])
    draws = random.Random(0)
    resampled = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(1000))
    ratio, interval = statistics.median(ratios), [resampled[25], resampled[974]]
    bench.say(f"  rule: {ratio:.3f}")
    return {"ratio": ratio, "interval": interval, "ratios": ratios, "drafted": drafted, "tokens": tokens}


def text_shares(
    steps: Sequence[Step], result: Decoded, bare: tuple[float, float], length: int, alone: float
) -> Measured:
    """The figures of one text's rounds of the full length, from the steps of both models.

    `bare` are rounds whose draft first reads one token, and two.
    """
    whole = [r for r in result.rounds if r.drafted == length]
    seconds = sum(r.seconds for r in whole)
    two = sum(r.accepted == length for r in whole[:-1])
    called = sum(s.seconds for s in steps) / max(len(result.rounds), 1)
    return {
        "tokens_per_round": sum(r.accepted + 1 for r in whole) / len(whole),
        "share": len(whole) * bare[0] / seconds,
        "with_two": (len(whole) * bare[0] + two * max(bare[1] - bare[0], 0.0)) / seconds,
        "alone": len(whole) * alone / seconds,
        "overhead": sum(r.seconds for r in result.rounds) / len(result.rounds) - called,
        "round": seconds / len(whole),
        "rate": (len(result.tokens) - 1) / result.seconds,
        "whole_rate": len(result.tokens) / (result.seconds + result.prefill_seconds),
    }


def fastest_steps(model: Model, limit: int, depth: int) -> dict[int, float]:
    """The fastest of the timed steps of m tokens, for m = 1..limit at a depth."""
    steps = measure_steps(model, range(1, limit + 1), depth, REPEATS, model.vocabulary_size)
    return {m: fastest for m, (_, fastest, _) in steps.items()}


def measure_rows(bench: Bench) -> Measured:
    """All lengths in mixed order, `repeats` times; medians over the repeats. Costs are taken from the other prompts."""
    big, small, prompts, options = bench.case.target, bench.case.draft, bench.prompts, bench.options
    lengths = options.lengths
    depth = len(prompts[0]) + options.tokens // 2
    curve = fastest_steps(big, max(CURVE, max(lengths) + 1), depth)
    own = fastest_steps(small, 4, depth)
    meter = RoundCostMeter(big, small, bench.others, lengths, False, options.tokens)
    found: dict[int, list[Measured]] = {length: [] for length in lengths}
    accepted: dict[int, list[list[float]]] = {length: [] for length in lengths}  # of each text, by position
    plains: list[float] = []
    singles: list[float] = []
    for repeat in range(options.repeats + 1):  # the first one warms up
        turn = repeat % len(lengths)
        prompt = prompts[repeat % len(prompts)]
        meter.text()
        for length in [*lengths[turn:], *lengths[:turn]]:
            watch = Watch()
            result = speculate(*watch.models(big, small), prompt, Fixed(length), options.tokens)
            taken = [step for steps in watch.take() for step in steps]
            bare = bare_rounds(big, small, [*prompt, *result.tokens][: depth + length], length)
            if repeat:
                found[length].append(text_shares(taken, result, bare, length, curve[length + 1] + length * own[1]))
                accepted[length].append(accepted_by_position([(r.drafted, r.accepted) for r in result.rounds]))
        single = plain(big, prompt, options.tokens)
        steps = plain_steps(big, [*prompt, *single.tokens][:depth])
        if repeat:
            plains.append(statistics.fmean(steps) * (len(single.tokens) - 1) / single.seconds)
            singles.append(len(single.tokens) / (single.prefill_seconds + single.seconds))
        bench.say(f"  {repeat} of {options.repeats}")
    meter.until(1)
    costs = meter.costs()
    rows: list[Measured] = [
        {"length": length, "repeats": len(all_of)}
        | {key: statistics.median([one[key] for one in all_of]) for key in all_of[0]}
        for length, all_of in found.items()
    ]
    for row in rows:
        row["speedup"] = row["whole_rate"] / statistics.median(singles)
        # Text by text: acceptance differs more from text to text than medians of it and of speeds agree.
        row["predicted"] = statistics.median(
            costs.predicted_speedup(row["length"], rates, len(prompts[0]), options.tokens) * single / one["whole_rate"]
            for rates, one, single in zip(accepted[row["length"]], found[row["length"]], singles, strict=True)
        )
    return {"plain": statistics.median(plains), "rows": rows, "curve": curve, "draft_curve": own}


def measure_peers(bench: Bench) -> Measured:
    """Our speed over the other decoder's, by length: medians over the repeats."""
    case, prompts, options = bench.case, bench.prompts, bench.options
    ratios: dict[int, list[float]] = {length: [] for length in options.lengths}
    for repeat in range(options.peer_repeats + 1):  # the first one warms up
        prompt = prompts[repeat % len(prompts)]
        for length in options.lengths:
            own = speculate(case.target, case.draft, prompt, Fixed(length), options.tokens)
            peer = peers(case, prompt, length, options)
            whole_rate = len(own.tokens) / (own.seconds + own.prefill_seconds)
            if repeat and "peer_seconds" in peer:
                ratios[length].append(whole_rate * peer["peer_seconds"] / options.tokens)
            elif repeat and "peer_rate" in peer:
                ratios[length].append((len(own.tokens) - 1) / own.seconds / peer["peer_rate"])
        bench.say(f"  peers, {repeat} of {options.peer_repeats}")
    return {str(length): statistics.median(found) for length, found in ratios.items() if found}


def bare_rounds(target: Model, draft: Model, context: Sequence[int], length: int) -> tuple[float, float]:
    """Means of bare rounds, whose draft first reads one token and two, at the end of `context` without its last tokens,
    which they take. Means, because the texts' own seconds are sums: a busy moment counts in both."""
    read = list(context[: len(context) - length - 1])
    for model in (target, draft):
        shared = min(model.lengths[0], len(read))
        model.rollback([shared])
        if shared < len(read):
            model.extend(read[shared:], want=[len(read) - shared - 1])
    both = [[bare_round(target, draft, read, length, first) for first in (1, 2)] for _ in range(BARE)]
    return statistics.fmean(one for one, _ in both), statistics.fmean(two for _, two in both)


def plain_steps(model: Model, context: Sequence[int]) -> list[float]:
    """Bare steps of one token at the end of `context`."""
    model.rollback([min(model.lengths[0], len(context))])
    depth, seconds = model.lengths[0], []
    for _ in range(BARE):
        started = time.perf_counter()
        model.extend(context[-1:], want=[0])
        seconds.append(time.perf_counter() - started)
        model.rollback([depth])
    return seconds


def peers(case: Case, prompt: Sequence[int], length: int, options: Any) -> Measured:
    """The other decoder on the same prompt, where there is one."""
    if case.hugging_face is not None:
        return {"peer_seconds": assisted(case.hugging_face, prompt, length, options.tokens)}
    if options.llama_bin is None:
        return {}
    assert case.files is not None and isinstance(case.target, GgufModel)
    text = case.target.detokenize(prompt).decode("utf-8", "replace")
    binary = options.llama_bin / "llama-speculative-simple"
    rate = speculative_simple(binary, case.files, text, length, options.tokens, options.threads)
    return {} if rate is None else {"peer_rate": rate}


PARTS = {"rows": measure_rows, "peers": measure_peers, "rule": measure_rule}


def table(cases: dict[str, Measured]) -> str:
    """The table of docs/benchmarks.md#the-engine."""
    lines = [
        "| engine | target | pair | n | τ | share of the bound | with two | alone | overhead, ms | peer | plain | "
        "speedup | predicted |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        named, ratios = " | ".join(name.split("-")), case.get("peers", {})
        for row in case["rows"]["rows"] if "rows" in case else ():
            peer = f"{ratios[str(row['length'])]:.2f}" if str(row["length"]) in ratios else "–"
            shares = f"{row['share']:.3f} | {row['with_two']:.3f} | {row['alone']:.3f} | {1e3 * row['overhead']:.2f}"
            lines.append(
                f"| {named} | {row['length']} | {row['tokens_per_round']:.2f} | {shares} | {peer} | "
                f"{case['rows']['plain']:.3f} | {row['speedup']:.2f} | {row['predicted']:.2f} |"
            )
        if "rule" in case:
            rule = case["rule"]
            drafted = f"{rule['drafted']} drafted, {len(rule['ratios'])} texts of {rule['tokens']}"
            low, high = rule["interval"]
            lines.append(f"| {named} | rule: {drafted} | | | | | | | | {rule['ratio']:.3f} [{low:.3f}, {high:.3f}] | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="JSON file of the results; finished cases are kept")
    parser.add_argument("--case", action="append", help="such as gguf-145M-demo; repeatable (default: all)")
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable (default: all)")
    parser.add_argument("--lengths", default="1,2,3,4,5,6,7,8", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peer-repeats", type=int, default=5)
    parser.add_argument("--rule-tokens", type=int, default=256)
    parser.add_argument("--rule-repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-speculative-simple")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = options.run.resolve()
    run = Run(folder, load_recipe(folder / "config.yaml"))
    prompts = [one.ids[: options.prompt_tokens] for one in read_prompts(run, "test")]
    prompts = [one for one in prompts if len(one) == options.prompt_tokens]
    others = validation_prompts(run, options.prompt_tokens, PAID)
    names = options.case or [f"{e}-{s}-{p}" for e in ENGINES for s in SIZES for p in PAIRS]
    found = read_json(options.to, {"cases": dict}) if options.to.exists() else {"cases": {}}

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            done = found["cases"].setdefault(name, {})
            missing = [part for part in options.part or PARTS if part not in done]
            if not missing:
                continue
            say(name)
            with opened(run, name, Path(scratch), options.threads) as case:
                bench = Bench(case, prompts, others, options, say)
                for part in missing:
                    done[part] = PARTS[part](bench)
                    found |= {"machine": machine(), "command": sys.argv}
                    write_json(options.to, found)
    print(table(found["cases"]))


if __name__ == "__main__":
    main()
