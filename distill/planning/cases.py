"""Costs for a plan: measured on a pair, whose draft can have a recipe's shape and random weights, or read from saved
curves."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.decoding.costs import CostCurve, Costs, measure_costs, predicted_speedups, tokens_per_round
from distill.engines.loaded import LoadedPair, load_pair, target_file
from distill.engines.pairs import require_drafts
from distill.engines.server_commands import N_MAX, P_MIN, SPEC_TYPE
from distill.engines.torch.hugging_face import load_config, text_folder, write_kept
from distill.engines.torch.products import require_kernel
from distill.errors import DataError, RecipeError
from distill.files import is_gguf
from distill.folders import copy_tokenizer
from distill.gguf.writer import export_gguf
from distill.planning.plan import Case, step_costs
from distill.progress import Progress, note
from distill.recipe import Gguf, GgufOptions, PyTorch, Recipe, Target
from distill.surgery.cutter import SHAPE, check_cut, planned_sizes
from distill.surgery.layers import layer_settings, set_layers

# ── Layer swapping: layers of a target larger than the device's memory stream over a link in every step ──
# Two buffers hold a streamed layer each: while one is computed, the next is on its way. The weights do not depend
# on the tokens, so that the first layers of the next step come while the draft works. Many tokens of a step then
# cost little more than one: their products are done while the link is busy.

BUFFERS = 2
STEPS = 64  # that are simulated; the first half fills the buffers


def cycle_seconds(compute: Sequence[float], transfer: Sequence[float], pause: float) -> float:
    """Seconds from one step to the next, in the long run: `compute` [L] and `transfer` [L] (0: the layer is resident)
    of each layer, and a `pause` between steps in which the link goes on.

    Every transfer and every layer's computation is an event. A transfer begins when the link is free and the layer that
    its buffer held has been computed; a layer begins when the one before it has been computed and its weights are
    there.
    """
    link = now = half = 0.0
    computed = [0.0] * BUFFERS  # when the layers in the buffers have been computed, the older one first
    for step in range(STEPS):
        if step == STEPS // 2:
            half = now
        now += pause
        for seconds, weights in zip(compute, transfer, strict=True):
            if weights:
                link = max(link, computed.pop(0)) + weights
                now = max(now, link)
            now += seconds
            if weights:
                computed.append(now)
    return (now - half) / (STEPS - STEPS // 2)


@dataclass(frozen=True)
class LayerSwap:
    """A target of which `streamed` of its `layers`, spread evenly, come over a link in each step; the transfer of one
    takes `transfer` of the curve's units. Of a mixture of experts whole layers are streamed: which experts a layer
    needs is known too late to fetch only those."""

    streamed: int
    layers: int
    transfer: float

    def cost(self, whole: float, pause: float = 0.0) -> float:
        """From step to step, where `whole` is a step's cost with all layers in memory, and `pause` lies between."""
        places = {place * self.layers // self.streamed for place in range(self.streamed)}
        transfer = [self.transfer if place in places else 0.0 for place in range(self.layers)]
        return cycle_seconds([whole / self.layers] * self.layers, transfer, pause)

    def applied(self, target: Sequence[float], draft: float) -> list[float]:
        """T(1..) with the transfers. While the draft makes its tokens, the link goes on: what is left of a round is the
        price of verifying."""
        drafting = [tokens * draft for tokens in range(len(target))]
        return [self.cost(whole, pause) - pause for whole, pause in zip(target, drafting, strict=True)]


# ── Costs for a plan: of a pair that is here, and of saved curves ──

PROMPT = 128  # tokens before those that are timed
TIMINGS = 3  # of every round; a plan shows their spread
UNSTEADY = 1.25  # a ratio of plain steps that shows other work


@dataclass(frozen=True)
class PlanRequest:
    """A target with a draft, with the draft that `recipe` cuts, or with a draft whose step costs `draft_cost` T(1).

    Requests have `prompt` tokens and `new` new ones.
    """

    target: Target
    draft: str | None
    draft_cost: float | None
    recipe: Recipe | None
    lengths: Sequence[int] = (1, 2, 3, 4, 6, 8)
    prompt: int = 128
    new: int = 96
    threads: int | None = None
    gguf: Gguf | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> PlanRequest:
        """The draft that a recipe cuts, for texts as it times them."""
        new = recipe.speedup.new_tokens
        prompt = max(1, min(PROMPT, recipe.corpus.block - new))
        return cls(recipe.target, None, None, recipe, prompt=prompt, new=new)


def measured_cases(request: PlanRequest) -> Iterator[Case]:
    """The request's pair on this machine; of a recipe, by each of its backends; of two GGUF files without llama.cpp's
    options, by each engine that is here."""
    recipe, here = request.recipe, "this machine, measured"
    if recipe is None:
        assert request.draft is not None
        target, draft = require_drafts(request.target.model, request.draft, False)
        place = request.target.model_copy(update={"model": target})
        tokens = request.prompt + request.new + max(request.lengths) + 1
        engines: dict[str, dict[str, Any]] = {here: {"gguf": request.gguf}}
        if request.gguf is None and is_gguf(target) and is_gguf(draft):
            ik = Gguf(target=GgufOptions(library="ik"))
            engines = {f"{here}, llama.cpp": {}}
            engines |= {f"{here}, ik_llama.cpp": {"gguf": ik}} if importlib.util.find_spec("ik_llama_cpp") else {}
            engines[f"{here}, PyTorch"] = {"pytorch": PyTorch(target_weights="file")}
        for number, (title, own) in enumerate(engines.items()):
            try:
                if "pytorch" in own:
                    require_kernel()
                opened = load_pair(place, draft, tokens=tokens, threads=request.threads, **own)
            except DataError as error:
                if not number:
                    raise
                note(f"{title}: left out: {error.what}")
                continue
            with opened as pair:
                yield _measured(pair, title, request)
        return
    with tempfile.TemporaryDirectory() as scratch:
        for backend in recipe.speedup.backends:
            with load_planned(recipe, backend, Path(scratch)) as pair:
                yield _measured(pair, f"{here}, {backend}", request)


def curve_case(curve: CostCurve, draft: CostCurve | None, request: PlanRequest, swap: LayerSwap | None) -> Case:
    """The case of saved curves, or of one and a given cost of the draft; RecipeError for curves of two units."""
    depth, (single, *_) = request.prompt, curve.at(request.prompt)
    steps = [(request.draft_cost or 0.0) * single] * 2
    if draft is not None:
        if draft.unit != curve.unit:
            hint = "give the cost of a draft step in T(1) instead, such as 0.05"
            raise RecipeError(f"the target's curve is in {curve.unit}, the draft's in {draft.unit}", hint)
        steps = [*draft.at(depth)[:2]]
    target = curve.at(depth) if swap is None else swap.applied(curve.at(depth), steps[0])
    costs = step_costs(target, steps[0], steps[-1], request.lengths)
    at = max([one for one in curve.depths if one <= depth], default=curve.depths[0])
    reached = [length for length in request.lengths if length < len(target)]
    return Case(f"{curve.model}, curve at depth {at}", [costs], reached, note=curve.note)


def _measured(pair: LoadedPair, title: str, request: PlanRequest) -> Case:
    """Time the steps of a loaded pair in the middle of a text, as `distill speedup` does.

    Raises DataError for contexts without room.
    """
    lengths, prompt, new = request.lengths, request.prompt, request.new
    room = min(pair.target.capacity, pair.draft.capacity) - max(max(lengths) + 1, new)
    if room < prompt:
        hint = "plan for fewer tokens: --depth, --tokens; of a recipe speedup.new_tokens"
        raise DataError(f"{title}: the context has no room for {new} tokens after {prompt}", hint)
    progress = Progress(f"{title}: timings", TIMINGS)
    timings = []
    for _ in range(TIMINGS):
        timings.append(measure_costs(pair.target, pair.draft, max(lengths), prompt + new // 2))
        progress.step()
    tokens = [costs.target[0] for costs in timings]
    note = (
        f"A plain step took {max(tokens) / min(tokens):.1f} times as long in one timing as in another: other programs "
        "were using this machine, so plan again when it is quiet."
    )
    return Case(title, timings, lengths, prompt, new, note=note if max(tokens) > UNSTEADY * min(tokens) else "")


def planned_config(recipe: Recipe) -> Any:
    """The configuration of the draft that a recipe cuts, without a trimmed head."""
    check_cut(recipe)
    config = copy.deepcopy(load_config(recipe.donor_model))
    sizes = planned_sizes(recipe, load_config(recipe.target.model), config)
    assert sizes is not None  # the families that can be cut name them
    set_layers(config, layer_settings(config, range(sizes["layers"])))
    for word, name in SHAPE.items():
        setattr(config, name, sizes[word])
    return config


def load_planned(recipe: Recipe, backend: str, scratch: Path) -> LoadedPair:
    """The recipe's target and a draft of the planned shape with random weights, written to `scratch`: what a step costs
    depends on shapes, not on weights."""
    from transformers import AutoModelForCausalLM

    folder = scratch / "draft"
    if not folder.exists():
        model = AutoModelForCausalLM.from_config(planned_config(recipe))
        model.save_pretrained(folder)
        copy_tokenizer(text_folder(recipe.target.model), folder)
        if recipe.cut.trim_size is not None:
            write_kept(folder, list(range(recipe.cut.trim_size)), model.config.vocab_size, {})
    if backend == "pytorch":
        return load_pair(recipe.target, str(folder), device=recipe.device, pytorch=recipe.pytorch)
    kind, options = recipe.speedup.files[backend], recipe.gguf_pair(backend)
    draft = export_gguf(folder, scratch / f"draft-{kind}.gguf", kind).path
    target = target_file(recipe, scratch / f"target-{kind}.gguf", backend)
    return load_pair(Target(model=str(target)), str(draft), tokens=recipe.corpus.block, gguf=options)


# ── llama.cpp's settings from a curve ──

MAX_LENGTH = 32  # drafted tokens that are considered
MAX_LISTED = 64  # costs in GGML_BATCH_COSTS


def llama_settings(curve: CostCurve, accepted: Sequence[float], draft: float, depth: int) -> list[str]:
    """llama.cpp settings from the target's curve, conditional acceptance by position and the draft's D(1).

    `draft` is in units of T(1). GGML_BATCH_COSTS are T(m) / (m·T(1)) as measured, not smoothed. llama.cpp builds with
    profile-guided lengths (pull request 17034) read the environment variables, every llama-server reads the flags: the
    fixed length of greatest predicted speed, and the probability below which a token costs more time than it saves.
    """
    costs = Costs(curve.at(depth), draft * curve.at(depth)[0], draft * curve.at(depth)[0])
    speeds = predicted_speedups(costs.target, costs.draft, accepted[:MAX_LENGTH])
    best = speeds.index(max(speeds))
    relative = [f"{value:.3f}".rstrip("0").rstrip(".") for value in curve.relative(depth)[:MAX_LISTED]]
    environment = [f"GGML_BATCH_COSTS={','.join(relative)}", f"GGML_MAX_LOOK_AHEAD={look_ahead(costs, speeds[best])}"]
    if best == 0:
        # Not --spec-draft-n-max 0: llama-server drafts a token all the same, and aborts at the first request.
        return [*environment, f"{SPEC_TYPE} none"]
    floor = probability_floor(costs, accepted, best, speeds[best])
    return [*environment, f"{N_MAX} {best}", f"{P_MIN} {floor:.2f}"]


def look_ahead(costs: Costs, speed: float = 1.0) -> int:
    """Return how many tokens a draft must look ahead to see past the steps of the curve.

    Decoding at `speed` times plain decoding, k accepted tokens save k·T(1) / speed seconds and cost
    T(n + 1 + k) − T(n + 1) + k·D. Returns the smallest k that pays, the largest such k over all lengths n; lengths from
    which no k pays do not count. At least 1.
    """
    saved, longest = costs.target[0] / speed, len(costs.target) - 1

    def pays(n: int, k: int) -> bool:
        return k * saved > costs.target[n + k] - costs.target[n] + k * costs.draft

    looks = (next((k for k in range(1, longest - n + 1) if pays(n, k)), 1) for n in range(longest))
    return max(looks, default=1)


def probability_floor(costs: Costs, accepted: Sequence[float], length: int, speed: float) -> float:
    """The probability of acceptance at which verifying one more token pays for itself, within [0, 0.95].

    The draft step of a drafted token is spent already. Verifying it costs (T(n + 1) − T(1)) / n seconds, averaged over
    n = `length`; in that time decoding at `speed` makes speed / T(1) tokens a second. The token is worth its own
    probability times that of all tokens before it, for which the mean over the positions is used.
    """
    reached = tokens_per_round(accepted[: length - 1])  # the mean number of positions that are reached
    cost = speed * (costs.target[length] - costs.target[0]) / (length * costs.target[0])
    return min(max(cost * length / reached, 0.0), 0.95)
