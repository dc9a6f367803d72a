"""The texts of a run: the summaries of stages questions, corpus and answers as dataclasses."""

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
class AskedQuestions:
    """The questions that the target wrote for one source of kind target.

    Of `asked` texts `usable` passed the filters, and the first `kept` of them are used; `wanted` were requested.
    `dropped` counts the others by reason, `turns` conversations by their user's turns, `dropped_turns` further turns by
    reason.
    `median_tokens` and `most_tokens` are the lengths that half and nine tenths of the questions do not exceed,
    `distinct` the shares of different 1-, 2- and 3-grams of words among all, `repeated` the share of texts asked for
    that repeat others or nearly do.
    """

    file: str
    header: str
    temperature: float
    top_p: float
    tokens: int
    wanted: int
    asked: int
    usable: int
    kept: int
    dropped: dict[str, int]
    turns: dict[str, int]
    dropped_turns: dict[str, int]
    median_tokens: float
    most_tokens: float
    distinct: list[float]
    repeated: float
    examples: list[str]


@dataclass(frozen=True)
class QuestionTexts:
    """questions/summary.json: what wrote the questions, and those of each source of kind target."""

    writer: str
    sources: list[AskedQuestions] = field(default_factory=list)


@dataclass(frozen=True)
class AnswerTexts:
    """What answers/manifest.json says of the target's own answers to train prompts."""

    answers: int = 0
    answer_tokens: int = 0
    not_ended: int = 0
    writer: str = ""
    dropped: dict[str, int] = field(default_factory=dict)
    by_class: list[TextCount] = field(default_factory=list)
