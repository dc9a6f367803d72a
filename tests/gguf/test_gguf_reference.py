"""Our GGUF files against those of llama.cpp's own converter: every field, and every tensor bit for bit.

tests/gguf_reference.json is made by scripts/gguf_reference.py, which says how. The differences that we mean are listed
here and in docs/export.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import TOKENIZERS

from distill.gguf.writer import export_files

needs_tokenizers = pytest.mark.skipif(
    not (TOKENIZERS / "llama-2").is_dir(), reason=f"{TOKENIZERS} is not here; set DISTILL_SHARED"
)


script = tiny.script("gguf_reference")
REFERENCE = json.loads(script.REFERENCE.read_text(encoding="utf-8"))
# Tokenizers that other cases have too, and one that takes ten seconds.
SLOW = {"smollm3", "qwen3", "phi-3-long", "phi-3-partial", "mistral", "llama-3", "qwen2-yarn", "qwen3-yarn"}
# Fields that only we write, and why.
OURS = {
    "distill.version": "who wrote the file",
    "tokenizer.ggml.add_bos_token": "llama.cpp's default differs by kind of tokenizer",
    "tokenizer.ggml.add_eos_token": "likewise",
}
# Fields that only the converter writes.
THEIRS = {"tokenizer.ggml.add_sep_token": "false, which is llama.cpp's default"}


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The differences that are not listed above."""
    found = [f"{key} is missing" for key in theirs if key not in ours and key not in THEIRS]
    found += [f"{key} is ours alone: {ours[key]}" for key in ours if key not in theirs and key not in OURS]
    found += [f"{key}: {ours[key]} for {theirs[key]}" for key in ours if key in theirs and ours[key] != theirs[key]]
    return found


def test_every_case_has_a_reference() -> None:
    assert list(REFERENCE) == list(script.CASES)
    assert all(set(REFERENCE[name]) == set(script.OUTTYPES) for name in REFERENCE)


@needs_tokenizers
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in script.CASES]
)
def test_equals_the_converter(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    script.build(name, TOKENIZERS, folder)
    for report in export_files(folder, {tmp_path / f"{outtype}.gguf": outtype for outtype in script.OUTTYPES}):
        ours, theirs = script.describe(report.path), REFERENCE[name][report.outtype]
        assert compare(ours["fields"], REFERENCE[name]["f16"]["fields"] | theirs["fields"]) == []
        assert compare(ours["tensors"], theirs["tensors"]) == []
