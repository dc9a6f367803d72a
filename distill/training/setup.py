"""The state of a training, built in one place: models, data, optimizer, and the choice of the best weights.

Legend: b blocks of a step.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from distill.errors import RecipeError, RunError
from distill.models.hugging_face import end_ids, load_config, load_target, load_tokenizer, pick_device
from distill.models.trimmed_head import read_kept
from distill.packing import Packed
from distill.processes import agree, process_count
from distill.recipe import Recipe, Train
from distill.run import Run
from distill.sampler import Sampler
from distill.target.online import OnlineTarget
from distill.target.source import TeacherSource, open_teacher, require_fit
from distill.target.store import read_manifest
from distill.texts import Prompt, read_prompts
from distill.training.average import WeightAverage
from distill.training.checkpoint import whole_weights
from distill.training.choice.acceptance import Judge, counts, judge_for, rates, speaking
from distill.training.choice.alpha import StoredAnswers
from distill.training.loading import load_draft
from distill.training.optimizer import make_optimizer
from distill.training.penalty import Penalty, penalty_of
from distill.training.plan import (
    REPLAY,
    PlannedPart,
    check_hidden_states,
    last_step,
    planned,
    protocol_of,
    temperatures,
)
from distill.training.step import Columns, Learner, batch_blocks, split_blocks
from distill.training.trackers import require_trackers, start_trackers


def new_state() -> dict[str, Any]:
    """The state before the first step.

    `tokens` counted in the loss; `rate` is the last step's over its part's peak. `curve` holds the points of the
    learning curve, measured on `texts`; `skipped` steps of a constant phase were not worth their hours.
    """
    learning: dict[str, Any] = {"tokens": 0, "rate": 0.0, "texts": None, "curve": [], "skipped": 0}
    return {"step": 0, "best": None, "misses": 0, "sparsity": None, **learning}


@dataclass
class Training:
    """A training in progress. `state` is saved in checkpoints beside weights and moments."""

    recipe: Recipe
    run: Run
    accelerator: Any
    parts: list[PlannedPart]
    source: TeacherSource
    learner: Any
    optimizer: Any
    penalty: Penalty | None
    kept: list[int] | None
    vocabulary: int
    spare: Any = None  # a whole draft to evaluate, where the learner's weights are sharded
    target: Any = None  # of an online teacher; else loaded on first use
    replayed: TeacherSource | None = None
    held_out: StoredAnswers | None = None  # opened on first use, where the target is not loaded
    average: WeightAverage | None = None
    state: dict[str, Any] = field(default_factory=new_state)

    @property
    def settings(self) -> Train:
        """The recipe's section."""
        return self.recipe.train

    @property
    def steps(self) -> int:
        """Steps of all parts."""
        return self.parts[-1].end

    def micro_batches(self, step: int, part: PlannedPart) -> list[tuple[TeacherSource, Tensor]]:
        """This process's blocks of a step, as many at once as settings allow: a pure function of the step.

        Every process gets the same number of micro-batches, some of them empty if need be: FSDP gathers weights at each
        forward pass.
        """
        settings, rank, ranks = self.settings, self.accelerator.process_index, self.accelerator.num_processes
        replayed = 0
        if part.name == REPLAY:
            assert settings.replay is not None and self.replayed is not None
            replayed = min(settings.batch, max(1, round(settings.replay.share * settings.batch)))
        parts = [(self.source, _blocks(self.source, step, settings.batch - replayed, self.recipe.seed))]
        if self.replayed is not None and replayed:
            parts.append((self.replayed, _blocks(self.replayed, step - part.first, replayed, self.recipe.seed)))
        found: list[tuple[TeacherSource, Tensor]] = []
        before = 0  # blocks of the previous sources: the next source starts with the processes that have fewer of them
        for source, blocks in parts:
            pieces = split_blocks(blocks, (rank - before) % ranks, ranks, settings.micro_batch)
            found += [(source, piece) for piece in pieces]
            before += len(blocks)
        return found

    def body(self) -> Iterator[torch.nn.Parameter]:
        """All parameters but the input embedding and the head."""
        outer = ("embed_tokens.weight", "lm_head.weight", "wte.weight")
        return (p for name, p in self.learner.named_parameters() if not name.endswith(outer))

    def any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.accelerator.num_processes == 1:
            return flag
        return bool(self.accelerator.reduce(torch.tensor(int(flag), device=self.accelerator.device), "sum"))

    def draft(self) -> Any:
        """The draft with the present weights, whole in the main process; every process must call it."""
        if self.spare is None:
            return self.accelerator.unwrap_model(self.learner).draft
        weights = whole_weights(self.learner)
        if self.accelerator.is_main_process:
            self.spare.load_state_dict({name.removeprefix("draft."): value for name, value in weights.items()})
        return self.spare

    @contextlib.contextmanager
    def served(self) -> Iterator[Any]:
        """The draft in its served form, for the main process to decode with."""
        with speaking(self.draft(), self.kept) as draft, torch.compiler.set_stance("force_eager"):
            yield draft

    def loaded_target(self) -> Any:
        """The target, loaded on first use."""
        if self.target is None:
            self.target = load_target(self.recipe.target, self.accelerator.device)
        return self.target

    def online(self, packed: Packed) -> TeacherSource:
        """The target's distributions on other blocks, computed on demand."""
        return OnlineTarget(self.loaded_target(), packed, self.source.manifest, self.recipe.teacher.batch)

    def judge(self) -> Judge:
        """The target, set up to decode with drafts."""
        recipe, target = self.recipe, self.loaded_target()
        ends = end_ids(target.config, load_tokenizer(recipe.target.model))
        protocol = protocol_of(recipe.train, recipe.sampler.temperature)
        return judge_for(target, self.vocabulary, ends, Sampler.of(recipe.sampler), protocol, recipe.seed)

    def validation(self) -> tuple[list[Prompt], list[Prompt]]:
        """Validation prompts: those for the choice of weights, and the others, for the decision on a replay."""
        prompts = read_prompts(self.run, "validation")
        first = self.settings.acceptance.prompts if self.settings.acceptance else 0
        judges = self.settings.replay.judges if self.settings.replay else 0
        return prompts[:first], prompts[first : first + judges]

    def acceptance(self) -> dict[str, Any]:
        """The rates of the present weights on the validation prompts, and counts of each prompt that was decoded, the
        same in every process.

        The first texts that are decoded, whose distribution is the target's alone, are kept for `expected`.
        """
        found = texts = None
        with self.served() as draft:
            if self.accelerator.is_main_process:
                found, texts = self._rates(draft)
        if self.state["texts"] is None:
            self.state["texts"] = agree(texts)
        agreed: dict[str, Any] = agree(found)
        return agreed

    def _rates(self, draft: Any) -> tuple[dict[str, Any], list[list[int]] | None]:
        """Decoded with the target, and the texts; where that is not loaded, α on its stored distributions, and None."""
        settings = self.settings.acceptance
        assert settings is not None
        if self.recipe.target.load:
            prompts, _ = self.validation()
            decoded = self.judge().decode(draft, prompts, settings.new_tokens, settings.length)
            return rates(decoded) | counts(decoded), [text.tokens for text in decoded]
        self.held_out = self.held_out or StoredAnswers(self.recipe, self.run)
        protocol = protocol_of(self.settings, self.recipe.sampler.temperature)
        return self.held_out.rates(draft, protocol, self.settings.chunk), None

    def expected(self) -> list[float]:
        """Of each validation prompt, the present weights' probability to be accepted, summed over its text in
        `state["texts"]`."""
        found = None
        with self.served() as draft:
            if self.accelerator.is_main_process:
                prompts, _ = self.validation()
                found = self.judge().expected(draft, prompts, self.state["texts"])
        agreed: list[float] = agree(found)
        return agreed


def _blocks(source: TeacherSource, step: int, count: int, seed: int) -> Tensor:
    return batch_blocks(step, count, source.blocks, seed) if count else torch.empty(0, dtype=torch.long)


def require_processes(recipe: Recipe, device: torch.device) -> None:
    """Raise RunError or RecipeError where the processes of this command cannot share the recipe's steps and device."""
    processes = process_count()
    if device.index is not None and processes > 1:
        raise RunError(
            f"device is {recipe.device}, and {processes} processes were started, each of which takes its own",
            "set device=auto; CUDA_VISIBLE_DEVICES selects the GPUs",
        )
    if recipe.train.batch % processes:
        raise RecipeError(
            f"a step's {recipe.train.batch} blocks cannot be shared evenly by {processes} processes",
            f"set train.batch to a multiple of {processes}, or start fewer processes",
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":  # accelerate launch, of its own processes
        check_sharded(recipe.train)


def make_accelerator(recipe: Recipe, run: Run) -> Any:
    """The Accelerator of this process and the others, with the trackers that the recipe asks for.

    Raises RecipeError for a tracker whose package is missing, RunError for a device that cannot be used, is not the
    one that accelerate takes, or is one GPU for several processes, and for FSDP that is not FSDP2.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    settings = recipe.train
    AcceleratorState._reset_state()  # undo an earlier training's choices in this process; the process group stays
    require_trackers(settings.trackers)
    device, processes = pick_device(recipe.device), process_count()
    require_processes(recipe, device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # accelerate takes the current one
    accelerator = Accelerator(
        cpu=device.type == "cpu" if processes == 1 else None,
        mixed_precision="bf16" if settings.dtype == "bfloat16" else "no",
        log_with=list(settings.trackers) or None,
        project_dir=str(run.path("trackers")) if settings.trackers else None,
    )
    if recipe.device != "auto" and accelerator.device.type != device.type:
        raise RunError(
            f"device is {recipe.device}, and the processes were started for {accelerator.device.type}",
            "set device=auto, or start them for that device",
        )
    if accelerator.distributed_type == "FSDP":
        plugin = accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise RunError(
                "the processes were started for FSDP of version 1; sharding needs version 2",
                "set fsdp_version: 2 in accelerate's configuration, as recipes/accelerate/fsdp2.yaml does",
            )
        if settings.dtype == "bfloat16":
            plugin.mixed_precision_policy = exact_outside(plugin.mixed_precision_policy)
    return accelerator


def exact_outside(policy: Any) -> Any:
    """A mixed-precision policy of FSDP2 that shortens only the weights, when they enter a product.

    accelerate's own policy also sums gradients over processes in the short type, and casts the learner's inputs and
    outputs: the target's distributions, and the counts by which gradients are divided.
    """
    return replace(policy, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False)


def check_sharded(settings: Train) -> None:
    """Raise RecipeError for settings that FSDP excludes."""
    if settings.sparsity is not None or settings.adapter is not None:
        raise RecipeError("sparsity and adapters are not offered with FSDP", "start with DDP, or leave them out")
    if settings.optimizer == "muon":
        raise RecipeError(
            "train.optimizer is muon, which needs whole matrices; FSDP gives each process a part of them",
            "start with DDP, or set train.optimizer=adamw",
        )


def set_up(recipe: Recipe, run: Run) -> Training:
    """Load everything, and refuse incompatible parts before the first step.

    Raises DataError for a teacher of another target or recipe, RecipeError for settings that exclude each other.
    """
    settings = recipe.train
    accelerator = make_accelerator(recipe, run)
    device = accelerator.device
    parts = planned(settings, recipe.sampler.temperature, recipe.corpus.block)
    manifest, trim = read_manifest(run.path("teacher")), read_kept(run.path("cut"))
    config = load_config(str(run.path("cut")))
    require_fit(manifest, recipe, config, temperatures(parts))
    width = load_config(recipe.target.model).get_text_config().hidden_size
    check_hidden_states(settings, manifest["kind"], config.hidden_size, width)
    kept = trim["kept"] if trim else None
    for part in parts:
        part.loss.require_columns(manifest["vocabulary"] if kept is None else len(kept))
    settings.require_judges(len(read_prompts(run, "validation")))
    draft = load_draft(recipe, run, device)
    target = load_target(recipe.target, device) if recipe.teacher.kind == "online" else None
    source = open_teacher(run, recipe, device, target)
    penalty = penalty_of(draft, settings.model_copy(update={"steps": parts[-1].end}))
    optimizer: Any = make_optimizer(draft, settings, penalty.parameters() if penalty else ())
    length = settings.acceptance.length if settings.acceptance else 4
    learner = Learner(draft, Columns(source.vocabulary, kept, device), settings.chunk, length)
    sharded = accelerator.distributed_type == "FSDP"
    if sharded:
        check_sharded(settings)
    spare = copy.deepcopy(draft) if sharded else None
    learner, optimizer = accelerator.prepare(learner, optimizer)
    learner.train()
    start_trackers(accelerator, recipe, run)
    work = Training(
        recipe, run, accelerator, parts, source, learner, optimizer, penalty, kept, source.vocabulary, spare, target
    )
    if settings.average is not None:
        work.average = WeightAverage(learner, settings.average, last_step(parts))
    return work
