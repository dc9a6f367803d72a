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
from statistics import median
from typing import Any

from distill.data.chat_template import ChatTemplate, Message, PlainTexts, UserHeader
from distill.data.prompts import ChatPrompts
from distill.data.sources import question_files
from distill.data.texts import (
    Answer,
    AskedQuestions,
    Prompt,
    QuestionTexts,
    drop_reason,
    is_looping,
    listed,
    read_answers,
    write_lines,
)
from distill.devices import barrier, process_count, process_index
from distill.engines.torch.hugging_face import encode, end_ids, load_tokenizer
from distill.errors import DataError, RecipeError, printable
from distill.files import write_result
from distill.recipe import Recipe, SamplerSettings, Source
from distill.run import Run
from distill.teacher.answers import AnswerRules, rules_of, write_answers, writer_kind

# ── Which texts are usable questions, and how varied those are ──

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


def fault(template: ChatTemplate, before: Sequence[Message], answer: Answer, text: str, thinking: bool | None) -> str:
    """The reason why a text is not usable as a question behind the messages `before`; empty where it is.

    `text` is the decoded `answer`, without its end and the white space around it.
    """
    if answer.dropped:
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


def distinct(texts: Sequence[str], length: int) -> float:
    """The share of different n-grams among all n-grams of words; 0 without any."""
    found = Counter(gram for text in texts for gram in grams(text, length))
    return len(found) / found.total() if found else 0.0


def lengths(counts: Sequence[int]) -> tuple[float, float]:
    """The median and the 90th percentile (the smallest count that nine tenths do not exceed); 0 without any."""
    if not counts:
        return 0.0, 0.0
    return float(median(counts)), float(sorted(counts)[math.ceil(0.9 * len(counts)) - 1])


# ── The conversations ──

OPENINGS = 4  # are shown
TEXTS_PER_QUESTION = 3  # are asked for at most


@dataclass
class Conversation:
    """A numbered conversation: its messages so far, and whether the template is rendered with thinking on."""

    id: str
    messages: list[dict[str, Any]]
    thinking: bool | None
    opening: str = ""  # of the user's first message

    @property
    def texts(self) -> list[str]:
        """The user's messages."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    def add(self, text: str, role: str = "user") -> None:
        """Append a message."""
        self.messages = [*self.messages, {"role": role, "content": text}]


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
        if self.plain and source.turns > 1:
            raise RecipeError(
                f"corpus.sources: turns {source.turns} of a target without a chat template, which writes texts",
                "leave turns out",
            )
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

    def begin(self, number: int) -> Conversation:
        """The conversation of a numbered text, with the system prompt and the thinking that the seed draws for it."""
        name = f"question-{self.number}-{number:07d}"
        openings = self.source.openings
        opening = self.chat.draw(name, "opening", openings) if openings else ""
        return Conversation(name, self.chat.system(name), self.chat.thinking(name), opening)

    def record(self, conversation: Conversation) -> dict[str, Any]:
        """The line of a conversation in the file of questions; of a target without a template, of its text."""
        return {"text": conversation.texts[0]} if self.plain else {"messages": conversation.messages}

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
        if len(messages) < 2:  # the same for many conversations
            self._headers[name] = header
        return header

    def first_header(self) -> UserHeader:
        """The header of the first text; with its opening where a target without a template begins no text itself."""
        first = self.begin(0)
        return self.header(first.messages, None, first.opening if self.plain else "")

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
        turns = f", up to {source.turns} user's turns each" if source.turns > 1 else ""
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
                f"questions: {source.questions} of the target's own, from at most {count} texts {limits}{turns}",
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
    """Write the conversations of each source of kind target to questions/target.jsonl (target-2.jsonl, …), and
    summary.json.

    Texts are asked for as stage `answers` asks for answers, shared among processes and resumed as those are.
    """
    share = process_index(), process_count()
    summaries = []
    for number, (source, name) in enumerate(zip(recipe.corpus.asked, question_files(recipe.corpus), strict=True)):
        asking = _Questions(recipe, source, number, run, share)
        conversations, summary = asking.ask(name)
        if share[0] == 0:
            write_lines(run.path("questions", name), map(asking.record, conversations))
            _say(run, summary)
        summaries.append(summary)
    if share[0] == 0:
        write_result(run.path("questions", SUMMARY), QuestionTexts(writer_kind(recipe), summaries))
    barrier()
    return [run.path("questions")]


class _Questions(Asking):
    """The questions of one source, as they are written in a run; `share` as of stage `questions`."""

    def __init__(self, recipe: Recipe, source: Source, number: int, run: Run, share: tuple[int, int]) -> None:
        super().__init__(recipe, source, number)
        self.run, self.share = run, share

    def ask(self, name: str) -> tuple[list[Conversation], AskedQuestions]:
        """The conversations of a source, and what is known about them."""
        goal = self.source.questions
        assert goal is not None
        begun: list[Conversation] = []
        reasons: list[str] = []
        usable: list[Conversation] = []
        repeated: Counter[str] = Counter()
        for number in itertools.count(1):
            if len(usable) >= goal or len(begun) >= TEXTS_PER_QUESTION * goal:
                break
            count = _next(self.recipe.answers.batch, goal, len(usable), len(begun))
            fresh = [self.begin(place) for place in range(len(begun), len(begun) + count)]
            written = self._write_turn(fresh, f"asked-{self.number}-round-{number}")
            for one, (text, reason) in zip(fresh, written, strict=True):
                one.add(text)
                reasons.append(reason)
            begun += fresh
            sound = [one for one, reason in zip(begun, reasons, strict=True) if not reason]
            verdicts = repeats([one.texts[0] for one in sound])
            usable = [one for one, verdict in zip(sound, verdicts, strict=True) if not verdict]
            repeated = Counter(filter(None, verdicts))
        dropped = Counter(filter(None, reasons)) + repeated
        if not usable:
            raise DataError(
                f"the target wrote no usable question in {len(begun)} texts: {listed(dropped)}",
                "raise tokens of this corpus source (and use --redo questions), or use other sources"
                + ("" if self.plain else ": the target may not be an instruct model"),
            )
        kept = usable[:goal]
        dropped_turns: Counter[str] = Counter()
        going = kept
        for turn in range(2, self.source.turns + 1):
            going = self._go_on(going, f"asked-{self.number}-turn-{turn}", dropped_turns)
        return kept, self._summary(name, len(begun), kept, dropped, dropped_turns)

    def _write_turn(self, conversations: Sequence[Conversation], name: str) -> list[tuple[str, str]]:
        """The target's next user's message of each conversation, with the reason why it is not usable, else nothing."""
        openings = ["" if one.texts else one.opening for one in conversations]
        headers = [
            self.header(one.messages, one.thinking, opening)
            for one, opening in zip(conversations, openings, strict=True)
        ]
        recipe = self.writing(sorted({header.end for header in headers if header.end is not None}))
        rules = replace(self.rules, new_tokens=self.source.tokens, keep_truncated=True)
        prompts = [
            Prompt(f"{one.id}/{len(one.texts) + 1}", header.ids, "target")
            for one, header in zip(conversations, headers, strict=True)
        ]
        turns = []
        answers = self._written(recipe, prompts, rules, name, "texts")
        for one, header, opening, answer in zip(conversations, headers, openings, answers, strict=True):
            # The opening as it was asked with: its last tokens may have been left for the target to write.
            empty = self.template.prompt([]) if self.plain else self.header(one.messages, one.thinking).ids
            begun = header.ids[len(empty) :] if opening else []
            # A text that was cut short may end within a character.
            text = rules.text_of([*begun, *answer.answer]).strip().rstrip("\ufffd" if self.plain else "")
            reason = fault(self.template, one.messages, answer, text, one.thinking)
            turns.append((text, reason or (WORDLESS if not words(rules.text_of(answer.answer)) else "")))
        return turns

    def _written(self, recipe: Recipe, prompts: list[Prompt], rules: AnswerRules, name: str, what: str) -> list[Answer]:
        """What the target writes behind prompts, in their order; each process takes its share and reads all."""
        write_answers(recipe, self.run, prompts, rules, self.share, "questions", name, f"questions, {what}", idle=True)
        barrier()
        answers = read_answers(self.run, name, "questions")
        if [one.id for one in answers] != [prompt.id for prompt in prompts]:
            raise DataError(
                f"{self.run.path('questions')} holds other texts than were asked for",
                "make it again with `distill train RECIPE --redo questions`",
            )
        return answers

    def _go_on(self, conversations: Sequence[Conversation], name: str, dropped: Counter[str]) -> list[Conversation]:
        """Let the target answer each conversation and write the user's next turn; those that have it now.

        The others stay as they were, and are counted in `dropped`.
        """
        prompts = [
            Prompt(f"{one.id}/{len(one.texts)}/answer", self.template.prompt(one.messages, one.thinking), "target")
            for one in conversations
        ]
        answered = []
        answers = self._written(self.recipe, prompts, self.rules, f"{name}-answers", "answers")
        for one, answer in zip(conversations, answers, strict=True):
            reason = drop_reason(answer) or ("" if answer.ended else "truncated")
            if reason:  # a user would not go on after such an answer
                dropped[f"answer: {reason}"] += 1
                continue
            longer = replace(one)
            longer.add(self.rules.text_of(answer.answer), "assistant")
            answered.append((one, longer))
        going = []
        texts = self._write_turn([longer for _, longer in answered], f"{name}-texts")
        for (one, longer), (text, reason) in zip(answered, texts, strict=True):
            reason = reason or (EQUAL if text in one.texts else "")
            if not reason:
                longer.add(text)
                ids = self.template.prompt(longer.messages, one.thinking)
                reason = "no room in the block" if len(ids) > self.chat.longest else ""
            if reason:
                dropped[reason] += 1
                continue
            one.messages = longer.messages
            going.append(one)
        return going

    def _summary(
        self, name: str, asked: int, kept: Sequence[Conversation], dropped: Counter[str], dropped_turns: Counter[str]
    ) -> AskedQuestions:
        source, texts = self.source, [one.texts[0] for one in kept]
        middle, long = lengths([len(encode(self.template.tokenizer, text)) for text in texts])
        turns = Counter(len(one.texts) for one in kept)
        return AskedQuestions(
            file=name,
            header=self.first_header().text,
            temperature=source.temperature,
            top_p=source.top_p,
            tokens=source.tokens,
            wanted=source.questions or 0,
            asked=asked,
            usable=asked - dropped.total(),
            kept=len(kept),
            dropped=dict(sorted(dropped.items())),
            turns={str(number): turns[number] for number in sorted(turns)},
            dropped_turns=dict(sorted(dropped_turns.items())),
            median_tokens=middle,
            most_tokens=long,
            distinct=[round(distinct(texts, length), 4) for length in (1, 2, 3)],
            repeated=round((dropped[EQUAL] + dropped[ALIKE]) / asked, 4),
            examples=[text[:SHOWN_CHARACTERS] for text in texts[:EXAMPLES]],
        )


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
    words, pairs, triples = (f"{100 * share:.0f} %" for share in found.distinct)
    run.say(
        f"  their tokens: median {found.median_tokens:g}, nine tenths at most {found.most_tokens:g}; different among "
        f"all words {words}, 2-grams {pairs}, 3-grams {triples}; texts that repeat others: {100 * found.repeated:.1f} %"
    )
    if len(found.turns) > 1 or found.dropped_turns:
        turns = ", ".join(f"{count} of {number}" for number, count in found.turns.items())
        over = f"; conversations that end early: {listed(found.dropped_turns)}" if found.dropped_turns else ""
        run.say(f"  user's turns: {turns}{over}")
    for text in found.examples:
        run.say(f"  such as: {printable(' '.join(text.split()))}")
