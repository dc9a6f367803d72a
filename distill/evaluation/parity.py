"""The same tokens scored in every way that a pair is run: one acceptance, or where the difference enters.

Every figure is at temperature 1 with nothing truncated, because the training's losses know nothing else. Legend: N
scored positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distill import divergences
from distill.models.base import Model
from distill.models.conversion.importing import file_type
from distill.models.gguf.model import GgufModel
from distill.models.loaded import growing_decoder
from distill.progress import Progress
from distill.results.parity_results import ParityRow, ParityTable
from distill.results.tables import markdown_table

STEP = 4  # tokens that a decoder reads at once, as when it verifies a draft


class Text(NamedTuple):
    """Tokens of a prompt and of what follows it; those from `first` on are scored."""

    ids: list[int]
    first: int

    @property
    def scored(self) -> list[int]:
        """The N tokens that are predicted."""
        return self.ids[self.first :]


class Read(NamedTuple):
    """What a way gives of one text: the logits [N, V] of both models, −inf where a draft has no token."""

    target: Tensor
    draft: Tensor


class Sums(NamedTuple):
    """Of a way that gives no logits: sums over the N positions of a text; `most` is an upper bound of `acceptance`."""

    acceptance: float
    most: float
    agreement: float
    kl: float


Reader = Callable[[Text], Read | Sums]


@dataclass(frozen=True)
class Way:
    """A way of scoring: `open` loads its models for as long as they are read. `against` names the way before it that it
    is compared with."""

    name: str
    models: str
    open: Callable[[], AbstractContextManager[Reader]]
    against: str | None = None


def compare_ways(ways: Sequence[Way], texts: Sequence[Text], missing: Sequence[str], command: str) -> ParityTable:
    """The row of each way, one after the other: of the ways that others are compared with the logits are held."""
    held: dict[str, list[Read]] = {}
    progress, rows = Progress("ways of scoring", len(ways)), []
    for way in ways:
        with way.open() as reader:
            read = [reader(text) for text in texts]
        rows.append(_row(way, texts, read, held.get(way.against or "")))
        logits = [one for one in read if isinstance(one, Read)]
        if any(other.against == way.name for other in ways):
            held[way.name] = logits
        progress.step()
    return ParityTable(command, sum(len(text.scored) for text in texts), len(texts), rows, list(missing))


def _row(way: Way, texts: Sequence[Text], found: Sequence[Read | Sums], reference: Sequence[Read] | None) -> ParityRow:
    count = sum(len(text.scored) for text in texts)
    sums = [_sums(*one) if isinstance(one, Read) else one for one in found]
    acceptance, most, agreement, kl = (sum(column) / count for column in zip(*sums, strict=True))
    row = {"acceptance": acceptance, "acceptance_most": most, "agreement": agreement, "kl": kl}
    if reference is not None:
        base = sum(_accepted(*one) for one in reference) / count
        row["difference"] = acceptance - base
        pairs = [(new, old) for new, old in zip(found, reference, strict=True) if isinstance(new, Read)]
        if pairs:
            row["by_target"] = sum(_accepted(new.target, old.draft) for new, old in pairs) / count - base
            row["by_draft"] = sum(_accepted(old.target, new.draft) for new, old in pairs) / count - base
            row |= _errors(texts, pairs)
    return ParityRow(way.name, way.models, way.against, **row)


def _errors(texts: Sequence[Text], pairs: Sequence[tuple[Read, Read]]) -> dict[str, float]:
    """The differences of the log-probabilities of the texts' tokens, where both ways have them, and of the argmaxes."""
    found = {}
    for name in ("target", "draft"):
        gaps, same = [], []
        for text, (new, old) in zip(texts, pairs, strict=True):
            following = torch.tensor(text.scored)[:, None]
            logs = [getattr(one, name).log_softmax(-1).gather(1, following)[:, 0] for one in (new, old)]
            gap = (logs[0] - logs[1]).abs()
            gaps.append(gap[gap.isfinite()])  # a trimmed draft cannot write every token
            same.append(getattr(new, name).argmax(-1) == getattr(old, name).argmax(-1))
        found[f"{name}_error"] = float(torch.cat(gaps).mean())
        found[f"{name}_top"] = float(torch.cat(same).double().mean())
    return found


def _sums(target: Tensor, draft: Tensor) -> Sums:
    accepted = _accepted(target, draft)
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    kl = divergences.forward_kl(log_p.masked_fill(torch.isneginf(draft), -torch.inf).log_softmax(-1), log_q)
    agreement = divergences.acceptance_greedy(target, draft)
    return Sums(accepted, accepted, float(agreement.double().sum()), float(kl.double().sum()))


def _accepted(target: Tensor, draft: Tensor) -> float:
    return float(divergences.acceptance_sampling(target.softmax(-1), draft.softmax(-1)).double().sum())


# ── ways ──


@contextmanager
def whole_texts(load: Callable[[], tuple[Any, Any]], vocabulary: int) -> Iterator[Reader]:
    """Two models of transformers read each text in one pass, as the evaluation does."""
    models = load()

    def read(text: Text) -> Read:
        rows = slice(text.first - 1, len(text.ids) - 1)
        logits = (_forward(model, text)[rows, :vocabulary].float().cpu() for model in models)
        return Read(*logits)

    yield read


@torch.inference_mode()
def _forward(model: Any, text: Text) -> Tensor:
    ids = torch.tensor([text.ids], device=model.get_input_embeddings().weight.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


@contextmanager
def steps_of_decoders(load: Callable[[], tuple[Any, Any]], vocabulary: int) -> Iterator[Reader]:
    """Two models of transformers decode with caches and prepacked layers, as for users: the prompt, then STEP tokens at
    once."""
    models = [growing_decoder(model, vocabulary) for model in load()]
    yield lambda text: Read(*(_steps(model, text, vocabulary) for model in models))


@contextmanager
def steps_of_files(target: Path, draft: Path, context: int, threads: int | None) -> Iterator[Reader]:
    """Two GGUF files decode in llama.cpp."""
    with (
        GgufModel(target, context=context, threads=threads) as big,
        GgufModel(draft, context=context, threads=threads) as small,
    ):
        vocabulary = min(big.vocabulary_size, small.vocabulary_size)
        yield lambda text: Read(*(_steps(model, text, vocabulary) for model in (big, small)))


def _steps(model: Model, text: Text, vocabulary: int) -> Tensor:
    """The logits [N, V] that predict the scored tokens, the text read like a decoded one."""
    model.rollback([0])
    prompt, rest = text.ids[: text.first], text.scored[:-1]
    rows = [model.extend(prompt, want=[len(prompt) - 1]).full()]
    rows += [model.extend(rest[start : start + STEP]).full() for start in range(0, len(rest), STEP)]
    return torch.cat(rows)[:, :vocabulary].float()


def file_ways(
    targets: Sequence[Path], drafts: Mapping[str, Path], context: int, threads: int | None, against: str | None
) -> list[Way]:
    """Every target's file with every draft's, by the type of its tensors."""
    return [
        Way(
            "llama.cpp",
            f"{file_type(target)}, {kind}",
            lambda target=target, draft=draft: steps_of_files(target, draft, context, threads),  # type: ignore[misc]
            against,
        )
        for target in targets
        for kind, draft in drafts.items()
    ]


# ── shown ──


def as_markdown(table: ParityTable) -> str:
    """The table, and what follows from it."""

    def cell(value: float, form: str) -> str:
        return "–" if value != value else format(value, form)

    rows = []
    for row in table.rows:
        bounds = f" to {row.acceptance_most:.4f}" if row.acceptance_most - row.acceptance > 1e-6 else ""
        rows.append(
            [
                row.way,
                row.models,
                f"{row.acceptance:.4f}{bounds}",
                cell(row.agreement, ".4f"),
                cell(row.kl, ".4f"),
                row.against or "–",
                *(cell(value, "+.4f") for value in (row.difference, row.by_target, row.by_draft)),
                *(cell(value, ".4f") for value in (row.target_error, row.draft_error)),
            ]
        )
    heads = ["way", "models", "acceptance", "same argmax", "KL, nats", "against", "difference", "its target's share"]
    heads += ["its draft's share", "change of log p", "of log q"]
    title = f"The same {table.tokens} tokens of {table.texts} texts, temperature 1, nothing truncated"
    lines = [*table.verdict, *(f"Not tried: {one}" for one in table.missing)]
    blocks = [title, markdown_table(heads, rows, "lllrrlr"), "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join([*blocks, f"`{table.command}`"]) + "\n"


def flat_rows(table: ParityTable) -> list[dict[str, Any]]:
    """A row for each way, for jsonl and csv."""
    return [asdict(row) for row in table.rows]
