"""Trees whose rounds stay on the device: the draft's levels, the target's step, the verdict, and one transfer.

In a tree of a fixed shape the parents are known before, so that the draft's levels follow each other without a look. A
tree that grows best-first is chosen on the device after each level; only how many levels the draft takes has to be
settled before: as many as the last tree had use for, and one more where that tree was cut by it.

Chance: at the beginning of a round one number is taken for each drawn node; one for its acceptance, where rejection
sampling decides; and one for the token after each node and after the context, whatever becomes of them.

Legend: n nodes of a tree, N = n + 1 with the context's last token before them, i nodes that have children, c children
of a node, m nodes of a level, W nodes that the draft takes, M nodes that could be in the tree, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.decoding import verify
from distill.decoding.drafters import NONE
from distill.decoding.lengths import ROOT, Proposal, children_of, entropies
from distill.decoding.rules import Rules
from distill.decoding.trees import Shape, TreeDrafter
from distill.decoding.verify import TREES, Random, walk_greedy
from distill.engines.model import PendingTree
from distill.engines.torch.model import TorchModel, fetch, model_name, send
from distill.errors import DataError
from distill.sampler import place_of, require_finite, shrunk

Stepped = TorchModel  # one whose `steps_on_device`
FIRST_LEVELS = 4  # of the first best-first tree of a text


class _Level:
    """The nodes of one level of a fixed shape: whose children they are, and which of them the draft takes next."""

    def __init__(self, nodes: Sequence[int], above: Sequence[int], shape: Shape, first: int, device: Any) -> None:
        row = {node: index for index, node in enumerate(above)}
        ranks = [shape.ranks[node] for node in nodes]
        self.nodes, self.first, self.width = len(nodes), first, max(ranks) + 1
        self.inner = [node for node in nodes if node in shape.parents]
        self.rows, self.ranks = send([[row[shape.parents[node]] for node in nodes], ranks], device)
        self.taken = send([node - nodes[0] for node in self.inner], device)
        # The nodes of each rank, in the order of their parents, and where they go among the nodes of the level.
        of_rank = [[index for index, rank in enumerate(ranks) if rank == r] for r in range(self.width)]
        self.of_rank = [send(part, device) for part in of_rank]
        order = [index for part in of_rank for index in part]
        self.back = send(sorted(range(len(order)), key=order.__getitem__), device)


class _Plan:
    """A fixed shape as the draft (where one fills it) and the target read it, its nodes level by level."""

    def __init__(self, shape: Shape, draft: Stepped | None, target: Stepped) -> None:
        levels, above = list[list[int]](), [ROOT]
        places: dict[int, int] = {ROOT: ROOT}
        while below := [child for node in above for child, parent in enumerate(shape.parents) if parent == node]:
            places |= {node: len(places) - 1 + index for index, node in enumerate(below)}
            levels.append(below)
            above = below
        self.shape = Shape(tuple(places[shape.parents[node]] for level in levels for node in level))
        self.order = [node for level in levels for node in level]  # of the nodes as they were given
        self.depths, self.seen = _as_read([ROOT, *(parent + 1 for parent in self.shape.parents)], target)  # [N], [N, N]
        self.inner, self._device = sorted(_children(self.shape.parents)), target.device
        if draft is not None:
            self._for_the_draft(draft, [len(level) for level in levels])

    @functools.cached_property
    def families(self) -> tuple[Tensor, Tensor]:
        """The rows of N that have children [i], and these children [i, c], filled up with NONE."""
        children = _children(self.shape.parents)
        widest = max(map(len, children.values()))
        filled = [[*children[row], *[NONE] * (widest - len(children[row]))] for row in self.inner]
        return send(self.inner, self._device), send(filled, self._device)

    def _for_the_draft(self, draft: Stepped, sizes: Sequence[int]) -> None:
        shape, start, slots, above = self.shape, 0, dict[int, int]({ROOT: ROOT}), [ROOT]
        self.levels = list[_Level]()
        for size in sizes:
            self.levels.append(_Level(range(start, start + size), above, shape, len(slots) - 1, draft.device))
            above = self.levels[-1].inner
            slots |= {node: len(slots) - 1 + index for index, node in enumerate(above)}
            start += size
        inner = [node for node in slots if node != ROOT]
        if inner:
            self.taken_depths, self.taken_seen = _as_read([slots[shape.parents[node]] for node in inner], draft)


def _children(parents: Sequence[int]) -> dict[int, list[int]]:
    """The nodes below each of N, the context's last token being 0 and node k being k + 1; none for leaves."""
    return {parent + 1: nodes for parent, nodes in children_of(parents).items()}


def _as_read(parents: Sequence[int], model: Stepped) -> tuple[Tensor, Tensor]:
    """The depths [W] and paths [W, W] of a tree's nodes, on the model's device."""
    tree = PendingTree().grown(parents)
    return send(tree.depths, model.device), send(tree.seen(0, len(tree)), model.device, torch.bool)


@dataclass(frozen=True)
class _Grown:
    """A tree on the device: tokens [n], NONE where there is none, below parents that lie there (best-first) or not."""

    tokens: Tensor
    parents: Tensor | Sequence[int]
    depths: Tensor  # [N], 1 for the context's last token
    seen: Tensor  # [N, N]
    peaks: Tensor  # the largest logit of each of the draft's steps
    distributions: Tensor | None = None  # [n, V] that the tokens were drawn from; None: chosen without chance
    plan: _Plan | None = None


class DeviceTrees:
    """The rounds of one text in which trees are verified; a `drafter`'s model grows its trees on its device."""

    def __init__(self, target: Stepped, rules: Rules, drafter: TreeDrafter | None) -> None:
        self.target, self.drafter, self.rules = target, drafter, rules
        self._plans: dict[Shape, _Plan] = {}
        self._levels = FIRST_LEVELS

    @torch.inference_mode()
    def drafted(self, context: Sequence[int], limit: int, random: Random) -> tuple[Proposal, list[int], int] | None:
        """A round of the drafter's tree: the proposal, its accepted nodes, and the token after them.

        None, with nothing done, where there is no tree to draft. The target is left with everything committed but that
        token, the draft with the context.
        """
        drafter = self.drafter
        assert drafter is not None
        shape, nodes = drafter.size(limit)
        if not nodes:
            return None
        model: Any = drafter.model
        fresh = list(context[model.lengths[0] :])
        if len(fresh) > 2:  # another drafter's tokens, or plain ones
            model.extend(fresh[:-1], want=[len(fresh) - 2])
            fresh = fresh[-1:]
        start = model.lengths[0]
        sent = send([[*fresh, len(fresh), start]], model.device)
        logits = model.step(sent[:, :-2], sent[:, -2], sent[:, -1], len(context), 1)[:, -1]  # [1, V]
        model.commit([len(context)])
        if shape is None:
            return self._verified(self._best_first(drafter, logits, nodes, limit), context, random)
        plan = self._plans.get(shape) or self._plans.setdefault(shape, _Plan(shape, model, self.target))
        return self._verified(self._filled(drafter, plan, logits), context, random)

    @torch.inference_mode()
    def proposed(self, proposal: Proposal, context: Sequence[int], random: Random) -> tuple[list[int], int]:
        """A round of another drafter's tree: its accepted nodes, and the token after them."""
        target = self.target
        plan = _Plan(Shape(tuple(proposal.parents)), None, target)
        tokens = send([proposal.tokens[node] for node in plan.order], target.device)
        q = proposal.distributions
        q = None if q is None else q[plan.order].to(target.device)
        none = torch.zeros(0, device=target.device)
        grown = _Grown(tokens, plan.shape.parents, plan.depths, plan.seen, none, q, plan)
        _, path, token = self._verified(grown, context, random)
        return [plan.order[node] for node in path], token

    # The draft's levels.

    def _filled(self, drafter: TreeDrafter, plan: _Plan, logits: Tensor) -> _Grown:
        """A fixed shape, filled from the logits [1, V] after the context."""
        model: Any = drafter.model
        uniforms = None
        if not drafter.best:
            uniforms = send([drafter.random() for _ in plan.shape.parents], model.device, torch.float64)
        tokens, distributions, peaks = list[Tensor](), list[Tensor](), list[Tensor]()
        above: Tensor | None = None  # tokens of the level's parents
        done = 0
        for level in plan.levels:
            q, largest = drafter.sampler.unchecked(logits)  # [i, V]
            peaks.append((largest if above is None else largest.masked_fill(above < 0, 0)).float().amax())
            if uniforms is None:
                token = _best(q, level)
            else:
                token, own = _drawn(q.double(), level, uniforms[done : done + level.nodes], drafter.distinct)
                distributions.append(own)
            if above is not None:
                token = token.masked_fill(above[level.rows] < 0, NONE)
            tokens.append(token)
            done += level.nodes
            if not level.inner:
                break
            above = token[level.taken]
            seen = plan.taken_seen[level.first : level.first + len(level.inner)]
            logits = model.grow(above.clamp(min=0), plan.taken_depths, seen, level.first)
        model.commit(model.lengths)
        drawn_from = torch.cat(distributions) if distributions else None
        return _Grown(
            torch.cat(tokens), plan.shape.parents, plan.depths, plan.seen, torch.stack(peaks), drawn_from, plan
        )

    def _best_first(self, drafter: TreeDrafter, logits: Tensor, most: int, limit: int) -> _Grown:
        """The tree of at most `most` nodes of greatest value in as many levels as are settled; see `best_first`."""
        model: Any = drafter.model
        levels, device = max(1, min(self._levels, drafter.depth, limit, most)), model.device
        size = min(drafter.branching, logits.shape[-1])
        counts = [size]  # nodes of each level that could be in the tree
        columns = list[int]()  # and those of it that the draft takes
        for _ in range(levels - 1):
            columns.append(min(most - 1, sum(counts)))
            counts.append(columns[-1] * size)
        taken_depths = send([depth + 1 for depth, count in enumerate(columns) for _ in range(count)] or [0], device)
        seen = torch.zeros(0, max(sum(columns), 1), dtype=torch.bool, device=device)
        value = torch.ones(1, device=device, dtype=torch.float64)
        pool: list[tuple[Tensor, ...]] = []  # of each level: value, token, parent in the pool, the draft's own parent
        peaks, parent, slot = list[Tensor](), torch.full_like(value, ROOT, dtype=torch.long), 0
        above = parent
        for depth in range(levels):
            q, largest = drafter.sampler.unchecked(logits)  # [m, V]
            peaks.append(largest.masked_fill(value < 0, 0).float().amax())
            chances, ids = _chances(q, depth, drafter, size)
            children = torch.where((chances > 0) & (value >= 0)[:, None], value[:, None] * chances, -1.0)
            spread = torch.ones_like(ids)
            pool.append((children, ids, parent[:, None] * spread, above[:, None] * spread))
            values, tokens, parents, slots = (
                torch.cat([part.flatten() for part in kind]) for kind in zip(*pool, strict=True)
            )
            if depth == levels - 1:
                break
            # Stable, so that of equal values the parent comes first.
            order = values.sort(descending=True, stable=True).indices[: columns[depth]]
            fresh = order >= len(values) - counts[depth]
            value = values[order].masked_fill(~fresh, -1.0)
            parent, above = order, torch.arange(slot, slot + columns[depth], device=device)
            own = above[:, None] == torch.arange(seen.shape[1], device=device)
            if depth:
                own = own | seen[slots[order].clamp(min=0)] & (slots[order] >= 0)[:, None]
            seen = torch.cat([seen, own])
            logits = model.grow(tokens[order].clamp(min=0), taken_depths, own, slot)
            slot += columns[depth]
        model.commit(model.lengths)
        order = values.sort(descending=True, stable=True).indices[:most]
        token = tokens[order].masked_fill(values[order] < 0, NONE)
        places = torch.full_like(tokens, ROOT).scatter(0, order, torch.arange(len(order), device=device))
        parent = torch.where(parents[order] < 0, ROOT, places[parents[order].clamp(min=0)])
        # Of N: the paths are the powers of "is its parent", a level each.
        reach = torch.eye(len(order) + 1, device=device, dtype=torch.float64)
        reach[1:] += (parent + 1)[:, None] == torch.arange(len(order) + 1, device=device)
        for _ in range((levels - 1).bit_length()):
            reach = reach @ reach
        paths = reach > 0
        return _Grown(token, parent, paths.sum(-1), paths, torch.stack(peaks))

    # The target's step.

    def _verified(self, grown: _Grown, context: Sequence[int], random: Random) -> tuple[Proposal, list[int], int]:
        target, rules = self.target, self.rules
        tokens = grown.tokens.to(target.device)
        ids = torch.cat([send(context[-1:], target.device), tokens.clamp(min=0)])
        logits = target.grow(ids, grown.depths.to(target.device), grown.seen.to(target.device), 0)  # [N, V]
        hits = None
        if grown.distributions is not None and rules.verifier in ("token", "distinct"):
            largest, hits, after = self._rejected(grown, tokens, logits, random)
        else:
            largest, after = self._chosen(logits, random)
        sent = [tokens.int(), after.int(), shrunk(largest), shrunk(grown.peaks.to(target.device))]
        if isinstance(grown.parents, Tensor):
            sent.append(grown.parents.to(target.device, torch.int16))
        if hits is not None:
            sent.append(hits.to(torch.int16))
        found = [part.tolist() for part in fetch(*sent)]
        parents = found[4] if isinstance(grown.parents, Tensor) else list(grown.parents)
        try:
            self._require_finite(context, found[0], parents, found[2], found[3])
        except DataError:
            target.commit(target.lengths)  # nothing of this round
            raise
        whole = Proposal(found[0], parents)
        if hits is None:
            path, token = walk_greedy(found[1], whole)
        else:
            assert grown.plan is not None
            path, token = _walked(grown.plan, found[-1], found[1])
        target.settle([ROOT, *(parent + 1 for parent in parents)], [0, *(node + 1 for node in path)])
        if isinstance(grown.parents, Tensor):
            self._learn(whole)
        return (*_without_gaps(whole, path), token)

    def _chosen(self, logits: Tensor, random: Random) -> tuple[Tensor, Tensor]:
        """The largest logits [N], and the target's own token [N] after each node: a child that is it is accepted."""
        if self.rules.by_argmax:
            choices = logits.argmax(-1)
            return logits.gather(-1, choices[:, None])[:, 0], choices
        p, largest = self.rules.sampler.unchecked(logits)
        if self.rules.verifier == "greedy":
            return largest, p.argmax(-1)
        uniforms = send([random() for _ in range(len(p))], p.device, torch.float64)
        return largest, verify.unchecked_transform(p, uniforms)

    def _rejected(self, grown: _Grown, tokens: Tensor, logits: Tensor, random: Random) -> tuple[Tensor, Tensor, Tensor]:
        """The largest logits [N], the child [i] that each inner node accepts (NONE: none), and the token [N] after each
        node where it is the last."""
        plan, q = grown.plan, grown.distributions
        assert plan is not None and q is not None
        p, largest = self.rules.sampler.unchecked(logits)
        uniforms = send([random() for _ in range(len(tokens) + len(p))], p.device, torch.float64)
        rows, children = plan.families
        places = children.clamp(min=0)
        below = tokens[places].masked_fill(children < 0, NONE)  # [i, c]
        verdict = TREES[self.rules.verifier](p[rows], q.to(p)[places], below)
        taken = verify.below(uniforms[: len(tokens)][places], verdict.acceptance)
        hits = taken.int().argmax(-1).masked_fill(~taken.any(-1), NONE)
        after = p.index_copy(0, rows, verdict.residual)
        return largest, hits, verify.unchecked_transform(after, uniforms[len(tokens) :])

    def _require_finite(
        self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int], largest: Any, peaks: Any
    ) -> None:
        """DataError for a logit that is not finite; nothing of the round is committed then."""
        if self.drafter is not None:
            levels = [len(context) + level for level in range(len(peaks))]
            name = model_name(self.drafter.model.model)  # type: ignore[attr-defined]
            require_finite(peaks, place_of(name, levels), empty=True)
        depths = [0, *Shape(tuple(parents)).depths]
        real = [0, *(node + 1 for node, token in enumerate(tokens) if token != NONE)]
        places = [len(context) + depths[row] for row in real]
        require_finite([largest[row] for row in real], place_of(model_name(self.target.model), places))

    def _learn(self, whole: Proposal) -> None:
        """How many levels the draft takes for the next tree: one below each node that could have had children."""
        depths = Shape(tuple(whole.parents)).depths
        inner = zip(whole.tokens[: len(whole.tokens) - 1], depths, strict=False)
        self._levels = 1 + max((depth for token, depth in inner if token != NONE), default=0)


def _best(q: Tensor, level: _Level) -> Tensor:
    """The tokens [m] of a level: a child of rank r is the (r + 1)-th best of its parent's distribution [i, V]."""
    values, ids = q.topk(min(level.width, q.shape[-1]))
    ranks = level.ranks.clamp(max=ids.shape[-1] - 1)
    impossible = (values[level.rows, ranks] <= 0) | (level.ranks > ranks)
    return ids[level.rows, ranks].masked_fill(impossible, NONE)


def _drawn(q: Tensor, level: _Level, uniforms: Tensor, distinct: bool) -> tuple[Tensor, Tensor]:
    """Tokens [m] of a level drawn from their parents' distributions [i, V], and those that they were drawn from."""
    tokens, distributions = list[Tensor](), list[Tensor]()
    for nodes in level.of_rank:
        rows = level.rows[nodes]
        own = q[rows]
        token = verify.unchecked_transform(own, uniforms[nodes])
        tokens.append(token.masked_fill(own.sum(-1) <= 0, NONE))
        distributions.append(own)
        if distinct:
            left = own.scatter(-1, token[:, None], 0)
            # Scaled by the mass left, not by 1 − q: that difference can round to 0.
            left = left / left.sum(-1, keepdim=True).clamp(min=torch.finfo(left.dtype).tiny)
            q = q.index_copy(0, rows, left)
    return torch.cat(tokens)[level.back], torch.cat(distributions)[level.back]


def _chances(q: Tensor, position: int, drafter: TreeDrafter, size: int) -> tuple[Tensor, Tensor]:
    """The chances of acceptance [m, c] of the `size` best children of each distribution [m, V], and the children."""
    found, ids = q.topk(min(max(size, 2), q.shape[-1]))
    chances = found.double()
    if drafter.calibration is not None:
        first = drafter.calibration.accept_all(position, chances, entropies(q).double())
        scale = torch.where(chances[:, 0] < 1, (1 - first) / (1 - chances[:, 0]).clamp(min=1e-300), 0.0)
        others = (chances[:, 1:] * scale[:, None]).clamp(max=1)
        chances = torch.cat([first[:, None], others], 1).masked_fill(found <= 0, 0)
    return chances[:, :size], ids[:, :size]


def _walked(plan: _Plan, hits: Sequence[int], after: Sequence[int]) -> tuple[list[int], int]:
    """The accepted nodes and the token after them, from the child that each inner node accepts."""
    children, accepts = _children(plan.shape.parents), dict(zip(plan.inner, hits, strict=True))
    path: list[int] = []
    while (hit := accepts.get(path[-1] + 1 if path else 0, NONE)) != NONE:
        path.append(children[path[-1] + 1 if path else 0][hit])
    return path, after[path[-1] + 1 if path else 0]


def _without_gaps(whole: Proposal, path: Sequence[int]) -> tuple[Proposal, list[int]]:
    """The proposal without the nodes that got no token, and the path in it."""
    kept = [node for node, token in enumerate(whole.tokens) if token != NONE]
    place = {ROOT: ROOT, **{node: index for index, node in enumerate(kept)}}
    proposal = Proposal([whole.tokens[node] for node in kept], [place[whole.parents[node]] for node in kept])
    return proposal, [place[node] for node in path]
