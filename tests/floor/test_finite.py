"""NaN and infinite logits or weights: one message that names model and position, never a made-up token.

Logits of −∞ are legal; a draft that has nothing else proposes nothing.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from table_model import TableModel
from tables import TableRows
from tiny import Capture
from toys import decode_at_once, toy
from writing_worlds import new_ids

from distill.decoding.decode import Decoded, decode_text, plain
from distill.decoding.drafters import Drafter, ModelDrafter
from distill.decoding.lengths import Fixed, ProbabilityFloor
from distill.decoding.proposals import Proposal
from distill.decoding.rules import Rules
from distill.decoding.trees import Shape, TreeDrafter
from distill.decoding.verify import CHAINS, TREES, draw, draw_chain, draw_token, walk
from distill.engines.llama_cpp.context import GgufLogits
from distill.engines.loaded import BatchedTorchModel
from distill.engines.torch.model import TorchLogits, TorchModel
from distill.errors import DataError
from distill.recipe import Sampler
from distill.sampler import probabilities_of
from distill.training.learner import Learner

INF, NAN = math.inf, math.nan
WRONG = {"NaN": [0.0, NAN, 1.0], "+inf": [0.0, INF, 1.0], "all -inf": [-INF] * 3}
SAMPLERS = (
    Sampler(temperature=0),
    Sampler(temperature=1.0),
    Sampler(temperature=0.7, top_k=2),
    Sampler(temperature=1.3, top_p=0.8),
    Sampler(temperature=1.0, min_p=0.1),
    Sampler(temperature=0).penalised(1.2),
)

pytestmark = pytest.mark.usefixtures("one_thread")


# Samplers and logits.


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sampler_names_the_row(sampler: Sampler, wrong: str, dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, -INF, 1.0], WRONG[wrong]], dtype=dtype)
    with pytest.raises(DataError, match="place 1"):
        probabilities_of(sampler, values, [[], []], lambda row: f"place {row}")
    assert bool(probabilities_of(sampler, values[:1], [[]]).sum() > 0.99)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_empty_draft_has_no_distribution(sampler: Sampler) -> None:
    found = probabilities_of(sampler, torch.tensor([[-INF, 2.0, 1.0], [-INF] * 3]), [[], []], empty=True)
    assert float(found[0].sum()) == pytest.approx(1) and found[1].tolist() == [0, 0, 0]
    with pytest.raises(DataError, match="nan"):
        probabilities_of(sampler, torch.tensor([WRONG["NaN"]]), [[]], empty=True)


@pytest.mark.parametrize("temperature", [1e-20, 1e-38, 1e-40, 1e-45, 1e-60, 1e-300, 5e-324])
def test_a_temperature_too_small_is_greedy(temperature: float) -> None:
    rows = torch.tensor([[3.0, 90.0, -2.0], [-3.0, -90.0, -2.0], [0.0, -INF, -1.0], [1e30, 2e30, 0.0]])
    for sampler in (
        Sampler(temperature=temperature),
        Sampler(temperature=temperature, top_k=2),
        Sampler(temperature=temperature, top_p=0.5, min_p=0.1),
    ):
        assert torch.equal(probabilities_of(sampler, rows), probabilities_of(Sampler(temperature=0), rows))


class Files:
    generation, path = 0, "model"


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("engine", ["torch", "gguf"])
def test_an_argmax_is_checked(engine: str, wrong: str) -> None:
    def logits(rows: list[list[float]]) -> Any:
        if engine == "torch":
            return TorchLogits(torch.tensor(rows), lambda row: f"model after {row} tokens")
        values = numpy.array(rows, dtype=numpy.float32)
        return GgufLogits(Files(), values, range(len(rows)))  # type: ignore[arg-type]

    bad = logits([[-INF, 1.0, 0.0], WRONG[wrong]])
    with pytest.raises(DataError, match="model after 1 tokens"):
        bad.argmax()
    with pytest.raises(DataError, match="model after 0 tokens"):  # a lone row
        logits([WRONG[wrong]]).argmax()
    assert logits([[-INF, 1.0, 1.0]]).argmax() == [1]
    if wrong == "all -inf":
        assert bad.argmax(-1) == [1, -1]
    else:
        with pytest.raises(DataError):
            bad.argmax(-1)


# Draws and verifiers.


@pytest.mark.parametrize("distribution", [[NAN] * 3, [0.5, NAN, 0.5], [0.0] * 3, [INF, 1.0, 0.0]])
def test_nothing_is_drawn_from_no_distribution(distribution: list[float]) -> None:
    for uniform in (0.0, 0.3, 0.999999):
        with pytest.raises(DataError, match="no token can be drawn"):
            draw_token(torch.tensor(distribution), lambda uniform=uniform: uniform)  # type: ignore[misc]


@pytest.mark.parametrize("verifier", ["token", "match", "block"])
def test_nan_is_never_accepted(verifier: str) -> None:
    tokens, q = torch.tensor([1, 2]), torch.full((2, 3), 1 / 3)
    for p in (torch.full((3, 3), NAN), torch.tensor([[0.2, NAN, 0.8], [0.1, 0.8, 0.1], [1.0, 0.0, 0.0]])):
        for draft, seed in itertools.product((q, None), range(20)):
            with pytest.raises(DataError, match="no token can be drawn"):
                draw_chain(verifier, p, Proposal.chain(tokens.tolist(), draft), random.Random(seed).random)
            with pytest.raises(DataError, match="no token can be drawn"):
                draw(CHAINS[verifier](p, draft, tokens), random.Random(seed).random)


def test_nan_is_never_accepted_in_a_tree() -> None:
    proposal = Proposal([0, 2, 1], [-1, -1, 0], torch.full((3, 3), 1 / 3))
    for verifier, seed in itertools.product(("token", "match", "distinct"), range(20)):
        with pytest.raises(DataError, match="no token can be drawn"):
            walk(TREES[verifier], torch.full((4, 3), NAN), proposal, random.Random(seed).random)


# Models decoded.


def damaged(table: TableModel, value: float, row: int | None = None) -> TableModel:
    """The same with this value in one column, or in all columns of the row of a context."""
    other = table.near(0.0, 0)
    if row is None:
        other.table[:, 1] = value
    else:
        other.table[row] = value
    return other


TREE = Shape((-1, -1, 0))
DRAFTERS: dict[str, tuple[Callable[[TableModel, Callable[[], float]], Drafter], Rules]] = {
    "greedy": (lambda m, r: ModelDrafter(m, Fixed(3), Sampler(temperature=0), r), Rules()),
    "greedy by floor": (lambda m, r: ModelDrafter(m, ProbabilityFloor(3, 0.1), Sampler(temperature=0), r), Rules()),
    "sampled": (
        lambda m, r: ModelDrafter(m, Fixed(3), Sampler(temperature=1), r),
        Rules(Sampler(temperature=1), "token"),
    ),
    "block": (
        lambda m, r: ModelDrafter(m, Fixed(3), Sampler(temperature=1), r),
        Rules(Sampler(temperature=1), "block"),
    ),
    "argmax": (
        lambda m, r: ModelDrafter(m, Fixed(3), Sampler(temperature=1), r, True),
        Rules(Sampler(temperature=1), "match"),
    ),
    "best tree": (lambda m, r: TreeDrafter(m, Sampler(temperature=0), r, 4), Rules()),
    "drawn tree": (
        lambda m, r: TreeDrafter(m, Sampler(temperature=1), r, 3, shape=TREE),
        Rules(Sampler(temperature=1), "token"),
    ),
    "distinct tree": (
        lambda m, r: TreeDrafter(m, Sampler(temperature=1), r, 3, shape=TREE, distinct=True),
        Rules(Sampler(temperature=1), "distinct"),
    ),
}


def decoded(target: TableModel, draft: TableModel, kind: str, seed: int) -> Decoded:
    make, rules = DRAFTERS[kind]
    draws = random.Random(seed).random
    rules = Rules(rules.sampler, rules.verifier, random=draws)
    return decode_text(target, make(draft, draws), [0, 2], 12, rules)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_damaged_target_or_draft_ends_the_text(kind: str, value: float) -> None:
    target = TableModel(4, 7, memory=1)
    for pair in ((damaged(target, value), target), (target, damaged(target, value))):
        with pytest.raises(DataError, match="not finite"):
            decoded(*pair, kind, 0)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_an_empty_draft_proposes_nothing(kind: str) -> None:
    """Everywhere, and after one token only; the greedy text is the target's own."""
    target = TableModel(4, 7, memory=1)
    draft = target.near(0.5, 3)
    nowhere = damaged(draft, -INF)
    nowhere.table[:] = -INF
    silent = decoded(target, nowhere, kind, 1)
    assert len(silent.tokens) == 12 and all(r.drafted == 0 for r in silent.rounds)
    for token in range(4):
        result = decoded(target, damaged(draft, -INF, draft.place([token])), kind, 2)
        assert len(result.tokens) == 12 and all(0 <= own < 4 for own in result.tokens)
        if DRAFTERS[kind][1].sampler.temperature == 0:
            assert result.tokens == plain(target, [0, 2], 12).tokens


@pytest.mark.parametrize(
    "sampler", [Sampler(temperature=0), Sampler(temperature=1.0), Sampler(temperature=0).penalised(1.1)]
)
def test_batches(sampler: Sampler) -> None:
    whole = TableModel(4, 7, memory=1)
    prompts, verifier = [[0, 2], [1], [3, 3]], "token" if sampler.temperature else "match"
    randoms = [random.Random(seed).random for seed in range(3)]
    rules = Rules(sampler, "greedy" if sampler == Sampler(temperature=0) else verifier)
    for value in (NAN, INF):
        broken = damaged(whole, value)
        for pair in ((broken, whole), (whole, broken)):
            target, draft = (TableRows(model, 3) for model in pair)
            with pytest.raises(DataError, match="not finite"):
                decode_at_once(target, draft, prompts, 9, rules, 3, randoms)
    empty = damaged(whole, -INF)
    empty.table[:] = -INF
    results = decode_at_once(TableRows(whole, 3), TableRows(empty, 3), prompts, 9, rules, 3, randoms)
    assert all(len(result.tokens) == 9 and all(r.drafted == 0 for r in result.rounds) for result in results)


def test_model_and_position_are_named() -> None:
    """In a chain, a chosen place, a tree, a row of a batch and a batch of samples."""
    model = toy(seed=1)
    with torch.no_grad():
        model.model.norm.weight[3] = NAN
    model.config._name_or_path = "models/mine"
    one = TorchModel(model)
    for extend, lengths in (
        (lambda: one.extend([1, 2, 3]), 1),
        (lambda: one.extend([4, 5], want=[1]), 5),
        (lambda: one.extend([6, 7], parents=[-1, 0], want=[1]), 7),
    ):
        with pytest.raises(DataError, match=re.escape(f"models/mine after {lengths} tokens")):
            extend().argmax()
    rows = BatchedTorchModel(model, 3)
    with pytest.raises(DataError, match="models/mine, row 2, after 2 tokens"):
        rows.extend([5, 6], [0, 0, 2], want=[1]).argmax()
    with pytest.raises(DataError, match="models/mine, row 0, after 3 tokens"):
        new_ids(rows, [[1, 2, 3], [4]], Sampler(temperature=1.0), 4)


# Commands.


def spoiled(folder: Path, name: str, value: float, to: Path) -> Path:
    """A copy of a model folder whose final norm holds one such weight."""
    shutil.copytree(folder, to / name)
    weights = load_file(to / name / "model.safetensors")
    weights["model.norm.weight"][0] = value
    save_file(weights, to / name / "model.safetensors", {"format": "pt"})
    return to / name


def test_commands_name_the_damaged_model(
    world: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.machine.usable_cores", lambda: 1)
    whole, broken = world / "target", spoiled(world / "target", "broken", NAN, tmp_path)
    for target, draft in ((broken, whole), (whole, broken)):
        pair = (target, draft)
        for options in (
            (),
            ("--temperature", 0.8),
            ("-C", "drafter=tree"),
            ("--temperature", 1, "-C", "verifier=block"),
        ):
            told = tiny.refused(capsys, "generate", "def alpha(", *pair, "--tokens", 8, *options)
            assert "are not finite" in told and f"{broken} after " in told
        for options in (("--kl",), ("--acceptance",)):
            text = ("--prompts", world / "corpus" / "test", "--count", 4)
            told = tiny.refused(capsys, "eval", *pair, *text, *options)
            assert "are not finite" in told and f"the logits of {broken}" in told


def test_training_stops_at_a_loss_that_is_not_finite(
    world: Path, copied: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is named, its weights are not saved, and the last checkpoint goes on afterwards."""
    whole = tiny.digest(copied / "draft" / "model.safetensors")
    forward, calls = Learner.forward, [0]

    def diverges(self: Learner, *arguments: Any) -> Any:
        total, sums = forward(self, *arguments)
        calls[0] += 1
        if calls[0] > 4:
            sums[next(name for name in sums if name.startswith("loss/"))].fill_(NAN)
        return total, sums

    training = ("train", world / "recipe.yaml", "--runs", copied.parent, "--until", "train")
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "forward", diverges)
        told = tiny.refused(capsys, *training, "--redo", "train")
    assert re.search(r"not finite at step \d", told) and "step-0" in told and "train.rate" in told
    saved = sorted(path.name for path in (copied / "checkpoints").glob("step-*"))
    assert saved and saved[-1] in told
    assert tiny.call(*training) == 0
    assert tiny.digest(copied / "draft" / "model.safetensors") == whole
