"""One training step's loss on blocks of the teacher store, over the whole head or over a trimmed one's kept columns.

Legend: b blocks, S positions, N scored positions, H hidden, V vocabulary, K kept tokens, k stored entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from distill.packing import Packed, attention_mask, epoch_order
from distill.recipe import Train
from distill.target.laws import CompactTeacher
from distill.target.store import TeacherStore
from distill.training.fused import head_loss
from distill.training.losses import LossSettings


class Columns:
    """The head's columns that learn: the first `vocabulary`, or the kept ones of a trimmed head.

    Of a trimmed head the target's mass on the other tokens goes to the tail, and they are no labels.
    """

    def __init__(self, vocabulary: int, kept: list[int] | None, device: torch.device) -> None:
        self.count = vocabulary if kept is None else len(kept)
        self.kept = None if kept is None else torch.tensor(kept, device=device)
        self.place: Tensor | None = None
        if self.kept is not None:  # where each id went; the column after the last stands for all that are gone
            self.place = torch.full((vocabulary,), self.count, dtype=torch.long, device=device)
            self.place[self.kept] = torch.arange(self.count, device=device)

    def head(self, weight: Tensor) -> Tensor:
        """The rows [count (+ 1), H] of the head's weight [V, H] that take part; the added one is masked as padding."""
        if self.kept is None:
            return weight
        return torch.cat([weight[self.kept], weight.new_zeros(1, weight.shape[1])])

    def teacher(self, ids: Tensor, logs: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stored ids [N, k], log-probabilities [N, k] and log tails [N] in these columns."""
        if self.place is None:
            return ids, logs, tail
        columns = self.place[ids.long()]
        gone = columns == self.count
        moved = logs.float().masked_fill(~gone, -torch.inf).logsumexp(-1)
        return columns, logs.float().masked_fill(gone, -torch.inf), torch.logaddexp(tail.float(), moved)

    def labels(self, labels: Tensor) -> Tensor:
        """The columns of labels [N]."""
        return labels if self.place is None else self.place[labels]


def batch_blocks(step: int, batch: int, count: int, seed: int) -> Tensor:
    """Indices [b] of the blocks of one step: a pure function, so that a resumed run sees the same data."""
    wanted = range(step * batch, (step + 1) * batch)
    epochs = {index // count for index in wanted}
    orders = {epoch: epoch_order(count, seed, epoch) for epoch in epochs}
    return torch.tensor([int(orders[index // count][index % count]) for index in wanted])


def blocks_loss(
    model: Any, blocks: Packed, laws: Mapping[str, Tensor], settings: Train, columns: Columns, device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """Summed loss, the sums of forward KL, cross-entropy and agreement, and N, of some blocks and the laws on them."""
    scored = blocks.mask.to(device)
    hidden = model.model(
        input_ids=blocks.ids.long().to(device),
        position_ids=blocks.positions.long().to(device),
        attention_mask=attention_mask(blocks.documents.to(device)),
        use_cache=False,
    ).last_hidden_state[scored]  # [N, H]
    head = columns.head(model.lm_head.weight)
    ids, logs, tail = columns.teacher(
        laws["top_ids"].to(device)[scored],
        laws["top_log_probabilities"].to(device)[scored],
        laws["log_tail"].to(device)[scored],
    )
    total, sums = head_loss(
        hidden,
        head,
        CompactTeacher(ids, logs, {1.0: tail}, columns.count),
        columns.labels(blocks.labels().long().to(device)[scored]),
        LossSettings({name: weight for name, weight in settings.loss.items()}),
        None,
        settings.chunk,
    )
    shown = torch.stack([sums[name] for name in ("forward_kl", "cross_entropy", "agreement")])
    return total, shown, int(scored.sum())


def parameter_groups(
    model: Any, weight_decay: float, penalised: Iterable[torch.nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norms, biases) and what a sparsity penalty already shrinks do not.

    Embeddings and head are a group of their own (`outer`), because they may learn before the rest.
    """
    spared = {id(parameter) for parameter in penalised}
    outer = {id(model.get_input_embeddings().weight), id(model.lm_head.weight)}
    inner = [p for p in model.parameters() if id(p) not in outer]
    matrices = [p for p in inner if p.ndim >= 2 and id(p) not in spared]
    vectors = [p for p in inner if p.ndim < 2 or id(p) in spared]
    return [
        {"params": [p for p in model.parameters() if id(p) in outer], "weight_decay": weight_decay, "outer": True},
        {"params": matrices, "weight_decay": weight_decay, "outer": False},
        {"params": vectors, "weight_decay": 0.0, "outer": False},
    ]


def heal(
    model: Any,
    store: TeacherStore,
    settings: Train,
    steps: int,
    seed: int,
    kept: list[int] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> float:
    """Train a cut model in place for a few steps, to compare cuts; the mean loss of the last tenth of the steps.

    The recipe's batch, rate, loss and clipping; warm-up and cosine over these steps alone; fp32, one process.
    """
    from distill.training.rate import rate_at

    device = next(model.parameters()).device
    short = settings.model_copy(update={"steps": max(1, steps)})
    columns = Columns(int(store.manifest["vocabulary"]), kept, device)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay), lr=settings.rate, betas=(settings.beta1, settings.beta2)
    )
    model.train()
    losses: list[float] = []
    for step in range(steps):
        index = batch_blocks(step, settings.batch, store.blocks, seed)
        total, _, count = blocks_loss(model, store.packed.take(index), store.laws(index), settings, columns, device)
        loss = total / max(1, count)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, short)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if after_step is not None:
            after_step(step)
    model.eval()
    tail = losses[-max(1, steps // 10) :]
    return sum(tail) / len(tail) if tail else float("nan")
