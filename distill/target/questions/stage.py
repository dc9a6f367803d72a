"""Stage `questions`: the target writes the questions that it will be asked.

An instruct model that continues the user header of its chat template writes a message of the kind that it was trained
to answer (Magpie, arXiv 2406.08464). The texts are numbered, and each has its own system prompt and random numbers.
They are asked for in rounds until enough of them are usable; the first usable ones count, whatever the rounds.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distill import processes
from distill.documents.sources import question_files
from distill.errors import DataError, printable
from distill.models.hugging_face import encode
from distill.recipe import Recipe, Source
from distill.results.serialise import write_result
from distill.results.text_results import AskedQuestions, QuestionTexts
from distill.run import Run
from distill.target.answers import writer_kind
from distill.target.groups import Rules, write_answers
from distill.target.questions.asking import TEXTS_PER_QUESTION, Asking, Conversation
from distill.target.questions.usable import ALIKE, EQUAL, WORDLESS, distinct, fault, lengths, repeats, words
from distill.texts import Answer, Prompt, drop_reason, listed, read_answers, write_lines

EXPECTED, LOWEST_EXPECTED = 0.8, 1 / TEXTS_PER_QUESTION  # share of usable texts
SPARE = 1.1  # more are asked for, to be sure
EXAMPLES, SHOWN_CHARACTERS = 3, 500  # of each
SUMMARY = "summary.json"


def questions(recipe: Recipe, run: Run, share: tuple[int, int] | None = None) -> list[Path]:
    """Write the conversations of each source of kind target to questions/target.jsonl (target-2.jsonl, …), and
    summary.json.

    Texts are asked for as stage `answers` asks for answers, and resumed as those are; `share` as there.
    """
    share = share or (processes.process_index(), processes.process_count())
    summaries = []
    for number, (source, name) in enumerate(zip(recipe.corpus.asked, question_files(recipe.corpus), strict=True)):
        conversations, summary = _Questions(recipe, source, number, run, share).ask(name)
        if share[0] == 0:
            write_lines(run.path("questions", name), ({"messages": one.messages} for one in conversations))
            _say(run, summary)
        summaries.append(summary)
    if share[0] == 0:
        write_result(run.path("questions", SUMMARY), QuestionTexts(writer_kind(recipe), summaries))
    processes.barrier()
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
                "raise tokens of this corpus source (and use --redo questions), or use other sources: the target may "
                "be no instruct model",
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
            begun = header.ids[len(self.header(one.messages, one.thinking).ids) :] if opening else []
            text = rules.text_of([*begun, *answer.answer]).strip()
            reason = fault(self.template, one.messages, answer, text, one.thinking)
            turns.append((text, reason or (WORDLESS if not words(rules.text_of(answer.answer)) else "")))
        return turns

    def _written(self, recipe: Recipe, prompts: list[Prompt], rules: Rules, name: str, what: str) -> list[Answer]:
        """What the target writes behind prompts, in their order; each process takes its share and reads all."""
        write_answers(recipe, self.run, prompts, rules, self.share, "questions", name, f"questions, {what}", idle=True)
        processes.barrier()
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
            header=self.header(self.begin(0).messages, None).text,
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
    count = math.ceil(SPARE * (goal - usable) / rate / batch) * batch
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
