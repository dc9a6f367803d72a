"""The texts of a run: corpus/summary.json and answers/manifest.json as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TextCount:
    """Texts of one class and mode, and their tokens."""

    label: str
    mode: str
    texts: int
    tokens: int


@dataclass(frozen=True)
class SplitTexts:
    """A split of the corpus: documents, tokens of given text kept (by class and by text, prompt or answer), prompts."""

    documents: int
    tokens: int
    blocks: int
    prompts: int
    given: dict[str, dict[str, int]] = field(default_factory=dict)
    asked: list[TextCount] = field(default_factory=list)


@dataclass(frozen=True)
class CorpusTexts:
    """corpus/summary.json; `dropped` counts documents and conversations by reason."""

    dropped: dict[str, int]
    train: SplitTexts
    validation: SplitTexts
    test: SplitTexts


@dataclass(frozen=True)
class AnswerTexts:
    """What answers/manifest.json says of the target's own answers to train prompts."""

    answers: int = 0
    answer_tokens: int = 0
    not_ended: int = 0
    writer: str = ""
    dropped: dict[str, int] = field(default_factory=dict)
    by_class: list[TextCount] = field(default_factory=list)
