"""What is counted on other texts than the measured ones: calibrations, acceptance by rank, and trees chosen from them.

Legend: n drafted tokens of a round or nodes of a tree, d levels, T target, D draft.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

from distill.data.packing import Packed
from distill.data.samples import read_prompts
from distill.decoding.calibration import (
    FITTED,
    TABLE_TERMS,
    Calibration,
    Recorded,
    expected_calibration_error,
    fit_calibration,
    log_loss,
    predicted,
)
from distill.decoding.configured import (
    Fitted,
    configured_sampler,
    guesses,
    lossy_reason,
    make_drafter,
    names_of_fits,
    title_with_tree,
)
from distill.decoding.costs import StepCosts
from distill.decoding.decode import Decoded, decode, room_for
from distill.decoding.drafters import NONE, Drafter
from distill.decoding.lengths import Proposal, best_tokens
from distill.decoding.ngrams import NGramTable
from distill.decoding.rules import GREEDY, Rules
from distill.decoding.trees import RankTally, Shape, ShapeTable, Tree, TreeDrafter, expected_accepted
from distill.decoding.verify import walk_greedy
from distill.engines.loaded import LoadedPair, load_pair
from distill.engines.model import Model
from distill.errors import DataError
from distill.files import from_json, has_form, read_json, write_json
from distill.measuring.compare import PairSettings
from distill.measuring.measure import rounds_of, write_texts
from distill.measuring.speedup_results import ChosenTree, ComparedTree
from distill.progress import Progress
from distill.recipe import Configuration, Recipe
from distill.run import Run
from distill.sampler import Sampler

# ── Calibrations and acceptance by rank ──

FORMAT = 1
FORM = {"format": int, "fits": {...: {"kind": str, "fields": dict}}}  # of a calibration.json
LENGTH = 8  # tokens drafted in every recorded round
RANKS = 8  # of the draft's best tokens that are tallied
Text = tuple[list[int], list[int]]  # a prompt, and what the target wrote after it


@dataclass(frozen=True)
class Fit:
    """A calibration as calibration.json holds it, beside how it does on text new to it."""

    kind: Literal["Logistic"]
    fields: Calibration


def record_rounds(draft: Model, texts: Sequence[Text], ends: Collection[int]) -> tuple[list[list[Recorded]], RankTally]:
    """The rounds of LENGTH drafted tokens in which greedy decoding writes each text; and which of the draft's RANKS
    best tokens the target wrote, at every place that is drafted: all but the first new token.

    The draft reads each text once: at every position that a round judges, all before it were accepted.
    """
    recorded, tally, sampler = list[list[Recorded]](), RankTally(), Sampler(1.0)
    progress = Progress("rounds of other texts, prompts", len(texts), brief=True)
    for prompt, new in texts:
        text = [*prompt, *new][: draft.capacity]
        places = range(len(prompt), len(text) - 1)
        draft.rollback([0])
        logits = draft.extend(text[:-1], want=places) if places else None
        distributions = [] if logits is None else [*sampler.distributions(logits, empty=True)]
        for place, distribution in zip(places, distributions, strict=True):
            tally.observe(best_tokens(distribution, RANKS)[0], text[place + 1])
        recorded.append(rounds_of(text, len(prompt), distributions, ends, LENGTH))
        progress.step()
    return recorded, tally


def validation_prompts(run: Run, tokens: int, count: int) -> list[list[int]]:
    """`count` validation prompts: questions of conversations, as the template writes them, before pieces of text.

    The pieces have `tokens` tokens, first ones of all documents, then later ones.
    """
    asked = [one.prompt for one in read_prompts(run, "validation") if one.chat is not None]
    blocks = Packed.load(run.path("corpus", "text-validation.safetensors"))
    pieces: list[tuple[int, list[int]]] = []
    for ids, documents in zip(blocks.ids, blocks.documents, strict=True):
        for document in range(int(documents.max()) + 1):
            text = ids[documents == document].tolist()
            starts = range(0, len(text) - tokens, 2 * tokens)
            pieces += [(piece, text[start : start + tokens]) for piece, start in enumerate(starts)]
    pieces.sort(key=lambda piece: piece[0])
    return [*asked, *(ids for _, ids in pieces)][:count]


def calibrate(
    of_draft: Sequence[Sequence[Recorded]],
    command: str,
    ranks: RankTally | None = None,
    counted: Mapping[str, Sequence[Sequence[Recorded]]] | None = None,
) -> dict[str, Any]:
    """What calibration.json holds: every calibration fitted on all rounds, and how it does on text new to it.

    `log_loss` (nats) and `calibration_error` are of fits on the even prompts, scored on the odd ones; those of
    `uncalibrated`, the draft's own probability, stand beside them. `unfitted` gives the reason where the rounds do not
    allow a fit, for instance without both outcomes among them. `ranks` go in as they are. `counted` are the guesses of
    a table of n-grams at the texts, by the name of the calibration that they get.
    """
    judged = sum(len(one.judged()) for one in chain.from_iterable(of_draft))
    table: dict[str, Any] = {"format": FORMAT, "command": command, "split": "validation", "prompts": len(of_draft)}
    table |= {"rounds": sum(map(len, of_draft)), "judged": judged, "fits": {}, "unfitted": {}}

    def scored(calibration: Calibration, rounds: Sequence[Sequence[Recorded]]) -> dict[str, float]:
        probabilities, accepted = predicted(calibration, [*chain.from_iterable(rounds[1::2])])
        if not probabilities:
            raise DataError("no judged position in the odd-numbered texts, which score a fit", "give more prompts")
        return {
            "log_loss": log_loss(probabilities, accepted),
            "calibration_error": expected_calibration_error(probabilities, accepted),
        }

    fits = [(name, terms, of_draft) for name, terms in FITTED.items() if of_draft]
    fits += [(name, TABLE_TERMS, rounds) for name, rounds in (counted or {}).items()]
    for name, terms, rounds in fits:
        try:
            fit = Fit("Logistic", fit_calibration([*chain.from_iterable(rounds)], terms))
            half = [*chain.from_iterable(rounds[::2])]
            table["fits"][name] = asdict(fit) | scored(fit_calibration(half, terms), rounds)
        except DataError as error:
            table["unfitted"][name] = error.what
    if table["fits"].keys() & FITTED.keys():
        table["uncalibrated"] = scored(Calibration(), of_draft)
    if ranks is not None:
        table["ranks"] = asdict(ranks)
    return table


@dataclass(frozen=True)
class Calibrated:
    """What calibration.json holds (`table`), and the texts it was counted on: prompts, and what the target wrote.

    `source` names the table in errors.
    """

    table: dict[str, Any]
    texts: list[Text]
    source: str = "the calibration"

    @property
    def of_texts(self) -> str:
        """The texts, in words."""
        split = self.table.get("split", "validation")
        return "validation text" if split == "validation" else f"other {split}"


def calibrate_pair(
    pair: LoadedPair,
    prompts: Sequence[Sequence[int]],
    settings: PairSettings,
    command: str,
    split: str,
    table: NGramTable | None,
) -> Calibrated:
    """Decode the prompts, of this `split`, greedily, and fit the calibrations of draft and table on their rounds.

    Where a table drafts for a sampler, too, its chances are fitted on texts drawn with it, which hold more surprises.
    """
    rules, new_tokens = Rules(GREEDY, "greedy", pair.ends), settings.speedup.new_tokens
    written = write_texts(pair.target, prompts, new_tokens, rules)
    texts = [([*prompt], new) for prompt, new in zip(prompts, written, strict=True)]
    recorded, ranks = ([], None) if settings.draft is None else record_rounds(pair.draft, texts, pair.ends)
    counted: dict[str, Sequence[Sequence[Recorded]]] = {}
    tables = [one for one in settings.configurations if one.counts_ngrams]
    for sampler in dict.fromkeys(configured_sampler(one, settings.sampler) for one in tables):
        names, new = names_of_fits(sampler.temperature > 0), written
        if sampler.temperature:
            draws = random.Random(f"{settings.seed}/{names[0]}").random
            new = write_texts(pair.target, prompts, new_tokens, Rules(sampler, "token", pair.ends, draws))
        made = [guesses(table, prompt, text) for prompt, text in zip(prompts, new, strict=True)]
        counted |= zip(names, zip(*made, strict=True), strict=True)
    return Calibrated(calibrate(recorded, command, ranks, counted) | {"split": split, "prompts": len(texts)}, texts)


def need_calibration(configurations: Sequence[Configuration]) -> bool:
    """Whether some configuration reads what is counted on other texts beforehand."""
    return any(one.needs_calibration or one.needs_tree_choice for one in configurations)


def calibrate_run(recipe: Recipe, run: Run, pair_settings: PairSettings, table: NGramTable | None) -> Calibrated | None:
    """The run's speedup/calibration.json and validation.json, made on validation text if they are not there yet.

    None where no configuration reads them.
    """
    settings = recipe.speedup
    if not need_calibration(settings.configurations):
        return None
    path, texts = run.path("speedup", "calibration.json"), run.path("speedup", "validation.json")
    if not path.exists():
        prompts = validation_prompts(run, recipe.answers.prompt_tokens, settings.calibration_prompts)
        with load_pair(recipe.target, str(run.path("draft")), device=recipe.device, pytorch=recipe.pytorch) as pair:
            made = calibrate_pair(pair, prompts, pair_settings, run.command, "validation", table)
        save_texts(texts, made.texts)
        write_json(path, made.table)
    calibrated = Calibrated(read_json(path, FORM), load_texts(texts), str(path))
    found = calibrated.table
    scores = {name: f"{fit['log_loss']:.3f}" for name, fit in found["fits"].items()}
    if "uncalibrated" in found:
        scores = {"uncalibrated": f"{found['uncalibrated']['log_loss']:.3f}", **scores}
    line = "log loss " + ", ".join(f"{name} {loss}" for name, loss in scores.items()) if scores else "no calibration"
    line += "".join(f"; {name} not fitted: {reason}" for name, reason in found["unfitted"].items())
    run.say(f"  probabilities on {found['prompts']} validation texts, {found['rounds']} rounds of the draft: {line}")
    return calibrated


def read_calibrations(table: Mapping[str, Any], source: str) -> dict[str, Calibration]:
    """The calibrations of what `calibrate` made; DataError, which names `source`, for another format."""
    if table.get("format") != FORMAT:
        what = f"{source} holds no calibrations: its format is {table.get('format')}"
        raise DataError(what, "make it again: `distill train RECIPE --redo speedup`")
    return {name: fit.fields for name, fit in from_json(table.get("fits"), dict[str, Fit], source).items()}


def load_calibrations(path: Path) -> dict[str, Calibration]:
    """The calibrations of a calibration.json by name; raises DataError when it is damaged or of another format."""
    return read_calibrations(read_json(path, FORM), str(path))


def read_ranks(table: Mapping[str, Any], source: str) -> RankTally:
    """The acceptance by rank of what `calibrate` made; DataError, which names `source`, where there is none."""
    tally: Any = table.get("ranks")
    if not has_form(tally, {"tried": [int], "taken": [int]}) or not tally["tried"]:
        raise DataError(f"{source} holds no acceptance by rank", "make it again: `distill train RECIPE --redo speedup`")
    return RankTally(tally["tried"], tally["taken"])


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """Write recorded texts as token ids; see `load_texts`."""
    write_json(path, {"split": "validation", "texts": [{"prompt": prompt, "new": new} for prompt, new in texts]})


def load_texts(path: Path) -> list[Text]:
    """Prompts, and what the target wrote after each; raises DataError when the file is missing or damaged."""
    texts = read_json(path, {"texts": [{"prompt": [int], "new": [int]}]})["texts"]
    return [(text["prompt"], text["new"]) for text in texts]


# ── The size or shape of a configuration's tree, by expected tokens and measured seconds ──

# Trees that are timed; each costs a few texts, and what lies between two of them is hardly faster than both.
SIZES = (1, 2, 3, 4, 6, 8, 11, 15, 21, 29, 40, 63)
ROUNDS = 128  # of the draft alone, in which it is seen what values the nodes of trees have
TIMED = 2, 5  # prompts, and rounds after each that are timed with trees of every size


def explain_tree(chosen: ChosenTree, of_texts: str, counted: float | None) -> str:
    """The choice and its reason; `of_texts` names what it was made on, `counted` are the tokens of a round that it then
    had, None where none was decoded."""
    if not chosen.nodes:
        return (
            f"`{chosen.configuration}`: on {of_texts} no tree size is predicted to be faster than plain decoding, "
            "so no tree is drafted."
        )
    title = title_with_tree(chosen.configuration, chosen.tree)
    return (
        f"`{title}`, the fastest by its prediction on {of_texts}: {chosen.tokens:.2f} tokens "
        f"in {chosen.seconds * 1e3:.2f} ms a round, {chosen.speedup:.2f}× plain decoding after the prompt."
        + (f" The measured rounds had {counted:.2f} tokens." if counted is not None else "")
    )


def time_rounds(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    rounds: int,
    rules: Rules,
    make: Callable[[Tree], Drafter],
    trees: Mapping[int, Tree],
    lossy: bool = False,
) -> dict[int, float]:
    """Median seconds of a round of n drafted nodes, for each size n of `trees` that rounds came to.

    After every prompt `rounds` are decoded with each tree, in the order of sizes; `make` gives the drafter of a tree.
    Smaller trees, for which alone the end of a context leaves room, do not count.
    """
    seconds: dict[int, list[float]] = {size: [] for size in sorted(trees)}
    for prompt in prompts:
        room = room_for(target, draft, len(prompt), (rounds + 1) * (max(trees, default=0) + 1))
        for size in seconds:
            result = Decoded()
            for _ in decode(target, make(trees[size]), prompt, room, rules, result, lossy):
                if result.rounds and result.rounds[-1].drafted == size:
                    seconds[size].append(result.rounds[-1].seconds)
                if len(result.rounds) >= rounds:
                    break
    return {size: statistics.median(taken) for size, taken in seconds.items() if taken}


def mean_values(drafter: TreeDrafter, texts: Sequence[Text], nodes: int, ends: Collection[int]) -> list[float]:
    """The mean value of the n-th best node of a round, for n up to `nodes`, over at most ROUNDS rounds of given texts.

    A round starts behind the token at which the text left the tree of the one before, as rounds do that are decoded
    greedily; no target is asked.
    """
    values: list[list[float]] = []
    for prompt, new in texts:
        text, at = [*prompt, *new], len(prompt)  # at: the last committed token
        drafter.begin(prompt)
        while at + 1 < len(text) and drafter.room(at + 1) > nodes and len(values) < ROUNDS:
            proposal = drafter.propose(text[: at + 1], nodes, ends)
            values.append([*drafter.values, *[0.0] * (nodes - len(drafter.values))])
            accepted = follow(proposal, text[at + 1 :])
            at += accepted + 1
            drafter.accepted(proposal, accepted, at + 1, 0.0)
    return [statistics.fmean(column) for column in zip(*values, strict=True)]


def follow(proposal: Proposal, text: Sequence[int]) -> int:
    """How many tokens of a text a tree holds from the top down."""
    depths = [0, *Shape(tuple(proposal.parents)).depths]
    return len(walk_greedy([text[depth] if depth < len(text) else NONE for depth in depths], proposal)[0])


def best_shapes(rates: Sequence[float], sizes: Sequence[int], depth: int, costs: StepCosts) -> dict[int, Shape]:
    """By its nodes, the shape of the most tokens per second of each size, at an acceptance by rank.

    Of n nodes and d levels these are (1 + expected accepted) / (T(n + 1) + the seconds of drafting), fewer levels on
    ties; drafting is taken to cost d draft steps and a round's overhead. A size that `depth` levels have no room for
    gives the largest that they have.
    """
    room = sum(len(rates) ** level for level in range(1, depth + 1))
    table = ShapeTable(rates, min(max(sizes), room), depth)

    def speed(nodes: int, levels: int) -> float:
        seconds = costs.target[nodes] + (costs.overhead + levels * costs.draft)
        return float(1 + table.expected[levels, nodes]) / seconds

    return {
        n: table.shape(n, max(range(1, min(n, depth) + 1), key=partial(speed, n)))
        for n in {min(size, room) for size in sizes}
    }


def choose_tree(
    title: str, trees: Mapping[int, Tree], tokens: Mapping[int, float], seconds: Mapping[int, float], costs: StepCosts
) -> ChosenTree:
    """The tree of the most tokens per second among `trees` by their nodes, the smallest on ties; 0 is plain decoding.

    `tokens` are those expected of a round of n nodes. It takes T(n + 1) and the part of the timed `seconds` beyond it:
    drafting, and walking the tree. Sizes that no round came to are left out.
    """
    compared = [
        ComparedTree(n, tokens[n], costs.target[n], max(seconds[n] - costs.target[n], 0.0) if n else 0.0)
        for n in sorted(trees.keys() & tokens.keys())
        if n < len(costs.target) and (n == 0 or n in seconds)
    ]
    best = max(compared, key=lambda one: one.tokens / (one.target_seconds + one.other_seconds))
    spent = best.target_seconds + best.other_seconds
    tree, speedup = trees[best.nodes], best.tokens * costs.target[0] / spent
    nodes, parents = (len(tree), [*tree.parents]) if isinstance(tree, Shape) else (tree, None)
    return ChosenTree(title, nodes, parents, best.tokens, spent, speedup, compared)


def choose_trees(
    settings: PairSettings,
    target: Model,
    draft: Model,
    texts: Sequence[Text],
    ends: Collection[int],
    fitted: Fitted,
    rates: Sequence[float],
    timed: tuple[int, int] = TIMED,
) -> list[ChosenTree]:
    """A choice for each configuration that leaves its tree open, of fewer nodes than `speedup.max_tokens`.

    `texts` are prompts of the validation split, each with the target's text after it; `timed` (prompts, rounds) is
    after how many of them how many rounds are timed. `rates` are the acceptance by rank. Configurations that share a
    tree share its choice.
    """
    costs = replace(fitted.costs, target=fitted.costs.target[: settings.speedup.max_tokens])
    max_nodes = len(costs.target) - 1
    prompts = [prompt for prompt, _ in texts[: timed[0]]]
    choices: list[ChosenTree] = []
    made: dict[str, ChosenTree] = {}
    for configuration in settings.others:
        if not configuration.needs_tree_choice:
            continue
        title, alone = configuration.title, configuration.tree_alone.title
        if alone in made:
            choices.append(replace(made[alone], configuration=title))
            continue
        sampler = configured_sampler(configuration, settings.sampler)
        draws = random.Random(f"{settings.seed}/{title}/timed").random
        rules = Rules(sampler, configuration.verified_by, ends, draws)
        sizes = sorted({*(size for size in SIZES if size < max_nodes), max_nodes})
        trees: dict[int, Tree] = {size: size for size in sizes}
        make = partial(make_drafter, configuration.tree_alone, draft, sampler, draws, fitted)
        lossy = lossy_reason(configuration, sampler) is not None
        if configuration.ranked:
            nodes = sizes if configuration.nodes is None else [configuration.nodes]
            shapes = best_shapes(rates, nodes, configuration.max_length, costs)
            trees = {**shapes}
            tokens = {0: 1.0} | {n: 1 + expected_accepted(shape, rates) for n, shape in shapes.items()}
        else:
            drafter = make(max_nodes)
            assert isinstance(drafter, TreeDrafter)
            values = mean_values(drafter, texts, max_nodes, ends)
            tokens = dict(enumerate(accumulate(values, initial=1.0)))
        timing = partial(time_rounds, target, draft, prompts, timed[1], rules, make, lossy=lossy)
        plainly = configuration.nodes is None
        seconds = time_worthwhile(timing, trees, tokens, costs, 1 / costs.target[0] if plainly else 0.0)
        if plainly or not seconds:
            trees[0] = Shape(()) if configuration.ranked else 0
        made[alone] = choose_tree(title, trees, tokens, seconds, costs)
        choices.append(made[alone])
    return choices


def time_worthwhile(
    timing: Callable[[Mapping[int, Tree]], Mapping[int, float]],
    trees: Mapping[int, Tree],
    tokens: Mapping[int, float],
    costs: StepCosts,
    fastest: float,
) -> dict[int, float]:
    """The `timing` of those `trees` that may be the fastest, one after another: see `choose_tree`.

    A round takes T(n + 1) and a draft step at least. The trees are timed by the tokens per second that this leaves
    possible, until the next can no more than the best of those timed, and than `fastest`.
    """
    known, seconds = [n for n in trees if n in tokens and n < len(costs.target)], dict[int, float]()
    possible = {n: tokens[n] / (costs.target[n] + costs.draft) for n in known}
    progress = Progress("rounds of trees, sizes", len(possible), brief=True)
    for n in sorted(possible, key=possible.__getitem__, reverse=True):
        if possible[n] <= fastest:
            break
        seconds |= timing({n: trees[n]})
        if n in seconds:
            fastest = max(fastest, tokens[n] / max(seconds[n], costs.target[n]))
        progress.step()
    progress.step(progress.total - progress.done)
    return seconds
