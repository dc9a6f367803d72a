"""One acceptance, whatever scores a pair: evaluation, training loss, our decoder, llama.cpp on exported files;
with a whole and with a trimmed head."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import random_prompts

from distill.data.packing import pack
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.loaded import growing_decoder
from distill.engines.torch.blocks import Packed, hidden_states
from distill.engines.torch.hugging_face import load_model, load_target
from distill.gguf.writer import export_gguf
from distill.measuring.evaluation import Measured, block_values, sum_by_document, text_values
from distill.recipe import Sampler, Target
from distill.teacher.distributions import DenseTeacher, Head
from distill.training.learner import Columns, Learner

CPU = torch.device("cpu")


def acceptance(measured: Measured) -> float:
    return measured.divergences().acceptance_sampling.mean


@torch.no_grad()
def by_loss(target: Any, draft: Any, blocks: Packed, vocabulary: int, kept: list[int] | None) -> float:
    """What the log of a training step says of blocks: the same forward passes and the same loss, without a step."""
    states = hidden_states(target, blocks)[blocks.mask]
    learner = Learner(draft, Columns(vocabulary, kept, CPU), chunk=max(1, len(states) // 2))
    settings = {"forward_kl": 1.0}
    sums = learner(blocks, DenseTeacher(states, Head.of(target, vocabulary)), settings)[1]
    return float(sums["acceptance"]) / int(blocks.mask.sum())


@pytest.mark.parametrize("trimmed", [False, True])
def test_one_acceptance(trimmed: bool, copied: Path, world: Path, tmp_path: Path) -> None:
    """At temperature 1, nothing truncated: the losses know nothing else."""
    folders = {"target": world / "target", "draft": copied / "draft"}
    size = json.loads((folders["draft"] / "config.json").read_text())["vocab_size"]
    kept = [*range(0, size, 2)] if trimmed else None
    whole = load_model(str(folders["draft"]), "float32", CPU)  # llama.cpp has the whole head
    if kept is not None:
        (folders["draft"] / "kept_tokens.json").write_text(json.dumps({"kept": kept, "vocabulary": size}))
    target = load_target(Target(model=str(folders["target"])), CPU)
    draft = load_model(str(folders["draft"]), "float32", CPU)
    blocks = pack([(ids, 2) for ids in random_prompts(9, size, seed=3)], 64, split_long=False)
    score: dict[str, Callable[[Any, Any], float]] = {
        "evaluation": lambda big, small: acceptance(
            sum_by_document(block_values(big, {"d": small}, blocks, Sampler(), size))["d"]
        ),
        "texts": lambda big, small: acceptance(
            sum_by_document(text_values(big, {"d": small}, blocks, Sampler(), size, ""))["d"]
        ),
    }
    reference = score["evaluation"](target, draft)
    assert 0.05 < reference < 0.999
    assert by_loss(target, whole, blocks, size, kept) == pytest.approx(reference, abs=1e-4)
    decoders = [growing_decoder(model, size) for model in (target, draft)]
    assert score["texts"](*decoders) == pytest.approx(reference, abs=1e-4)
    assert score["evaluation"](target, target) == pytest.approx(1, abs=1e-5)
    of_whole = score["evaluation"](target, whole)
    assert trimmed == (abs(of_whole - reference) > 1e-2)
    with ExitStack() as stack:
        for name, folder in folders.items():
            export_gguf(folder, tmp_path / f"{name}.gguf", "f16")
        big, small, same = (
            stack.enter_context(GgufModel(tmp_path / f"{name}.gguf", context=64)) for name in (*folders, "target")
        )
        assert score["texts"](big, small) == pytest.approx(of_whole, abs=5e-3)
        assert score["texts"](big, same) == pytest.approx(1, abs=1e-5)
