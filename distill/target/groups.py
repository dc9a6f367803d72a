"""Prompts in fixed groups, one file of answers each, and the journal of a group that is being written.

Groups are a pure function of the prompts, so the files do not depend on the order of replies, on kills or on the number
of processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from distill.faults import faults_explained
from distill.files import has_form, parse_object, write_text
from distill.texts import Answer, Prompt, Reply, Request, is_looping, prompt_seed

REPLY = {"id": str, "ids": [int], "ended": bool, "dropped": str}  # the form of a line of a journal

# The next prompt of a conversation, from its first prompt and the texts of the answers so far; None where it is over.
NextPrompt = Callable[[Prompt, list[str]], list[int] | None]


@dataclass(frozen=True)
class Rules:
    """What decides on requests and answers: the recipe's seed and limits, and the end of texts.

    `room` is the most tokens of a prompt with its answer. `text_of` decodes the ids of an answer without its end token.
    """

    seed: int
    new_tokens: int
    room: int
    keep_truncated: bool
    text_of: Callable[[Sequence[int]], str]
    next_prompt: NextPrompt | None = None

    def request(self, name: str, prompt: Prompt, ids: list[int], texts: list[str]) -> Request | None:
        """What a writer is asked next, after answers of these texts; None where the block has no room left for it."""
        limit = min(self.new_tokens, self.room - len(ids))
        if limit < 1:
            return None
        chat = prompt.chat
        if chat is None:
            return Request(name, ids, prompt_seed(self.seed, name), limit)
        messages = list(chat["messages"])
        for text, turn in zip(texts, chat.get("turns") or [], strict=False):
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn}]
        return Request(name, ids, prompt_seed(self.seed, name), limit, messages, chat.get("arguments") or {})


@dataclass
class Conversation:
    """A prompt and its answers so far; a prompt without further turns has one."""

    number: int
    prompt: Prompt
    group: Group
    answers: list[Answer] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def begin(self, rules: Rules, known: dict[str, Reply]) -> Request | None:
        """The first request that no reply in `known` answers; None where all are answered."""
        request = rules.request(self.prompt.id, self.prompt, self.prompt.ids, [])
        if request is None:
            self._add(
                Request(self.prompt.id, self.prompt.ids, 0, 0), Reply("", [], False, "no room in the block"), rules
            )
        while request is not None and request.id in known:
            request = self.take(request, known[request.id], rules)
        return request

    def take(self, request: Request, reply: Reply, rules: Rules) -> Request | None:
        """Add the answer of a reply; the next request of the conversation, None where it is over."""
        answer = self._add(request, reply, rules)
        if rules.next_prompt is None or not answer.ended or answer.dropped or answer.looping or len(answer.answer) < 2:
            return None  # a user would not go on after such an answer
        self.texts.append(rules.text_of(answer.answer))
        ids = rules.next_prompt(self.prompt, list(self.texts))
        if ids is None:
            return None
        return rules.request(f"{self.prompt.id}/{len(self.texts)}", self.prompt, ids, self.texts)

    def _add(self, request: Request, reply: Reply, rules: Rules) -> Answer:
        prompt = request.ids if reply.prompt is None else reply.prompt
        truncated = not (reply.dropped or reply.ended or rules.keep_truncated)
        self.answers.append(
            Answer(
                request.id,
                prompt,
                reply.ids,
                is_looping(reply.ids),
                self.prompt.source,
                reply.ended,
                self.prompt.label,
                self.number,
                reply.dropped or ("truncated" if truncated else ""),
                self.prompt.mode,
            )
        )
        return self.answers[-1]


@dataclass
class Group:
    """Prompts whose answers make one file."""

    path: Path
    prompts: list[tuple[int, Prompt]]
    conversations: list[Conversation] = field(default_factory=list)
    open: int = 0  # conversations without their last answer

    @property
    def journal(self) -> Path:
        """Where replies are kept until the file is written; hidden, so that it is no artifact."""
        return self.path.with_name(f".{self.path.stem}.journal")

    def known(self) -> dict[str, Reply]:
        """The replies in the journal, by request; a line that a kill left torn is none."""
        if not self.journal.exists():
            return {}
        found = {}
        for line in self.journal.read_bytes().split(b"\n"):
            record = parse_object(line)
            if isinstance(record, dict) and has_form(record, REPLY):
                found[record["id"]] = Reply(**record)
        return found

    def note(self, reply: Reply) -> None:
        """Append a reply to the journal, so that a kill does not lose it."""
        line = json.dumps(asdict(reply)) + "\n"
        with faults_explained(self.journal):
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            with open(self.journal, "ab") as handle:
                # A line of its own, whatever a kill left before it; blank lines are skipped.
                handle.write(b"\n" + line.encode())

    def finish(self) -> None:
        """Write the file, in prompt order within the group, and remove the journal."""
        answers = [answer for one in self.conversations for answer in one.answers]
        write_text(self.path, "".join(json.dumps(asdict(answer)) + "\n" for answer in answers))
        self.journal.unlink(missing_ok=True)


def groups_of(prompts: Sequence[Prompt], size: int, folder: Path, name: str = "train") -> list[Group]:
    """The groups of a list of prompts, the longest prompts first, so that texts of a group have like lengths.

    The longest also take the most memory: where it does not suffice, that shows at once.
    """
    order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number].ids), number))
    return [
        Group(
            folder / f"{name}-{group:05d}.jsonl", [(number, prompts[number]) for number in order[start : start + size]]
        )
        for group, start in enumerate(range(0, len(order), size))
    ]
