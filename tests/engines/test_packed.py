"""Products with a GGUF file's own bits against the gguf package's values, and models that are loaded so."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from distill.engines.torch.packed import KINDS, FileEmbedding, PackedLinear, PackedWeight, kernel
from distill.errors import DataError
from distill.gguf.importing import FileTensor

torch.set_num_threads(1)


def has_kernel() -> bool:
    try:
        return kernel() is not None
    except DataError:
        return False


needs_kernel = pytest.mark.skipif(not has_kernel(), reason="no AVX-512, or no C++ compiler")


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
    embedded = FileEmbedding(stored(tmp_path / "tensor", kind, 37, 512))(torch.tensor([[3, 36], [0, 3]]))
    assert torch.equal(embedded, values(stored(tmp_path / "tensor", kind, 37, 512))[torch.tensor([[3, 36], [0, 3]])].bfloat16())


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_every_number_of_tokens(tmp_path: Path, kind: str) -> None:
    weight = [PackedWeight.read(stored(tmp_path / "one", kind, rows, 256, rows)) for rows in (20, 48)]
    both = PackedWeight([tiles for one in weight for tiles in one.tiles], 256)
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
