"""Optimizers and rates: each step by hand, and nothing but rounding hangs on kills, micro-batches and processes."""

from __future__ import annotations

import copy
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import toys
import trainings
from tiny import Capture, Patch

from distill import machine
from distill.engines.torch.hugging_face import load_config
from distill.errors import RecipeError
from distill.recipe import Adapter, Train, load_recipe, parse_section
from distill.run import Run
from distill.surgery.cutter import kept_share
from distill.training import optimizer, setup
from distill.training.losses import loss_settings, protocol_of
from distill.training.optimizer import (
    make_optimizer,
    orthogonalised,
    outer_share,
    peak_rate,
    rate_share,
    set_rates,
    with_rate,
)
from distill.training.setup import attach

MUON = ("train.optimizer=muon",)


def settings_of(**values: Any) -> Train:
    return parse_section(Train, {"optimizer": "muon", **values})


def with_gradients(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


# ── steps by hand ──


@pytest.mark.parametrize(("tied", "features"), [(True, {"bf16"}), (False, {"bf16"}), (True, {"avx2"}), (True, None)])
def test_a_step_is_that_of_torchs_muon_and_adamw(tied: bool, features: set[str] | None, monkeypatch: Patch) -> None:
    """The matrices of the layers by Muon, the rest by AdamW, each with its own rate, bit for bit; but for the
    rounding of bfloat16, in which torch's Muon orthogonalises, of oblong matrices, whose iterations are done on their
    inner products, and where the processor has no instructions for it."""
    monkeypatch.setattr(machine, "cpu_features", lambda: features)
    exact = features != {"avx2"}
    settings = settings_of(rate=0.01)
    ours, by_hand = (toys.toy("qwen2", tie_word_embeddings=tied) for _ in range(2))
    optimizer = make_optimizer(ours, settings)
    named = dict(by_hand.named_parameters())
    matrices = [p for name, p in named.items() if name.endswith("_proj.weight")]
    outer = [p for name, p in named.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    vectors = [p for name, p in named.items() if name.endswith((".bias", "norm.weight"))]
    assert (len(matrices), len(outer), len(vectors)) == (14, 1 if tied else 2, 11)
    assert len(matrices) + len(outer) + len(vectors) == len(named)
    muon = torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": outer, "weight_decay": 0.0}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step in range(4):
        for model in (ours, by_hand):
            with_gradients(model, step)
        set_rates(optimizer, 0.01 / (step + 1), 0.005 / (step + 1))
        optimizer.step()
        adamw.param_groups[0]["lr"] = 0.01 / (step + 1)
        adamw.param_groups[1]["lr"] = 0.005 / (step + 1)
        muon.param_groups[0]["lr"] = 0.005 / (step + 1)
        muon.step()
        adamw.step()
        if step == 1:  # and from its saved state
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make_optimizer(ours, settings)
            optimizer.load_state_dict(saved)
    start = dict(toys.toy("qwen2", tie_word_embeddings=tied).named_parameters())
    for name, parameter in ours.named_parameters():
        oblong = 2 * max(parameter.shape) > 3 * min(parameter.shape)
        if not name.endswith("_proj.weight") or (exact and not oblong):
            assert torch.equal(parameter, named[name]), name
        else:
            apart, learnt = (parameter - named[name]).norm(), (named[name] - start[name]).norm()
            assert 0 < apart < 0.05 * learnt, name


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12)])
def test_singular_values_are_those_of_the_iterated_polynomial(shape: tuple[int, int]) -> None:
    """In double precision, against a singular value decomposition: s → 3.4445 s − 4.775 s³ + 2.0315 s⁵, five times."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    found = orthogonalised(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert torch.allclose(found, left @ values.diag() @ right, atol=1e-10)


def test_adapters_are_matrices_too() -> None:
    """Without anything for AdamW: both matrices of each adapter learn, each orthogonalised, and nothing else moves."""
    model = attach(toys.toy("qwen2"), Adapter(rank=4), seed=0)
    before = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model, settings_of(rate=0.1))
    with_gradients(model, 0)
    set_rates(optimizer, 0.1, 0.1)
    optimizer.step()
    for name, value in model.state_dict().items():
        moved = value - before[name]
        assert bool(moved.any()) == ("lora_" in name), name
        if "lora_" in name:
            size = torch.linalg.svdvals(moved) / (0.1 * 0.2 * max(moved.shape) ** 0.5)
            assert len(size) == 4 and bool(((size > 0.6) & (size < 1.3)).all()), name


# ── rates ──


def test_the_rate_follows_what_the_cut_leaves(world: Path, ready: Path, tmp_path: Path, capsys: Capture) -> None:
    """Named by `check`, and taken by the training of that very cut."""
    shares = (0.05, 1 / 6, 0.4, 0.7, 1.0)
    rates = [peak_rate(share) for share in shares]
    assert rates[:2] == [1.5e-3, 1.5e-3] and rates[-1] == 1.5e-5 and rates == sorted(rates, reverse=True)
    assert peak_rate(7 / 12) == pytest.approx(1.5e-4, rel=0.05)  # halfway, the geometric mean
    settings = settings_of()
    assert with_rate(settings, 0.4).rate == peak_rate(0.4) and with_rate(settings_of(rate=0.2), 0.4).rate == 0.2
    rates = [with_rate(settings_of(adapter={}), share).rate for share in (1 / 6, 1.0)]
    assert (
        rates == pytest.approx([8e-3, 1.5e-4])
        and with_rate(settings_of(adapter={}, optimizer="adamw"), 1 / 6).rate == 2e-3
    )
    recipe = load_recipe(world / "recipe.yaml", ["train.rate=null"])
    donor = load_config(recipe.donor_model)
    left = 2 / donor.num_hidden_layers
    assert kept_share(recipe) == kept_share(recipe, load_config(str(ready / "cut"))) == pytest.approx(left)
    assert f"at up to {peak_rate(left):g}: " in tiny.shown(capsys, "check", world / "recipe.yaml", "train.rate=null")
    changed = ["cut.transplant={}", "train.rate=null"]
    given = load_recipe(world / "recipe.yaml", ["cut.transplant={}", "train.embedding_rate=0.1"])
    shares = [outer_share(one, 5e-5) for one in (load_recipe(world / "recipe.yaml", changed), recipe, given)]
    assert (
        shares == pytest.approx([30, 1, 0.1]) and outer_share(load_recipe(world / "recipe.yaml", changed), 3e-3) == 0.5
    )
    run = trainings.trained(world, ready, tmp_path, "train.rate=null", "train.steps=2", "train.acceptance=null")
    assert json.loads((run / "training.json").read_text())["rate"] == peak_rate(left)


def test_a_continuation_goes_on_as_a_whole_donor_does(world: Path, ready: Path, monkeypatch: Patch) -> None:
    """Of a trained draft nothing is new, neither its layers nor the rows of a transplant."""
    more = ["train.rate=null", "train.acceptance=null"]
    recipe = load_recipe(world / "recipe.yaml", more)
    monkeypatch.setattr(Run, "parent", lambda _: {"generation": 2})
    monkeypatch.setattr(setup, "outer_share", lambda *_: 30.0)
    work = setup.set_up(recipe, Run(ready, recipe))
    assert (work.rate, work.outer) == (1.5e-5, 1.0)
    monkeypatch.setattr(Run, "parent", lambda _: None)
    work = setup.set_up(recipe, Run(ready, recipe))
    assert work.rate > 5e-5 and work.outer == 30.0


def test_the_default_loss_is_that_of_the_protocol() -> None:
    settings = settings_of(steps=100, rate=1.0)
    assert loss_settings(settings, 0.8) == {"jsd": 1.0} and loss_settings(settings, 0.0) == {"forward_kl": 1.0}
    assert protocol_of(settings.model_copy(update={"protocol": "match"}), 0.0) == "match"


def test_a_rate_that_is_constant_and_then_falls_in_a_line() -> None:
    shares = [rate_share(step, 50) for step in range(50)]
    assert shares[:2] == [0.5, 1] and set(shares[2:41]) == {1}
    assert shares[41:] == pytest.approx([1 - 0.1 * step for step in range(1, 10)])  # 0 is behind the last step


# ── whole trainings ──


@pytest.mark.parametrize(
    ("overrides", "killed_at"),
    [
        ((*MUON, trainings.MIXED, "train.embedding_rate=5"), 3),
        ((*MUON, "train.adapter={rank: 4}", "train.acceptance=null"), 5),
        pytest.param(
            (*MUON, "train.steps=50", "train.sparsity={mlp_width: 32}"), 7, marks=pytest.mark.slow
        ),  # with AdamW: test_sparsity.py
    ],
)
def test_resumed_is_uninterrupted_bit_for_bit(
    train: trainings.Trainer, tmp_path: Path, overrides: tuple[str, ...], killed_at: int, monkeypatch: Patch
) -> None:
    whole = train(*overrides, folder=tmp_path / "whole")
    with trainings.interrupted_after(killed_at, monkeypatch):
        train(*overrides, status=130, folder=tmp_path / "two")
    assert list((tmp_path / "two" / "tiny" / "checkpoints").glob("step-*"))
    run = train(*overrides, folder=tmp_path / "two")
    assert (run / "training.json").read_text() == (whole / "training.json").read_text()
    last = sorted((whole / "checkpoints").glob("step-*"))[-1].name
    for name in ("model", "optimizer"):
        one, other = (torch.load(r / "checkpoints" / last / f"{name}.pt", weights_only=True) for r in (whole, run))
        assert json.dumps(one, default=torch.Tensor.tolist) == json.dumps(other, default=torch.Tensor.tolist)
    assert trainings.largest_difference(run, whole) == 0


SHARED = """
import hashlib, json, sys
import torch, toys
from distill.devices import end_process, process_count, process_index
from distill.recipe import Train
from distill.training import optimizer

found = {"orthogonalised": 0, "gathers": 0, "bytes": 0}
one, gather = optimizer.orthogonalised, torch.distributed.all_gather

def counted(*given):
    found["orthogonalised"] += 1
    return one(*given)

def gathered(output, own):
    found["gathers"] += 1
    found["bytes"] += own.nbytes
    return gather(output, own)

optimizer.orthogonalised, torch.distributed.all_gather = counted, gathered
draft = toys.toy("qwen2")
muon = optimizer.make_optimizer(draft, Train(optimizer="muon", rate=0.01))
for step in range(2):
    generator = torch.Generator().manual_seed(step)
    for parameter in draft.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    muon.step()
content = b"".join(value.contiguous().numpy().tobytes() for _, value in sorted(draft.state_dict().items()))
line = [process_index(), process_count(), hashlib.sha256(content).hexdigest(), found]
with open(f"{sys.argv[1]}/{process_count()}-{process_index()}.json", "w") as file:  # two processes share one stdout
    json.dump(line, file)
end_process()
"""


def test_processes_share_what_muon_orthogonalises(tmp_path: Path, monkeypatch: Patch) -> None:
    """Each computes half of the matrices, gets the others once, and has the weights of one process bit for bit."""
    program = tmp_path / "shared.py"
    program.write_text(SHARED)
    path = os.pathsep.join((str(tiny.ROOT), str(tiny.ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *trainings.TORCHRUN, str(program), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    for module, name in ((optimizer, "orthogonalised"), (torch.distributed, "all_gather")):
        monkeypatch.setattr(module, name, getattr(module, name))  # The program replaces both; the test puts them back.
    monkeypatch.setattr(sys, "argv", [str(program), str(tmp_path)])
    runpy.run_path(str(program))
    lines = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    (_, _, alone, counts), *both = lines
    assert counts == {"orthogonalised": 28, "gathers": 0, "bytes": 0}  # 14 matrices, 2 steps
    matrices = sum(p.numel() for name, p in toys.toy("qwen2").named_parameters() if name.endswith("_proj.weight"))
    width = 2 if machine.has_instructions("bfloat16") is not False else 4
    assert [line[:2] for line in both] == [[0, 2], [1, 2]]
    for _, _, weights, shared in both:
        assert weights == alone
        assert shared == {"orthogonalised": 14, "gathers": 14, "bytes": matrices * width}


# ── refusals ──


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"optimizer": "lion"}, "known: adamw, muon"),
        ({"acceptance": {"patience": 2}, "sparsity": {"mlp_width": 32}}, "sparsity needs all steps"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        settings_of(**values)
