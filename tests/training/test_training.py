"""Training: nothing but rounding depends on how a step is split, nothing leaks, nothing is lost, the best is taken."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import question_worlds
import tiny
import torch
import toys
from safetensors.torch import load_file
from tiny import Capture, Patch
from trainings import (
    MIXED,
    Trainer,
    accelerate,
    command,
    interrupted_after,
    largest_difference,
    metrics,
    same_up_to_rounding,
    trained,
    trained_by_two,
    two_processes,
    weights,
)

from distill.data.packing import pack
from distill.data.samples import read_answers
from distill.devices import memory_explained
from distill.engines.torch.blocks import scored_states
from distill.engines.torch.hugging_face import load_model, load_tokenizer
from distill.errors import RunError
from distill.recipe import Sampler, Train, load_recipe
from distill.run import BEGIN, Run
from distill.sampler import probabilities_of
from distill.teacher.distributions import DenseTeacher, Head
from distill.training import loop, validation
from distill.training.learner import Columns, Learner
from distill.training.optimizer import make_optimizer
from distill.training.saved import (
    BEST,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    set_weights,
    step_of_weights,
)
from distill.training.setup import Training, make_accelerator
from distill.training.validation import served_form, stored_acceptance


@pytest.fixture(scope="module")
def whole(world: Path, ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training in one piece."""
    return trained(world, ready, tmp_path_factory.mktemp("whole"), MIXED)


# ── a step ──


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_change_nothing_but_rounding(train: Trainer, whole: Path, size: int) -> None:
    run = train(MIXED, f"train.micro_batch={size}")
    same_up_to_rounding(run, whole)


@pytest.mark.parametrize("overrides", [pytest.param((), marks=pytest.mark.slow), ("train.micro_batch=1",)])
def test_two_processes_change_nothing_but_rounding(
    train: Trainer, world: Path, ready: Path, whole: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """A factor in the gradient, which clipping hides, would show."""
    alone = whole
    if overrides:
        alone = train(MIXED, *overrides, folder=tmp_path / "alone")
    run, said = trained_by_two(world, ready, tmp_path, MIXED, *overrides)
    same_up_to_rounding(run, alone)
    assert said.count("step 8/8") == 1  # one process speaks


@pytest.mark.slow
def test_a_compiled_body_changes_nothing_but_rounding(train: Trainer, whole: Path, monkeypatch: Patch) -> None:
    """By the traced graphs; how they are turned into machine code is torch's affair."""
    seen: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(len(list(graph.graph.nodes)))
        return graph

    compile_of = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_of(module, backend=backend))
    run = train(MIXED, "train.compile=true")
    assert seen
    assert largest_difference(run, whole) < 2e-5


@pytest.mark.parametrize(("batch", "ranks", "size"), [(4, 2, 1), (8, 4, None), (6, 3, 3), (6, 2, 2)])
def test_processes_share_the_blocks_of_a_step(batch: int, ranks: int, size: int | None) -> None:
    recipe = SimpleNamespace(train=Train(batch=batch, micro_batch=size), seed=0)

    def blocks(rank: int, ranks: int) -> list[list[int]]:
        process = SimpleNamespace(process_index=rank, num_processes=ranks)
        work: Any = Training(recipe, None, process, None, SimpleNamespace(blocks=5), *[None] * 4)  # type: ignore[arg-type]
        return [piece.tolist() for piece in work.micro_batches(1)]

    found = [blocks(rank, ranks) for rank in range(ranks)]
    assert len({tuple(map(len, one)) for one in found}) == 1  # as many of each size in every process
    assert all(len(piece) <= (size or batch) for one in found for piece in one)
    flat = sorted(i for one in found for piece in one for i in piece)
    assert flat == sorted(i for piece in blocks(0, 1) for i in piece) and len(flat) == batch


def packed_learner(seed: int = 0) -> tuple[Learner, Any, Any]:
    """A toy draft with its loss, a target's head, and two documents in one block."""
    draft, target = toys.toy(seed=seed), toys.toy(seed=seed + 5)
    blocks = pack([([3, 9, 4, 8, 2, 7, 5], 1), ([11, 6, 14, 12, 1], 1)], 16, split_long=False)
    return Learner(draft, Columns(61, None, torch.device("cpu")), 4), target, blocks


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_rows_that_cannot_learn_are_left_out_and_put_back(family: str, tied: bool) -> None:
    """Of a trimmed draft's embeddings and head: the same weights after some steps as with all rows, and the same in
    evaluation between them, also of a row for padding, which learns as a kept one alone."""
    kept, steps, found = [2, 3, 4, 9, 30], 4, []
    target, blocks = toys.toy(seed=5), packed_learner()[2]
    teacher = DenseTeacher(scored_states(target, blocks).detach(), Head.of(target, 61))
    for ids in (None, blocks.ids.unique().long()):
        draft = toys.toy(family, seed=0, tie_word_embeddings=tied, pad_token_id=2)
        learner = Learner(draft, Columns(61, kept, torch.device("cpu")), 4, ids)
        assert len(draft.lm_head.weight) == (61 if ids is None else 14)
        optimizer = make_optimizer(draft, Train(rate=0.01))
        logits = []
        for _ in range(steps):
            learner(blocks, teacher, {"jsd": 1.0})[0].backward()
            norm = torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), learner.whole() as whole:
                logits.append(whole(torch.tensor([[60, 5, 9, 2]])).logits)
        with learner.whole() as whole:
            found.append((copy.deepcopy(whole.state_dict()), norm, logits))
    (wide, norm, logits), (narrow, own_norm, own_logits) = found
    assert sorted(wide) == sorted(narrow)
    for name, value in wide.items():
        assert torch.allclose(value, narrow[name], atol=1e-6), name
    for whole, own in zip([norm, *logits], [own_norm, *own_logits], strict=True):
        assert torch.allclose(whole, own, atol=1e-5)


@pytest.mark.parametrize("kind", ["granite", "cohere2", "gemma2"])
def test_scaled_and_capped_logits_are_learnt_as_the_model_gives_them(kind: str) -> None:
    changes = {"granite": {"logits_scaling": 3.0}, "cohere2": {}, "gemma2": {"final_logit_softcapping": 2.0}}[kind]
    draft, ids = toys.toy(kind, **changes), torch.tensor([[3, 9, 4, 8, 2, 7, 5]])
    blocks = pack([(ids[0].tolist(), 1)], 7, split_long=False)
    states, target = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)), Head.of(toys.toy(), 61)
    learner = Learner(draft, Columns(61, None, torch.device("cpu")), 4)
    total, _ = learner(blocks, DenseTeacher(states, target), {"forward_kl": 1.0})
    logs = draft(ids).logits[0, :-1].log_softmax(-1)
    expected = torch.nn.functional.kl_div(logs, target.logits(states).log_softmax(-1), log_target=True, reduction="sum")
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    weights = [draft.lm_head.weight, draft.model.layers[0].mlp.down_proj.weight]
    for found, own in zip(torch.autograd.grad(total, weights), torch.autograd.grad(expected, weights), strict=True):
        assert (found - own).abs().max() <= 1e-5 * own.abs().max()


def gradient_at_embeddings(learner: Learner, target: Any, blocks: Any, document: int) -> torch.Tensor:
    """The gradient of one document's loss with respect to the input embeddings [S, H] of the whole block."""
    from dataclasses import replace

    blocks = replace(blocks, mask=blocks.mask & (blocks.documents == document))
    kept: list[torch.Tensor] = []

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.detach().requires_grad_()
        kept.append(output)
        return output

    handle = learner.draft.get_input_embeddings().register_forward_hook(hook)
    states = torch.randn(int(blocks.mask.sum()), 32, generator=torch.Generator().manual_seed(1))
    distributions = DenseTeacher(states, Head.of(target, 61))
    total, _ = learner(blocks, distributions, {"forward_kl": 1.0, "lk_hybrid": 1.0})
    handle.remove()
    (gradient,) = torch.autograd.grad(total, kept)
    return gradient[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("document", [0, 1])
def test_no_document_learns_from_another(attention: str, document: int) -> None:
    learner, target, blocks = packed_learner()
    learner.draft.set_attn_implementation(attention)
    own = (blocks.documents == document)[0]
    gradient = gradient_at_embeddings(learner, target, blocks, document)
    assert gradient[own][:-1].abs().sum(-1).min() > 0  # the last position's distribution does not count
    assert gradient[~own].abs().max() == 0
    blocks.ids[0, ~own] = (blocks.ids[0, ~own] + 17) % 61
    assert torch.equal(gradient_at_embeddings(learner, target, blocks, document)[own], gradient[own])


def test_activation_checkpointing_gives_the_same_weights(train: Trainer, whole: Path) -> None:
    run = train(MIXED, "train.checkpointing=true")
    assert largest_difference(run, whole) < 1e-6


# ── what chooses the weights ──


def tell(monkeypatch: Patch, *acceptances: float | None) -> None:
    """Let the evaluations find these acceptances, one after the other."""
    told = iter(acceptances)

    def sums(work: Any) -> Any:
        value = next(told)
        return [] if value is None else [(10 * value, 10 * value, 10)] * 4

    monkeypatch.setattr(validation, "measure_acceptance", sums)


def test_the_best_weights_are_taken_not_the_last(train: Trainer, monkeypatch: Patch) -> None:
    tell(monkeypatch, 0.3, 0.6, 0.5, 0.4)
    run = train("train.acceptance.every=3")
    assert json.loads((run / "training.json").read_text())["best"]["step"] == 3
    saved = torch.load(run / "checkpoints" / "best" / "model.pt", weights_only=True)
    own = weights(run)
    assert all(torch.equal(saved[f"draft.{name}"], value) for name, value in own.items())
    last = torch.load(run / "checkpoints" / "step-000008" / "model.pt", weights_only=True)
    assert any(not torch.equal(last[f"draft.{name}"], value) for name, value in own.items())


def test_the_weights_named_best_are_those_that_were_kept(train: Trainer, monkeypatch: Patch) -> None:
    """Where a training measures less after a kill than before it, as on a GPU: step 4 had taken the place of step 2."""
    often = ("train.acceptance.every=2", "train.save_every=3")
    tell(monkeypatch, 0.3, 0.6, 0.7)
    with interrupted_after(5, monkeypatch):
        train(*often, status=130)
    tell(monkeypatch, 0.5, 0.4, 0.4)
    run = train(*often)
    assert json.loads((run / "training.json").read_text())["best"]["step"] == 4
    assert step_of_weights(Run(run, load_recipe(run / "config.yaml")), BEST) == 4


def test_a_training_ends_when_patience_has_run_out(train: Trainer, monkeypatch: Patch) -> None:
    tell(monkeypatch, 0.5, 0.6, 0.2, 0.1)
    patience = ("train.acceptance.every=1", "train.acceptance.patience=2")
    run = train(*patience, "train.steps=40")
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    summary = json.loads((run / "training.json").read_text())
    assert summary["best"]["step"] == 1
    assert summary["steps"] == 3
    log = (run / "log.txt").read_text()
    assert "; fewer if acceptance stops rising (train.acceptance.patience 2)" in log
    assert "warning" not in log and "tok/s" in log and ", at most " in log


def test_a_training_that_begins_again_leaves_no_figures_behind(tmp_path: Path, world: Path) -> None:
    run = Run(tmp_path, load_recipe(world / "recipe.yaml"))
    for _ in range(2):
        run.record(BEGIN)
        for step in (1, 2, 3):
            run.record("train", step=step)
    run.record("acceptance", step=3)
    assert [(one["stage"], one["step"]) for one in run.metrics()] == [
        *(("train", step) for step in (1, 2, 3)),
        ("acceptance", 3),
    ]
    run.record(BEGIN)
    run.record("train", step=1)
    assert [(one["stage"], one["step"]) for one in run.metrics()] == [("train", 1)]


@pytest.mark.parametrize("protocol", ["sampling", "match", "greedy"])
def test_stored_acceptance_by_hand(protocol: Any, ready: Path, world: Path) -> None:
    """Of each validation answer, from the models' own logits, one position after the other; the target as its own draft
    is always accepted."""
    run = Run(ready, load_recipe(ready / "config.yaml"))
    sampler = Sampler(temperature=0.7, top_k=20, top_p=0.9)
    target, draft = (
        load_model(str(folder), "float32", torch.device("cpu")) for folder in (world / "target", ready / "cut")
    )
    with served_form(draft, None):
        found = stored_acceptance(run, draft, sampler, protocol)
    answers = [one for one in read_answers(run, "validation") if one.answer]
    assert len(found) == len(answers) >= 2
    size = len(load_tokenizer(str(world / "target")))
    for one, (least, most, count) in zip(answers, found, strict=True):
        total = 0.0
        for at in range(len(one.answer)):
            ids = torch.tensor([[*one.prompt, *one.answer[:at]]])
            with torch.no_grad():
                own, other = (model(input_ids=ids).logits[:, -1, :size].float() for model in (target, draft))
            p, q = probabilities_of(sampler, own)[0], probabilities_of(sampler, other)[0]
            if protocol == "sampling":
                total += float(torch.minimum(p, q).sum())
            else:
                best = int(other.argmax())
                total += float(p[best]) if protocol == "match" else float(int(own.argmax()) == best)
        assert least == most == pytest.approx(total, abs=1e-4) and count == len(one.answer)
    if protocol != "match":
        whole = stored_acceptance(run, target, sampler, protocol)
        assert [least for least, _, _ in whole] == pytest.approx([count for _, _, count in whole], abs=1e-4)


def test_nothing_is_chosen_where_nothing_was_drafted(train: Trainer, monkeypatch: Patch, capsys: Capture) -> None:
    tell(monkeypatch, *[None] * 3)
    run = train()
    assert json.loads((run / "training.json").read_text())["best"] is None
    assert not (run / "checkpoints" / "best").exists()
    assert "nothing is chosen by it" in capsys.readouterr().err


def test_every_evaluation_has_it_on_the_same_texts(train: Trainer) -> None:
    found = metrics(train("train.rate=1e-9"), "acceptance")
    expected = [line["acceptance"] for line in found]
    assert [line["step"] for line in found] == [0, 4, 8] and 0 < expected[0] < 1
    assert expected == pytest.approx([expected[0]] * 3, abs=1e-4), "weights that hardly change, on the same texts"
    low, high = found[0]["interval"]["low"], found[0]["interval"]["high"]
    assert found[0]["gain"] is None and low <= expected[0] <= high
    assert found[1]["gain"]["mean"] == pytest.approx(0, abs=1e-4) and found[0]["positions"] > found[0]["answers"] >= 2


# ── interruptions ──


@pytest.mark.parametrize("killed_at", [7, 8, None])
def test_resumed_is_uninterrupted_bit_for_bit(
    train: Trainer, whole: Path, tmp_path: Path, killed_at: int | None, monkeypatch: Patch
) -> None:
    """None: after the last setup, before the draft is written."""

    def killed(work: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, interrupted_after(killed_at, monkeypatch):
        if killed_at is None:
            patch.setattr(loop, "write_draft", killed)
        train(MIXED, status=130)
    assert killed_at is not None or (tmp_path / "tiny" / "checkpoints" / "step-000008").exists()
    run = train(MIXED)
    assert largest_difference(run, whole) == 0
    assert (run / "training.json").read_text() == (whole / "training.json").read_text()


@pytest.mark.parametrize(
    ("name", "steps", "saved", "number"),
    [
        ("evaluate_weights", 4, 4, signal.SIGTERM),
        ("one_step", 7, 8, signal.SIGINT),
        pytest.param("one_step", 7, 8, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_is_never_forgotten(
    train: Trainer,
    whole: Path,
    tmp_path: Path,
    name: str,
    steps: int,
    saved: int,
    number: int,
    monkeypatch: Patch,
    capfd: Capture,
) -> None:
    """While drafts are evaluated, and in the last step of all; it says how to go on."""
    function = getattr(loop, name)

    def signalled(work: Any, *rest: Any) -> Any:
        if work.state["step"] == steps:
            os.kill(os.getpid(), number)
        return function(work, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop, name, signalled)
        train(MIXED, status=(130 if number == signal.SIGINT else 143))
    said = capfd.readouterr().err
    assert said.count("saves a checkpoint after this step and stops") == 1 and "the same command goes on there" in said
    run = tmp_path / "tiny"
    assert (run / "checkpoints" / f"step-{saved:06d}").exists() and metrics(run)[-1]["step"] == saved
    assert not (run / "draft").exists()
    train(MIXED)
    assert largest_difference(run, whole) == 0
    assert (run / "training.json").read_text() == (whole / "training.json").read_text()


def test_the_last_checkpoints_stay_past_a_million_steps(tmp_path: Path) -> None:
    """999999 sorts after 1000000 as text."""
    run = SimpleNamespace(path=tmp_path.joinpath)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        save_checkpoint(run, step, model, optimizer, {})  # type: ignore[arg-type]
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-1000000", "step-1000001"]
    newest = newest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None and load_checkpoint(newest, model, optimizer)["step"] == 1_000_001


SIGNALLED = """
import os, sys
from distill.cli.app import main
from distill.training import loop

step_of, (number, last, index) = loop.one_step, (int(sys.argv.pop(1)) for _ in range(3))

def signalled(work, step, rate):
    if step == last and work.accelerator.process_index == index:
        os.kill(os.getpid(), number)
    return step_of(work, step, rate)

loop.one_step = signalled
main()
"""


def signalled(folder: Path, number: signal.Signals, step: int, process: int) -> list[str]:
    """`distill` that sends itself a signal in this step of one process."""
    program = folder / "signalled.py"
    program.write_text(SIGNALLED)
    return [str(program), *map(str, (int(number), step, process))]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_and_one_process_goes_on(
    train: Trainer, world: Path, ready: Path, whole: Path, tmp_path: Path
) -> None:
    """Nothing but rounding changes; the processes are those of accelerate and its file."""
    shutil.copytree(ready, tmp_path / "runs" / "tiny")
    program = signalled(tmp_path, signal.SIGTERM, step=5, process=1)
    result = two_processes(world, tmp_path / "runs", MIXED, launcher=accelerate("ddp"), program=program)
    assert result.returncode != 0 and "stopped and saved at step 6 of 8" in result.stderr, result.stderr[-3000:]
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "step-000006" / "state.json").exists()
    run = train(MIXED, folder=tmp_path / "runs")
    assert [line["step"] for line in metrics(run)] == list(range(1, 9))
    same_up_to_rounding(run, whole)
    found, expected = (json.loads((one / "training.json").read_text()) for one in (run, whole))
    for name in ("interval", "gain", "acceptance", "most"):
        first, second = (one["best"].pop(name) for one in (found, expected))
        assert first == pytest.approx(second, abs=1e-5)
    assert found == expected


def test_memory_that_runs_out_while_files_are_loaded_is_no_damage(
    train: Trainer, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    def exhausted(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    train()
    shutil.rmtree(tmp_path / "tiny" / "draft")
    with monkeypatch.context() as patch:
        take = set_weights
        turns = iter([take, exhausted])  # the checkpoint's weights, then the best ones
        for name, instead, doing in (
            ("_set_moments", exhausted, "loaded"),
            ("set_weights", lambda *args: next(turns)(*args), "written"),
        ):
            patch.setattr(f"distill.training.saved.{name}", instead)
            train(status=2)
            words = capsys.readouterr().err
            assert f"memory ran out while the draft was {doing}" in words
            assert "delete" not in words and "is damaged" not in words
            patch.undo()
        (tmp_path / "tiny" / "checkpoints" / "step-000008" / "model.pt").write_bytes(b"torn")
        train(status=2)
        assert "is damaged" in capsys.readouterr().err


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
OF_CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried")
FEWER = ("train.micro_batch=1", "train.checkpointing=true")


@pytest.mark.parametrize(
    ("place", "name", "error", "said", "instead"),
    [
        # What is lowered is no part of the stage's key: the same training goes on.
        (loop, "one_step", OF_CPU, ("train.micro_batch (now 4)", "train.checkpointing=true"), FEWER),
        (loop, "set_up", FULL, ("while the draft was loaded", "{base: int4}"), ()),
        (validation, "measure_acceptance", MemoryError(), ("after step 0", "the same command", "MemoryError"), ()),
        (loop, "write_draft", FULL, ("written, after step 8", "the same command"), ()),
    ],
    ids=["in a step", "loading the draft", "in an evaluation", "writing the draft"],
)
def test_memory_that_runs_out_names_what_counts_there(
    train: Trainer,
    monkeypatch: Patch,
    capsys: Capture,
    place: Any,
    name: str,
    error: Exception,
    said: tuple[str, ...],
    instead: tuple[str, ...],
) -> None:
    def exhausted(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(place, name, exhausted)
        train(MIXED, status=2)
    words = capsys.readouterr().err
    assert "Traceback" not in words and "memory ran out" in words and all(word in words for word in said), words
    assert ("micro_batch" in words) == (name == "one_step")
    if instead:
        train(MIXED, *instead)


def test_other_errors_are_not_of_memory() -> None:
    with pytest.raises(RuntimeError, match="else"), memory_explained(lambda: ("", "")):
        raise RuntimeError("something else")


# ── what is refused before the first step ──


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.adapter={rank: 2, base: int4}", "bitsandbytes"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_first_step(
    train: Trainer, override: str, words: str, capsys: Capture, monkeypatch: Patch
) -> None:
    there = importlib.util.find_spec
    absent = ("wandb", "bitsandbytes")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else there(name, *rest))
    run = train(override, status=2)
    said = capsys.readouterr().err
    assert words in said
    assert not list(run.glob("checkpoints/step-*"))


def test_training_runs_on_the_named_device(pretend: Any, monkeypatch: Patch, tmp_path: Path) -> None:
    """One that accelerate does not know."""
    recipe: Any = SimpleNamespace(device="auto", train=Train(steps=1))
    assert make_accelerator(recipe).device == torch.device("pretend")
    recipe.device = "pretend:1"
    assert make_accelerator(recipe).device == torch.device("pretend:1")
    assert torch.accelerator.current_device_index() == 1
    recipe.device = "cpu"
    assert make_accelerator(recipe).device == torch.device("cpu")
    monkeypatch.setattr("distill.training.setup.process_count", lambda: 2)
    monkeypatch.setattr("accelerate.Accelerator", lambda **_: SimpleNamespace(device=torch.device("pretend")))
    with pytest.raises(RunError, match="device is cpu, and the processes were started for pretend"):
        make_accelerator(recipe)
    recipe.device = "pretend:1"
    with pytest.raises(RunError, match="2 processes were started, and each takes another device"):
        make_accelerator(recipe)


# ── adapters ──


@pytest.mark.parametrize("base", ["null", "int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_an_adapter_is_trained_resumed_and_merged(
    train: Trainer, ready: Path, tmp_path: Path, monkeypatch: Patch, base: str
) -> None:
    if base != "null":
        pytest.importorskip("bitsandbytes")
    overrides = (
        f"train.adapter={{rank: 4, base: {base}}}",
        "train.acceptance=null",
    )  # the last weights are taken, which differ from the first
    one = train(*overrides, folder=tmp_path / "one")
    with interrupted_after(5, monkeypatch):
        train(*overrides, status=130, folder=tmp_path / "two")
    two = train(*overrides, folder=tmp_path / "two")
    assert largest_difference(one, two) == 0
    found, before = weights(one), load_file(ready / "cut" / "model.safetensors")
    assert found.keys() == before.keys()
    changed = {name for name in found if not torch.equal(found[name], before[name])}
    assert changed and all(name.endswith("_proj.weight") for name in changed)
    saved = {
        name: torch.load(one / "checkpoints" / "step-000008" / f"{name}.pt", weights_only=True)
        for name in ("model", "optimizer")
    }
    assert saved["model"].keys() == saved["optimizer"]["state"].keys()  # and nothing of the base
    assert all("lora" in name for name in saved["model"])
    load_model(str(one / "draft"), "float32", torch.device("cpu"))


@pytest.mark.parametrize(("variable", "kind"), [("FSDP", "FSDP"), ("DEEPSPEED", "DeepSpeed")])
def test_processes_that_would_spread_the_draft_are_refused(
    world: Path, tmp_path: Path, monkeypatch: Patch, capsys: Any, variable: str, kind: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(f"ACCELERATE_USE_{variable}", "true")
    words = tiny.refused(capsys, "train", world / "recipe.yaml", "--runs", tmp_path)
    assert f"launched for {kind}" in words and "ddp.yaml" in words
    assert not (tmp_path / "tiny" / "corpus").exists()


@pytest.mark.slow
def test_two_processes_from_the_first_question_on_killed_and_resumed(tmp_path: Path) -> None:
    """Killed in a step, and in the end by one process."""
    recipe = question_worlds.build(tmp_path)
    asked = "corpus.sources=[{kind: target, questions: 12, tokens: 24}]"
    overrides = (asked, "answers.new_tokens=8", "answers.group=4", "teacher.shard_blocks=1", "train.save_every=3")
    whole, runs = tmp_path / "whole" / "tiny", tmp_path / "runs"
    with tiny.one_thread():
        assert tiny.call(*command(tmp_path, whole.parent, *overrides)[1:]) == 0
    program = signalled(tmp_path, signal.SIGKILL, 4, process=0)
    assert two_processes(tmp_path, runs, *overrides, launcher=accelerate("ddp"), program=program).returncode
    run = runs / "tiny"
    with tiny.one_thread():
        assert tiny.call("train", recipe, "--runs", run.parent, "--until", "train", *overrides) == 0
    for name in ("questions", "corpus", "answers", "teacher"):
        assert tiny.contents(run / name) == tiny.contents(whole / name), name
    assert [line["step"] for line in metrics(run)] == list(range(1, 9))
    same_up_to_rounding(run, whole)


def test_bfloat16_products_keep_float32_weights(train: Trainer, whole: Path) -> None:
    run = train(MIXED, "train.dtype=bfloat16")
    assert all(value.dtype == torch.float32 for value in weights(run).values())
    assert metrics(run)[0]["loss"] == pytest.approx(metrics(whole)[0]["loss"], rel=0.02)
    saved = torch.load(run / "checkpoints" / "step-000008" / "optimizer.pt", weights_only=True)
    assert all(state["exp_avg"].dtype == torch.float32 for state in saved["state"].values())


def test_every_kind_of_teacher_trains(train: Trainer, tmp_path: Path) -> None:
    """A store of all entries, and whole distributions from stored states: the same training."""
    every = ("teacher.top_k=100000", "teacher.mass=null")
    losses = []
    for number, overrides in enumerate((every, ("teacher.kind=exact",))):
        run = train(*overrides, "--redo", "teacher", "train.steps=4", folder=tmp_path / str(number))
        losses.append([line["loss"] for line in metrics(run)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)  # fp16 in the store


def test_blocks_that_are_shorter_than_what_is_served(finished: Path, world: Path) -> None:
    """The log of a training says so, where the target takes more."""
    log = (finished / "log.txt").read_text()
    recipe = load_recipe(world / "recipe.yaml")
    context = json.loads((world / "target" / "config.json").read_text())["max_position_embeddings"]
    assert f"blocks have 64 tokens, and the target takes up to {context:,}:" in log
    assert loop.beyond_blocks(load_recipe(world / "recipe.yaml", [f"corpus.block={context}"])) == ""
    assert loop.beyond_blocks(recipe) in log
