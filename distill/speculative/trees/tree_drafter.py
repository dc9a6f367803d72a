"""A model that proposes trees of tokens. Legend: V vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from distill.models.base import SPARE_NODES, Model
from distill.sampler import Sampler
from distill.speculative.calibration import Calibration
from distill.speculative.draft import distribution_sampler, read_prompt
from distill.speculative.proposal import Proposal
from distill.speculative.trees.shape import Shape
from distill.speculative.trees.tree import best_first, sampled_tree, top_tree
from distill.speculative.verify import Random


class TreeDrafter:
    """A model that proposes trees: of the nodes of greatest value, or in a fixed shape.

    Without a `shape` the tree has the `nodes` nodes of greatest value (deterministic children). With one, children are
    the best tokens where `best`, else drawn from the draft's distribution, without replacement where `distinct`.
    `values` are those of the last tree that was made without a shape, best first.
    """

    tree = True

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        random: Random,
        nodes: int,
        *,
        shape: Shape | None = None,
        best: bool = False,
        distinct: bool = False,
        branching: int = 16,
        depth: int = 8,
        calibration: Calibration | None = None,
    ) -> None:
        if sampler.repetition_penalty != 1:
            raise ValueError("trees are not drafted under a repetition penalty: branches have different histories")
        if shape is not None and not best and sampler.temperature == 0:
            raise ValueError("a greedy sampler draws nothing: ask for trees of the best tokens")
        self.model, self.sampler, self.random, self.nodes = model, distribution_sampler(sampler), random, nodes
        self.shape, self.best, self.distinct = shape, best, distinct
        self.values: list[float] = []
        self.branching, self.depth, self.calibration = branching, depth, calibration

    @property
    def kind(self) -> str:
        """Deterministic, sampled or distinct."""
        return "deterministic" if self.shape is None or self.best else "distinct" if self.distinct else "sampled"

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt but for its last token; nothing where it has no room, or where no tree pays."""
        read_prompt(self.model, prompt, self.nodes > 0)

    def room(self, length: int) -> int:
        """The room left in the draft's context, which holds every node that the draft takes."""
        return self.model.capacity - length

    def propose(self, context: Sequence[int], limit: int, ends: Collection[int]) -> Proposal:
        """A tree of at most `limit` levels; a shape loses its deeper ones. Its size is settled before any draw."""
        shape = None if self.shape is None else self.shape.within(limit)
        nodes = self.nodes if shape is None else len(shape)
        # The target holds a path of limit + 1 nodes and SPARE_NODES beside it; the context's last token is one of them.
        room = limit + SPARE_NODES - 2
        if limit <= 0 or nodes == 0 or (shape is not None and nodes > room):
            return Proposal.chain([])
        fresh = list(context[self.model.lengths[0] :])
        root = self.sampler.distributions(self.model.extend(fresh, want=[len(fresh) - 1]), empty=True)[0]

        def expand(tokens: list[int], parents: list[int]) -> Tensor:
            return self.sampler.distributions(self.model.extend(tokens, parents=parents), empty=True)

        if shape is not None and self.best:
            return top_tree(shape, root, expand)
        if shape is not None:
            return sampled_tree(shape, root, expand, self.random, not self.distinct)
        proposal, self.values = best_first(
            root,
            expand,
            min(nodes, room),
            branching=self.branching,
            depth=min(self.depth, limit),
            calibration=self.calibration,
            max_leaves=self.model.max_leaves,
        )
        return proposal

    def accepted(self, proposal: Proposal, count: int, length: int, seconds: float) -> None:
        """Drop the tree; the accepted path is read again together with the next token."""
        self.model.rollback([min(self.model.lengths[0], length - 1)])
