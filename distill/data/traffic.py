"""Served logs as the target's text: the pinned part of a growing jsonl file or folder of files, split and encoded.

A run reads the whole lines that were present when its stage `answers` began. The next refresh reads later lines.
Nothing here imports torch, so that a command can read a file without delay.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.data.records import (
    CLOSING,
    CUT_SHORT,
    ENDED,
    LONG,
    OF_LINE,
    SPELLED_END,
    THINKING,
    THOUGHT,
    Fields,
    count_fields,
    efforts,
    fault_of_text,
    message_of,
    template_arguments,
    unread_fields,
)
from distill.data.requests import KNOWN, steered
from distill.data.samples import SPLITS, Sample, adding_samples, fault_of, last_tokens, write_samples
from distill.data.sources import question_name, split_of
from distill.errors import DataError
from distill.files import has_form, names_of, parse_object, read_json, write_json
from distill.recipe import Recipe, Source
from distill.run import Run

if TYPE_CHECKING:
    from distill.data.chat_template import ChatTemplate

PIN = "traffic (content)"  # the entry in the answers stage's key that identifies the lines read
SOURCE = "traffic"
PART = {"path": str, "bytes": int, "lines": int, "sha256": str, "start": int, "start_line": int}
PINNED = {"path": str, "lines": int, "start_line": int, "parts": [PART]}  # the form of a pin
LINES_PER_FILE = 2048
CHECKED_LINES = 1000  # A check reads this many lines.
# The server's count of an answer's tokens may differ from ours by this factor and by this many tokens more.
MAX_COUNT_RATIO, EXTRA_TOKENS = 1.25, 8
MAX_REASONS = 20  # More reasons are not named, because hostile logs have a new argument in each line.
OF_TEMPLATE = {"tools", "documents", "chat_template_kwargs"}  # not read if the prompt is a text
HIDDEN = "thinking that the server hides"
REPEATED = "further answers to held-out prompts"
CUT_AT_END = "answers cut at an end token within them"
BEGUN, CUT = "prompts that keep their last tokens, to fit corpus.block", "answers cut to fit corpus.block"


@dataclass(frozen=True)
class Line:
    """One served answer: prompt and answer as text or as messages.

    `number` counts the lines of all files of a folder. `ended`: the target wrote an end token. `arguments` are those of
    the chat template, with `tools`. `unread` names the fields that are not read, `noted` counts what is not read of the
    messages. `tokens` is the server's count, 0 if unknown.
    """

    number: int
    prompt: str | list[dict[str, Any]]
    answer: str | dict[str, Any]
    ended: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    noted: dict[str, int] = field(default_factory=dict)
    tokens: int = 0

    @property
    def question(self) -> str:
        """The first question of the conversation, or the whole of a prompt that is a text."""
        if isinstance(self.prompt, str):
            return self.prompt
        asked = [str(message["content"]) for message in self.prompt if message["role"] == "user"]
        return asked[0] if asked else json.dumps(self.prompt, sort_keys=True)

    @property
    def name(self) -> str:
        """The prompt's name, by its content. Equal prompts have equal names."""
        text = self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, sort_keys=True)
        return f"{SOURCE}#{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


@dataclass(frozen=True)
class BadLine:
    """The place of a line that is not read, and the reason."""

    place: str
    reason: str


def pin_traffic(recipe: Recipe, run: Run) -> dict[str, Any] | None:
    """The lines of the traffic that a run reads (`pin_of`): the whole lines after those of its parent.

    None if the recipe names no traffic.
    """
    if recipe.answers.traffic is None:
        return None
    return pin_of(Path(recipe.answers.traffic), (run.parent() or {}).get("traffic"))


def pin_of(path: Path, read: dict[str, Any] | None = None) -> dict[str, Any]:
    """The whole lines so far of a file, or of the *.jsonl files of a folder in the order of their names (`parts`).

    `bytes`, `lines` and `sha256` describe a part. An earlier pin has read the part up to `start` and `start_line`.
    """
    known = {part["path"]: part for part in read["parts"]} if read else {}
    parts = []
    for file in _files_of(path):
        before = known.get(str(file), {"bytes": 0, "lines": 0})
        parts.append({"path": str(file), **measure(file), "start": before["bytes"], "start_line": before["lines"]})
    sums = {name: sum(part[name] for part in parts) for name in ("lines", "start_line")}
    return {"path": str(path), **sums, "parts": parts}


def _files_of(path: Path) -> list[Path]:
    """The file, or the files of a folder. Raises DataError for a folder without any."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"traffic folder {path} has no *.jsonl file", "correct answers.traffic")
    return files


def _whole_lines(path: Path) -> Iterator[bytes]:
    """All complete lines of a file. An unterminated last line is skipped. Raises DataError for an unreadable file."""
    try:
        with open(path, "rb") as handle:
            yield from (line for line in handle if line.endswith(b"\n"))
    except OSError as error:
        raise DataError(f"traffic file {path} cannot be read: {error.strerror}") from error


def measure(path: Path, limit: float = math.inf) -> dict[str, Any]:
    """Bytes, lines and sha256 of the whole lines within the first `limit` bytes of a file."""
    total, lines, hashed = 0, 0, hashlib.sha256()
    for line in _whole_lines(path):
        if total + len(line) > limit:
            break
        hashed.update(line)
        total, lines = total + len(line), lines + 1
    return {"bytes": total, "lines": lines, "sha256": hashed.hexdigest()}


def begins_with(path: Path, pin: dict[str, Any]) -> bool:
    """Whether a file still begins with its pinned part."""
    return bool(measure(path, pin["bytes"])["sha256"] == pin["sha256"])


def unfinished_line(pin: dict[str, Any]) -> str | None:
    """A sentence on text after the pinned lines that has no newline and is not read. None without such text."""
    part = pin["parts"][-1]  # Only the last file of a folder grows.
    try:
        with open(part["path"], "rb") as handle:
            handle.seek(part["bytes"])
            rest = handle.readline()
    except OSError:
        return None
    if rest.endswith(b"\n") or not rest.strip():
        return None
    return (
        f"line {part['lines'] + 1} of {part['path']} has no newline at its end and was not read: end it, then "
        "--refresh reads it"
    )


def first_lines(path: Path, count: int) -> bytes:
    """The first `count` lines of a file or folder, unchanged. Raises DataError for an unreadable file."""
    return b"".join(islice((line for file in _files_of(path) for line in _whole_lines(file)), count))


def read_lines(pin: dict[str, Any]) -> Iterator[Line | BadLine]:
    """The content or the fault of every pinned line that is not blank, in order."""
    before = 0
    for part in pin["parts"]:
        path, number = Path(part["path"]), part["start_line"]
        place = "line" if part["path"] == pin["path"] else f"{path.name}, line"
        with open(path, "rb") as handle:
            handle.seek(part["start"])
            while handle.tell() < part["bytes"]:
                number += 1
                raw = handle.readline()
                if not raw.strip():
                    continue
                line = parse_line(raw, before + number)
                yield BadLine(f"{place} {number}", line) if isinstance(line, str) else line
        before += part["lines"]


def parse_line(raw: bytes, number: int) -> Line | str:
    """A line's content, or its fault."""
    record: Any = parse_object(raw)
    if isinstance(record, str):
        return record
    end = record.get("finish_reason")
    if end is not None and not (isinstance(end, str) and end in (*ENDED, *CUT_SHORT)):
        return f"a `finish_reason` of another kind than {', '.join((*ENDED, *CUT_SHORT))}"
    # The target writes no end token before a stop string.
    ended = (end is None or end in ENDED) and not record.get("stop") and not record.get("stop_token_ids")
    if extra := next((name for name in THINKING if record.get(name) and not efforts({name: record[name]})), None):
        return f"a field `{extra}` that is not a message's: put it into the assistant's message"
    if reason := steered(record):
        return reason
    usage = record.get("usage") or {}
    tokens = record.get("completion_tokens", usage.get("completion_tokens") if isinstance(usage, dict) else usage) or 0
    if not isinstance(usage, dict) or isinstance(tokens, bool) or not isinstance(tokens, int):
        return "`completion_tokens` that are not a whole number"
    details = usage.get("completion_tokens_details")
    hidden = isinstance(details, dict) and bool(details.get("reasoning_tokens"))
    return (_chat_line if "messages" in record else _text_line)(record, number, ended, tokens, hidden)


def _read(record: dict[str, Any]) -> set[str]:
    """The names of a line's known fields whose value has the right form."""
    return {name for name, value in record.items() if name in KNOWN and KNOWN[name].fits(value)}.union(
        OF_LINE, ["usage"]
    )


def _text_line(record: dict[str, Any], number: int, ended: bool, tokens: int, hidden: bool) -> Line | str:
    """A line whose prompt and answer are texts, or its fault."""
    prompt, answer = record.get("prompt"), record.get("answer")
    for name, value in (("prompt", prompt), ("answer", answer)):
        if not isinstance(value, str):
            return f"no text in field `{name}` (it has: {names_of(record)})"
    if not prompt or not answer:
        return "an empty prompt" if not prompt else "an empty answer"
    if reason := fault_of_text(prompt, answer) or (HIDDEN if hidden and CLOSING not in answer else ""):
        return reason
    unread = tuple(unread_fields(record, _read(record) - OF_TEMPLATE))
    return Line(number, prompt, answer, ended, unread=unread, tokens=tokens)


def _chat_line(record: dict[str, Any], number: int, ended: bool, tokens: int, hidden: bool) -> Line | str:
    """A line whose last message is the answer, or its fault."""
    if not has_form(record["messages"], [{}]) or len(record["messages"]) < 2:
        return "`messages` must be a list of at least a question and an answer"
    noted = Counter[str]()
    try:
        *asked, last = (message_of(message, noted) for message in record["messages"])
        arguments = template_arguments(Fields(record, Source(kind="jsonl", path=SOURCE)))
    except ValueError as error:
        return str(error)
    if last["role"] != "assistant":
        return f"the last message is the {last['role']}'s, not the assistant's"
    if last.get("weight") == 0:
        return "an answer of weight 0"
    if not last["content"] and not last.get("tool_calls") and (ended or THOUGHT not in last):
        return "an empty answer"
    if hidden and THOUGHT not in last and CLOSING not in last["content"]:
        return HIDDEN
    if reason := fault_of_text("", f"{last.get(THOUGHT, '')}{last['content']}"):
        return reason
    asked = [{name: value for name, value in message.items() if name != "weight"} for message in asked]
    unread = tuple(unread_fields(record, _read(record) - {"prompt", "answer"}))
    return Line(number, asked, last, ended, arguments, unread, dict(noted), tokens)


def encode_line(
    line: Line, tokenizer: Any, template: ChatTemplate | None, left: Counter[str] | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the answer after it. ValueError with the line's fault. `left` counts losses."""
    from distill.engines.torch.hugging_face import encode_behind

    left, eos = Counter() if left is None else left, tokenizer.eos_token_id
    if isinstance(line.prompt, str) or isinstance(line.answer, str):
        text, prompt = str(line.answer), str(line.prompt)
        end = [] if eos is None else [eos]
        before_end = text if template is None else _until_end(template, text, left)
        if template is not None and (template.is_rendered(prompt) or template.looks_rendered(prompt)):
            end = template.end
        ids, answer = encode_behind(tokenizer, prompt, before_end)
        answer += end if line.ended else []
    elif template is None:
        raise ValueError("messages, but the target's tokenizer has no chat template")
    else:
        template, names = template.of_conversation(line.arguments)
        left.update(f"requests with the template argument `{name[:40]}`, which the template lacks" for name in names)
        *asked, last = (
            message | {"content": _until_end(template, message["content"], left)}
            if message["role"] == "assistant"
            else message
            for message in [*line.prompt, line.answer]
        )
        prompt, text = template.text(asked), str(line.answer["content"])
        ids, answer = template.answered([*asked, last], ended=line.ended, served=True)
    if not ids or not answer:
        raise ValueError("it gives no token")
    if repeats_prompt(prompt, text, len(ids), len(answer), line.tokens):
        raise ValueError("an answer that begins with its whole prompt")
    if line.tokens > MAX_COUNT_RATIO * len(answer) + EXTRA_TOKENS:
        raise ValueError("the server counted more tokens than the answer has: the server may hide thinking")
    if line.tokens and len(answer) > MAX_COUNT_RATIO * line.tokens + EXTRA_TOKENS:
        raise ValueError("the server counted fewer tokens than the answer has: the target did not write all of it")
    return ids, answer


def _until_end(template: ChatTemplate, text: str, left: Counter[str]) -> str:
    """The text of an answer before an end token that is spelled out in it. The server went on after the token."""
    before_end, rest = template.split_at_end(text)
    left.update([SPELLED_END] if before_end != text and not rest else [CUT_AT_END] if rest else [])
    return before_end


def repeats_prompt(prompt: str, text: str, prompt_tokens: int, answer_tokens: int, counted: int) -> bool:
    """Whether an answer begins with its whole prompt, with or without the prompt's special tokens.

    A short prompt may be repeated by chance. The number of tokens that the server counted then decides.
    """
    plain = re.sub(r"<[|\w｜▁]+>|\[/?INST\]", "", prompt).strip()
    for whole in filter(None, (prompt.strip(), plain)):
        if text.lstrip().startswith(whole):
            rest = answer_tokens - prompt_tokens
            return len(whole) >= LONG or (counted > 0 and abs(rest - counted) < abs(answer_tokens - counted))
    return False


@dataclass
class Sorted:
    """Counts of lines: `samples` of each split, `bad` lines with their number and first place by reason, and `left`,
    which counts what else was left out or cut. A held-out prompt counts once."""

    samples: Counter[str] = field(default_factory=Counter)
    bad: dict[str, tuple[int, str]] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)

    def leave_out(self, place: str, reason: str) -> None:
        """Count a line that is not read."""
        reason = reason if reason in self.bad or len(self.bad) < MAX_REASONS else "other reasons"
        count, first = self.bad.get(reason, (0, place))
        self.bad[reason] = count + 1, first

    def summary_lines(self, pin: dict[str, Any]) -> list[str]:
        """Sentences on the lines. The first counts the answers to learn from and the prompts to measure."""
        train, validation, test = (self.samples[split] for split in SPLITS)
        unfinished = unfinished_line(pin)
        return [
            f"{train} answers to learn from, {validation} validation and {test} test prompts",
            *(f"{count} bad lines left out, first {place}: {reason}" for reason, (count, place) in self.bad.items()),
            *(f"{count} {reason}" for reason, count in self.left.most_common(MAX_REASONS)),
            *([unfinished] if unfinished else []),
        ]


def sort_lines(recipe: Recipe, lines: Iterable[Line | BadLine], tokenizer: Any, counts: Sorted) -> Iterator[Sample]:
    """Encode lines and divide them among the splits, by the first question of each conversation as in the corpus.

    Answers are cut at the end of the block. A prompt that leaves an answer no room keeps its last tokens. So does a
    held-out prompt that leaves less room than answers.new_tokens.
    """
    from distill.data.chat_template import ChatTemplate
    from distill.vocabulary.vocabulary import opening_of

    opening, held_out = opening_of(tokenizer), set[str]()
    template = ChatTemplate(tokenizer, recipe.chat) if tokenizer.chat_template else None
    for line in lines:
        if isinstance(line, BadLine):
            counts.leave_out(line.place, line.reason)
            continue
        try:
            prompt, answer = encode_line(line, tokenizer, template, counts.left)
        except ValueError as error:
            counts.leave_out(f"line {line.number}", str(error))
            continue
        asked = line.question if template is None else template.first_question(line.question)
        split = split_of(question_name(asked), recipe.corpus.validation, recipe.corpus.test)
        count_fields(line.unread, "lines", counts.left)
        counts.left.update(line.noted)
        block, new = recipe.corpus.block, recipe.answers.new_tokens
        if block - len(prompt) < (2 if split == "train" else new):
            counts.left[BEGUN] += 1
            most = max(block - len(answer), block // 2) if split == "train" else block - new
            prompt = last_tokens(prompt, most, opening)
        room = block - len(prompt)
        fits, answer = len(answer) <= room, answer[:room]
        ended = line.ended and fits
        counts.left.update([CUT] if split == "train" and not fits else [])
        name = f"{line.name}@{line.number}" if split == "train" else line.name
        if split != "train":  # A prompt that is served often is measured once.
            if name in held_out:
                counts.left[REPEATED] += 1
                continue
            held_out.add(name)
        counts.samples[split] += 1
        yield Sample(name, prompt, answer, split, SOURCE, ended=ended, dropped=fault_of(answer))


def write_traffic(recipe: Recipe, run: Run, tokenizer: Any) -> None:
    """Write answers/train/traffic-NNNNN.arrow, prompts-validation.arrow, prompts-test.arrow and traffic.json.

    Does nothing if they exist. Raises DataError if the file no longer begins with the pinned lines, or if none of them
    can be learnt from. The pin is then deleted, so that the next command reads the file again.
    """
    folder = run.path("answers")
    path = folder / "traffic.json"
    if path.exists() and all((folder / name).exists() for name in read_json(path, {"files": [str]})["files"]):
        return
    pin = read_json(run.path("stages", "answers.begun.json"), {PIN: PINNED})[PIN]
    if not all(Path(part["path"]).exists() and begins_with(Path(part["path"]), part) for part in pin["parts"]):
        what = f"{pin['path']} no longer begins with the {pin['lines']} lines that this run pinned; was it rotated?"
        raise DataError(what, f"{_unpin(run)} reads the present file")
    sorted_lines, files = Sorted(), list[str]()
    with ExitStack() as held_out:
        add = {}
        for split in ("validation", "test"):
            files.append(f"prompts-{split}.arrow")
            add[split] = held_out.enter_context(adding_samples(folder / files[-1]))

        def train() -> Iterator[Sample]:
            for sample in sort_lines(recipe, read_lines(pin), tokenizer, sorted_lines):
                if sample.split == "train":
                    yield sample
                else:
                    add[sample.split](sample)

        samples = train()
        for first in samples:
            files.append(f"train/traffic-{len(files) - len(add):05d}.arrow")
            write_samples(folder / files[-1], chain([first], islice(samples, LINES_PER_FILE - 1)))
        # A refreshed run of a changed target may have no new line, because the target answers its prompts again.
        nothing_new = pin["start_line"] == pin["lines"] and recipe.answers.prompts != 0
        if not sorted_lines.samples["train"] and not nothing_new:  # only then is the pin deleted
            raise no_answers(sorted_lines, pin, _unpin(run))
    counts: dict[str, Any] = {split: sorted_lines.samples[split] for split in SPLITS}
    counts |= {"bad": sum(count for count, _ in sorted_lines.bad.values()), "left": dict(sorted_lines.left)}
    counts |= {"reasons": {reason: count for reason, (count, _) in sorted_lines.bad.items()}}
    write_json(path, {**pin, **counts, "files": files})
    for sentence in sorted_lines.summary_lines(pin):
        run.say(f"  traffic, lines {pin['start_line'] + 1} to {pin['lines']}: {sentence}")


def no_answers(counts: Sorted, pin: dict[str, Any], command: str) -> DataError:
    """The error that no pinned line can be learnt from. The `command` reads the file again."""
    if pin["lines"] == 0 and not unfinished_line(pin):
        empty = "its *.jsonl files are" if Path(pin["path"]).is_dir() else "the file is"
        return DataError(f"{pin['path']}: {empty} empty", f"correct answers.traffic; then {command} reads it again")
    return DataError(
        f"{pin['path']} has no answer in lines {pin['start_line'] + 1} to {pin['lines']}: "
        + "; ".join(counts.summary_lines(pin)),
        f"correct the file; then {command} reads it again",
    )


def _unpin(run: Run) -> str:
    """Delete the pin, unless generated answers depend on it. Return the command that reads the file again."""
    if any(run.path("answers", "train").glob("[0-9]*.arrow")):
        return "`distill train RECIPE --redo answers`"
    run.path("stages", "answers.begun.json").unlink()
    return "the same command"


def check_traffic(recipe: Recipe) -> list[str]:
    """Sort the first lines of the traffic file. Raises DataError if no line of a whole file can be learnt from."""
    from distill.engines.torch.hugging_face import load_tokenizer

    settings = recipe.answers.traffic
    if settings is None:
        return []
    pin = pin_of(Path(settings))
    counts = Sorted()
    for _ in sort_lines(recipe, islice(read_lines(pin), CHECKED_LINES), load_tokenizer(recipe.target.model), counts):
        pass
    if not counts.samples["train"] and pin["lines"] <= CHECKED_LINES:
        raise no_answers(counts, pin, "the same command")
    if recipe.answers.prompts == 0 and not recipe.keeps_given_text and pin["lines"] <= CHECKED_LINES:
        # Nothing but served answers is held out, and training would end hours before this was noticed.
        for split in ("validation", "test"):
            if not counts.samples[split]:
                raise DataError(
                    f"{settings}: none of its {pin['lines']} lines falls into the {split} split, and nothing else is "
                    "measured",
                    f"raise corpus.{split}, record more, or let the target answer prompts, too (answers.prompts)",
                )
    first, *rest = counts.summary_lines(pin)
    read = min(CHECKED_LINES, pin["lines"])
    lines = [f"traffic {settings}: {pin['lines']} lines; of the first {read}, {first}"]
    return lines + [f"warning: traffic: {sentence}" for sentence in rest]
