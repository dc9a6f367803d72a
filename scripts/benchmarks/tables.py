"""Measure n-gram tables of the target's answers, by the number of counted answers, replayed on other answers of a run.

    python scripts/benchmarks/tables.py runs/smollm2-demo --costs 1,1.13,1.04,1.03,1.05,1.1,1.15,1.2,1.21

RUN has answers/ and teacher/ (`distill train RECIPE --until teacher`). Every fifth answer is held out and replayed as
if the target wrote it. At most `--tokens` tokens of each answer count, and a session has `--texts` answers. No model
runs, so everything except the milliseconds is the same on every machine. `--costs` are T(1), T(2), … in plain steps. A
longer step costs as much as the last step of the list.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from distill.cli.shared import numbers
from distill.data.samples import learnt_answers
from distill.decoding.configured import MIN_MATCH
from distill.decoding.costs import Costs
from distill.decoding.drafters import Drafter, FallbackDrafter, LookupDrafter
from distill.decoding.lengths import Adaptive
from distill.decoding.ngrams import ORDER, Mixture, NGramTable, count_ngrams
from distill.decoding.proposals import ROOT, Proposal
from distill.decoding.table_drafter import TableDrafter
from distill.recipe import load_recipe
from distill.recipe.configuration import LENGTH, TABLE_NODES
from distill.run import Run
from distill.tables import Cell, Row, Table, document
from distill.teacher.store import TeacherStore
from distill.teacher.table import expected_tokens
from distill.teacher.texts import packed_order

Text = tuple[list[int], list[int]]


def follow(proposal: Proposal, text: list[int]) -> int:
    """Return how many tokens of a proposal a text accepts."""
    children, node = proposal.children(), ROOT
    for count, token in enumerate(text):
        below = [child for child in children.get(node, ()) if proposal.tokens[child] == token]
        if not below:
            return count
        node = below[0]
    return len(text)


def replay(make: Callable[[], Drafter], texts: list[Text], costs: Costs, session: int) -> tuple[float, float, float]:
    """Return tokens per round, speed in plain steps, and the milliseconds in which a round was drafted."""
    rounds, paid, tokens, drafting, drafter = 0, 0.0, 0, 0.0, make()
    for number, (prompt, new) in enumerate(texts):
        text, at, drafter = [*prompt, *new], len(prompt), drafter if number % session else make()
        drafter.begin(prompt)
        while at + 1 < len(text):
            started = time.process_time()
            proposal = drafter.propose(text[: at + 1], len(text) - at - 2, ())
            drafting += time.process_time() - started
            accepted, seconds = follow(proposal, text[at + 1 :]), costs.target[len(proposal.tokens)]
            rounds, paid, tokens, at = rounds + 1, paid + seconds, tokens + accepted + 1, at + accepted + 1
            drafter.accepted(proposal, accepted, at + 1, seconds)
    return tokens / rounds, tokens / paid, drafting / rounds * 1e3


def likeliest_right(table: NGramTable | None, texts: list[Text]) -> float:
    """Return the share of tokens that were likeliest by the counts of the table and of the text before them."""
    right, mixture = 0, Mixture(table)
    for prompt, new in texts:
        mixture.begin()
        for at, token in enumerate(new):
            mixture.read([*prompt, *new[:at]])
            right += mixture.guess(mixture.tail, mixture.place, 1).tokens == [token]
    return right / sum(len(new) for _, new in texts)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--costs", default="1")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--texts", type=int, default=8)
    given = parser.parse_args()
    run = Run(given.run, load_recipe(given.run / "config.yaml"))
    steps = numbers(given.costs, "--costs", float, "1,1.1,1.2")
    costs = Costs((*steps, *[steps[-1]] * (TABLE_NODES + 1 - len(steps))), 0.0, 0.0)
    answers = learnt_answers(run)
    stored = packed_order(answers, run.recipe)
    expected = expected_tokens(TeacherStore(run), stored, torch.device("cpu"))
    likely = dict(zip(stored.column("id"), expected, strict=True))
    held: list[Text] = [(sample.prompt, sample.answer[: given.tokens]) for sample in answers[::5]]
    counted = [[*sample.prompt[-ORDER:], *sample.answer] for place, sample in enumerate(answers) if place % 5]
    looked_up = replay(lambda: LookupDrafter(LENGTH, rule=Adaptive(costs, LENGTH)), held, costs, given.texts)
    rows: list[Row] = [["lookup", *map(Cell, [None] * 2), *looked_up]]
    expected = [likely[sample.id] for place, sample in enumerate(answers) if place % 5]
    for count, by_store in ((0, False), (50, False), (100, False), (len(counted), False), (len(counted), True)):
        levels = count_ngrams(counted[:count], expected=expected[:count] if by_store else None)
        table = NGramTable(levels, {}) if count else None

        def make(table: NGramTable | None = table) -> Drafter:
            rule = Adaptive(costs, LENGTH)
            by_table = TableDrafter(table, TABLE_NODES, LENGTH, rule=rule)
            return FallbackDrafter(LookupDrafter(LENGTH, MIN_MATCH, rule), by_table)

        right = likeliest_right(table, held)
        ngrams = 0 if table is None else sum(len(level.tokens) for level in table.levels)
        name = f"table of {count} answers" + (", by the teacher's probabilities" if by_store else "")
        rows.append([name, ngrams, Cell(right, "%"), *replay(make, held, costs, given.texts)])
    heads = [
        "drafter",
        "n-grams",
        "likeliest token right",
        "tokens per round",
        "speed, plain = 1",
        "ms of CPU to draft",
    ]
    print(document([Table(heads, rows, title=f"{len(held)} answers replayed")]))


if __name__ == "__main__":
    main()
