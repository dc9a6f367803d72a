"""ik_llama.cpp as the library of a GGUF model: the texts of llama.cpp's protocol, and batches checked before use."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("llama_cpp")
pytest.importorskip("ik_llama_cpp", reason="the package ik-llama-cpp-python is not installed")

from distill.decoding.decode import decode_text, plain
from distill.decoding.drafters import ModelDrafter
from distill.decoding.lengths import Fixed
from distill.decoding.rules import Rules
from distill.engines.llama_cpp import model as decoder
from distill.engines.llama_cpp.context import GgufContext
from distill.engines.llama_cpp.model import BatchCheck, GgufModel
from distill.engines.loaded import load_pair
from distill.errors import DataError, RecipeError
from distill.files import write_result
from distill.gguf.library import compiled_with, engine_of
from distill.gguf.writer import export_gguf
from distill.recipe import Gguf, GgufOptions, Sampler, Target

IK = GgufOptions(library="ik", threads=1)
PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def files(gguf_toys: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target in f32 and q8_0, and a draft near it."""
    if "AVX512" in compiled_with(engine_of(IK)):
        pytest.skip("compiled for this processor, ik_llama.cpp rounds more of so small a model: its files are refused")
    target, draft = gguf_toys
    quantised = tmp_path_factory.mktemp("ik") / "q8_0.gguf"
    export_gguf(target.with_suffix(""), quantised, "q8_0")
    return {"f32": target, "q8_0": quantised, "draft": draft}


def apart(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest total variation of two distributions, from logits [n, V]: keys and values are cached in f16."""
    return float((first.softmax(-1) - second.softmax(-1)).abs().sum(-1).max() / 2)


@pytest.fixture
def model(files: dict[str, Path]) -> Iterator[GgufModel]:
    with GgufModel(files["f32"], context=256, max_leaves=8, options=IK) as opened:
        yield opened


def test_logits_are_those_of_llama_cpp(files: dict[str, Path], model: GgufModel) -> None:
    with GgufModel(files["f32"], context=256, options=IK.model_copy(update={"library": None})) as other:
        assert apart(model.extend(PROMPT).full(), other.extend(PROMPT).full()) < 1e-3


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_greedy_texts_are_the_plain_ones(files: dict[str, Path], kind: str) -> None:
    options = Gguf(target=IK)
    with load_pair(Target(model=str(files[kind])), str(files["draft"]), tokens=128, gguf=options) as pair:
        assert pair.backend == "ik"
        expected = plain(pair.target, PROMPT, 64).tokens
        drafter = ModelDrafter(pair.draft, Fixed(4), Sampler(temperature=0), random.Random(0).random)
        found = decode_text(pair.target, drafter, PROMPT, 64, Rules())
    assert found.tokens == expected
    assert any(r.accepted for r in found.rounds)


def test_what_it_cannot_do_is_refused(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="n_gpu_layers with library ik, which computes on the CPU"):
        GgufModel(files["f32"], options=GgufOptions(library="ik", n_gpu_layers=4))
    with pytest.raises(ValueError, match="library ik caches keys in f16 or q8_0, and values in f16"):
        GgufOptions(library="ik", cache_type_v="f32", flash_attn="on")
    from distill.gguf import library

    monkeypatch.setattr(library.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    library.ik_library.cache_clear()
    try:
        with pytest.raises(DataError, match="library ik needs ik-llama-cpp-python") as raised:
            GgufModel(files["f32"], options=IK)
        assert "ik" in str(raised.value.hint)
    finally:
        library.ik_library.cache_clear()


def test_structures_of_another_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are filled and read by their places, and a library of another version has other ones."""
    from ik_llama_cpp import _ctypes_api as declared

    from distill.gguf import library

    library._require_sizes(declared._lib, declared)
    for name in ("llama_model_params", "llama_context_params", "llama_batch"):
        longer = type("longer", (getattr(declared, name),), {"_fields_": [("new", ctypes.c_int64)]})
        with monkeypatch.context() as other, pytest.raises(DataError, match=r"declares longer with \d+ bytes, but its"):
            other.setattr(declared, name, longer)
            library._require_sizes(declared._lib, declared)


# ── Batches against single tokens ──


def test_trees_whose_gaps_hide_tokens_are_found_and_not_used(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ik_llama.cpp does not see tokens behind an empty cell at certain places: gaps are closed, or trees refused. Kept
    branches leave gaps between them up to the end of the context."""
    draws = random.Random(0)
    with GgufModel(files["f32"], context=256, max_leaves=3, options=IK) as model:
        assert model.batches is not None and model.batches.takes_trees and model.max_leaves == 3
        text, found = [7], []
        model.extend(text)
        while len(text) < model.capacity - 8:
            nodes = draws.sample(range(5, 200), 4)
            found += [model.extend(nodes, parents=[-1, 0, 0, 2]).full()[[0, 2, 3]]]
            model.keep([[0, 2, 3]])
            text += [nodes[0], *nodes[2:]]
        model.rollback([1])
        alone = torch.cat([model.extend([token]).full() for token in text[1:]])
    assert (torch.cat(found) - alone).abs().max() < 1e-3
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path))
    monkeypatch.setattr(GgufContext, "close_gaps", lambda self: None)
    with GgufModel(files["f32"], context=256, max_leaves=3, options=IK) as model:
        assert model.max_leaves == 0 and "trees are wrong" in capsys.readouterr().err
        with pytest.raises(ValueError, match="opened without room for trees"):
            model.extend([5, 6], parents=[-1, 0])


def test_a_wrong_kernel_is_found_kept_in_mind_and_worked_around(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path))
    rows, wrong_from, calls = decoder._rows, 32, []

    def kernel(context: object, ids: np.ndarray, start: int) -> np.ndarray:
        calls.append(len(ids))
        logits = rows(context, ids, start)  # type: ignore[arg-type]
        return logits[:, ::-1].copy() if len(ids) >= wrong_from else logits

    monkeypatch.setattr(decoder, "_rows", kernel)
    with GgufModel(files["f32"], context=256, options=IK) as model:
        assert model.batches is not None
        assert model.batches.largest == 31
        assert model._context._library.llama_n_ubatch(model._context._context) == 31
        long = list(range(5, 45))
        together = model.extend(long).full()
        model.rollback([0])
        single = torch.cat([model.extend([token]).full() for token in long])
    assert torch.equal(together, single)
    assert "at most 31 are computed at once" in capsys.readouterr().err
    assert sorted(calls) == [*[1] * 64, 2, 8, 16, 31, 32, 64]

    calls.clear()
    with GgufModel(files["f32"], context=256, options=IK):
        assert not calls, "what was found is kept by file and build"
    (kept,) = (tmp_path / "batches").iterdir()
    with monkeypatch.context() as other:
        other.setattr("distill.gguf.library.compiled_with", lambda library: ["AVX512"])
        with GgufModel(files["f32"], context=256, options=IK):
            assert calls, "another build of the same version is measured, too"
    calls.clear()
    kept.write_text("{}", encoding="utf-8")
    with GgufModel(files["f32"], context=256, options=IK):
        assert calls, "a damaged record is measured again"

    write_result(kept, BatchCheck("ik_llama.cpp", {2: 1.9}, 0.0))
    with pytest.raises(DataError, match=r"computes 2 tokens at once differently from single tokens \(KL 1.9 nats\)"):
        GgufModel(files["f32"], context=256, options=IK)
