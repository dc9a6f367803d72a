"""The draft with its loss on blocks of a teacher, over the whole head or over a trimmed head's kept columns.

Legend: b blocks, S positions, N scored positions, H hidden, V vocabulary, C columns of the head that take part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distill.devices import CPU, free_bytes
from distill.engines.torch.blocks import PADDING, Packed, scored_states
from distill.teacher.distributions import Teacher, logit_form
from distill.training.losses import LossSettings, LossSums, head_loss

# ── One training step's loss on blocks of a teacher, over the whole head or over a trimmed one's kept columns ──

# Positions of the head and its loss that are computed at once. A CPU's cache holds the logits of CHUNK. An accelerator
# reads the head and reads and writes its gradient again for every chunk, so that few large ones move fewer bytes.
CHUNK, MOST_CHUNK = 256, 8192
CHUNK_SHARE = 1 / 4  # of the free memory of an accelerator that a chunk may take
LOGIT_BYTES = 16  # of a logit of a chunk: the draft's, and those of an exact teacher before and after their softmax
STATE_BYTES = 12  # of a weight that learns: its gradient and two moments


def chunk_of(draft: Any, columns: int, device: torch.device) -> int:
    """Positions of a chunk, a power of two: CHUNK on a CPU, on an accelerator as its free memory allows, 1,024 if it
    does not say how much that is."""
    if device.type == CPU:
        return CHUNK
    free = free_bytes(device)
    if free is None:
        return 4 * CHUNK
    state = sum(parameter.numel() for parameter in draft.parameters() if parameter.requires_grad) * STATE_BYTES
    fitting = int(CHUNK_SHARE * max(0, free - state)) // (LOGIT_BYTES * columns)
    return max(CHUNK, min(MOST_CHUNK, 2 ** (fitting.bit_length() - 1) if fitting else 0))


class Columns:
    """The head's columns that learn: the first `vocabulary`, or the kept ones of a trimmed head.

    For a trimmed head, the target's mass on the other tokens goes to the tail, and these tokens are no labels.
    """

    def __init__(self, vocabulary: int, kept: list[int] | None, device: torch.device) -> None:
        self.count = vocabulary if kept is None else len(kept)
        self.kept = None if kept is None else torch.tensor(kept, device=device)
        self.place: Tensor | None = None
        if self.kept is not None:  # the column of each id; the column after the last stands for all trimmed ids
            self.place = torch.full((vocabulary,), self.count, dtype=torch.long, device=device)
            self.place[self.kept] = torch.arange(self.count, device=device)

    def rows(self, head: Tensor) -> Tensor:
        """The rows of the head's weight [V, H] or bias [V] that take part."""
        return head if self.kept is None else head[self.kept]

    def first(self, head: Tensor) -> Tensor:
        """These rows of a weight or bias whose first ones they are."""
        return head[: self.count]

    def restrict(self, teacher: Teacher) -> Teacher:
        """The same distributions over these columns."""
        return teacher if self.kept is None else teacher.restrict(self.kept)

    def labels(self, labels: Tensor) -> Tensor:
        """The columns of labels [N]; C where a label is not among them."""
        return labels if self.place is None else self.place[labels]


class Learner(torch.nn.Module):
    """The draft with its loss.

    With the `ids` that occur in the blocks, a draft with a trimmed head holds only the rows of its embeddings and head
    that can learn, the kept ones first: of all others every gradient is zero, and they would cost as much again in
    gradients, moments and time. `whole` puts the rows back.
    """

    def __init__(self, draft: Any, columns: Columns, chunk: int, ids: Tensor | None = None) -> None:
        super().__init__()
        self.draft = draft
        self.columns, self.chunk, self.form = columns, chunk, logit_form(draft.config)
        self.place: Tensor | None = None  # the row of each id
        self._tables: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        table = draft.get_input_embeddings()
        # Of several tables another may be read by ids, too.
        alone = sum(isinstance(module, torch.nn.Embedding) for module in draft.modules()) == 1
        if ids is not None and columns.kept is not None and alone and table.weight.requires_grad:
            self._narrow(torch.cat([columns.kept, ids.to(columns.kept.device)]), table)

    def _narrow(self, ids: Tensor, table: Any) -> None:
        self.place = torch.full((len(table.weight),), PADDING, dtype=torch.long, device=ids.device)
        self.place[self.columns.kept] = torch.arange(self.columns.count, device=ids.device)
        others = ids[self.place[ids] == PADDING].unique()
        self.place[others] = torch.arange(len(others), device=ids.device) + self.columns.count
        self.ids = torch.cat([ids[: self.columns.count], others])
        if table.padding_idx is not None:  # whose row has no gradient as an embedding
            row = int(self.place[table.padding_idx])
            table.padding_idx = None if row == PADDING else row
        head, narrow = self.draft.lm_head, dict[int, torch.nn.Parameter]()  # tied ones stay tied
        for module, name in ((table, "weight"), (head, "weight"), (head, "bias")):
            if (whole := getattr(module, name, None)) is not None:
                own = torch.nn.Parameter(whole.detach()[self.ids], whole.requires_grad)
                self._tables.append((module, name, whole))
                setattr(module, name, narrow.setdefault(id(whole), own))

    @contextlib.contextmanager
    def whole(self) -> Iterator[Any]:
        """Within the block, the draft with all rows."""
        narrow = [getattr(module, name) for module, name, _ in self._tables]
        for (module, name, whole), own in zip(self._tables, narrow, strict=True):
            whole.data[self.ids] = own.data
            setattr(module, name, whole)
        try:
            yield self.draft
        finally:
            for (module, name, _), own in zip(self._tables, narrow, strict=True):
                setattr(module, name, own)

    def forward(self, blocks: Packed, teacher: Teacher, loss: LossSettings) -> tuple[Tensor, LossSums]:
        """Σ ℓ over the N scored positions, and the sums for the log; divide by their number over the whole step."""
        labels = self.columns.labels(blocks.labels().long())
        rows = self.columns.rows
        if self.place is not None:
            blocks, rows = replace(blocks, ids=self.place[blocks.ids.long()]), self.columns.first
        hidden = scored_states(self.draft, blocks)  # [N, H]
        head = self.draft.lm_head
        bias = None if getattr(head, "bias", None) is None else rows(head.bias)
        teacher = self.columns.restrict(teacher)
        return head_loss(hidden, rows(head.weight), teacher, labels, loss, self.chunk, bias, self.form)
