"""Length rules on recorded acceptance traces: the speed of each on a cost curve, beside plain decoding and the ideal.

    python scripts/benchmarks/lengths.py record --target data/demo-target --draft runs/demo/draft --traces traces.json
    python scripts/benchmarks/lengths.py simulate --traces traces.json [--curve profile.json] [--split validation]
    python scripts/benchmarks/lengths.py measure runs/demo

A trace is the target's greedy text; for every position of it, the draft's greedy continuation of 16 tokens, features of
its distributions before each draw, and how many of the tokens agree with the target's text. A rule replays it round by
round at the costs of a curve. Calibrations are fitted on validation text, and the rules' defaults were chosen there;
the figures printed by default are of test text. The best γ and the clairvoyant are chosen on the very text on which
they are scored. `measure` decodes on this machine instead, and simulates the same texts on the machine's own curve.

Legend: m tokens of a step, n or γ drafted, T(m) seconds of the target, D of the draft, T(1) = 1.
"""

from __future__ import annotations

import argparse
import ast
import copy
import io
import itertools
import json
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimal_stopping import Chain, stopping_speed

from distill.files import read_json
from distill.speculative.calibration import (
    FEATURE_TERMS,
    FITTED,
    Calibration,
    Recorded,
    expected_calibration_error,
    fit_calibration,
    log_loss,
    predicted,
)
from distill.speculative.costs.curve import StepCosts
from distill.speculative.expected_value import ExpectedValue
from distill.speculative.lengths import (
    AcceptedRatio,
    BetaFilter,
    Fixed,
    LengthRule,
    ProbabilityFloor,
    StartContinue,
)
from distill.speculative.proposal import LONGEST, Features, NGramIndex

AHEAD = 16
CLASSES = ("code", "prose", "copied text")


# ── recording ──


def prose_of(source: str) -> str:
    """Docstrings and comment blocks of a module, in order of their kind, as plain lines."""
    pieces = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    lines = [
        token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    return "\n\n".join(filter(None, [*pieces, "\n".join(lines)]))


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prompts_of(folder: Path, encode: Any, count: int) -> Iterator[tuple[str, list[int]]]:
    """(class, token ids): `count` prompts of each class, from as many modules as there are, each at its middle."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    code = [encode(source) for source in sources]
    prose = [encode(prose_of(source)) for source in sources]
    for kind, texts, needed in (("code", code, 64), ("prose", prose, 64), ("copied text", code, 128)):
        pieces = [
            (piece, text[start : start + needed])
            for text in texts
            for piece, start in enumerate(range(len(text) // 8, len(text) - needed, max(needed, len(text) // 6)))
        ]
        pieces.sort(key=lambda pair: pair[0])  # first pieces of all modules, then second ones, and so on
        for _, ids in pieces[:count]:
            yield kind, ids if kind != "copied text" else [*ids, *ids, *ids[:16]]


def looks(logits: Any) -> list[tuple[int, list[float]]]:
    """(best token, [top, second, entropy]) of each row of logits."""
    distributions = logits.full().double().softmax(-1)
    best = distributions.topk(2)
    entropies = -(distributions * distributions.clamp_min(1e-300).log()).sum(-1)
    return [
        (int(ids[0]), [round(float(value), 6) for value in (*values, entropy)])
        for ids, values, entropy in zip(best.indices, best.values, entropies, strict=True)
    ]


def record_trace(target: Any, draft: Any, prompt: list[int], limit: int, ends: Sequence[int]) -> list[dict[str, Any]]:
    """One row for every position of the target's greedy text after `prompt` from which 16 more tokens are known.

    If the draft's first token is the text's, the rest of its continuation is that of the next position, so only the
    others are decoded, from the last to the first, each after a rollback.
    """
    from distill.speculative.decode import plain

    text = plain(target, prompt, limit + AHEAD + 1, ends).tokens
    if len(text) <= AHEAD:
        return []
    draft.rollback([0])
    draft.extend(prompt, want=[len(prompt) - 1])
    distributions = looks(
        draft.extend(text[:-1])
    )  # after text[0], text[1], ...: what the draft thinks of the token behind
    rows: list[dict[str, Any]] = []
    known: list[tuple[int, list[float]]] = []  # the continuation of the position behind
    for position in range(len(text) - 2, -1, -1):
        path = [distributions[position]]
        if known and path[0][0] == text[position + 1]:
            path += known[: AHEAD - 1]
        else:
            draft.rollback([len(prompt) + position + 1])
            while len(path) < AHEAD and draft.lengths[0] < draft.capacity:
                path += looks(draft.extend([path[-1][0]], want=[0]))
        known = path
        if position + AHEAD < len(text) and len(path) == AHEAD:
            run = next((j for j in range(AHEAD) if path[j][0] != text[position + 1 + j]), AHEAD)
            index, context = NGramIndex(), [*prompt, *text[: position + 1]]
            index.read(context)
            context += [token for token, _ in path]
            ends_at = len(context) - AHEAD
            matches = [
                index.match(context[max(0, ends_at + j - LONGEST) : ends_at + j], path[j][0]) for j in range(AHEAD)
            ]
            features = [[*seen, match] for (_, seen), match in zip(path, matches, strict=True)]
            rows.append({"position": position, "run": run, "features": features})
    return rows[::-1]


def record_traces(
    target: Any, draft: Any, prompts: Sequence[tuple[str, list[int]]], limit: int, ends: Sequence[int]
) -> list[dict[str, Any]]:
    """Rows of all prompts: {class, prompt, position, run, features [16][top, second, entropy, match]}."""
    return [
        {"class": kind, "prompt": number, **row}
        for number, (kind, prompt) in enumerate(prompts)
        for row in record_trace(target, draft, prompt, limit, ends)
    ]


def record(arguments: argparse.Namespace) -> None:
    import torch

    from distill.models.hugging_face import encode, end_ids, load_model, load_tokenizer
    from distill.models.torch_model import TorchModel

    tokenizer = load_tokenizer(str(arguments.target))
    models = [load_model(str(path), "float32", torch.device("cpu")) for path in (arguments.target, arguments.draft)]
    ends = end_ids(models[0].config, tokenizer)
    target, draft = (TorchModel(model) for model in models)
    found = {}
    for split in ("validation", "test"):
        prompts = list(prompts_of(arguments.data / split, lambda text: encode(tokenizer, text), arguments.prompts))
        found[split] = record_traces(target, draft, prompts, arguments.tokens, ends)
    arguments.traces.write_text(json.dumps(found), encoding="utf-8")
    for split, rows in found.items():
        for kind in CLASSES:
            runs = [row["run"] for row in rows if row["class"] == kind]
            print(f"{split} {kind}: {len(runs)} positions, mean accepted run {sum(runs) / max(len(runs), 1):.2f} of 16")


# ── simulation ──

PUBLISHED = {  # per-token cost of m = 1..16 relative to m = 1
    "GLM-4.6, RPC": (
        1,
        1.027,
        0.712,
        0.544,
        0.459,
        0.389,
        0.347,
        0.315,
        0.281,
        0.256,
        0.233,
        0.214,
        0.199,
        0.186,
        0.178,
        0.166,
    ),
    "DeepSeek-R1, NUMA": (
        1,
        0.606,
        0.472,
        0.415,
        0.378,
        0.362,
        0.339,
        0.331,
        0.321,
        0.311,
        0.298,
        0.296,
        0.287,
        0.281,
        0.277,
        0.279,
    ),
    "Mistral-Large, GPUs": (
        1,
        0.531,
        0.397,
        0.384,
        0.334,
        0.36,
        0.364,
        0.328,
        0.178,
        0.16,
        0.146,
        0.134,
        0.124,
        0.115,
        0.108,
        0.101,
    ),
}
DRAFT_COSTS = (0.02, 0.05, 0.1)

Trace = list[tuple[int, list[Features]]]  # of one prompt: at every position the accepted run and 16 features


def replay(rule: LengthRule, trace: Trace, costs: StepCosts) -> tuple[int, float, int]:
    """(tokens, seconds, drafted) of one prompt's text under a rule; every draft step that was started is paid."""
    position = tokens = drafted = 0
    clock, whole = 0.0, False
    while position < len(trace):
        run, features = trace[position]
        count = steps = 0
        for step in range(min(rule.limit(), AHEAD, len(costs.target) - 1)):
            if not rule.step_on(step):
                break
            steps += 1
            if not rule.go_on(step, features[step]):
                break
            count += 1
        accepted = min(run, count)
        seconds = costs.target[count] + steps * costs.draft
        if steps:  # after a round accepted whole the draft takes two tokens first
            seconds += costs.overhead + (costs.draft_two - costs.draft if whole else 0.0)
        whole = accepted == count > 0
        rule.observe(count, accepted, features[:count], seconds)
        tokens, clock, drafted = tokens + accepted + 1, clock + seconds, drafted + count
        position += accepted + 1
    return tokens, clock, drafted


def speed(rule: LengthRule, traces: Sequence[Trace], costs: StepCosts) -> float:
    """Speed relative to plain decoding over all prompts in turn; the rule keeps its state between them."""
    found = [replay(rule, trace, costs) for trace in traces]
    return costs.target[0] * sum(tokens for tokens, _, _ in found) / sum(seconds for _, seconds, _ in found)


@dataclass
class Clairvoyant(LengthRule):
    """Sees each round's run beforehand and takes the n of greatest min(n, run) + 1 − λ·seconds."""

    costs: StepCosts
    rate: float
    runs: Iterator[int]

    def limit(self) -> int:
        """The best n for the coming run."""
        run = next(self.runs)
        lengths = range(len(self.costs.target))
        return max(lengths, key=lambda n: min(n, run) + 1 - self.rate * self.costs.round_seconds(n))


def clairvoyant(traces: Sequence[Trace], costs: StepCosts) -> float:
    """Speed of the clairvoyant rule at its own long-run rate λ, found by iteration."""
    best = 1.0
    for _ in range(8):
        tokens, seconds = 0, 0.0
        for trace in traces:
            position = 0
            while position < len(trace):
                run = trace[position][0]
                n = Clairvoyant(costs, best / costs.target[0], iter([run])).limit()
                accepted = min(run, n)
                tokens, seconds = tokens + accepted + 1, seconds + costs.round_seconds(n)
                position += accepted + 1
        found = costs.target[0] * tokens / seconds
        if abs(found - best) < 1e-9:
            break
        best = max(found, best)
    return best


# ── tables ──


def read_traces(path: Path, split: str) -> dict[str, list[Trace]]:
    """Traces of each class, cut to equal numbers of positions, and of the mixed set, classes in turn."""
    found: dict[str, dict[int, Trace]] = {kind: {} for kind in CLASSES}
    for row in json.loads(path.read_text(encoding="utf-8"))[split]:
        seen = [Features(*values) for values in row["features"]]
        found[row["class"]].setdefault(row["prompt"], []).append((row["run"], seen))
    room = min(sum(map(len, traces.values())) for traces in found.values())
    classes: dict[str, list[Trace]] = {}
    for kind, traces in found.items():
        left, classes[kind] = room, []
        for trace in traces.values():
            if left > 0:
                classes[kind].append(trace[:left])
                left -= len(trace)
    turns = itertools.zip_longest(*classes.values(), fillvalue=[])
    return {**classes, "mixed": [trace for turn in turns for trace in turn if trace]}


def rounds_of(traces: Sequence[Trace]) -> list[Recorded]:
    """A round of 16 tokens from every position: what calibrations are fitted on."""
    return [Recorded(features, run) for trace in traces for run, features in trace]


def rules_for(costs: StepCosts, calibration: Calibration) -> dict[str, Callable[[], LengthRule]]:
    """Makers of every adaptive rule in its initial state, with the defaults of the library."""
    most = min(AHEAD, len(costs.target)) - 1
    return {
        "p_min .5": lambda: ProbabilityFloor(most, 0.5),
        "p_min .75": lambda: ProbabilityFloor(most, 0.75),
        "start .5, continue .7": lambda: StartContinue(most, 0.5, 0.7),
        "accepted ratio": lambda: AcceptedRatio(longest=most),
        "Beta filter": lambda: BetaFilter(most),
        "expected value, myopic": lambda: ExpectedValue(costs, copy.deepcopy(calibration), look_ahead=0),
        "expected value": lambda: ExpectedValue(costs, copy.deepcopy(calibration)),
    }


def best_fixed(traces: Sequence[Trace], costs: StepCosts) -> tuple[int, float]:
    """The γ of greatest speed on these very traces, 0 included, and its speed."""
    found = [speed(Fixed(n), traces, costs) for n in range(min(AHEAD, len(costs.target)))]
    best = max(range(len(found)), key=lambda n: found[n])
    return best, found[best]


def known_beforehand(traces: Sequence[Trace], costs: StepCosts, calibration: Calibration) -> float:
    """Speed of a rule that sees the features of all 16 positions before it drafts, and pays for n steps only.

    No rule that reads calibrated features can do better; only chance separates it from the clairvoyant rule.
    """
    best = 1.0
    for _ in range(8):
        tokens, seconds, rate = 0, 0.0, best / costs.target[0]
        for trace in traces:
            position = 0
            while position < len(trace):
                run, features = trace[position]
                survival, expected, n, value = 1.0, 1.0, 0, 1 - rate * costs.round_seconds(0)
                for length in range(1, min(AHEAD, len(costs.target))):
                    survival *= calibration.accept(length - 1, features[length - 1])
                    expected += survival
                    if expected - rate * costs.round_seconds(length) > value:
                        n, value = length, expected - rate * costs.round_seconds(length)
                accepted = min(run, n)
                tokens, seconds = tokens + accepted + 1, seconds + costs.round_seconds(n)
                position += accepted + 1
        best = max(best, costs.target[0] * tokens / seconds)
    return best


def curves_of(path: Path | None) -> dict[str, StepCosts]:
    """The published curves with each draft cost, or those of a run's pair, from its profile.json."""
    if path is None:
        return {
            f"{name}, D = {draft:g}·T(1)": StepCosts(tuple(m * c for m, c in enumerate(row, 1)), draft, draft)
            for name, row in PUBLISHED.items()
            for draft in DRAFT_COSTS
        }
    found = read_json(path)["curves"]
    sides = {(curve["backend"], curve["model"]): tuple(curve["seconds"]) for curve in found}
    return {
        f"{path}, {backend}": StepCosts(sides[backend, "target"][:AHEAD], *sides[backend, "draft"][:2])
        for backend in dict.fromkeys(curve["backend"] for curve in found)
    }


def simulate(arguments: argparse.Namespace) -> None:
    fitted = rounds_of(read_traces(arguments.traces, "validation")["mixed"])
    sets = read_traces(arguments.traces, arguments.split)
    calibrations: dict[str, Calibration] = {
        "none": Calibration(),
        "logistic on " + ", ".join(FEATURE_TERMS): fit_calibration(fitted, FEATURE_TERMS),
        "the same and the n-gram match": fit_calibration(fitted, FITTED["context"]),
    }
    print(
        f"Text: {arguments.split}, {sum(map(len, sets['code']))} positions of each class. Calibrated on validation.\n"
    )
    print("| calibration | log loss | expected calibration error |\n|---|--:|--:|")
    for name, calibration in calibrations.items():
        probabilities, accepted = predicted(calibration, rounds_of(sets["mixed"]))
        error = expected_calibration_error(probabilities, accepted)
        print(f"| {name} | {log_loss(probabilities, accepted):.3f} | {error:.3f} |")
    calibration = list(calibrations.values())[-1]
    chain = Chain.of(fitted, calibration)
    verdicts = []
    for title, costs in curves_of(arguments.curve).items():
        print(f"\n**{title}** (speed, plain decoding = 1)\n\n| rule | {' | '.join(sets)} |\n|---|{'--:|' * len(sets)}")
        rows: dict[str, list[float]] = {}
        fixed = {kind: best_fixed(traces, costs) for kind, traces in sets.items()}
        gamma = fixed["mixed"][0]
        rows[f"γ = {gamma}, best of the mixed set"] = [speed(Fixed(gamma), t, costs) for t in sets.values()]
        rows["best γ of each column"] = [found for _, found in fixed.values()]
        for name, make in rules_for(costs, calibration).items():
            rows[name] = [speed(make(), traces, costs) for traces in sets.values()]
        rows["optimal stopping"] = [
            stopping_speed(chain, calibration, costs, lambda rule, t=t, costs=costs: speed(rule, t, costs))
            for t in sets.values()
        ]
        rows["all features known beforehand"] = [known_beforehand(t, costs, calibration) for t in sets.values()]
        rows["clairvoyant"] = [clairvoyant(traces, costs) for traces in sets.values()]
        for name, values in rows.items():
            print(f"| {name} | {' | '.join(f'{value:.2f}' for value in values)} |", flush=True)
        mine, best, ideal = rows["expected value"], fixed["mixed"][1], rows["clairvoyant"][-1]
        share = [
            (rows[name][-1] - best) / (ideal - best) if ideal > best else float("nan")  # nothing could be gained
            for name in ("expected value", "optimal stopping", "all features known beforehand")
        ]
        verdicts.append((title, *share, mine[-1] / best, min(mine), rows["expected value, myopic"][-1]))
    heads = (
        "share of the clairvoyant's gain over the best γ",
        "of it, optimal stopping",
        "of it, features known",
        "of the best γ's speed",
        "worst class against plain",
        "myopic",
    )
    print(f"\n| curve, mixed set | {' | '.join(heads)} |\n|---|{'--:|' * len(heads)}")
    for title, mine_share, stopping, bound, *speeds in verdicts:
        shares = f"{mine_share:.0%} | {stopping:.0%} | {bound:.0%}"
        print(f"| {title} | {shares} | {' | '.join(f'{value:.3f}' for value in speeds)} |")


def measure(arguments: argparse.Namespace) -> None:
    import measured_lengths

    measured_lengths.main(arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("record")
    command.set_defaults(run=record)
    command.add_argument("--target", type=Path, default=Path("data/demo-target"))
    command.add_argument("--draft", type=Path, default=Path("runs/demo/draft"))
    command.add_argument("--data", type=Path, default=Path("data"), help="folder with validation/ and test/")
    command.add_argument("--prompts", type=int, default=24, help="of each class and split")
    command.add_argument("--tokens", type=int, default=120, help="positions recorded after each prompt")
    command.add_argument("--traces", type=Path, default=Path("traces.json"))
    command = commands.add_parser("simulate")
    command.set_defaults(run=simulate)
    command.add_argument("--traces", type=Path, default=Path("traces.json"))
    command.add_argument("--curve", type=Path, help="profile.json of a run instead of the published curves")
    command.add_argument("--split", choices=("validation", "test"), default="test")
    command = commands.add_parser("measure")
    command.set_defaults(run=measure)
    command.add_argument("run_folder", type=Path, metavar="RUN", nargs="?", default=Path("runs/demo"))
    command.add_argument("--data", type=Path, default=Path("data"), help="folder with test/")
    command.add_argument("--prompts", type=int, default=4, help="of each class")
    command.add_argument("--tokens", type=int, default=48, help="decoded after each prompt")
    command.add_argument("--repeats", type=int, default=7, help="of every timed step")
    command.add_argument("--backends", nargs="+", choices=("pytorch", "gguf"), default=["pytorch", "gguf"])
    command.add_argument("--pairs", choices=("both", "shipped", "grown"), default="both")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
