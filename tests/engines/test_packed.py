"""Products with a GGUF file's own bits against the gguf package's values, and models that are loaded so."""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
import torch
from toys import save_toy, speculative, toy, toy_tokenizer

from distill.decoding.decode import plain
from distill.engines import loaded
from distill.engines.loaded import BatchedTorchModel, growing_decoder, load_pair, settled_decoding
from distill.engines.torch.hugging_face import encode_text, load_model, load_tokenizer
from distill.engines.torch.products import (
    exact_logits,
    file,
    kernel,
    kernel_fault,
    load_in_bits,
    load_packed,
    models,
    packed,
)
from distill.engines.torch.products.file import FOUR_BITS, four_bit_linear
from distill.engines.torch.products.linear import FourBitLinear, has_four_bits
from distill.engines.torch.products.models import pack
from distill.engines.torch.products.packed import KINDS, FileEmbedding, PackedLinear, PackedWeight
from distill.engines.torch.static import StaticTorchModel
from distill.errors import RecipeError, RunError
from distill.gguf.importing import FileTensor, read_import, write_import
from distill.gguf.writer import export_gguf
from distill.measuring import identity
from distill.progress import warn_once
from distill.recipe import Adapter, PyTorch, Target
from distill.recipe.target import parse_section
from distill.training.setup import attach

CPU = torch.device("cpu")

torch.set_num_threads(1)


needs_kernel = pytest.mark.skipif(bool(kernel_fault()), reason=kernel_fault())
BUILT = "" if kernel_fault() else kernel.library()._name


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel is looked for anew in a test. Later tests have the one from before, which takes seconds to compile."""
    monkeypatch.setattr(kernel, "_load", functools.cache(kernel._load.__wrapped__))
    kernel_fault.cache_clear()
    yield
    kernel_fault.cache_clear()


def stored(place: Path, kind: str, rows: int, columns: int, seed: int = 0, heads: int = 0) -> FileTensor:
    """A tensor of random blocks, whose scales are of the sizes that files have."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    halves = {"Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}.get(kind, [0])
    for start in halves:
        scale = random.uniform(1e-4, 1e-2, blocks.shape[:2]) * random.choice([-1, 1], blocks.shape[:2])
        blocks[..., start : start + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    place.write_bytes(b"before" + blocks.tobytes())
    return FileTensor(place, "blk.0.x", number, 6, (rows, columns), heads)


def values(source: FileTensor) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([*source.parts()])).double()


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_files(tmp_path: Path, kind: str) -> None:
    """Each of them once, within its bfloat16 rounding; rows that fill no tile, and rows of heads in another order."""
    for rows, heads in ((37, 0), (48, 3)):
        source = stored(tmp_path / "tensor", kind, rows, 512, heads=heads)
        exact = values(source)
        found = PackedLinear(PackedWeight.read(source), None)(torch.eye(512, dtype=torch.bfloat16)).T.double()
        rounding = torch.finfo(torch.bfloat16).eps / 2 * exact.abs() + 1e-6 * exact.abs().max()
        assert found.shape == exact.shape and ((found - exact).abs() <= rounding).all()
    source, ids = stored(tmp_path / "tensor", kind, 37, 512), torch.tensor([[3, 36], [0, 3]])
    assert torch.equal(FileEmbedding(source)(ids), values(source)[ids].bfloat16())


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_every_number_of_tokens(tmp_path: Path, kind: str) -> None:
    weight = [PackedWeight.read(stored(tmp_path / "one", kind, rows, 256, rows)) for rows in (20, 48)]
    both = weight[0].joined(weight[1:])
    exact = torch.cat([values(stored(tmp_path / "one", kind, rows, 256, rows)) for rows in (20, 48)])
    numbers = torch.Generator().manual_seed(1)
    bias = torch.randn(68, generator=numbers).bfloat16()
    product = PackedLinear(both, bias)
    for count in range(1, 18):
        x = torch.randn(count, 256, generator=numbers).bfloat16()
        expected = torch.nn.functional.linear(x.double(), exact, bias.double())
        # Sums in fp32 in any order, of levels and zeros apart, then one rounding.
        sums = torch.nn.functional.linear(x.double().abs(), exact.abs() + exact.abs().amax(1, keepdim=True))
        allowed = 300 * torch.finfo(torch.float32).eps * sums + torch.finfo(torch.bfloat16).eps * expected.abs() / 2
        assert ((product(x).double() - expected).abs() <= allowed + 1e-30).all(), count
        zero = torch.zeros(count, 68).bfloat16()
        assert torch.equal(product(x, zero), product(x)) and not product(x, zero, "mul").any()
    activated = PackedLinear(both, bias, "silu")(x.view(1, count, 256))
    assert torch.equal(activated[0], torch.nn.functional.silu(product(x)))


@needs_kernel
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_within_half_a_level(bits: int) -> None:
    """Of the range of each 32 values, and of the half precision of their scale and zero; constant and tiny groups."""
    weight = torch.randn(37, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight[3, :32], weight[4, 32:64] = 0, -0.75
    weight[5] *= 1e-3  # whose scales are subnormal halves
    groups = weight.double().unflatten(1, (-1, 32))
    reach = groups.abs().amax(-1) / 127 if bits == 8 else (groups.amax(-1) - groups.amin(-1)) / 15
    allowed = (reach / 2 + groups.abs().amax(-1) / 256 + 1e-7).repeat_interleave(32, 1)
    found = PackedLinear(PackedWeight.rounded(weight, bits), None)(torch.eye(96, dtype=torch.bfloat16)).T.double()
    assert found.shape == weight.shape and ((found - weight.double()).abs() <= allowed).all()


needs_operators = pytest.mark.skipif(not has_four_bits(CPU), reason="torch has no operators for 4 bits")


@needs_operators
@pytest.mark.parametrize("kind", FOUR_BITS)
def test_torchs_operators_read_the_same_values(tmp_path: Path, kind: str) -> None:
    """But for their scales and zeros, which are bfloat16."""
    numbers = torch.Generator().manual_seed(1)
    for rows, heads in ((37, 0), (48, 3)):
        source = stored(tmp_path / "tensor", kind, rows, 512, heads=heads)
        exact, eye = values(source), torch.eye(512, dtype=torch.bfloat16)
        bias = torch.randn(rows, generator=numbers).bfloat16()
        found = (four_bit_linear(source, None, CPU)(eye)).T.double()
        reach = exact.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
        assert found.shape == exact.shape and ((found - exact).abs() <= reach / 64).all()
        assert float((found - exact).std() / exact.std()) < 5e-3
        x = torch.randn(2, 3, 512, generator=numbers).bfloat16()
        own = four_bit_linear(source, bias, CPU)(x).double()
        expected = torch.nn.functional.linear(x.double(), found, bias.double())
        assert float((own - expected).abs().max()) < 0.01 * float(expected.abs().max())


# ── models ──


def saved(folder: Path, kind: str, outtype: str = "q8_0", **changes: Any) -> Path:
    tokenizer = toy_tokenizer()
    model = toy(kind, len(tokenizer), **{"hidden_size": 64, "intermediate_size": 96} | changes)
    return export_gguf(save_toy(model, tokenizer, folder / kind), folder / f"{kind}.gguf", outtype).path


def kl(exact: torch.Tensor, found: torch.Tensor) -> float:
    p, q = exact.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@needs_kernel
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "granite"])
def test_models_of_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Reordered heads, tied heads, biases, shifted norms and fused tensors: as near to float32 as bfloat16 weights."""
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "MIN_VALUES", 1)
    changes: dict[str, Any] = {
        "phi3": {"sliding_window": None},
        "gemma3": {"query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    }
    place = str(saved(tmp_path, kind, **changes.get(kind, {})))
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
    exact, rounded = (growing_decoder(load_model(place, dtype, CPU)) for dtype in ("float32", "bfloat16"))
    model = growing_decoder(load_packed(place))
    assert not [one for one in model.model.modules() if type(one) is torch.nn.Linear]
    own = model.extend(ids).full()
    logits = exact.extend(ids).full()
    assert kl(logits, own) <= 4 * kl(logits, rounded.extend(ids).full()) + 1e-5
    alone = []
    model.rollback([0])
    for token in ids:  # one by one
        alone.append(model.extend([token]).full())
    assert kl(own, torch.cat(alone)) <= 4 * kl(logits, own) + 1e-5
    model.rollback([4])
    if model.max_leaves:
        tree = model.extend([9, 5, 9], parents=[-1, -1, 1]).full()  # the path 5, 9 is the text
        assert kl(own[4:6], tree[1:]) <= 4 * kl(logits, own) + 1e-4
        model.keep([[1, 2]])
        assert kl(own[6:], model.extend(ids[6:]).full()) <= 4 * kl(logits, own) + 1e-4


@needs_kernel
@pytest.mark.parametrize(("kind", "width"), [("llama", 32), ("qwen2", 64), ("qwen3", 160)])
def test_layers_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, width: int) -> None:
    """Heads that share keys, biases, norms of heads; chains, trees, roll-backs, a cache that grows, rows of a batch."""
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "MIN_VALUES", 1)
    own = {"hidden_size": 4 * width} if kind == "qwen2" else {"head_dim": width}
    place = str(saved(tmp_path, kind, max_position_embeddings=400, **own))
    model = growing_decoder(load_packed(place))
    step = model.model.model.in_one_call
    calls, inner = list[int](), type(step).__call__
    monkeypatch.setattr(
        type(step), "__call__", lambda self, x, *rest: calls.append(x.shape[1]) or inner(self, x, *rest)
    )
    numbers = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 50, (300,), generator=numbers).tolist()
    with torch.inference_mode():
        exact = load_model(place, "float32", CPU).double()(input_ids=torch.tensor([ids])).logits[0]
    near = kl(exact[:64], growing_decoder(load_model(place, "bfloat16", CPU)).extend(ids[:64]).full()) * 4 + 1e-5
    found = [model.extend(ids[:8]).full()]
    for first, last in ((8, 9), (9, 11), (11, 20), (20, 64), (64, 128), (128, 290)):
        found.append(model.extend(ids[first:last]).full())
    assert calls == [1, 2, 9, 44, 64] and model.size > 256  # longer steps are prompts
    assert kl(exact[:290], torch.cat(found)) <= near
    model.rollback([100])
    tree = model.extend([9, ids[100], ids[101], 7], parents=[-1, -1, 1, 1]).full()
    model.keep([[1, 2]])
    again = torch.cat([tree[1:3], model.extend(ids[102:104]).full()])
    assert kl(exact[100:104], again) <= near
    rows = StaticTorchModel(model.model, rows=2)
    rows.extend([*ids[:5], *ids[:9]], [5, 9])
    assert kl(exact[[5, 6, 9, 10]], rows.extend([*ids[5:7], *ids[9:11]], [2, 2]).full()) <= near
    assert calls[-1] == 2


@needs_kernel
def test_pairs_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts leave the text as it is; rows of a batch and a static cache; no folder of weights is written."""
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    place = str(saved(tmp_path, "qwen2", "q4_1"))
    settings = PyTorch(target_weights="file", draft_weights="file")
    with load_pair(Target(model=place), place, pytorch=settings) as pair:
        assert pair.backend == "pytorch"
        assert pair.pytorch.suffix == ", target in its file's bits, draft in its file's bits"
        assert not [*tmp_path.glob("cache/imported/*/*.safetensors")]
        text = plain(pair.target, [3, 1, 4], 24).tokens
        assert speculative(pair.target, pair.draft, [3, 1, 4], 24, 3).tokens == text
        pair.target.rollback([0])
        rows = BatchedTorchModel(pair.target.model, 2).extend([3, 1, 4, 9, 2], [3, 2]).full()
        torch.testing.assert_close(rows[:3], pair.target.extend([3, 1, 4]).full(), atol=0.1, rtol=0.1)
    with load_pair(Target(model=place), pytorch=PyTorch(target_weights="file", static=True), tokens=40) as pair:
        assert plain(pair.target, [3, 1, 4], 24).tokens == text


@needs_kernel
def test_auto_takes_the_bits_of_files_that_pytorch_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where most weights have a kernel here; files that llama.cpp decodes, and small ones, are decoded as before."""
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    place, folder = str(saved(tmp_path, "qwen2")), str(tmp_path / "qwen2")

    def said() -> str:
        warn_once.cache_clear()
        return capsys.readouterr().err

    small, plainest = Target(model=place, dtype="float32"), PyTorch(draft_weights=None)
    big = Target(model=str(export_gguf(tmp_path / "qwen2", tmp_path / "f16.gguf", "f16").path), dtype="float32")
    said()
    assert settled_decoding(small, folder, plainest) == (small, plainest) and not said()
    monkeypatch.setattr(loaded, "MIN_WEIGHTS", 1)
    for draft in (None, place):
        assert settled_decoding(small, draft, plainest) == (small, plainest) and not said()
    expected = small.model_copy(update={"dtype": "bfloat16"}), plainest.model_copy(update={"target_weights": "file"})
    assert settled_decoding(small, folder, plainest) == expected and "its own bits (100% have a kernel)" in said()
    assert settled_decoding(small, place, PyTorch(draft_weights="file"))[1].target_weights == "file"
    for target, settings, reason in (
        (big, plainest, "float32: 0% of its weights have a kernel"),
        (small, PyTorch(static=True, compile=True), "float32: quantise, shard and compile"),
        (small.model_copy(update={"quantise": "int4"}), plainest, "float32: quantise, shard and compile"),
    ):
        said()
        assert settled_decoding(target, folder, settings) == (target, settings) and reason in said()
    with load_pair(small, folder, pytorch=plainest) as pair:
        assert pair.pytorch.suffix == ", target in its file's bits" and pair.options["target_weights"] == "file"
    said()

    monkeypatch.setattr(loaded, "kernel_fault", lambda: "this processor has no avx512bw")
    with load_pair(small, folder, pytorch=plainest) as pair:
        assert pair.backend == "pytorch" and not pair.pytorch.suffix and pair.target.model.dtype == torch.float32
    assert "decodes in float32: this processor has no avx512bw" in said()


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_the_kl_of_bits_is_that_to_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of the file's own values: those that an import writes in float32; measured once, without a folder of weights."""
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    changes = {"query_pre_attn_scalar": 8, "tie_word_embeddings": True} if kind == "gemma3" else {}
    place = saved(tmp_path, kind, "q4_1", **changes)
    write_import(read_import(place), tmp_path / "float32")
    folder = load_model(str(tmp_path / "float32"), "float32", CPU)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [8, 9, 7, 9, 3, 0, 0, 0]])
    with torch.inference_mode():
        torch.testing.assert_close(exact_logits(str(place), ids), folder(ids).logits, atol=1e-5, rtol=1e-5)
    apart = []
    decoder = growing_decoder(load_in_bits(str(place), CPU))
    for text in identity.TEXTS:
        prompt = encode_text(load_tokenizer(str(place)), text)
        new = plain(decoder, prompt, identity.COMPARED[1]).tokens
        read = [growing_decoder(folder), decoder]
        for one in read:
            one.rollback([0])
        rows = [one.extend([*prompt, *new[:-1]]).full()[len(prompt) - 1 :] for one in read]
        apart += [kl(exact, bits) for exact, bits in zip(*rows, strict=True)]
    found = identity.kl_of_bits(str(place))
    assert found.positions == len(apart) == 256 and found.kl == pytest.approx(np.mean(apart), rel=0.05)
    assert f"KL {found.kl:.2g} nats from the file in float32, 256 positions" == found.words
    monkeypatch.setattr(identity, "growing_decoder", None)
    assert identity.kl_of_bits(str(place)) == found and not [*tmp_path.glob("cache/imported/*/*.safetensors")]


def test_without_a_kernel_it_is_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forgotten: None
) -> None:
    """Each reason is found once in a process, and a compiler that hangs is ended with its children."""
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    place = str(saved(tmp_path, "qwen2"))
    expected = growing_decoder(load_model(place, "bfloat16", CPU)).extend([3, 1, 4]).full()
    compiler = tmp_path / "compiler"
    for script, reason in (
        (None, "this processor has no avx512bw"),
        ("", "there is no C++ compiler"),
        ("echo no such flag >&2; exit 1", f"{compiler} does not compile kernel.cpp: no such flag"),
        ("sleep 60 & echo $! >> $0.children; wait", f"{compiler} did not compile kernel.cpp within 2s"),
        ('touch "${!#}"', "cannot be loaded"),
    ):
        kernel._load.cache_clear()
        kernel_fault.cache_clear()
        features = {"avx2"} if script is None else {*kernel.NEEDED}
        monkeypatch.setattr(kernel, "cpu_features", lambda features=features: features)
        if script:
            compiler.write_text(f"#!/bin/bash\n{script}\n")
            compiler.chmod(0o755)
        monkeypatch.setattr(kernel.shutil, "which", lambda _, script=script: str(compiler) if script else None)
        monkeypatch.setattr(kernel, "COMPILE_SECONDS", 1.5 if script and "sleep" in script else 60)
        with load_pair(Target(model=place), pytorch=PyTorch(target_weights="file")) as pair:
            assert torch.equal(pair.target.extend([3, 1, 4]).full(), expected)
        said = capsys.readouterr().err
        assert "decoded in bfloat16, not in its own bits: " in said and reason in said
    children = [int(line) for line in (tmp_path / "compiler.children").read_text().split()]
    assert len(children) == 1 and not _runs(children[0])


def _runs(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@needs_operators
@pytest.mark.parametrize("tied", [False, True])
def test_without_ours_torchs_operators_take_four_bits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tied: bool,
    forgotten: None,
) -> None:
    """As on an accelerator; where torch has none either, bfloat16, with both reasons."""
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    place, ids = str(saved(tmp_path, "qwen2", "q4_1", tie_word_embeddings=tied)), [3, 1, 4, 1, 5, 9, 2, 6]
    exact, rounded = (
        growing_decoder(load_model(place, kind, CPU)).extend(ids).full() for kind in ("float32", "bfloat16")
    )
    monkeypatch.setattr(kernel, "cpu_features", lambda: {"avx2"})
    model = load_in_bits(place, CPU)
    assert "in its own bits by torch's operators: this processor has no avx512" in capsys.readouterr().err
    assert sum(isinstance(one, FourBitLinear) for one in model.modules()) >= 14
    decoder = growing_decoder(model)
    assert kl(exact, decoder.extend(ids).full()) <= 4 * kl(exact, rounded) + 1e-5
    decoder.rollback([3])
    assert kl(exact[3:], decoder.extend(ids[3:]).full()) <= 4 * kl(exact, rounded) + 1e-5
    monkeypatch.setattr(file, "has_four_bits", lambda _: False)
    assert torch.equal(growing_decoder(load_in_bits(place, CPU)).extend(ids).full(), rounded)
    assert "has no avx512bw; torch has no operator for 4 bits on cpu" in capsys.readouterr().err


@needs_kernel
def test_types_and_widths_without_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of 48 are no groups of 32, so that the file has them in f16: bfloat16 here, and said with their share."""
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    place, ids = str(saved(tmp_path, "qwen2", "q4_1", hidden_size=48)), [3, 1, 4, 1, 5, 9]
    exact, logits = (
        growing_decoder(load_model(place, kind, CPU)).extend(ids).full() for kind in ("float32", "bfloat16")
    )
    capsys.readouterr()
    assert kl(exact, growing_decoder(load_in_bits(place, CPU)).extend(ids).full()) <= 4 * kl(exact, logits) + 1e-5
    said = capsys.readouterr().err
    assert "of the weights (F16) have no kernel in the file's bits and are bfloat16" in said and "87%" in said
    monkeypatch.setattr(file, "FORMS", {"Q4_0": kernel.FORMS["Q4_0"]})
    monkeypatch.setattr(file, "FOUR_BITS", {})
    assert torch.equal(growing_decoder(load_in_bits(place, CPU)).extend(ids).full(), logits)
    assert "not in its own bits: there are kernels for Q4_0, and none of its weights" in capsys.readouterr().err


@needs_kernel
@pytest.mark.parametrize("fault", [None, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_stops_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: int | None,
    forgotten: None,
) -> None:
    """The kernel is compiled for this process alone, and leaves no file."""
    monkeypatch.setattr(kernel, "_compile", lambda command: shutil.copy(BUILT, command[-1]))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / ("cache" if fault else "file")))
    if fault:
        inner = Path.mkdir

        def mkdir(self: Path, *arguments: Any, **options: Any) -> None:
            if self.name == "kernels":
                raise OSError(fault, os.strerror(fault), str(self))
            inner(self, *arguments, **options)

        monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(kernel.tempfile, "tempdir", str(tmp_path / "scratch"))
    inner(tmp_path / "scratch") if fault else (tmp_path / "scratch").mkdir()
    assert not kernel_fault() and not [*(tmp_path / "scratch").iterdir()]
    assert "not kept for later commands" in capsys.readouterr().err


@needs_kernel
def test_a_kernel_that_multiplies_wrongly_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forgotten: None
) -> None:
    """The products of one type, and the layers in one call: torch's operators take their places."""
    monkeypatch.setattr(kernel, "_load", functools.cache(lambda: kernel._opened(Path(BUILT))))
    inner = PackedLinear.forward

    def wrong(self: PackedLinear, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return inner(self, x, *rest) * (1.5 if self.weight.tiles[0].kind == "Q5_K" else 1)

    monkeypatch.setattr(PackedLinear, "forward", wrong)
    assert kernel_fault() == "the compiled kernel multiplies Q5_K wrongly"
    monkeypatch.undo()
    kernel_fault.cache_clear()
    monkeypatch.setattr(models, "MIN_VALUES", 1)
    draft = toy("llama", hidden_size=64, intermediate_size=96, head_dim=32).bfloat16()
    assert pack(draft, "int8").model.in_one_call is not None
    step = packed.PackedStep.__call__
    monkeypatch.setattr(packed.PackedStep, "__call__", lambda self, hidden, *rest: -step(self, hidden, *rest))
    warn_once.cache_clear()
    assert pack(draft, "int8").model.in_one_call is None
    assert "the kernel's layers differ from torch's operators by" in capsys.readouterr().err


@needs_kernel
def test_the_door_to_the_kernel() -> None:
    """What it would read beyond the end of, or as another type, is a ValueError before any address is passed."""
    weight = PackedWeight.rounded(torch.randn(48, 64).bfloat16(), 8)
    product, x = PackedLinear(weight, None), torch.randn(3, 64).bfloat16()
    assert torch.equal(product(x.float()), product(x)), "an input is converted"
    wrong = {
        "an input [3, 64]": lambda: product(x[:, :32]),
        "an input [2, 64]": lambda: product(torch.randn(2, 96)),
        "an added tensor [3, 48]": lambda: product(x, torch.zeros(3, 47).bfloat16()),
        "an added tensor [3, 48] of torch.bfloat16": lambda: product(x, torch.zeros(3, 48)),
        "a bias [48]": lambda: PackedLinear(weight, torch.zeros(47)),
        "a multiple of 32 numbers, got 80": lambda: replace(weight.tiles[0], columns=80),
        "a multiple of 256 numbers": lambda: replace(weight.tiles[0], kind="Q4_K"),
        "Q8_0 tiles of": lambda: replace(weight.tiles[0], rows=49),
        "rows of one weight have different lengths": lambda: weight.joined([PackedWeight.rounded(x[:, :32], 8)]),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel_fault():
        monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
        with pytest.raises(RunError, match=r"qwen2\.gguf is held in its file's bits, and adapters need floating"):
            attach(load_packed(str(saved(tmp_path, "qwen2"))), Adapter())
    folder = str(tmp_path)
    for settings, target, draft, message in (
        (PyTorch(target_weights="file"), Target(model=folder), None, "target_weights: file is for a GGUF file"),
        (PyTorch(draft_weights="file"), Target(model=folder), folder, "draft_weights: file is for a GGUF file"),
        (PyTorch(target_weights="file"), Target(model="a.gguf", quantise="int4"), None, "goes with neither"),
    ):
        with pytest.raises(RecipeError, match=message):
            load_pair(target, draft, pytorch=settings)
    with pytest.raises(RecipeError, match="are not compiled"):
        parse_section(PyTorch, {"target_weights": "file", "static": True, "compile": True})
