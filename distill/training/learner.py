"""The draft with its loss on packed blocks, over the whole head or over the kept columns of a trimmed head.

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
from distill.training.losses import LossSums, Mixture, head_loss

# The head and its loss are computed on so many positions at once. A CPU's cache holds the logits of CHUNK_POSITIONS. An
# accelerator reads the head, and reads and writes its gradient, once per chunk, so that large chunks move fewer bytes.
CHUNK_POSITIONS, MAX_CHUNK_POSITIONS = 256, 8192
CHUNK_SHARE = 1 / 4  # the share of an accelerator's free memory that a chunk may take
LOGIT_BYTES = 16  # A chunk holds the draft's logits, and an exact teacher's before and after the softmax.
STATE_BYTES = 12  # A weight that learns has a gradient and two moments.


def chunk_of(draft: Any, columns: int, device: torch.device) -> int:
    """The positions of a chunk, a power of two: CHUNK_POSITIONS on a CPU, as many as fit on an accelerator.

    An accelerator that does not report its free memory gets 1,024.
    """
    if device.type == CPU:
        return CHUNK_POSITIONS
    free = free_bytes(device)
    if free is None:
        return 4 * CHUNK_POSITIONS
    state = sum(parameter.numel() for parameter in draft.parameters() if parameter.requires_grad) * STATE_BYTES
    fitting = int(CHUNK_SHARE * max(0, free - state)) // (LOGIT_BYTES * columns)
    return max(CHUNK_POSITIONS, min(MAX_CHUNK_POSITIONS, 2 ** (fitting.bit_length() - 1) if fitting else 0))


class Columns:
    """The head's columns that learn: the first `vocabulary`, or the kept columns of a trimmed head.

    With a trimmed head, the target's mass on the other tokens goes to the tail, and these tokens are no labels.
    """

    def __init__(self, vocabulary: int, kept: list[int] | None, device: torch.device) -> None:
        self.count = vocabulary if kept is None else len(kept)
        self.kept = None if kept is None else torch.tensor(kept, device=device)
        self.place: Tensor | None = None
        if self.kept is not None:  # The column after the last stands for all trimmed ids.
            self.place = torch.full((vocabulary,), self.count, dtype=torch.long, device=device)
            self.place[self.kept] = torch.arange(self.count, device=device)

    def rows(self, head: Tensor) -> Tensor:
        """The rows of the head's weight [V, H] or bias [V] for these columns."""
        return head if self.kept is None else head[self.kept]

    def first(self, head: Tensor) -> Tensor:
        """The rows for these columns in a weight or bias that begins with them."""
        return head[: self.count]

    def restrict(self, teacher: Teacher) -> Teacher:
        """The same distributions over these columns."""
        return teacher if self.kept is None else teacher.restrict(self.kept)

    def labels(self, labels: Tensor) -> Tensor:
        """The columns of labels [N]; C for a label without a column."""
        return labels if self.place is None else self.place[labels]


class Learner(torch.nn.Module):
    """The draft with its loss.

    `ids` are the ids in the blocks. With them, a draft with a trimmed head holds only the rows of its embeddings and
    head that can learn, the kept rows first. The gradients of all other rows are zero, and would double the memory and
    the time of gradients and moments. `whole` puts the other rows back.
    """

    def __init__(self, draft: Any, columns: Columns, chunk: int, ids: Tensor | None = None) -> None:
        super().__init__()
        self.draft = draft
        self.columns, self.chunk, self.form = columns, chunk, logit_form(draft.config)
        self.place: Tensor | None = None  # the row of each id
        self._tables: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        table = draft.get_input_embeddings()
        # A model with several tables may read another of them by ids, too.
        alone = sum(isinstance(module, torch.nn.Embedding) for module in draft.modules()) == 1
        if ids is not None and columns.kept is not None and alone and table.weight.requires_grad:
            self._narrow(torch.cat([columns.kept, ids.to(columns.kept.device)]), table)

    def _narrow(self, ids: Tensor, table: Any) -> None:
        self.place = torch.full((len(table.weight),), PADDING, dtype=torch.long, device=ids.device)
        self.place[self.columns.kept] = torch.arange(self.columns.count, device=ids.device)
        others = ids[self.place[ids] == PADDING].unique()
        self.place[others] = torch.arange(len(others), device=ids.device) + self.columns.count
        self.ids = torch.cat([ids[: self.columns.count], others])
        if table.padding_idx is not None:  # The embedding gives this row no gradient.
            row = int(self.place[table.padding_idx])
            table.padding_idx = None if row == PADDING else row
        head, narrow = self.draft.lm_head, dict[int, torch.nn.Parameter]()  # Tied weights stay tied.
        for module, name in ((table, "weight"), (head, "weight"), (head, "bias")):
            if (whole := getattr(module, name, None)) is not None:
                rows = torch.nn.Parameter(whole.detach()[self.ids], whole.requires_grad)
                self._tables.append((module, name, whole))
                setattr(module, name, narrow.setdefault(id(whole), rows))

    @contextlib.contextmanager
    def whole(self) -> Iterator[Any]:
        """Yield the draft with all its rows."""
        narrow = [getattr(module, name) for module, name, _ in self._tables]
        for (module, name, whole), rows in zip(self._tables, narrow, strict=True):
            whole.data[self.ids] = rows.data
            setattr(module, name, whole)
        try:
            yield self.draft
        finally:
            for (module, name, _), rows in zip(self._tables, narrow, strict=True):
                setattr(module, name, rows)

    def forward(self, blocks: Packed, teacher: Teacher, loss: Mixture) -> tuple[Tensor, LossSums]:
        """Σ ℓ over the N scored positions, and the sums for the log. The caller divides both by a step's positions."""
        labels = self.columns.labels(blocks.labels().long())
        rows = self.columns.rows
        if self.place is not None:
            blocks, rows = replace(blocks, ids=self.place[blocks.ids.long()]), self.columns.first
        hidden = scored_states(self.draft, blocks)  # [N, H]
        head = self.draft.lm_head
        bias = None if getattr(head, "bias", None) is None else rows(head.bias)
        teacher = self.columns.restrict(teacher)
        return head_loss(hidden, rows(head.weight), teacher, labels, loss, self.chunk, bias, self.form)
