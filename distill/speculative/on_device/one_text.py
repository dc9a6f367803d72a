"""The rounds of one text on the device: with the draft's chain, or with what another drafter proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distill.models.base import Model
from distill.speculative.draft import ChainDraft, Drafter, ModelDrafter
from distill.speculative.on_device.device_draft import RowRound
from distill.speculative.on_device.device_round import DeviceRounds, rounds_on_device
from distill.speculative.proposal import Proposal

if TYPE_CHECKING:
    from distill.speculative.decode import Rules


def rounds_of_text(target: Model, drafter: Drafter, rules: Rules) -> DeviceRounds | None:
    """The rounds of this text on the target's device, the draft's chain too where it is there; None on the host."""
    if drafter.tree:
        return None
    if type(drafter) is ModelDrafter and drafter.kind != "cut":
        rounds = rounds_on_device(target, rules, drafter.model, drafter.argmax, [drafter.rule])
        if rounds is not None:
            return rounds
    return rounds_on_device(target, rules, None)


def round_of_text(
    rounds: DeviceRounds, drafter: Drafter, context: Sequence[int], most: int, rules: Rules
) -> tuple[Proposal, list[int], int]:
    """A round on the device: the proposal, its accepted nodes, and the token after them."""
    row = RowRound(0, context, rules.random)
    if most > 0 and rounds.draft is not None:
        assert isinstance(drafter, ModelDrafter)
        rounds.draft.looks = drafter.rule.reads_features
        if rounds.draft.looks:
            drafter.index.read(context)
        chain = ChainDraft(drafter.rule, drafter.random, drafter.argmax, most, rules.ends)
        if len(context) - drafter.model.lengths[0] > 2 and chain.goes_on():
            drafter.catch_up(context)
        row = replace(row, chain=chain, index=drafter.index)
    elif most > 0:
        row = replace(row, proposed=drafter.propose(context, most, rules.ends))
    outcome = rounds.run([row])[0]
    return outcome.proposal, list(range(outcome.accepted)), outcome.token
