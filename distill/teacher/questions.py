"""Stage `questions`: the target writes the questions that it will be asked.

An instruct model that continues the user header of its chat template writes a message of the kind that it was trained
to answer (Magpie, arXiv 2406.08464). A model without a template writes texts, from its beginning token or from given
first words; prompts are cut from these. The texts are numbered, and each has its own system prompt and random numbers.
They are asked for in rounds until enough of them are usable; the first usable ones count, whatever the rounds.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill.data.chat_template import ChatTemplate, Message, PlainTexts, UserHeader
from distill.data.prompts import ChatPrompts
from distill.data.samples import TEXT_FAULTS, AskedQuestions, QuestionTexts, Sample, is_looping, listed, read_answers
from distill.data.sources import question_files
from distill.devices import barrier, process_count, process_index
from distill.engines.torch.hugging_face import encode, end_ids, load_tokenizer
from distill.errors import DataError, RecipeError, printable
from distill.files import write_result, write_text
from distill.recipe import Recipe, SamplerSettings, Source
from distill.run import Run
from distill.teacher.answers import rules_of, write_answers, writer_kind

# ── Which texts are usable questions ──

FEWEST_TOKENS = 3  # of a question
SIMILAR = 0.7  # the Jaccard similarity of word 3-grams from which two questions are near-duplicates
SHORT, WORDLESS = f"shorter than {FEWEST_TOKENS} tokens", "without words"
SPECIAL = "with special tokens or control characters"
LOOPING = "that end in a loop"
EQUAL, ALIKE = "equal to another", f"like another (Jaccard similarity of word 3-grams of {SIMILAR} or more)"
NOT_ENDED = "not ended within the limit"
# Scripts without spaces between words count character by character.
_WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff\ufffd\ufffe\uffff\ud800-\udfff]")


def fault(template: ChatTemplate, before: Sequence[Message], answer: Sample, text: str, thinking: bool | None) -> str:
    """The reason why a text is not usable as a question behind the messages `before`; empty where it is.

    `text` is the decoded `answer`, without its end and the white space around it.
    """
    if answer.dropped not in ("", *TEXT_FAULTS):
        return answer.dropped
    if not answer.ended and not isinstance(template, PlainTexts):
        return NOT_ENDED
    if not words(text):
        return WORDLESS
    ids = encode(template.tokenizer, text)
    if _CONTROL.search(text) or template.special & {*ids, *answer.answer[:-1]}:
        return SPECIAL
    if len(ids) < FEWEST_TOKENS:
        return SHORT
    if is_looping(ids):
        return LOOPING
    try:
        template.text([*before, {"role": "user", "content": text}], thinking)
    except ValueError as error:
        return str(error)
    return ""


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return _WORD.findall(text.casefold())


def grams(text: str, length: int) -> Iterator[tuple[str, ...]]:
    """The n-grams of a text's words; of a text with fewer words, all of them as one."""
    found = words(text)
    for start in range(max(1, len(found) - length + 1)):
        yield tuple(found[start : start + length])


def repeats(texts: Sequence[str]) -> list[str]:
    """For each text EQUAL or ALIKE where one before it is, else nothing; such a text is not compared with later ones.

    Exact, and quick for many texts: two sets with a similarity of at least s share one of the rarest
    ⌊(1 − s) n⌋ + 1 of their n elements, so only texts that share one of those are compared (prefix filtering, Chaudhuri
    et al. 2006).
    """
    numbers: dict[tuple[str, ...], int] = {}
    sets = [frozenset(numbers.setdefault(gram, len(numbers)) for gram in grams(text, 3)) for text in texts]
    frequency = Counter(number for own in sets for number in own)
    seen: set[str] = set()
    index: dict[int, list[int]] = {}
    found = []
    for place, (text, own) in enumerate(zip(texts, sets, strict=True)):
        plain = " ".join(text.casefold().split())
        rarest = sorted(own, key=lambda number: (frequency[number], number))
        rarest = rarest[: len(own) - math.ceil(SIMILAR * len(own) - 1e-9) + 1]
        others = {other for number in rarest for other in index.get(number, ())}
        if plain in seen:
            found.append(EQUAL)
        elif any(_alike(own, sets[other]) for other in others):
            found.append(ALIKE)
        else:
            found.append("")
            seen.add(plain)
            for number in rarest:
                index.setdefault(number, []).append(place)
    return found


def _alike(own: frozenset[int], other: frozenset[int]) -> bool:
    if min(len(own), len(other)) < SIMILAR * max(len(own), len(other)) - 1e-9:
        return False
    common = len(own & other)
    return common >= SIMILAR * (len(own) + len(other) - common) - 1e-9


# ── What is asked ──

OPENINGS = 4  # are shown
TEXTS_PER_QUESTION = 3  # are asked for at most


@dataclass(frozen=True)
class Question:
    """A numbered question: the messages before it (a system prompt or none), whether the template is rendered with
    thinking on, how it begins, and its text once it is written."""

    id: str
    before: list[dict[str, Any]]
    thinking: bool | None
    opening: str = ""
    text: str = ""


class Asking:
    """The requests for one source: headers, samplers and limits.

    Raises DataError or RecipeError where the target's user header cannot be found, where a target without a template
    begins no text, and where the questions would not fit a block.
    """

    def __init__(self, recipe: Recipe, source: Source, number: int) -> None:
        self.recipe, self.source, self.number = recipe, source, number
        tokenizer = load_tokenizer(recipe.target.model)
        self.plain = not tokenizer.chat_template
        self.template = (PlainTexts if self.plain else ChatTemplate)(tokenizer, recipe.chat)
        self.chat = ChatPrompts(self.template, recipe.corpus.block - recipe.answers.new_tokens, recipe.seed)
        self.ends = end_ids(recipe.target.model, tokenizer)
        self.rules = rules_of(recipe, tokenizer)
        self._headers: dict[str, UserHeader] = {}
        self._require_room()

    def _require_room(self) -> None:
        """Raise RecipeError where the longest question could not be answered in a block."""
        openings = [len(encode(self.template.tokenizer, text)) for text in self.source.openings]
        longest, room = self.source.tokens + max(openings, default=0), min(self.chat.longest, self.rules.room)
        if self.plain and longest < self.recipe.answers.prompt_tokens:
            raise RecipeError(
                f"a text of corpus.sources has at most {longest} tokens, too few for answers.prompt_tokens "
                f"{self.recipe.answers.prompt_tokens}, which are cut from it",
                "raise tokens of the source, or lower answers.prompt_tokens",
            )
        before = [[{"role": "system", "content": text}] for text in self.recipe.chat.system] or [[]]
        for system in before:
            for opening in self.source.openings if self.plain and self.source.openings else ("", *self.source.openings):
                self.header(system, None, opening)
        around = max(len(self.template.prompt([*one, {"role": "user", "content": "a"}])) for one in before)
        if around + longest > room:
            raise RecipeError(
                f"a question of corpus.sources may have {longest} tokens, with {around} of the template around it: "
                f"corpus.block has room for {room} before answers.new_tokens",
                "raise corpus.block, or lower tokens of the source, or answers.new_tokens",
            )

    def begin(self, number: int) -> Question:
        """A numbered question, with the system prompt and the thinking that the seed draws for it."""
        name = f"question-{self.number}-{number:07d}"
        openings = self.source.openings
        opening = self.chat.draw(name, "opening", openings) if openings else ""
        return Question(name, self.chat.system(name), self.chat.thinking(name), opening)

    def record(self, question: Question) -> dict[str, Any]:
        """The line of a question in its file; of a target without a template, of its text."""
        if self.plain:
            return {"text": question.text}
        return {"messages": [*question.before, {"role": "user", "content": question.text}]}

    def header(self, messages: list[dict[str, Any]], thinking: bool | None, opening: str = "") -> UserHeader:
        """The user header behind messages, with the message's opening; DataError, with the reason, where it cannot be
        found."""
        name = json.dumps([messages, thinking, opening])
        if name in self._headers:
            return self._headers[name]
        try:
            header = self.template.user_header(messages, self.ends, thinking, opening)
        except ValueError as error:
            if self.plain:
                raise DataError(f"the target cannot begin a text: {error}", "give openings of its texts") from error
            raise DataError(
                f"the target's chat template has no user header that questions could be written behind: {error}",
                "use other corpus.sources than kind: target",
            ) from error
        self._headers[name] = header  # the same for many questions
        return header

    def first_header(self) -> UserHeader:
        """The header of the first text; with its opening where a target without a template begins no text itself."""
        first = self.begin(0)
        return self.header(first.before, None, first.opening if self.plain else "")

    def writing(self, ends: Sequence[str]) -> Recipe:
        """The recipe of a writer of questions, which end before each of the texts `ends`, too."""
        own = {"stop": tuple(ends), "repetition_penalty": 1.0}
        return self.recipe.model_copy(
            update={
                "sampler": SamplerSettings(temperature=self.source.temperature, top_p=self.source.top_p),
                "answers": self.recipe.answers.model_copy(update=own),
            }
        )


def check_questions(recipe: Recipe) -> list[str]:
    """What each source of kind target will ask, for `distill check`; loads no weights. Raises as `Asking` does."""
    lines = []
    for number, source in enumerate(recipe.corpus.asked):
        asking = Asking(recipe, source, number)
        header = asking.first_header()
        limits = f"of at most {source.tokens} tokens, at temperature {source.temperature:g} and top-p {source.top_p:g}"
        count = TEXTS_PER_QUESTION * (source.questions or 0)
        if asking.plain:
            begun = "first words" if source.openings else f"its beginning token {header.text!r}"
            lines.append(
                f"no chat template: {source.questions} continuations of {begun} by the target, from at most {count} "
                f"texts {limits}; prompts are their first {recipe.answers.prompt_tokens} tokens"
            )
        else:
            lines += [
                f"questions: {source.questions} of the target's own, from at most {count} texts {limits}",
                f"written behind the template's user header ({len(header.ids)} tokens): {header.text!r}"
                + ("" if header.end is None else f", up to {header.end!r}"),
            ]
        if source.openings:
            shown = ", ".join(repr(text) for text in source.openings[:OPENINGS])
            more = len(source.openings) - OPENINGS
            lines.append(f"they begin with one of: {shown}" + (f" and {more} more" if more > 0 else ""))
    return lines


# ── The stage ──

EXPECTED, LOWEST_EXPECTED = 0.8, 1 / TEXTS_PER_QUESTION  # share of usable texts
SURPLUS = 1.1  # more are asked for, to be sure
EXAMPLES, SHOWN_CHARACTERS = 3, 500  # of each
SUMMARY = "summary.json"


def questions(recipe: Recipe, run: Run) -> list[Path]:
    """Write the questions of each source of kind target to questions/target.jsonl (target-2.jsonl, …), and
    summary.json.

    Texts are asked for as stage `answers` asks for answers, shared among processes and resumed as those are.
    """
    share = process_index(), process_count()
    summaries = []
    for number, (source, name) in enumerate(zip(recipe.corpus.asked, question_files(recipe.corpus), strict=True)):
        asking = Asking(recipe, source, number)
        kept, summary = _ask(asking, run, share, name)
        if share[0] == 0:
            lines = (json.dumps(asking.record(one)) + "\n" for one in kept)
            write_text(run.path("questions", name), "".join(lines))
            _say(run, summary)
        summaries.append(summary)
    if share[0] == 0:
        write_result(run.path("questions", SUMMARY), QuestionTexts(writer_kind(recipe), summaries))
    barrier()
    return [run.path("questions")]


def _ask(asking: Asking, run: Run, share: tuple[int, int], name: str) -> tuple[list[Question], AskedQuestions]:
    """The usable questions of a source, and what is known about them; `share` as of stage `questions`."""
    goal = asking.source.questions
    assert goal is not None
    asked: list[Question] = []
    reasons: list[str] = []
    usable: list[Question] = []
    repeated: Counter[str] = Counter()
    for number in itertools.count(1):
        if len(usable) >= goal or len(asked) >= TEXTS_PER_QUESTION * goal:
            break
        count = _next(asking.recipe.answers.batch, goal, len(usable), len(asked))
        fresh = [asking.begin(place) for place in range(len(asked), len(asked) + count)]
        for question, text, reason in _written(asking, run, share, fresh, f"asked-{asking.number}-round-{number}"):
            asked.append(replace(question, text=text))
            reasons.append(reason)
        sound = [one for one, reason in zip(asked, reasons, strict=True) if not reason]
        found = repeats([one.text for one in sound])
        usable = [one for one, reason in zip(sound, found, strict=True) if not reason]
        repeated = Counter(filter(None, found))
    dropped = Counter(filter(None, reasons)) + repeated
    if not usable:
        raise DataError(
            f"the target wrote no usable question in {len(asked)} texts: {listed(dropped)}",
            "raise tokens of this corpus source (and use --redo questions), or use other sources"
            + ("" if asking.plain else ": the target may not be an instruct model"),
        )
    kept = usable[:goal]
    shown = [one.text[:SHOWN_CHARACTERS] for one in kept[:EXAMPLES]]
    counts = goal, len(asked), len(asked) - dropped.total(), len(kept)
    return kept, AskedQuestions(name, *counts, dict(sorted(dropped.items())), shown)


def _written(
    asking: Asking, run: Run, share: tuple[int, int], fresh: Sequence[Question], name: str
) -> Iterator[tuple[Question, str, str]]:
    """Each question with its text and the reason why that is not usable, else nothing; each process writes its share
    and reads all."""
    headers = [asking.header(one.before, one.thinking, one.opening) for one in fresh]
    recipe = asking.writing(sorted({header.end for header in headers if header.end is not None}))
    rules = replace(asking.rules, new_tokens=asking.source.tokens, keep_truncated=True)
    prompts = [Sample(f"{one.id}/1", header.ids, source="target") for one, header in zip(fresh, headers, strict=True)]
    write_answers(recipe, run, prompts, rules, share, "questions", name, "questions, texts", idle=True)
    barrier()
    answers = read_answers(run, name, "questions")
    if [one.id for one in answers] != [prompt.id for prompt in prompts]:
        raise DataError(
            f"{run.path('questions')} holds other texts than were asked for",
            "make it again with `distill train RECIPE --redo questions`",
        )
    for one, header, answer in zip(fresh, headers, answers, strict=True):
        # The opening as it was asked with: its last tokens may have been left for the target to write.
        empty = asking.template.prompt([]) if asking.plain else asking.header(one.before, one.thinking).ids
        begun = header.ids[len(empty) :] if one.opening else []
        # A text that was cut short may end within a character.
        text = rules.text_of([*begun, *answer.answer]).strip().rstrip("\ufffd" if asking.plain else "")
        reason = fault(asking.template, one.before, answer, text, one.thinking)
        yield one, text, reason or (WORDLESS if not words(rules.text_of(answer.answer)) else "")


def _next(batch: int, goal: int, usable: int, asked: int) -> int:
    """How many texts the next round asks for: as many as the share of usable ones suggests, in whole batches."""
    rate = max(LOWEST_EXPECTED, usable / asked) if asked else EXPECTED
    count = math.ceil(SURPLUS * (goal - usable) / rate / batch) * batch
    return min(count, TEXTS_PER_QUESTION * goal - asked)


def _say(run: Run, found: AskedQuestions) -> None:
    """Write what is known about a source's questions to the log."""
    few = found.kept < found.wanted
    left = f"; dropped: {listed(found.dropped)}" if found.dropped else ""
    run.say(
        f"  {'warning: only ' if few else ''}{found.kept} of {found.wanted} questions: {found.usable} of {found.asked} "
        f"texts that the target wrote are usable{left}",
        warning=few,
    )
    for text in found.examples:
        run.say(f"  such as: {printable(' '.join(text.split()))}")
