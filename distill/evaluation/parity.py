"""The same tokens scored in every way that a pair is run: one acceptance, or where the difference enters.

Every figure is at temperature 1 with nothing truncated, because the training's losses know nothing else. Legend: N
scored positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
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
from distill.results.serialise import Figure
from distill.results.tables import markdown_table

STEP = 4  # tokens that a decoder reads at once, as when it verifies a draft
TOLERANCE = 0.005  # acceptances no further apart count as one


@dataclass(frozen=True)
class ParityRow:
    """One way of scoring, compared with the way named `against` (None: with none).

    `acceptance` is the mean Σ min(p, q) at temperature 1, `acceptance_most` its upper bound where the target's rarest
    tokens are unknown, else the same; `agreement` is the share of equal argmaxes. `difference` is the acceptance minus
    that of `against`; `by_target` and `by_draft` are what remains of it with the other model as in `against`.
    `target_error` and `draft_error` are mean absolute differences of the log-probabilities of the text's tokens, in
    nats; `target_top` and `draft_top` the shares of equal argmaxes. NaN is what a way does not tell.
    """

    way: str
    models: str
    against: str | None
    acceptance: Figure
    acceptance_most: Figure
    agreement: Figure
    kl: Figure
    difference: Figure = math.nan
    by_target: Figure = math.nan
    by_draft: Figure = math.nan
    target_error: Figure = math.nan
    draft_error: Figure = math.nan
    target_top: Figure = math.nan
    draft_top: Figure = math.nan

    @property
    def gap(self) -> float:
        """How far the acceptance lies from that of `against`: 0 where that is within the bounds."""
        width = self.acceptance_most - self.acceptance
        return self.difference if self.difference > 0 else min(0.0, self.difference + width)


@dataclass(frozen=True)
class ParityTable:
    """Every way, on `tokens` tokens of `texts` texts; `missing` says which ways were not tried, and why."""

    command: str
    tokens: int
    texts: int
    rows: list[ParityRow]
    missing: list[str]

    @property
    def verdict(self) -> list[str]:
        """One α, or where the differences enter."""
        apart = [row for row in self.rows if row.against is not None and abs(row.gap) > TOLERANCE]
        compared = sum(row.against is not None for row in self.rows)
        if not apart:
            return [f"One acceptance: {compared} ways lie within {TOLERANCE:g} of the way that each is compared with."]
        return [_enters(row) for row in apart]


def _enters(row: ParityRow) -> str:
    found = f"{row.way} ({row.models}): {row.gap:+.4f} against {row.against}"
    if math.isnan(row.by_target):
        return f"{found}."
    return f"{found}; {row.by_target:+.4f} with its target alone, {row.by_draft:+.4f} with its draft alone."


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


@dataclass(frozen=True)
class Way:
    """A way of scoring: `read` loads its models and scores texts with them. `against` names the way before it that it
    is compared with."""

    name: str
    models: str
    read: Callable[[Sequence[Text]], Sequence[Read | Sums]]
    against: str | None = None


def compare_ways(ways: Sequence[Way], texts: Sequence[Text], missing: Sequence[str], command: str) -> ParityTable:
    """The row of each way, one after the other: of the ways that others are compared with the logits are held."""
    held: dict[str, list[Read]] = {}
    progress, rows = Progress("ways of scoring", len(ways)), []
    for way in ways:
        read = way.read(texts)
        rows.append(_row(way, texts, read, held.get(way.against or "")))
        if any(other.against == way.name for other in ways):
            held[way.name] = [one for one in read if isinstance(one, Read)]
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


@torch.inference_mode()
def whole_texts(models: Sequence[Any], vocabulary: int, texts: Sequence[Text]) -> list[Read]:
    """Two models of transformers read each text in one pass, as the evaluation does."""

    def logits(model: Any, text: Text) -> Tensor:
        ids = torch.tensor([text.ids], device=model.get_input_embeddings().weight.device)
        found: Tensor = model(input_ids=ids, use_cache=False).logits[0, text.first - 1 : -1, :vocabulary]
        return found.float().cpu()

    return [Read(*(logits(model, text) for model in models)) for text in texts]


def steps_of_decoders(models: Sequence[Any], vocabulary: int, texts: Sequence[Text]) -> list[Read]:
    """Two models of transformers decode with caches and prepacked layers, as for users: the prompt, then STEP tokens at
    once."""
    return _by_steps([growing_decoder(model, vocabulary) for model in models], vocabulary, texts)


def steps_of_files(target: Path, draft: Path, context: int, threads: int | None, texts: Sequence[Text]) -> list[Read]:
    """Two GGUF files decode in llama.cpp."""
    with (
        GgufModel(target, context=context, threads=threads) as big,
        GgufModel(draft, context=context, threads=threads) as small,
    ):
        return _by_steps([big, small], min(big.vocabulary_size, small.vocabulary_size), texts)


def _by_steps(models: Sequence[Model], vocabulary: int, texts: Sequence[Text]) -> list[Read]:
    return [Read(*(_steps(model, text, vocabulary) for model in models)) for text in texts]


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
            partial(steps_of_files, target, draft, context, threads),
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
