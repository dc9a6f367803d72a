"""How near rounds come to their bound: tokens a second against τ ÷ (T(n + 1) + n·D), and beside other decoders.

    python scripts/benchmark_engine.py runs/demo --to engine.json                      # all cases; resumes by case
    python scripts/benchmark_engine.py runs/demo --to engine.json --llama-bin DIR      # beside llama-speculative-simple
    python scripts/benchmark_engine.py runs/demo --to engine.json --case gguf-145M-demo --lengths 2,4

A case is an engine, the size of the target (the run's own, or grown without changing its text) and a pair: `demo`, the
run's draft, or `same`, the target drafting for itself, which is accepted whole. Everything is greedy and goes on behind
end tokens. T(n + 1) and D are bare rounds: the same calls of both models in the same order and at the same depth, with
nothing read or decided between them, timed directly after each text; n draft steps of one token each. After a round
that was accepted whole a draft has two tokens to read, which no decoder can avoid: `with two` counts them.

`predicted` is the speedup over plain decoding that costs of validation prompts, timed between these texts, and the
acceptance by position of a text predict, over the one measured, prompts included: the median over texts. The last row
of a case is the expected-value rule with costs timed before (and, of the run's draft, its calibration): its speed over
plain decoding's, prompts included, texts of --rule-tokens, in turns.

`alone` is the share of the bound that steps of one model repeated by itself give, whose weights stay in cache;
`overhead` is what a round takes beyond the calls of both models; `plain` is the share that plain decoding attains of
1 ÷ T(1); `peer` is our tokens a second, prompt included, over transformers' assisted generation (PyTorch) or over the
decoding of llama-speculative-simple with the same files, prompt and length (GGUF, prompt left out).
"""

from __future__ import annotations

import argparse
import copy
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distill.benchmark.calibrate import load_calibrations, validation_prompts
from distill.benchmark.pair.watch import Watch, watched
from distill.export.writer import export_gguf
from distill.files import read_json, write_json
from distill.machine import machine
from distill.models.base import Model
from distill.models.gguf.model import GgufModel
from distill.models.hugging_face import load_model, load_tokenizer
from distill.models.loaded import torch_decoder
from distill.recipe import load_recipe
from distill.recipe.configuration import CALIBRATION
from distill.run import Run
from distill.speculative.calibration import Calibration, Power
from distill.speculative.costs.cheapest import CheapestSteps
from distill.speculative.costs.curve import measure_steps
from distill.speculative.costs.paid import PaidCosts, PaidMeter, measure_paid
from distill.speculative.decode import GREEDY, Decoded, Rules, decode, plain
from distill.speculative.draft import ModelDrafter
from distill.speculative.expected_value import ExpectedValue
from distill.speculative.lengths import Fixed, LengthRule
from distill.surgery.grow import grow
from distill.texts import read_prompts

SIZES = {"own": None, "15M": (2, 6), "145M": (4, 12)}  # tile and layers of the grown demo target
ENGINES, PAIRS = ("gguf", "pytorch"), ("same", "demo")
CAPACITY = 512
CURVE = 12  # m = 1..CURVE of the curves that choose how steps are given
BARE = 12  # bare rounds after a text
PAID = 4  # validation prompts that costs are taken from
Measured = dict[str, Any]


@dataclass
class Case:
    """Both models of a case and what its peers need."""

    target: Model
    draft: Model
    hugging_face: tuple[Any, Any] | None = None
    files: tuple[Path, Path] | None = None
    calibration: Calibration = field(default_factory=Power)


@contextmanager
def opened(run: Run, engine: str, size: str, pair: str, scratch: Path, threads: int) -> Iterator[Case]:
    """The models of a case; grown ones are written to `scratch` once."""
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


def cheapest(model: Model, depth: int, most: int) -> tuple[CheapestSteps, dict[int, float]]:
    """The model with its steps given the cheapest way, and its curve: the fastest of seven repeats."""
    found = measure_steps(model, range(1, most + 1), depth, 7, model.vocabulary_size)
    seconds, medians = ({m: taken[which] for m, taken in found.items()} for which in (1, 0))
    return CheapestSteps(model, seconds, medians), seconds


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
    rules, result = Rules(GREEDY, "greedy"), Decoded()
    drafter = ModelDrafter(draft, rule, GREEDY, rules.random)
    for _ in decode(target, drafter, prompt, tokens, rules, result):
        pass
    return result


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


def predicted_speedup(costs: PaidCosts, text: Decoded, length: int, prompt: int, tokens: int) -> float:
    """The speedup predicted for one text from costs and its own acceptance by position."""
    rounds = [r for r in text.rounds if r.drafted == length]
    reached = [sum(r.accepted >= position for r in rounds) for position in range(length + 1)]
    rates = [reached[i + 1] / reached[i] if reached[i] else 0.0 for i in range(length)]
    return costs.predicted_speedup(length, rates, prompt, tokens)


def measure_rule(
    target: Model,
    draft: Model,
    prompts: Sequence[list[int]],
    costs: PaidCosts,
    calibration: Calibration,
    options: Any,
) -> Measured:
    """The expected-value rule beside plain decoding, prompts included: the median of paired ratios."""
    ratios, drafted = [], 0
    for repeat in range(options.rule_repeats + 1):  # the first one warms up
        prompt = prompts[repeat % len(prompts)]
        tokens = min(options.rule_tokens, CAPACITY - len(prompt) - 1)
        seconds = {}
        for ruled in (True, False) if repeat % 2 else (False, True):
            rule = ExpectedValue(costs.step_costs(), copy.deepcopy(calibration))
            one = speculate(target, draft, prompt, rule, tokens) if ruled else plain(target, prompt, tokens)
            seconds[ruled] = one.prefill_seconds + one.seconds
            drafted += sum(r.drafted for r in one.rounds) if repeat else 0
        if repeat:
            ratios.append(seconds[False] / seconds[True])
    return {"ratio": statistics.median(ratios), "ratios": ratios, "drafted": drafted, "tokens": tokens}


def text_shares(watch: Watch, result: Decoded, bare: tuple[float, float], length: int, alone: float) -> Measured:
    """The figures of one text's rounds of the full length; `bare`: those whose draft first reads one token, and two."""
    whole = [r for r in result.rounds if r.drafted == length]
    seconds = sum(r.seconds for r in whole)
    two = sum(r.accepted == length for r in whole[:-1])
    steps = [s for s in (*watch.target, *watch.draft) if s.depth]  # not those that read the prompt
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


def measure_case(
    case: Case,
    prompts: Sequence[list[int]],
    others: Sequence[list[int]],
    lengths: Sequence[int],
    options: Any,
    say: Any,
) -> Measured:
    """All lengths in mixed order, `repeats` times; medians over the repeats. Costs are taken from the other prompts."""
    depth = len(prompts[0]) + options.tokens // 2
    big, curve = cheapest(case.target, depth, max(CURVE, max(lengths) + 1))
    small, own = cheapest(case.draft, depth, CURVE)
    for line in filter(None, (big.describe("target"), small.describe("draft"))):
        say(f"  {line}")
    costs = measure_paid(big, small, others, lengths, 9)
    meter = PaidMeter(big, small, others, lengths, (False,), options.tokens)
    found: dict[int, list[Measured]] = {length: [] for length in lengths}
    texts: dict[int, list[Decoded]] = {length: [] for length in lengths}
    plains: list[float] = []
    singles: list[float] = []
    for repeat in range(options.repeats + 1):  # the first one warms up
        turn = repeat % len(lengths)
        meter.text()
        for length in [*lengths[turn:], *lengths[:turn]]:
            prompt = prompts[repeat % len(prompts)]
            with watched(case.target, case.draft) as watch:
                result = speculate(big, small, prompt, Fixed(length), options.tokens)
                one = Watch(list(watch.target), list(watch.draft))
            bare = bare_rounds(big, small, [*prompt, *result.tokens][: depth + length], length)
            alone = curve[length + 1] + length * own[1]
            row = text_shares(one, result, bare, length, alone) | peers(case, prompt, length, options)
            if "peer_seconds" in row:
                row["peer"] = row["whole_rate"] * row["peer_seconds"] / options.tokens
            elif "peer_rate" in row:
                row["peer"] = row["rate"] / row["peer_rate"]
            if repeat:
                found[length].append(row)
                texts[length].append(result)
        single = plain(big, prompts[repeat % len(prompts)], options.tokens)
        steps = plain_steps(big, [*prompts[repeat % len(prompts)], *single.tokens][:depth])
        if repeat:
            plains.append(statistics.fmean(steps) * (len(single.tokens) - 1) / single.seconds)
            singles.append(len(single.tokens) / (single.prefill_seconds + single.seconds))
        say(f"  {repeat} of {options.repeats}")
    meter.until(1)
    during = meter.costs()
    rows: list[Measured] = [
        {"length": length, "repeats": len(all_of)}
        | {key: statistics.median([one[key] for one in all_of]) for key in all_of[0] if all(key in o for o in all_of)}
        for length, all_of in found.items()
    ]
    for row in rows:
        row["speedup"] = row["whole_rate"] / statistics.median(singles)
        # Text by text: acceptance differs more from text to text than medians of it and of speeds agree.
        row["predicted"] = statistics.median(
            predicted_speedup(during, text, row["length"], len(prompts[0]), options.tokens) * single / one["whole_rate"]
            for text, one, single in zip(texts[row["length"]], found[row["length"]], singles, strict=True)
        )
    rule = measure_rule(big, small, prompts, costs, case.calibration, options)
    return {"plain": statistics.median(plains), "rows": rows, "rule": rule, "curve": curve, "draft_curve": own}


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


def table(cases: dict[str, Measured]) -> str:
    """The table of docs/benchmarks.md."""
    lines = [
        "| engine | target | pair | n | τ | share of the bound | with two | alone | overhead, ms | peer | plain | "
        "speedup | predicted |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        engine, size, pair = name.split("-")
        for row in case["rows"]:
            peer = f"{row['peer']:.2f}" if "peer" in row else "–"
            shares = f"{row['share']:.3f} | {row['with_two']:.3f} | {row['alone']:.3f} | {1e3 * row['overhead']:.2f}"
            lines.append(
                f"| {engine} | {size} | {pair} | {row['length']} | {row['tokens_per_round']:.2f} | {shares} | {peer} | "
                f"{case['plain']:.3f} | {row['speedup']:.2f} | {row['predicted']:.2f} |"
            )
        rule = case["rule"]
        drafted = f"{rule['drafted']} drafted, {len(rule['ratios'])} texts of {rule['tokens']}"
        lines.append(f"| {engine} | {size} | {pair} | rule: {drafted} | | | | | | | | {rule['ratio']:.3f} | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="JSON file of the results; finished cases are kept")
    parser.add_argument("--case", action="append", help="such as gguf-145M-demo; repeatable (default: all)")
    parser.add_argument("--lengths", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rule-tokens", type=int, default=256)
    parser.add_argument("--rule-repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-speculative-simple")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lengths = [int(length) for length in options.lengths.split(",")]
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
            if name in found["cases"]:
                continue
            say(name)
            with opened(run, *name.split("-"), Path(scratch), options.threads) as case:
                found["cases"][name] = measure_case(case, prompts, others, lengths, options, say)
            found |= {"machine": machine(), "command": sys.argv}
            write_json(options.to, found)
    print(table(found["cases"]))


if __name__ == "__main__":
    main()
