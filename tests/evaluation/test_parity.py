"""`distill eval --parity`: every way against a loop in fp64, and where a difference enters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch

from distill.commands.parity import bounds_of
from distill.evaluation.parity import Read, Sums, Text, Way, as_markdown, compare_ways

Capture = pytest.CaptureFixture[str]
TEXTS = [Text([1, 2, 3, 4, 5], 2), Text([7, 0, 8, 3], 1)]


def logits(seed: int, near: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(len(text.scored), 9, generator=generator) for text in TEXTS]
    return drawn if near is None else [0.3 * new + old for new, old in zip(drawn, near, strict=True)]


def way(name: str, target: list[torch.Tensor], draft: list[torch.Tensor], against: str | None = None) -> Way:
    return Way(name, "x", lambda _: [Read(*pair) for pair in zip(target, draft, strict=True)], against)


def by_loops(target: list[torch.Tensor], draft: list[torch.Tensor]) -> tuple[float, float, float]:
    """Acceptance, agreement and KL over all positions, in fp64."""
    rows = []
    for row, other in zip(torch.cat(target).double().numpy(), torch.cat(draft).double().numpy(), strict=True):
        p, q = (numpy.exp(one) / numpy.exp(one).sum() for one in (row, other))
        rows.append((numpy.minimum(p, q).sum(), p.argmax() == q.argmax(), (p * numpy.log(p / q)).sum()))
    return tuple(map(float, numpy.mean(rows, 0)))  # type: ignore[return-value]


def test_where_a_difference_enters() -> None:
    p, q = logits(0), logits(1)
    other_p, other_q = logits(2, near=p), logits(3, near=q)
    base, p_alone, q_alone, both = (
        by_loops(*pair)[0] for pair in ((p, q), (other_p, q), (p, other_q), (other_p, other_q))
    )
    sums = Sums(0.5, 2.5, 1.0, math.nan)  # of one text, of three positions each
    ways = [
        way("first", p, q),
        way("same", p, q, "first"),
        way("other target", other_p, q, "first"),
        way("other draft", p, other_q, "first"),
        way("both", other_p, other_q, "first"),
        Way("bounds", "x", lambda texts: [sums] * len(texts), "first"),
    ]
    table = compare_ways(ways, TEXTS, ["a server: none"], "distill eval --parity")
    rows = {row.way: row for row in table.rows}
    assert (table.tokens, table.texts) == (6, 2)
    for row, pair in zip(table.rows, ((p, q), (p, q), (other_p, q), (p, other_q), (other_p, other_q)), strict=False):
        assert (row.acceptance, row.agreement, row.kl) == pytest.approx(by_loops(*pair), rel=1e-5)
    assert rows["same"].gap == rows["same"].by_target == rows["same"].target_error == 0
    assert rows["same"].target_top == rows["same"].draft_top == 1
    assert (
        rows["other target"].by_target == pytest.approx(p_alone - base, abs=1e-6) and rows["other target"].by_draft == 0
    )
    assert (
        rows["other draft"].by_draft == pytest.approx(q_alone - base, abs=1e-6) and rows["other draft"].by_target == 0
    )
    assert rows["both"].difference == pytest.approx(both - base, abs=1e-6)
    following = torch.tensor([token for text in TEXTS for token in text.scored])[:, None]
    logs = [torch.cat(one).double().log_softmax(-1).gather(1, following) for one in (p, other_p)]
    assert rows["both"].target_error == pytest.approx(float((logs[0] - logs[1]).abs().mean()), rel=1e-5)
    assert rows["bounds"].gap == 0 and rows["bounds"].acceptance == pytest.approx(1 / 6)
    apart = [line.split(" (")[0] for line in table.verdict]
    assert apart == [row.way for row in table.rows if row.against and abs(row.gap) > 0.005] != []
    assert "0.1667 to 0.8333" in as_markdown(table) and "Not tried: a server: none" in as_markdown(table)


@pytest.mark.parametrize("listed", [9, 5, 2])
def test_a_server_s_likeliest_tokens_bound_the_acceptance(listed: int) -> None:
    p, q = (torch.cat(one) for one in (logits(0), logits(1)))
    likeliest = [{int(token): float(row.log_softmax(-1)[token]) for token in row.topk(listed).indices} for row in p]
    found, (acceptance, agreement, _) = bounds_of(likeliest, q), by_loops([p], [q])
    assert found.acceptance - 1e-5 <= 6 * acceptance <= found.most + 1e-5 and found.agreement == 6 * agreement
    assert found.most - found.acceptance < {9: 1e-4, 5: 1.5, 2: 4.0}[listed]


def rows_of(capsys: Capture, *arguments: object) -> dict[tuple[str, str], dict[str, Any]]:
    capsys.readouterr()
    assert tiny.call("eval", "--parity", "-o", "jsonl", *arguments) == 0
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    return {(row["way"], row["models"]): row for row in rows}


def test_a_run_has_one_acceptance(finished: Path, capsys: Capture) -> None:
    """transformers, the training's loss, our decoder and the exported files."""
    rows = rows_of(capsys, finished)
    assert [way for way, _ in rows][:3] == ["transformers", "training's loss", "our decoder"]
    files = [row for (way, _), row in rows.items() if way == "llama.cpp"]
    assert files and all(abs(row["difference"]) < 5e-3 for row in files)
    for (way, _), row in rows.items():
        if way in ("training's loss", "our decoder"):
            assert row["difference"] == pytest.approx(0, abs=1e-4), way
    assert 0.05 < rows["transformers", "float32"]["acceptance"] < 0.999


def test_a_trimmed_draft_is_compared_with_and_without_its_head(copied: Path, world: Path, capsys: Capture) -> None:
    size = json.loads((copied / "draft" / "config.json").read_text())["vocab_size"]
    kept = {"kept": [*range(0, size, 2)], "vocabulary": size}
    (copied / "draft" / "kept_tokens.json").write_text(json.dumps(kept))
    pair = ["--target", world / "target", "--draft", copied / "draft", "--text", world / "corpus"]
    rows = rows_of(capsys, *pair)
    whole = rows["transformers, whole head", "float32"]
    assert whole["against"] == "transformers" and whole["by_target"] == 0 and whole["difference"] == whole["by_draft"]
    assert rows["training's loss", "float32"]["difference"] == pytest.approx(0, abs=1e-4)
    (file,) = [row for (way, _), row in rows.items() if way == "llama.cpp"]
    assert file["against"] == "transformers, whole head" and abs(file["difference"]) < 5e-3


def test_the_target_as_its_own_draft(world: Path, capsys: Capture) -> None:
    """KL 0 and acceptance 1, whatever computes them."""
    pair = ["--target", world / "target", "--draft", world / "target", "--text", world / "corpus"]
    rows = rows_of(capsys, *pair)
    assert len(rows) == 4
    for row in rows.values():
        assert row["acceptance"] == pytest.approx(1, abs=1e-5) and row["agreement"] == 1
        assert row["kl"] == pytest.approx(0, abs=1e-6)


def test_mistakes(finished: Path, world: Path, capsys: Capture) -> None:
    target = world / "target"
    pair = ["--target", target, "--draft", target, "--text", world / "corpus"]
    for arguments, said in (
        ([finished, "--parity", "--by", "token"], "leave the other options out"),
        ([*pair, "--parity", "--prompts", 9], "leave the other options out"),
        ([finished, "--parity", "--kl"], "leave the other options out"),
        ([finished, "--url", "http://127.0.0.1:1"], "leave the other options out"),
        ([*pair, "--draft", finished / "draft", "--parity"], "--parity is of one pair"),
        (["--parity", "--target", target], "a pair without a run needs"),
        ([*pair, "--parity", "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1"),
        ([finished, *pair], "a run was given beside --target or --draft"),
        ([finished, "--outtype", "q8_0", "--by", "depth"], "--by and --outtype were given together"),
    ):
        assert said in tiny.refused(capsys, "eval", *arguments)
