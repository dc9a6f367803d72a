"""Count the bytes that one training step reads and writes, operation by operation, on tensors without memory.

    python scripts/benchmarks/traffic.py            # a Qwen2.5-0.5B draft, whose head has 151,936 rows

Every operation counts the bytes of its inputs and outputs once, as its kernel reads and writes them if no cache holds
them. Views and new memory count nothing. No GPU is needed, and nothing is timed. The head is the final product, its
loss and all their gradients. The body is the rest of the forward and backward pass (attention by documents).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from steps import SHAPES, Shape, build
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distill.tables import Block, Row, Table, document
from distill.teacher.distributions import CompactTeacher
from distill.training import losses
from distill.training.optimizer import MuonAndAdamW, parameter_groups

META = torch.device("meta")
ENTRIES = 64  # entries of the compact store
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh", "is_pinned"}


class Traffic(TorchDispatchMode):
    """Counts the bytes of the operations within a context, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation._schema.name.removeprefix("aten::")
        is_view = any(
            part.alias_info is not None and not part.alias_info.is_write for part in operation._schema.returns
        )
        if not is_view and name not in FREE:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.bytes[name] += sum(tensor.nelement() * tensor.element_size() for tensor in (*read, *written))
        return result

    @property
    def gigabytes(self) -> float:
        """Return the sum in gigabytes."""
        return sum(self.bytes.values()) / 1e9


def head_traffic(rows: int, hidden: int, positions: int, chunk: int) -> Traffic:
    """Return the traffic of the head's product, loss and gradients over a step's positions, with bfloat16 products."""
    states, head = torch.empty(positions, hidden, device=META), torch.empty(rows, hidden, device=META)
    stored = [torch.empty(positions, ENTRIES, dtype=kind, device=META) for kind in (torch.int32, torch.float16)]
    teacher = CompactTeacher(*stored, torch.empty(positions, device=META), rows)
    labels, loss = torch.empty(positions, dtype=torch.long, device=META), {"jsd": 1.0}
    kinds = torch.bfloat16, torch.float32
    with Traffic() as counted:
        gradients = torch.zeros_like(states), torch.zeros_like(head), None
        scoring = losses._Scoring(teacher, labels, loss, chunk, *kinds, losses.PLAIN_LOGITS)
        losses._positions(states, head, None, scoring, gradients)
    return counted


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table. `arguments` replace those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen")
    parser.add_argument("--positions", type=int, default=16_384, help="scored positions of a step")
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 1024, 4096, 8192])
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape][0]
    print(document(tables(shape, options.positions, options.chunks)))


def tables(shape: Shape, positions: int, chunks: Sequence[int]) -> list[Block]:
    """Return the head's bytes by chunk, and those of the optimizer."""
    draft = build(shape, META, torch.float32)
    rows: list[Row] = []
    for chunk in chunks:
        counted = head_traffic(shape.vocabulary, shape.hidden, positions, chunk)
        passes = -(-positions // chunk)
        rows.append([chunk, passes, counted.gigabytes, logits_bytes(chunk, shape.vocabulary)])
    optimizer = MuonAndAdamW(parameter_groups(draft, muon=True), 1e-4)
    for parameter in draft.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()  # The first step creates the state.
    with Traffic() as counted:
        optimizer.step()
    heads = ["positions of a chunk", "chunks", "head, GB read and written", "logits at once, GB"]
    weights = f"{draft.num_parameters() / 1e6:.0f}M weights"
    return [Table(heads, rows), f"Muon and AdamW on {weights}: {counted.gigabytes:.1f} GB a step."]


def logits_bytes(chunk: int, vocabulary: int) -> float:
    """Return the gigabytes of a chunk's logits in bfloat16."""
    return chunk * vocabulary * 2 / 1e9


if __name__ == "__main__":
    main()
