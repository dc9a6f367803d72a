"""What the export wrote and compared: gguf/export.json as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parity:
    """Hugging Face fp32 against GGUF on the same ids; log-probabilities in nats, of the token that really follows.

    `tokenizer_mismatches` holds (index of the text, first differing position). Texts that the Hugging Face normaliser
    changes are compared after it, because llama.cpp never normalises; `tokenizer_normalized` counts them. `kl` is the
    mean divergence of the GGUF file's distributions from those of Hugging Face, in nats.
    """

    positions: int
    top1_agreement: float
    mean_abs_dlogprob: float
    max_abs_dlogprob: float
    tokenizer_texts: int
    tokenizer_mismatches: list[tuple[int, int]]
    tokenizer_normalized: int
    kl: float | None = None  # older results have none


@dataclass(frozen=True)
class ExportedFile:
    """One GGUF file: `path` within the run, `model` draft or target, tensors that another type
    holds because theirs did not fit."""

    path: str
    model: str
    outtype: str
    bytes: int
    fallback_tensors: int
    parity: Parity | None


@dataclass(frozen=True)
class ExportReport:
    """gguf/export.json."""

    command: str
    files: list[ExportedFile]
