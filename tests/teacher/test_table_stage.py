"""Stage `table`: what a run counts, decodes with and reports, and the commands that read its table.

The counts themselves, the mixture and the trees: tests/decoding/test_ngrams.py."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch
from test_ngrams import place_in
from tiny import Capture

from distill.data.samples import read_samples
from distill.decoding.ngrams import MIN_PROBABILITY as LEAST
from distill.decoding.ngrams import ORDER, TABLE_FILE, NGramTable
from distill.engines.torch.hugging_face import load_model, tokenizer_digest
from distill.teacher.table import LIKELIEST

PRICED = "{drafter: table, rule: expected-value, nodes: 4, length: 4}"


@pytest.fixture(scope="module")
def counted(world: Path, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run, with a table and a speedup of drafting from it."""
    runs = tmp_path_factory.mktemp("counted")
    shutil.copytree(finished, runs / "tiny")
    wanted = f"speedup.configurations=[{PRICED}]"
    assert tiny.call("train", world / "recipe.yaml", "--runs", runs, wanted, "speedup.lengths=[1]") == 0
    return runs / "tiny"


def test_a_run_counts_its_train_answers_and_nothing_else(counted: Path, world: Path) -> None:
    """Every n-gram of the table, against the answers' files and the target asked anew: none of a held-out text."""
    table = NGramTable.open(counted.joinpath(*TABLE_FILE), tokenizer_digest(str(world / "target")))
    files = sorted((counted / "answers" / "train").glob("*.arrow"))
    answers = [one for file in files for one in read_samples(file, "answers") if not one.dropped]
    assert len(answers) >= 4 and table.about["texts"] == str(len(answers))
    model = load_model(str(world / "target"), "float32", torch.device("cpu"))
    expected = Counter[tuple[int, ...]]()
    for one in answers:
        whole, first = [*one.prompt, *one.answer], len(one.prompt)
        with torch.no_grad():
            rows = model(torch.tensor([whole])).logits[0, first - 1 : -1].softmax(-1)
        for place in range(max(first - ORDER, 0), len(whole)):
            likely = {whole[place]: 1.0}
            if place >= first:
                chances, tokens = rows[place - first].topk(LIKELIEST)
                stored = chances.cumsum(0) - chances < 0.99  # as many as hold teacher.mass
                pairs = zip(tokens[stored].tolist(), chances[stored].tolist(), strict=True)
                likely = {whole[place]: LEAST} | {t: max(p, LEAST) for t, p in pairs if p > LEAST or t == whole[place]}
            for size in range(min(place - max(first - ORDER, 0), ORDER) + 1):
                for token, weight in likely.items():
                    expected[(*whole[place - size : place], token)] += weight
    for size in range(1, ORDER + 1):
        known = {ngram for ngram in expected if len(ngram) == size and place_in(table, ngram)[size - 1 :]}
        for context in known:
            best = table.following(size, place_in(table, context)[-1]).best
            assert best == pytest.approx({t: expected[(*context, t)] for t in best}, rel=0.02, abs=0.02)
    assert {*table.levels[0].tokens.tolist()} <= {ngram[0] for ngram in expected if len(ngram) == 1}
    for one in answers:  # the drawn tokens are all there, however unlikely
        whole = [*one.prompt[-ORDER:], *one.answer]
        assert all(len(place_in(table, whole[end - ORDER : end])) == ORDER for end in range(ORDER, len(whole) + 1))


def test_its_speedup_is_measured_with_the_targets_own_texts(counted: Path) -> None:
    report = json.loads((counted / "speedup.json").read_text())
    rows = [row for part in report["parts"] for row in part["measurements"] if row["drafter"] == "table"]
    assert [row["backend"] for row in rows] == ["pytorch", "gguf"]
    for row in rows:
        assert row["configuration"] == "table" and row["tokens_per_round"] >= 1
        assert row["different"] == 0 and row["identical"] + row["excused"] == 4
    assert ">table<" in (counted / "report.html").read_text()


def test_commands_draft_from_a_runs_table(counted: Path, world: Path, tmp_path: Path, capsys: Capture) -> None:
    target, prompt = str(world / "target"), "def alpha("

    run = (counted.name, "--runs", counted.parent)
    texts, alone = set(), (target, "-C", "drafter=table")
    for options in ((*run, "-C", "length=0"), (*run, "-C", "drafter=table"), alone, (*alone, "--table", counted)):
        capsys.readouterr()
        assert tiny.call("generate", prompt, "--tokens", 12, *options) == 0
        said = capsys.readouterr()
        assert ("knows those of the text so far alone" in said.err) == (options == alone)
        texts.add(said.out)
    assert len(texts) == 1
    pair = ("speedup", target, "--prompts", world / "corpus", "--count", 2, "--tokens", 8, "--lengths", 0)
    read = ("--configuration", "{drafter: table, nodes: 3}", "--table")
    report = json.loads(tiny.shown(capsys, *pair, *read, counted, "-o", "json"))
    assert report["parts"][0]["measurements"][1]["drafter"] == "table"
    tiny.build_model(tmp_path / "other", vocabulary=300)
    refusal = tiny.refused(capsys, "speedup", tmp_path / "other", *pair[2:], *read, counted)
    assert "another vocabulary" in refusal and str(world / "target") in refusal
    broken = tmp_path / "ngrams.safetensors"
    broken.write_bytes(counted.joinpath(*TABLE_FILE).read_bytes()[:-3])
    assert "cut short" in tiny.refused(capsys, *pair, *read, broken)
