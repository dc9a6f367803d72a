"""Measure a tuned target's sibling as it is and adapted on more and more of the target's answers, by rule.

    F=build/qwen-coder/qwen2.5-coder
    python scripts/benchmarks/tuned_target.py $F-1.5b-instruct-q4_k_m.gguf $F-0.5b-instruct-q4_k_m.gguf --to tuned/
    python scripts/benchmarks/tuned_target.py TARGET SIBLING --to tuned/ --rules envelope --tokens 1000,3000 --only all
    python scripts/benchmarks/tuned_target.py TARGET SIBLING --to tuned/ --own sql=FOLDER    # a rule of your own
    python scripts/benchmarks/tuned_target.py TARGET SIBLING --to tuned/ --tokens 3000 --variant fast=train.rate=6e-5
    python scripts/benchmarks/tuned_target.py TARGET SIBLING --to tuned/ --table             # what is measured so far

Each part is a command of distill or a script. A part is made once, and it continues after a kill. Part `tune` runs
scripts/tuned_examples.py and tune_target.py. Part `distance` measures the stock target as the tuned target's draft (KL
and agreement). The other parts are a run of recipes/adapt.yaml for each draft and each number of answer tokens. Runs on
equal tokens share the target's answers and distributions. --skip leaves a part out.

The drafts are: all weights, LoRA of the draft, and the half-width cut. --variant adds one: NAME=KEY=VALUE trains all
weights with another value of a key of the recipe. The sibling as it is (`stock`) is what the run of all weights begins
with. With --speed it also has a run of its own. All are measured on the same held-out prompts, of
the tuned kind and of the general kind (data/questions.jsonl). --speed also times each draft, a lookup, and both
together, which needs a quiet machine. --share is the share of general questions among the prompts that are learnt. A
share of 0 shows what the draft keeps without them. A rule of your own is a folder with examples.jsonl, prompts.jsonl
and held.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from distill.files import read_json, read_result, write_atomically
from distill.measuring.evaluation_results import EvaluationReport
from distill.tables import Cell, Interval, Row, Table, document

ROOT = Path(__file__).resolve().parents[2]
RULES = ("envelope", "house", "german")
DRAFTS = {
    "all": [],
    "lora": ["train.adapter={rank: 16}"],
    "half": ["cut.mlp_width=HALF", "train.steps=400"],
}
PER_ANSWER = 90  # tokens of an answer, which turn a number of tokens into a number of prompts
HELD, GENERAL = 24, 24  # prompts that are measured
WAYS = [{"drafter": "lookup", "rule": "expected-value"}, {"drafter": "lookup+draft", "rule": "expected-value"}]


def called(*words: object) -> str:
    """Return a program's output. If it fails, end the script with its status."""
    done = subprocess.run([*map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} ended with status {done.returncode}; the same command goes on")
    return done.stdout


def lines_of(path: Path, count: int) -> list[str]:
    """Return the first lines of a file."""
    return path.read_text(encoding="utf-8").splitlines()[:count]


def general_prompts(path: Path) -> None:
    """Write GENERAL questions of data/questions.jsonl, on which no draft is trained, at equal distances."""
    lines = (ROOT / "data" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    first = [record["prompt"] for record in records if "prompt" in record]  # The other records are dialogues.
    chosen = first[:: max(1, len(first) // GENERAL)][:GENERAL]
    content = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in chosen)
    path.write_text(content, encoding="utf-8")


class Bench:
    """A rule's folder, and what is made in it."""

    def __init__(self, asked: argparse.Namespace, rule: str, given: Path | None) -> None:
        self.asked, self.rule = asked, rule
        self.folder = asked.to.resolve() / rule
        self.texts = self.folder if given is None else given.resolve()
        self.adapter = self.folder / "adapter"
        self.given = given  # The texts of a rule with --own.

    def tune(self) -> None:
        """Write the texts and train the adapter."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.given is None:
            most = 1 + max(self.asked.tokens) // PER_ANSWER
            sizes = ("--prompts", most, "--held", HELD)
            called(sys.executable, ROOT / "scripts" / "tuned_examples.py", self.rule, self.folder, *sizes)
        general_prompts(self.folder / "general.jsonl")
        tuning = (self.asked.target, self.texts / "examples.jsonl", self.adapter, "--threads", self.asked.threads)
        called(sys.executable, ROOT / "scripts" / "tune_target.py", *tuning)

    def distance(self) -> None:
        """Measure the stock target as if it drafted for the tuned one, on its answers of the tuned kind."""
        place = self.folder / "distance.json"
        if not place.exists():
            pair = (self.asked.target, self.asked.target, "--adapter", self.adapter)
            options = ("--prompts", self.texts / "held.jsonl", "--count", HELD, "--kl", "-o", "json")
            settings = ("--threads", self.asked.threads, "--temperature", self.asked.temperature)
            printed = called(sys.executable, "-m", "distill", "eval", *pair, *options, *settings)
            write_atomically(place, lambda temporary: temporary.write_text(printed, encoding="utf-8"))

    def run(self, draft: str, tokens: int) -> Path:
        """Return the folder of a run. A name with `=` lets the run take over finished stages of the other runs."""
        share = "" if self.asked.share == SHARE else f"-share{self.asked.share:g}"
        return self.folder / "runs" / f"draft={draft}-{tokens}{share}"

    def adapt(self, draft: str, tokens: int) -> None:
        """Train a draft on about so many tokens of answers (0 for `stock`)."""
        count = max(1, round((tokens or min(self.asked.tokens)) / PER_ANSWER))
        questions = round(count * self.asked.share)
        prompts = self.folder / f"prompts-{count - questions}.jsonl"
        prompts.write_text(
            "\n".join(lines_of(self.texts / "prompts.jsonl", count - questions)) + "\n", encoding="utf-8"
        )
        kept = "keep: [train, validation]"
        sources = [f"{{kind: jsonl, path: {prompts}, given: false, label: tuned, {kept}}}"]
        if questions:
            sources.append(f"{{kind: target, questions: {questions}, label: general, {kept}}}")
        for label in ("tuned", "general"):
            place = self.texts / "held.jsonl" if label == "tuned" else self.folder / "general.jsonl"
            sources.append(f"{{kind: jsonl, path: {place}, given: false, label: {label}, split: test}}")
        run = self.run(draft, tokens)
        settings = [
            *(
                f"name={run.name}",
                f"threads={self.asked.threads}",
                f"sampler.temperature={self.asked.temperature:g}",
                "corpus.test=0",
            ),
            *(f"target.model={self.asked.target}", f"target.adapter={self.adapter}", f"cut.donor={self.asked.sibling}"),
            *(f"corpus.sources=[{', '.join(sources)}]", f"eval.prompts={HELD + GENERAL}", "eval.new_tokens=64"),
            *("export.outtypes=[]", "speedup.backends=[pytorch]", "speedup.lengths=[4]", "speedup.new_tokens=256"),
            f"speedup.configurations={json.dumps(WAYS)}",
            *(word.replace("HALF", str(self.asked.half)) for word in self.asked.drafts.get(draft, ["train.steps=0"])),
        ]
        until = () if self.asked.speed else ("--until", "eval")
        recipe = ROOT / "recipes" / "adapt.yaml"
        called(sys.executable, "-m", "distill", "train", recipe, *settings, "--runs", run.parent, *until)

    def rows(self) -> list[Row]:
        """Return the table's rows so far."""
        rows: list[Row] = []
        begun = [run for size in self.asked.tokens if ((run := self.run("all", size)) / "eval.json").exists()]
        for run in begun[:1]:
            accepted = self.accepted(run, "before")
            rows.append(["stock", 0, *(Cell(accepted.get(kind), "%") for kind in ("tuned", "general")), None, None])
        for draft, tokens in ((name, size) for name in self.asked.drafts for size in self.asked.tokens):
            run = self.run(draft, tokens)
            if not (run / "eval.json").exists():
                continue
            accepted = self.accepted(run, "after")
            gain = read_result(run / "eval.json", EvaluationReport).differences.get("after")
            answered = read_json(run / "answers" / "manifest.json", {"answer_tokens": int})["answer_tokens"]
            rows.append(
                [
                    *(draft, answered, Cell(accepted.get("tuned"), "%"), Cell(accepted.get("general"), "%")),
                    *(Cell(gain, "+.4f"), Cell(self.minutes(run), ".1f")),
                ]
            )
        return rows

    @staticmethod
    def accepted(run: Path, which: str) -> dict[str, Interval]:
        """Return a run's acceptance by kind of prompt, `before` or `after` its training."""
        report = read_result(run / "eval.json", EvaluationReport)
        return {group.label: group.acceptance[which] for group in report.groups if group.of == "class"}

    @staticmethod
    def minutes(run: Path) -> float:
        """Return the minutes of the run's stages up to its training."""
        stages = (run / "stages" / f"{name}.json" for name in ("questions", "answers", "teacher", "train"))
        return sum(read_json(path)["seconds"] for path in stages if path.exists()) / 60

    def table(self, command: str) -> list[Any]:
        """Return the rule's distance in a sentence, and its table."""
        place, sentence = self.folder / "distance.json", f"{self.rule}: "
        if place.exists():
            answers = read_json(place)["domains"]["answers"]["draft"]
            kl, agreement = (answers[name]["mean"] for name in ("forward_kl", "acceptance_greedy"))
            sentence += (
                f"the stock target's KL is {kl:.3f} nats, and it agrees with {agreement:.1%} of the tuned tokens."
            )
        heads = ["draft", "answer tokens", "tuned kind", "general kind", "gain, by prompt", "minutes"]
        return [
            sentence,
            Table(
                heads,
                self.rows(),
                command,
                f"acceptance probability, temperature {self.asked.temperature:g}: {self.rule}",
            ),
        ]


SHARE = 0.2


def main() -> None:
    """Do the requested parts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("sibling", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--own", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--tokens", default="1000,3000,10000,30000,100000")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=KEY=VALUE")
    parser.add_argument("--only", help="drafts that are adapted, such as all,lora (default: every one)")
    parser.add_argument("--skip", default="", help="parts to skip: tune, distance, stock, adapt")
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--temperature", type=float, default=0.0, help="of answers and measurements (0: greedy)")
    parser.add_argument("--half", type=int, default=2432, help="MLP width of the cut")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--table", action="store_true", help="only print the tables so far")
    asked = parser.parse_args()
    asked.target, asked.sibling = asked.target.resolve(), asked.sibling.resolve()
    asked.tokens = sorted(int(size) for size in asked.tokens.split(","))
    skipped = {*filter(None, asked.skip.split(","))} | (
        {"tune", "distance", "stock", "adapt"} if asked.table else set()
    )
    folders = dict(pair.split("=", 1) for pair in asked.own)
    variants = (word.partition("=") for word in asked.variant)
    asked.drafts = DRAFTS | {name: [setting] for name, _, setting in variants}
    only = [*asked.drafts] if asked.only is None else asked.only.split(",")
    rules = [*filter(None, asked.rules.split(",")), *folders]
    blocks: list[Any] = []
    for rule in dict.fromkeys(rules):
        bench = Bench(asked, rule, Path(folders[rule]) if rule in folders else None)
        if "tune" not in skipped:
            bench.tune()
        if "distance" not in skipped:
            bench.distance()
        if asked.speed and "stock" not in skipped:
            bench.adapt("stock", 0)
        for tokens in () if "adapt" in skipped else asked.tokens:
            for draft in only:
                bench.adapt(draft, tokens)
        blocks += bench.table(" ".join(["python", "scripts/benchmarks/tuned_target.py", *sys.argv[1:]]))
    print(document(blocks))


if __name__ == "__main__":
    main()
