"""How a text is decoded, whatever drafts it: the sampler, the verifier, what ends it, and where chance comes from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from distill.errors import DataError
from distill.grammar.constraint import Constraint
from distill.sampler import Sampler
from distill.speculative.draft import Drafter
from distill.speculative.stop_strings import Stop
from distill.speculative.verify import Random, refusal

GREEDY = Sampler(temperature=0)


@dataclass(frozen=True)
class Rules:
    """How a text is decoded: the served sampler, the verifier, what ends it, and where chance comes from.

    `stop` is called after every round, for stop strings and the like (see stop_strings.py). A round may add several
    tokens, so it must find the first place to stop instead of reading the end alone. A `constraint` masks the target's
    logits before the sampler; a draft under the same constraint (see grammar/constrained.py) is accepted more often.
    Raises DataError where the constraint ends texts with other tokens.
    """

    sampler: Sampler = GREEDY
    verifier: str = "greedy"
    ends: Collection[int] = ()
    random: Random = lambda: 0.0
    stop: Stop | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if self.constraint is not None and set(self.constraint.ends) != set(self.ends):
            raise DataError(
                f"the grammar ends texts with tokens {sorted(self.constraint.ends)}, the decoder with "
                f"{sorted(self.ends)}",
            )

    @property
    def by_argmax(self) -> bool:
        """Whether the target's largest logit alone decides, so that no distribution is computed."""
        return self.sampler.temperature == 0 and self.sampler.repetition_penalty == 1 and self.verifier == "greedy"


def require_lossless(drafter: Drafter, rules: Rules) -> None:
    """Raise DataError, with the reason, for a drafter and verifier that would change the target's distribution."""
    reason = refusal(rules.verifier, drafter.kind, rules.sampler.temperature, tree=drafter.tree)
    if reason is not None:
        raise DataError(
            f"verifier {rules.verifier} would change the target's distribution: {reason}", "or allow it as lossy"
        )
