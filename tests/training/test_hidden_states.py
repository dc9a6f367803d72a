"""The loss on final hidden states: its formula and gradient, its weight over the steps, interruptions and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import toys
import trainings

from distill.data.packing import Packed, hidden_states, pack
from distill.errors import RecipeError
from distill.recipe import Train, load_recipe, parse_section
from distill.teacher.distributions import CompactTeacher, Head
from distill.training.losses import LossSettings
from distill.training.step import (
    Columns,
    Learner,
    check_hidden_states,
    check_training,
    state_error,
    states_weight,
    target_states,
)

EXACT = "teacher.kind=exact"
PULL = "train.hidden_states={weight: 0.5, end: 0.7}"


@pytest.fixture(scope="module")
def exact(world: Path, ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an exact teacher that has everything but a trained draft."""
    runs = tmp_path_factory.mktemp("exact")
    shutil.copytree(ready, runs / "tiny")
    stages = ("--redo", "teacher", "--until", "cut")
    with tiny.one_thread():
        code = tiny.call("train", world / "recipe.yaml", "--runs", runs, EXACT, *stages)
    assert code == 0
    return runs / "tiny"


def data() -> Packed:
    texts = [[3, 9, 4, 8, 2, 7, 5, 1, 2], [11, 6, 14, 12, 1, 4, 3, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    return pack([(ids, 1) for ids in texts], 12, split_long=False)


# ── the formula ──


def test_error_and_gradient_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, target = (torch.randn(7, 5, generator=generator) for _ in range(2))
    hidden.requires_grad_(True)
    gap, size = (hidden - target).detach().double(), target.double().square().sum(-1)
    found = state_error(hidden, target)
    assert found.item() == pytest.approx(float((gap.square().sum(-1) / size).sum()), rel=1e-6)
    (gradient,) = torch.autograd.grad(found, hidden)
    torch.testing.assert_close(gradient.double(), 2 * gap / size.unsqueeze(-1), rtol=1e-5, atol=1e-6)
    assert state_error(hidden, hidden).item() == 0
    assert state_error(3 * hidden, 3 * target).item() == pytest.approx(found.item(), rel=1e-5)


@pytest.mark.parametrize("kept", [None, list(range(0, 61, 2))])
def test_it_is_added_to_the_other_losses(kept: list[int] | None) -> None:
    """Over a whole head and a trimmed one."""
    draft, target, blocks = toys.toy(seed=0), toys.toy(seed=5), data()
    learner = Learner(draft, Columns(61, kept, torch.device("cpu")), 4)
    with torch.no_grad():
        states = hidden_states(target, blocks)[blocks.mask]
    teacher = Head.of(target, 61).teacher(states)
    loss = LossSettings({"forward_kl": 1.0})
    gradients, totals, sums = [], [], {}
    for pull in (0.0, 0.5, 2.0):
        learner.zero_grad()
        total, sums[pull] = learner(blocks, teacher, loss, pull)
        total.backward()
        totals.append(float(total.detach()))
        gradients.append({name: p.grad.clone() for name, p in learner.named_parameters() if p.grad is not None})
    error = sums[0.5]["loss/hidden_states"].item()
    assert "loss/hidden_states" not in sums[0.0] and error > 0
    assert totals[1] - totals[0] == pytest.approx(0.5 * error, rel=1e-4)
    assert totals[2] - totals[0] == pytest.approx(2 * error, rel=1e-4)
    assert error == pytest.approx(state_error(own_states(draft, blocks), states).item(), rel=1e-5)
    for name, first in gradients[0].items():  # linear in the weight
        torch.testing.assert_close(gradients[2][name] - first, 4 * (gradients[1][name] - first), rtol=1e-3, atol=1e-4)
    learner.zero_grad()
    total, _ = learner(blocks, Head.of(target, 61).teacher(own_states(draft, blocks)), loss, 1e6)
    assert total.item() < 1e6 * 1e-6 + 100  # a draft with the target's states has nothing to learn from them


def own_states(draft: Any, blocks: Packed) -> torch.Tensor:
    with torch.no_grad():
        return hidden_states(draft, blocks)[blocks.mask]


def test_a_process_without_blocks_has_no_states() -> None:
    none = torch.empty(0)
    empty = CompactTeacher(none.long().view(0, 1), none.view(0, 1), {1.0: none}, 61)
    hidden = torch.zeros(0, 8)
    assert state_error(hidden, target_states(empty, hidden)).item() == 0


def test_its_weight_falls_in_a_line_to_nothing() -> None:
    values = {"steps": 100, "rate": 1e-3, "hidden_states": {"weight": 0.4, "end": 0.5}}
    settings = parse_section(Train, values)
    pulls = [states_weight(step, settings) for step in range(100)]
    assert pulls[:51] == pytest.approx([0.4 * (1 - step / 50) for step in range(51)])
    assert pulls[50:] == [0.0] * 50
    without = settings.model_copy(update={"hidden_states": None})
    assert states_weight(0, without) == 0


# ── whole trainings ──


@pytest.fixture(scope="module")
def whole(world: Path, exact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training with the loss, in one piece."""
    run = trainings.trained(world, exact, tmp_path_factory.mktemp("whole"), EXACT, trainings.MIXED, PULL)
    return run


def test_it_is_logged_until_its_weight_is_zero(whole: Path) -> None:
    lines = trainings.metrics(whole)
    assert ["hidden_states" in line["losses"] for line in lines] == [True] * 6 + [False] * 2  # 0.7 of 8 steps
    first = lines[0]
    assert first["loss"] == pytest.approx(
        0.9 * first["losses"]["lk_hybrid"]
        + 0.1 * first["losses"]["cross_entropy"]
        + 0.5 * first["losses"]["hidden_states"]
    )


def test_resumed_is_uninterrupted_bit_for_bit(
    world: Path, exact: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainings.interrupted_after(5, monkeypatch):
        trainings.trained(world, exact, tmp_path, EXACT, trainings.MIXED, PULL, status=130)
    run = trainings.trained(world, exact, tmp_path, EXACT, trainings.MIXED, PULL)
    assert trainings.largest_difference(run, whole) == 0


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_micro_batches_and_processes_change_nothing_but_rounding(
    world: Path, exact: Path, whole: Path, tmp_path: Path, processes: int
) -> None:
    """In micro-batches of 3 of 4 blocks, so that they are unequal."""
    overrides = (EXACT, trainings.MIXED, PULL)
    if processes == 1:
        run = trainings.trained(world, exact, tmp_path, *overrides, "train.micro_batch=3")
    else:
        run, _ = trainings.trained_by_two(world, exact, tmp_path, *overrides, "train.micro_batch=1")
    trainings.same_up_to_rounding(run, whole)


# ── refusals ──


def test_what_cannot_be_compared_is_refused_by_check_and_before_the_first_step(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = world / "recipe.yaml"
    check_training(load_recipe(recipe, [PULL, EXACT]))
    printed = tiny.shown(capsys, "check", recipe, PULL, EXACT, "train.optimizer=muon", "train.matrix_rate=0.002")
    assert "0.5 of the loss on hidden states at first, none from step 6 on" in printed
    assert "the layers' matrices learn by Muon, at 2 times the rate" in printed
    for overrides, words in {
        (PULL,): "which a compact teacher does not keep",
        ("train.hidden_states={weight: 0}",): "train.hidden_states.weight",
        ("train.hidden_states={end: 1.5}",): "train.hidden_states.end",
    }.items():
        for command in (("check", recipe), ("train", recipe, "--runs", tmp_path / "runs")):
            assert words in tiny.refused(capsys, *command, *overrides)
    settings = parse_section(Train, {"hidden_states": {}})
    with pytest.raises(RecipeError, match="one hidden size on both sides; the draft's is 48, the target's 64"):
        check_hidden_states(settings, "exact", 48, 64)
    check_hidden_states(settings, "online", 64, 64)
    check_hidden_states(Train(), "compact", 48, 64)
    assert not (tmp_path / "runs" / "tiny" / "checkpoints").exists()
