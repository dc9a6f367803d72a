"""The evaluation's KL and agreement against llama-perplexity's own, on the same GGUF files and the same tokens.

bash scripts/build_llama_cpp.sh
DISTILL_LLAMA_BIN=build/llama.cpp/bin pytest -m slow tests/measuring/test_llama_perplexity.py
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import torch

from distill.data.packing import pack
from distill.engines.llama_cpp.model import GgufModel
from distill.gguf.head import open_head
from distill.measuring.evaluation import sum_by_document, text_values
from distill.recipe import Sampler

FOLDER = os.environ.get("DISTILL_LLAMA_BIN", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="DISTILL_LLAMA_BIN names no build of llama.cpp"),
]


class Figures(NamedTuple):
    """Mean KL in nats, and the share of positions whose likeliest token is the same."""

    kl: float
    same_top: float


def theirs(target: Path, draft: Path, text: Path, window: int, chunks: int, base: Path) -> Figures:
    """What llama-perplexity prints, once the target's distributions are in the file `base`."""
    common = [str(Path(FOLDER) / "llama-perplexity"), "-c", str(window), "-b", str(window), "-t", "2"]
    common += ["--kl-divergence-base", str(base)]
    of_text = ["-m", str(target), "-f", str(text), "--chunks", str(chunks)]
    subprocess.run([*common, *of_text], check=True, capture_output=True, timeout=600)
    done = subprocess.run(
        [*common, "-m", str(draft), "--kl-divergence"], check=True, capture_output=True, text=True, timeout=600
    )
    said = done.stdout + done.stderr
    kl, top = re.search(r"Mean\s+KLD:\s+(-?[\d.]+)", said), re.search(r"Same top p:\s+([\d.]+)", said)
    assert kl is not None and top is not None, said[-2000:]
    return Figures(float(kl[1]), float(top[1]) / 100)


def ours(target: Path, draft: Path, base: Path) -> Figures:
    """The evaluation's figures on the tokens in `base`, which scores the second half of each window."""
    window, _, chunks = numpy.fromfile(base, "<u4", 3, offset=8).tolist()
    tokens = numpy.fromfile(base, "<i4", window * chunks, offset=20).reshape(chunks, window)
    with GgufModel(target, context=window) as big, GgufModel(draft, context=window) as small:
        told = open_head(target).values
        if told.get("tokenizer.ggml.add_bos_token"):  # which then stands in the place of each window's first token
            tokens[:, 0] = told["tokenizer.ggml.bos_token_id"]
        blocks = pack([(row.tolist(), window // 2 + 1) for row in tokens], window, False)
        assert int(blocks.mask.sum()) == chunks * (window - 1 - window // 2)
        values = text_values(big, {"draft": small}, blocks, Sampler(), big.vocabulary_size, "windows")
        found = sum_by_document(values)["draft"].divergences()
    return Figures(found.forward_kl.mean, found.acceptance_greedy.mean)


def compared(target: Path, draft: Path, text: Path, window: int, chunks: int, scratch: Path) -> tuple[Figures, Figures]:
    base = scratch / "base.bin"
    return theirs(target, draft, text, window, chunks, base), ours(target, draft, base)


def test_kl_is_llama_perplexity_s(gguf_toys: tuple[Path, Path], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text(encoding="utf-8") * 3, encoding="utf-8")
    other, own = compared(*gguf_toys, text, 128, 12, tmp_path)
    assert other.kl > 0.005 and own.kl == pytest.approx(other.kl, rel=0.01)
    assert own.same_top == pytest.approx(other.same_top, abs=0.005)
    same, own = compared(gguf_toys[0], gguf_toys[0], text, 128, 4, tmp_path)
    assert same.kl == pytest.approx(0, abs=1e-4) and own.kl == pytest.approx(0, abs=1e-6) and own.same_top == 1
