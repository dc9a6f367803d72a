"""What the export wrote and compared: gguf/export.json as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Parity:
    """Hugging Face fp32 against GGUF on the same ids; log-probabilities in nats, of the token that really follows.

    `tokenizer_mismatches` holds (index of the text, first differing position). Texts that the Hugging Face normaliser
    changes are compared after it, because llama.cpp never normalises. `kl` is the mean divergence of the GGUF file's
    distributions from those of Hugging Face, in nats.
    """

    positions: int
    top1_agreement: float
    mean_abs_dlogprob: float
    max_abs_dlogprob: float
    tokenizer_texts: int
    tokenizer_mismatches: list[tuple[int, int]]
    kl: float

    @property
    def words(self) -> str:
        """In one line."""
        return (
            f"top-1 {self.top1_agreement:.1%}, KL {self.kl:.2g}, mean |d log p| {self.mean_abs_dlogprob:.5f} over "
            f"{self.positions} positions, {len(self.tokenizer_mismatches)} of {self.tokenizer_texts} texts with other "
            "ids"
        )


@dataclass(frozen=True)
class ExportedFile:
    """One GGUF file: `path` within the run (elsewhere: absolute), `model` draft or target, tensors that another type
    holds because theirs did not fit.

    `parity` is None for a file that was not checked (--no-check); `faults` is what the check found wrong.
    """

    path: str
    model: str
    outtype: str
    bytes: int
    fallback_tensors: int
    parity: Parity | None
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExportReport:
    """gguf/export.json, and gguf/extra/export.json for the files of `distill export-gguf RUN`."""

    command: str
    files: list[ExportedFile]

    @property
    def faults(self) -> list[str]:
        """What the checks found wrong, with the file's name before it."""
        return [f"{file.path}: {fault}" for file in self.files for fault in file.faults]
