"""Which drafted tokens are accepted, and the distribution of the token after them.

Pure functions of the target's and the draft's distributions.

Legend: γ drafted tokens, n nodes of a tree, c children of a node, V vocabulary, … leading dimensions (rows); p is the
target's distribution, q the distribution that a token was drawn from, both after the sampler. A drafted token of −1
means that nothing was drafted there, because rows of different lengths are padded with it. Every u is uniform in
[0, 1) and accepts if u < h, so that a token of probability 0 is never accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from distill.decoding.proposals import ROOT, Proposal
from distill.devices import as_float64
from distill.errors import DataError

Random = Callable[[], float]


def inverse_transform(distribution: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [...] drawn from distributions [..., V] with uniforms [...] in [0, 1), never one of probability 0.

    The distributions need not sum to 1 exactly: each draw is scaled by the sum that rounding left. DataError for one
    whose sum is 0 or not finite: nothing can be drawn from it.
    """
    cumulative = as_float64(distribution).cumsum(-1)
    total = cumulative[..., -1]
    if not bool(((total > 0) & total.isfinite()).all()):
        wrong = next(value for value in total.flatten().tolist() if not 0 < value < float("inf"))
        hint = "the logits of the target or the draft are not finite: check both models' weights"
        raise DataError(f"no token can be drawn: the distribution sums to {wrong}", hint)
    return _at_uniforms(cumulative, uniforms).to(distribution.device)


def unchecked_transform(distribution: Tensor, uniforms: Tensor) -> Tensor:
    """`inverse_transform` that the host does not wait for; some token if nothing can be drawn."""
    return _at_uniforms(as_float64(distribution).cumsum(-1), uniforms).to(distribution.device)


def _at_uniforms(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """The first token of each row [..., V] whose cumulated mass is above that share of the row's total."""
    total = cumulative[..., -1:].contiguous()
    token = torch.searchsorted(cumulative, uniforms.to(cumulative).unsqueeze(-1) * total, right=True)
    # Where the product rounded up to the total: the last token that adds to it.
    last = torch.searchsorted(cumulative, total).clamp(max=cumulative.shape[-1] - 1)
    return torch.minimum(token, last).squeeze(-1)


def draw_token(distribution: Tensor, random: Random) -> int:
    """One token from a distribution [V]."""
    return int(inverse_transform(distribution, torch.tensor(random(), dtype=torch.float64)))


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Their ratio, and 0 if the denominator is 0, because such a token was never drawn."""
    possible = denominator > 0
    return torch.where(possible, numerator / denominator.masked_fill(~possible, 1), torch.zeros_like(numerator))


def _at(distributions: Tensor, tokens: Tensor) -> Tensor:
    """The probability of each token [...] in its distribution [..., V]; 0 for −1."""
    probabilities = distributions.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return probabilities.masked_fill(tokens < 0, 0)


def _drawn_from(q: Tensor | None, tokens: Tensor, like: Tensor) -> Tensor:
    """The distributions [..., V] that tokens [...] were drawn from: q, or 1 at the token; 0 throughout for −1."""
    present = (tokens >= 0).unsqueeze(-1)
    if q is not None:
        return q.masked_fill(~present, 0)
    return like.new_zeros(*tokens.shape, like.shape[-1]).scatter(
        -1, tokens.clamp(min=0).unsqueeze(-1), present.to(like.dtype)
    )


def _position(values: Tensor, index: Tensor) -> Tensor:
    """Return the value [..., *] that index [...] picks in each row of values [..., L, *]."""
    rows = values.reshape(-1, *values.shape[index.ndim :])
    picked = rows[torch.arange(len(rows), device=rows.device), index.reshape(-1)]
    return picked.reshape([*index.shape, *rows.shape[2:]])


def _remainder(p: Tensor, q: Tensor, fallback: Tensor) -> Tensor:
    """norm((p − q)+) [..., V], or the fallback if its mass rounds to 0."""
    excess = (p - q).clamp(min=0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass.masked_fill(mass == 0, 1), fallback)


@dataclass(frozen=True)
class Verdict:
    """The verification of a chain before chance enters: acceptance h [..., γ], and the parts of the residuals.

    First miss (`last_hit` false): position i is tried only if all before it were accepted. Last hit: every position has
    a uniform of its own, and all tokens up to the last hit are accepted. Then the next token is drawn from `residual`.
    """

    acceptance: Tensor  # h [..., γ]
    p: Tensor  # [..., γ + 1, V]
    q: Tensor | None  # [..., γ, V]; None: 1 at the token
    tokens: Tensor  # [..., γ]
    scale: Tensor  # r [..., γ], the factor of p before q is subtracted
    last_hit: bool = False

    def residual(self, accepted: Tensor | int) -> Tensor:
        """The distribution [..., V] of the token after the `accepted` [...] first ones: norm((r·p − q)+), or p after
        all γ."""
        length = self.acceptance.shape[-1]
        index = torch.as_tensor(accepted, device=self.p.device).expand(self.p.shape[:-2])
        p = _position(self.p, index)
        if length == 0:
            return p
        last = index.clamp(max=length - 1)
        q = None if self.q is None else _position(self.q, last)
        scaled = p * _position(self.scale, last).unsqueeze(-1)
        drawn = _drawn_from(q, _position(self.tokens, last), p)
        return torch.where((index == length).unsqueeze(-1), p, _remainder(scaled, drawn, p))


# Of p [..., γ + 1, V], q [..., γ, V] (None: 1 at the token) and tokens [..., γ].
ChainVerifier = Callable[[Tensor, Tensor | None, Tensor], Verdict]


def token(p: Tensor, q: Tensor | None, tokens: Tensor) -> Verdict:
    """Rejection sampling token by token: h = min(1, p/q), residual norm((p − q)+) (Leviathan et al. 2023, alg. 1)."""
    drawn = torch.ones_like(tokens, dtype=p.dtype) if q is None else _at(q, tokens)
    acceptance = _ratio(_at(p[..., :-1, :], tokens), drawn).clamp(max=1)
    return Verdict(acceptance, p, q, tokens, torch.ones_like(acceptance))


def match(p: Tensor, q: Tensor | None, tokens: Tensor) -> Verdict:
    """Draw the target's own token y ~ p and accept the drafted one if it is y: h = p(x), residual p without x.

    The output is y whatever was drafted and however (q is not used), so this is lossless with any draft.
    """
    return token(p, None, tokens)


def greedy(p: Tensor, q: Tensor | None, tokens: Tensor) -> Verdict:
    """Accept the target's best token (the first on ties), emit it at the first miss; lossless for a greedy sampler."""
    return token(_best(p), None, tokens)


def _best(p: Tensor) -> Tensor:
    """All mass on the best token of each distribution."""
    return torch.zeros_like(p).scatter(-1, p.argmax(-1, keepdim=True), 1)


def block(p: Tensor, q: Tensor | None, tokens: Tensor) -> Verdict:
    """Verify the block as a whole, accepting never fewer tokens on average than `token` (2403.10444, alg. 2).

    r_i = min(1, r_{i−1}·p(x_i)/q(x_i)); h_i = Z/(Z + 1 − r_i) with Z = Σ(r_i·p_{i+1} − q_{i+1})+, 0/0 being 1, and
    h_γ = r_γ; all tokens up to the last i with u_i < h_i are accepted.
    """
    length = tokens.shape[-1]
    drawn = torch.ones_like(tokens, dtype=p.dtype) if q is None else _at(q, tokens)
    ratio = _ratio(_at(p[..., :-1, :], tokens), drawn)
    reached = [torch.ones_like(p[..., 0, 0])]
    for i in range(length):
        reached.append((reached[-1] * ratio[..., i]).clamp(max=1))
    scale = torch.stack(reached, -1)  # r_0..r_γ
    excess = scale[..., 1:-1, None] * p[..., 1:-1, :]
    excess = excess - _drawn_from(None if q is None else q[..., 1:, :], tokens[..., 1:], p)
    mass = excess.clamp(min=0).sum(-1)  # Z_1..Z_{γ−1}
    missing = mass + 1 - scale[..., 1:-1]
    inner = torch.where(missing == 0, torch.ones_like(mass), _ratio(mass, missing))
    # A position that holds no token cannot be accepted, whatever the mass after it.
    acceptance = torch.cat([inner, scale[..., -1:]], -1)[..., :length].masked_fill(tokens < 0, 0)
    return Verdict(acceptance, p, q, tokens, scale[..., :-1], last_hit=True)


def draw(verdict: Verdict, random: Random) -> tuple[int, int]:
    """Draw the number of accepted tokens of one chain, and the token after them."""
    chances = verdict.acceptance.tolist()
    if verdict.last_hit:
        accepted = max((i + 1 for i, chance in enumerate(chances) if random() < chance), default=0)
    else:
        # Not `>=`: a chance that is NaN must not accept.
        accepted = next((i for i, chance in enumerate(chances) if not random() < chance), len(chances))
    return accepted, draw_token(verdict.residual(accepted), random)


def below(uniforms: Tensor, chances: Tensor) -> Tensor:
    """Which uniforms hit their chance; a chance that is NaN is never hit."""
    return uniforms < chances


def draw_on_device(verdict: Verdict, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """`draw` that the host does not wait for, with numbers [γ + 1]: those of the positions, tried or not, then one for
    the next token."""
    hits = below(uniforms[:-1].to(verdict.acceptance.device), verdict.acceptance)
    if verdict.last_hit:
        numbers = torch.arange(1, len(hits) + 1, device=hits.device)
        accepted = torch.nn.functional.pad(hits * numbers, (1, 0)).amax()
    else:
        accepted = hits.long().cumprod(-1).sum()
    return accepted, unchecked_transform(verdict.residual(accepted), uniforms[-1])


def draw_chain(verifier: str, p: Tensor, proposal: Proposal, random: Random) -> tuple[int, int]:
    """Draw how many tokens of a chain a verifier of CHAINS accepts given p [γ + 1, V], and the token after them."""
    q = None if proposal.distributions is None else proposal.distributions.to(p)
    return draw(CHAINS[verifier](p, q, p.new_tensor(proposal.tokens).long()), random)


@dataclass(frozen=True)
class NodeVerdict:
    """The verification of a node's children, tried in turn until one is accepted.

    `acceptance` h [..., c] is that of each child given that those before it were rejected, `residual` [..., V] the
    distribution of the next token when all are.
    """

    acceptance: Tensor
    residual: Tensor


# Of p [..., V], q [..., c, V] (None: 1 at the token) and the children's tokens [..., c].
NodeVerifier = Callable[[Tensor, Tensor | None, Tensor], NodeVerdict]


def node_token(p: Tensor, q: Tensor | None, tokens: Tensor, distinct: bool = False) -> NodeVerdict:
    """Accept child k with p(x_k)/q_k(x_k), else p ← norm((p − q_k)+) (SpecInfer, 2305.09781, alg. 2).

    q_k is the distribution that x_k was drawn from, given the siblings before it. `distinct` removes these from q_k.
    That is right for siblings drawn without replacement, whether each row of q holds their parent's whole distribution
    or the part that the siblings before left.
    """
    chances = []
    for k in range(tokens.shape[-1]):
        drawn = _drawn_from(None if q is None else q[..., k, :], tokens[..., k], p)
        if distinct and q is not None and k:
            removed = _drawn_from(None, tokens[..., :k], p).sum(-2) > 0
            drawn = drawn.masked_fill(removed, 0)
            drawn = _ratio(drawn, drawn.sum(-1, keepdim=True).expand_as(drawn))
        chances.append(_ratio(_at(p, tokens[..., k]), _at(drawn, tokens[..., k])).clamp(max=1))
        p = _remainder(p, drawn, p)
    return NodeVerdict(torch.stack(chances, -1) if chances else p[..., :0], p)


def walk(verify: NodeVerifier, p: Tensor, proposal: Proposal, random: Random) -> tuple[list[int], int]:
    """The accepted nodes of a tree from the top down, and the token after them.

    `p` [n + 1, V] holds the target's distribution after the context first, then those after each node. Each step draws
    a number of its own for every child that it tries, and reads only p at the node that it has reached.
    """
    children = proposal.children()
    path: list[int] = []
    while True:
        here = path[-1] if path else ROOT
        below = children.get(here, [])
        tokens = torch.tensor([proposal.tokens[child] for child in below], dtype=torch.long, device=p.device)
        q = None if proposal.distributions is None or not below else proposal.distributions[below].to(p)
        verdict = verify(p[here + 1], q, tokens)
        hit = next((k for k, chance in enumerate(verdict.acceptance.tolist()) if random() < chance), None)
        if hit is None:
            return path, draw_token(verdict.residual, random)
        path.append(below[hit])


CHAINS: dict[str, ChainVerifier] = {"greedy": greedy, "match": match, "token": token, "block": block}
TREES: dict[str, NodeVerifier] = {
    "greedy": lambda p, q, tokens: node_token(_best(p), None, tokens),
    "match": lambda p, q, tokens: node_token(p, None, tokens),  # goes down to the child that the target drew
    "token": node_token,
    "distinct": partial(node_token, distinct=True),
}

# How the tokens of a proposal were made.
HOW_CHOSEN = {
    "deterministic": "chosen without chance, their number too",
    "sampled": "drawn from the draft's distribution, siblings with replacement; every drawn token is kept",
    "distinct": "siblings drawn without replacement; every drawn token is kept",
    "cut": "drawn from the draft's distribution, some tokens dropped after the draw",
}
_CUT = (
    "a draft whose sampled tokens may be dropped after the draw no longer follows its distribution: decide before the "
    "draw, draft without chance, or verify with match"
)
_REFUSED: dict[tuple[str, str], str] = {
    ("token", "cut"): _CUT,
    ("block", "cut"): _CUT,
    ("distinct", "cut"): _CUT,
    ("token", "distinct"): "siblings drawn without replacement follow different distributions: use distinct",
    ("distinct", "sampled"): "siblings drawn with replacement may repeat, which distinct does not allow: use token",
}


def refusal(verifier: str, kind: str, temperature: float, tree: bool = False) -> str | None:
    """Why this verifier would change the target's distribution for proposals of this kind (see HOW_CHOSEN), or None.

    ValueError for a verifier of chains asked to verify trees, or the reverse.
    """
    known = TREES if tree else CHAINS
    if verifier not in known:
        raise ValueError(f"no verifier `{verifier}` for {'trees' if tree else 'chains'}: use one of {', '.join(known)}")
    assert kind in HOW_CHOSEN, kind
    if verifier == "greedy" and temperature > 0:
        return (
            f"greedy emits the target's best token only, temperature {temperature:g} allows others: use temperature 0"
        )
    if not tree and kind == "distinct":
        return None  # a chain has no siblings
    return _REFUSED.get((verifier, kind))


def verify_greedy(choices: Sequence[int], proposal: Sequence[int]) -> int:
    """Number of accepted tokens, from the target's best tokens [γ + 1] at each position."""
    for index, token in enumerate(proposal):
        if choices[index] != token:
            return index
    return len(proposal)


def walk_greedy(choices: Sequence[int], proposal: Proposal) -> tuple[list[int], int]:
    """The accepted nodes of a tree and the token after them, from the target's best tokens [n + 1] as of `walk`.

    It does what `walk` does with the greedy verifier, without distributions [n + 1, V].
    """
    children, path = proposal.children(), [ROOT]
    while True:
        token = choices[path[-1] + 1]
        below = next((node for node in children.get(path[-1], []) if proposal.tokens[node] == token), None)
        if below is None:
            return path[1:], token
        path.append(below)
