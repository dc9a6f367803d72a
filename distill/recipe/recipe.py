"""A whole recipe, with the checks that span several sections, and the stages that not every recipe's run has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from distill.machine import MOST_THREADS
from distill.recipe.corpus import Chat, Corpus
from distill.recipe.measuring import ON_CPU, Evaluate, Export, Gguf, GgufOptions, Speedup
from distill.recipe.target import Answers, PyTorch, SamplerSettings, Section, Target, TeacherStore
from distill.recipe.training import Cut, Train

REASON = "the target's weights are not loaded (target.load: false)"
QUESTIONS = "questions"  # the stage in which the target writes questions
TIMED = "speedup"  # the stage that times the target
COUNTED = "table"  # the stage that counts n-grams of the answers
HELD_OUT = ("validation", "test")  # stages that take the place of the target where it would be run on held-out texts


class Recipe(Section):
    """Everything a run depends on."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100, description="the run directory's name")
    seed: int = Field(0, ge=0, description="seed of all random choices")
    threads: int | None = Field(
        None,
        ge=1,
        le=MOST_THREADS,
        description="CPU threads; null: OMP_NUM_THREADS, else all cores that this process may use",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, mps, …")
    target: Target
    corpus: Corpus
    chat: Chat = Chat()
    sampler: SamplerSettings = SamplerSettings()
    pytorch: PyTorch = PyTorch()
    answers: Answers = Answers()
    teacher: TeacherStore = TeacherStore()
    cut: Cut = Cut()
    train: Train = Train()
    eval: Evaluate = Evaluate()
    export: Export = Export()
    speedup: Speedup = Speedup()
    gguf: Gguf = Gguf()

    @property
    def donor_model(self) -> str:
        """The model that the draft is cut from: cut.donor, or the target's folder or hub name."""
        return self.target.model if self.cut.donor == "target" else self.cut.donor

    def gguf_options(self, role: Literal["target", "draft"]) -> GgufOptions:
        """How llama.cpp opens a file of the target or the draft: null options follow `threads` and `device`."""
        options = self.gguf.of(role)
        threads = options.threads or self.threads
        if self.device == "cpu" and options.n_gpu_layers is None and not options.device and not options.tensor_split:
            return options.model_copy(update={"threads": threads, "device": ON_CPU.device})
        return options.model_copy(update={"threads": threads})

    def gguf_pair(self, backend: str) -> Gguf:
        """How a backend that opens GGUF files opens both models."""
        pair = {}
        for role in ("target", "draft"):
            options = self.gguf_options(role)
            library = "ik" if backend.startswith("ik") else options.library
            pair[role] = options.model_copy(update={"library": library})
        return Gguf(**pair)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.answers.prompt_tokens + self.answers.new_tokens > self.corpus.block:
            raise ValueError(
                f"answers.prompt_tokens + answers.new_tokens = {self.answers.prompt_tokens + self.answers.new_tokens} "
                f"does not fit corpus.block = {self.corpus.block}"
            )
        self._can_ask_the_target()
        if not self.target.load:
            needing = list(self._weights_needed())
            if needing:
                raise ValueError(f"target.load is false: {'; '.join(needing)}")
        for foreign in (one.title for one in self.speedup.configurations if one.other_vocabulary):
            raise ValueError(f"`{foreign}` is for a draft of another vocabulary; a run's draft has the target's")
        for backend, kind in self.speedup.files.items() if self.target.load else ():
            if kind not in self.export.outtypes:
                raise ValueError(f"speedup measures {backend} in {kind}, which is not among export.outtypes")
        return self

    def _can_ask_the_target(self) -> None:
        """Raise ValueError where sources of kind target ask for what the writer or section chat does not give."""
        asked = self.corpus.asked
        if asked and self.answers.writer is not None and self.answers.writer.api == "chat":
            raise ValueError(
                "corpus.sources of kind target continue the beginning of a prompt, and answers.writer.api chat sends "
                "whole messages: use api: completions"
            )
        longest = max((source.turns for source in asked), default=1)
        if longest > self.chat.turns:
            raise ValueError(
                f"corpus.sources: turns is {longest}, and chat.turns lets the target answer {self.chat.turns}: raise "
                "chat.turns, or lower turns"
            )

    def _weights_needed(self) -> Iterator[str]:
        """Everything that needs the target's weights where `target.load` is false, each with the remedy."""
        answers, teacher, cut, train = self.answers, self.teacher, self.cut, self.train
        if self.target.quantise is not None or self.target.shard:
            yield "target.quantise and target.shard are for loaded weights: leave them out"
        if answers.prompts and answers.writer is None:
            yield "answers.writer must name a GGUF file or servers that write the answers"
        elif self.corpus.asked and answers.writer is None:
            yield "answers.writer must name a GGUF file or servers that write the questions of corpus.sources"
        if teacher.kind != "compact":
            yield f"teacher.kind {teacher.kind} needs the weights: use compact"
        elif teacher.gguf is None and teacher.server is None:
            yield "teacher.gguf or teacher.server must give the distributions"
        if self.donor_model == self.target.model:
            yield "cut.donor is the target itself: name another model"
        if cut.compare:
            yield "cut.compare times the target: leave it out"
        if cut.trim is not None and cut.trim.size is None and cut.trim.by == "price":
            yield "cut.trim.by price times the target: use mass, or give a size"
        if train.acceptance is None:
            yield "train.acceptance is null: cuts and weights are chosen on its validation prompts; give it"
        if train.hidden_states is not None:
            yield "train.hidden_states reads the target's hidden states: leave it out"


def left_out(recipe: Recipe) -> dict[str, str]:
    """The stages that a recipe's run does not have, each with the reason."""
    unasked = {} if recipe.corpus.asked else {QUESTIONS: "its corpus has no source of kind target"}
    if not recipe.target.load or not any(one.counts_ngrams for one in recipe.speedup.configurations):
        unasked[COUNTED] = "no configuration that it measures drafts from a table of n-grams"
    if recipe.target.load:
        return unasked | dict.fromkeys(HELD_OUT, "its target is loaded and runs on held-out texts itself")
    return unasked | not_run(recipe)


def not_run(recipe: Recipe) -> dict[str, str]:
    """Those of them that runs have as a rule, so that a user should hear of each."""
    return {} if recipe.target.load else {TIMED: REASON}
