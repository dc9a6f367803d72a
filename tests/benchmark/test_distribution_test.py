"""The distribution test for users, and the commands that decode and time: `speedup --verify-distribution`, `generate`,
`profile`."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch
from table_model import TableModel

from distill.benchmark import distribution_test as tested
from distill.benchmark.identity import Identity
from distill.models.torch_logits import TorchLogits
from distill.sampler import Sampler
from distill.speculative.draft import ModelDrafter
from distill.speculative.lengths import Fixed


def test_homogeneity_by_hand() -> None:
    """2 × 2: χ² = N(ad − bc)² / (row and column sums); p of one degree of freedom is erfc(√(χ²/2))."""
    statistic, freedom, p = tested.homogeneity(Counter({0: 30, 1: 70}), Counter({0: 45, 1: 55}))
    expected = 200 * (30 * 55 - 70 * 45) ** 2 / (75 * 125 * 100 * 100)
    assert (statistic, freedom) == (pytest.approx(expected), 1)
    assert p == pytest.approx(math.erfc(math.sqrt(expected / 2)))
    assert tested.homogeneity(Counter({3: 50}), Counter({3: 60}))[1:] == (0, 1.0)
    # Twelve tokens seen once or twice are one cell.
    rare = Counter({token: 1 for token in range(12)})
    assert tested.homogeneity(rare + Counter({50: 90}), rare + Counter({50: 90}))[1] == 1


def test_p_values_of_one_distribution_are_spread_and_of_two_are_small() -> None:
    draws = random.Random(0)
    weights, others = [8, 4, 2, 1, 1], [6, 6, 2, 1, 1]
    same = []
    for _ in range(200):
        pair = [Counter(draws.choices(range(5), weights, k=300)) for _ in range(2)]
        same.append(tested.homogeneity(*pair)[2])
    assert 0.3 < sum(p < 0.5 for p in same) / 200 < 0.7 and min(same) > 1e-4
    two = [Counter(draws.choices(range(5), w, k=3000)) for w in (weights, others)]
    assert tested.homogeneity(*two)[2] < 1e-6


def test_a_lossless_pair_and_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, sampler = TableModel(5, 1), TableModel(5, 2), Sampler(1.0)
    prompts = [[0, 1], [3, 4, 2]]
    table = tested.verify_distribution(target, draft, prompts, sampler, 150, 0)
    assert table.lossless and len(table.tests) == 2 * len(tested.CONFIGURATIONS) and table.greedy.different == 0
    assert "Lossless" in tested.distribution_markdown(table) and table.skipped == []
    assert all(row.drafted_per_round >= (6 if "tree" in row.configuration else 2) for row in table.tests)

    class Sharper(ModelDrafter):
        """Draws from another distribution than it says."""

        def propose(self, context, limit, ends):  # type: ignore[no-untyped-def]
            proposal = super().propose(context, limit, ends)
            if proposal.distributions is not None and len(proposal.tokens):
                proposal.distributions.fill_(1 / 5)
            return proposal

    monkeypatch.setattr(tested, "CONFIGURATIONS", {"token": tested.CONFIGURATIONS["token"]})
    monkeypatch.setattr(tested, "make_drafter", lambda one, d, s, r: Sharper(d, Fixed(3), s, r))
    table = tested.verify_distribution(target, draft, prompts, sampler, 700, 0)
    assert not table.lossless and min(row.p for row in table.tests) < 1e-6
    assert "NOT lossless" in tested.distribution_markdown(table)


class NoTrees(TableModel):
    """As a model with a sliding window is."""

    max_leaves = 0


def test_models_without_trees_are_tested_by_chains() -> None:
    table = tested.verify_distribution(NoTrees(5, 1), TableModel(5, 2), [[0, 1]], Sampler(1.0), 50, 0)
    assert table.skipped == ["tree, distinct"] and [row.configuration for row in table.tests] == [
        name for name in tested.CONFIGURATIONS if "tree" not in name
    ]
    assert "Not tested, because a model takes no trees: tree, distinct" in tested.distribution_markdown(table)


class Rounded(TableModel):
    """Two best tokens within rounding, ordered by how many tokens are taken at once: what a shorter type may do."""

    def extend(self, tokens, *args, **named):  # type: ignore[no-untyped-def]
        logits = super().extend(tokens, *args, **named).full()
        best = logits.topk(2, -1).indices
        top = logits.gather(-1, best[:, :1])
        shift = 1e-2 if len(tokens) > 1 else -1e-2
        return TorchLogits(logits.scatter(-1, best[:, 1:], top + shift))


class Remembering(TableModel):
    """Two best tokens whose order hangs on how tokens were taken long before, which a cache keeps."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.together: list[int] = []  # for each token of the context: how many it was taken with

    def extend(self, tokens, *args, **named):  # type: ignore[no-untyped-def]
        start = self.lengths[0]
        self.together = self.together[:start] + [len(tokens)] * len(tokens)
        found = super().extend(tokens, *args, **named).full()
        asked = range(len(tokens)) if named.get("want") is None else named["want"]
        long_ago = [max(self.together[4 : max(start + at - 8, 4)], default=1) > 1 for at in asked]
        shift = torch.tensor([[1e-2 if together else -1e-2] for together in long_ago], dtype=found.dtype).reshape(-1, 1)
        best = found.topk(2, -1).indices
        return TorchLogits(found.scatter(-1, best[:, 1:], found.gather(-1, best[:, :1]) + shift))


@pytest.mark.parametrize("kind", [Rounded, Remembering])
def test_a_rounding_tie_of_a_shorter_type_is_excused(kind: type[TableModel]) -> None:
    pair, prompts = (kind(5, 1), TableModel(5, 2)), [[0, 1], [3, 4, 2]]
    assert tested.verify_distribution(*pair, prompts, Sampler(0), 0, 0).greedy.different == 2  # fp32 is not as coarse
    found = tested.verify_distribution(*pair, prompts, Sampler(0), 0, 0, rounded=True)
    assert found.greedy == Identity(0, 2, 0) and found.lossless


def test_greedy_sampler_compares_texts_only() -> None:
    table = tested.verify_distribution(TableModel(5, 1), TableModel(5, 2), [[0, 1]], Sampler(0), 100, 0)
    assert table.tests == [] and table.lossless and table.greedy.identical == 1


@pytest.mark.slow
def test_the_command_finds_a_run_lossless(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.call("speedup", "tiny", "--runs", copied.parent, "--verify-distribution", "--samples", 100) == 0
    assert "Lossless" in capsys.readouterr().out


def test_the_commands(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ("--runs", copied.parent)
    texts = []
    for options in (
        (),
        *(("--drafter", name) for name in ("tree", "lookup", "lookup+draft", "lookup+tree")),
        ("--length", 0),
    ):
        assert tiny.call("generate", "def alpha(", "--run", "tiny", *runs, "--tokens", 12, *options) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1  # greedy, whoever drafts
    sampled = ("--temperature", 0.9, "--top-k", 50)
    for options in ((), ("--verifier", "block"), ("--verifier", "match"), ("--drafter", "tree"), ("--length", 0)):
        assert tiny.call("generate", "def alpha(", "--run", "tiny", *runs, "--tokens", 8, *sampled, *options) == 0
        assert capsys.readouterr().out.startswith("def alpha(")
    for options, words in (
        (("--verifier", "greedy", *sampled), "would change the target's distribution"),
        (("--verifier", "nonsense"), "there is no verifier 'nonsense'"),
        (("--drafter", "nonsense"), "there is no drafter"),
        (("--drafter", "tree", "--repetition-penalty", 1.2), "repetition penalty"),
    ):
        assert tiny.call("generate", "def alpha(", "--run", "tiny", *runs, *options) == 2
        assert words in capsys.readouterr().err
    text = texts[0]
    stop = text[len("def alpha(") :].strip("\n")[3:6]
    assert tiny.call("generate", "def alpha(", "--run", "tiny", *runs, "--tokens", 12, "--stop", stop) == 0
    said = capsys.readouterr().out
    assert stop not in said[len("def alpha(") :] and text.startswith(said.rstrip("\n"))


def test_profile(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--depths", "8,16", "--max-tokens", 3, "--repeats", 5, "--threads", 1)
    assert tiny.call("profile", copied / "draft", *options, "--out", tmp_path / "c.json") == 0
    said = capsys.readouterr().out
    assert said.count("\n| 8 |") == 3 == said.count("\n| 16 |")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["depths"] == [8, 16] and len(saved["seconds"][0]) == 3
    assert tiny.call("profile", copied / "draft", *options, "--static", "--dtype", "bfloat16") == 0
    assert "draft, static cache, bfloat16, pytorch" in capsys.readouterr().out
    for arguments, words in (
        ((copied / "draft", "--compile"), "set static, too"),
        ((copied / "draft", "--dtype", "int8"), "there is no dtype 'int8'"),
        ((copied / "nothing.gguf", "--static"), "runs in llama.cpp, not in PyTorch"),
        ((copied / "draft", "--depths", "x"), "expected numbers separated by commas"),
        ((copied / "draft", "--depths", "9999"), "no room"),
        ((copied / "nothing.gguf",), "there is no file"),
    ):
        assert tiny.call("profile", *arguments) == 2
        assert words in capsys.readouterr().err


def test_a_draft_of_another_vocabulary_as_it_is(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not (world / "donor").exists():
        tiny.build_model(world / "donor", layers=2, vocabulary=350, seeds=range(40, 60))
    pair = ("--target", world / "target", "--draft", world / "donor", "--tokens", 10)
    texts = []
    for options in (("--drafter", "intersection"), ("--drafter", "string"), ("--drafter", "lookup")):
        assert tiny.call("generate", "def alpha(", *pair, *options) == (2 if "lookup" in options else 0)
        seen = capsys.readouterr()
        texts.append(seen.out)
    assert texts[0] == texts[1] and texts[0].startswith("def alpha(")
    assert "does not fit the target" in seen.err  # a drafter that reads the draft's ids as the target's own
    for drafter in ("intersection", "string"):
        assert tiny.call("generate", "def alpha(", *pair, "--drafter", drafter, "--temperature", 0.8) == 0
        assert capsys.readouterr().out.startswith("def alpha(")
