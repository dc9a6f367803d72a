"""Records of jsonl, csv and parquet files and of hub data sets, one mapping each, with the place that messages name.

And the conversations in them: chat messages, ShareGPT, lists of turns, prompt and answer, plain prompts.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distill.errors import DataError
from distill.files import has_form, parse_object
from distill.recipe import Source

Record = tuple[str, dict[str, Any]]  # where it stands, and its fields


def read_records(source: Source, paths: list[Path]) -> Iterator[Record]:
    """All records of a source; `paths` are its files, none for a hub data set.

    Raises DataError for a file that cannot be read, is of another format, or is empty.
    """
    if source.kind == "hub":
        yield from _hub(source)
        return
    read = {"jsonl": _jsonl, "csv": _csv, "parquet": _parquet, "target": _jsonl}[source.kind]
    for path in paths:
        empty = True
        try:
            for record in read(path):
                empty = False
                yield record
        except OSError as error:
            hint = "correct corpus.sources in the recipe"
            raise DataError(f"{path} cannot be read: {error.strerror or error}", hint) from error
        if empty:
            raise DataError(f"{path}: the file is empty", f"give a {source.kind} file with at least one record")


def _jsonl(path: Path) -> Iterator[Record]:
    with open(path, "rb") as handle:
        for number, raw in enumerate(handle, 1):
            if not raw.strip():
                continue
            record = parse_object(raw)
            if isinstance(record, str):
                raise DataError(f"{path}: line {number}: {record}", "each line must be one JSON object")
            yield f"line {number}", record


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a text may be longer than the module's default of 128 kB
    try:
        with open(path, encoding="utf-8-sig", newline="") as handle:
            reader = csv.DictReader(handle, strict=True)
            for record in reader:
                yield f"line {reader.line_num}", {name: value for name, value in record.items() if name is not None}
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8", "convert it") from error
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: {error}", "correct the quotes, or use jsonl") from error


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                for record in batch.to_pylist():
                    number += 1
                    yield f"row {number}", record
    except pyarrow.ArrowException as error:
        first = str(error).splitlines()[0][:200]
        raise DataError(f"{path} is no readable parquet file: {first}", "copy it again, or use jsonl") from error


def _hub(source: Source) -> Iterator[Record]:
    """Records of a hub data set, streamed through `datasets`."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the DataError below reports its faults, once
    try:
        found = datasets.load_dataset(source.path, source.subset, split=source.hub_split, streaming=True)
        for number, record in enumerate(found, 1):
            yield f"record {number}", record
    except Exception as error:  # the hub client raises many kinds; each means that the data set is not available
        kind = type(error).__name__
        wanted = f"subset {source.subset}, split {source.hub_split}"
        raise DataError(
            f"cannot read data set {source.path} ({wanted}): `datasets` stopped with {kind}",
            "check its name, its subset, its split and the network",
        ) from error


# ── conversations ──

Messages = tuple[dict[str, Any], ...]  # role, content, and whatever else the template reads

# The names under which data sets keep a speaker.
SPEAKERS = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
LISTS = ("messages", "conversations", "turns")
PROMPTS = ("prompt", "instruction", "question", "query")
ANSWERS = ("answer", "completion", "response", "output")
EXTRA = ("reasoning_content", "tool_calls", "tool_call_id", "name")  # of a message, kept for the template


def form_of(record: Mapping[str, Any], source: Source) -> str | None:
    """How a record holds its text: the source's `form`, or what its fields say; None where no field is known."""
    if source.form != "auto":
        return source.form
    names: Mapping[Any, str] = source.fields
    for form in LISTS:
        if isinstance(record.get(names.get(form, form)), list):
            return form
    if isinstance(record.get(source.field), str) and "prompt" not in names:
        return "text"
    return "prompt" if _first(record, names, "prompt", PROMPTS) is not None else None


def read_conversation(record: Mapping[str, Any], form: str, source: Source) -> Messages:
    """The messages of a record, ending with an answer or with a question; ValueError, with the reason, where it has
    none."""
    names: Mapping[Any, str] = source.fields
    if form == "prompt":
        prompt, answer = _first(record, names, "prompt", PROMPTS), _first(record, names, "answer", ANSWERS)
        if isinstance(prompt, list):  # messages before the answer, as preference data sets have them
            messages = _messages(prompt)
        elif isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        else:
            raise ValueError("no prompt that is text")
        if isinstance(answer, list):
            messages += _messages(answer)
        elif isinstance(answer, str) and answer:
            messages.append({"role": "assistant", "content": answer})
    elif form == "turns":
        turns: Any = record.get(names.get("turns", "turns"))
        if not has_form(turns, [str]):
            raise ValueError("turns that are no text")
        messages = [{"role": "user", "content": turn} for turn in turns]
    else:
        messages = _messages(record.get(names.get(form, form)))
    system = record.get(names.get("system", "system"))
    if isinstance(system, str) and system.strip() and not any(one["role"] == "system" for one in messages):
        messages.insert(0, {"role": "system", "content": system})
    return _usable(tuple(messages))


def _first(record: Mapping[str, Any], names: Mapping[Any, str], kind: str, known: tuple[str, ...]) -> Any:
    if kind in names:
        return record.get(names[kind])
    return next((record[name] for name in known if record.get(name) is not None), None)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages of role and content, or of ShareGPT's from and value."""
    if isinstance(value, str):  # some data sets keep the list as JSON text
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, list):
        raise ValueError("messages that are no list")
    messages = []
    for one in value:
        if not isinstance(one, dict):
            raise ValueError("a message that is no mapping")
        role = str(one.get("role", one.get("from")))
        if role.lower() not in SPEAKERS:
            raise ValueError(f"a message of the unknown role {role[:20]!r}")
        content = _text(one["content"] if "content" in one else one.get("value"))
        if content is None and not one.get("tool_calls"):
            raise ValueError("a message whose content is no text")
        extra = {name: one[name] for name in EXTRA if one.get(name)}
        messages.append({"role": SPEAKERS[role.lower()], "content": content or "", **extra})
    return messages


def _text(content: Any) -> str | None:
    """The text of a message: itself, or its parts of type text; None for anything else, such as images."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def _usable(messages: Messages) -> Messages:
    """The messages up to the last question or answer; ValueError where a model cannot be asked them."""
    roles = [one["role"] for one in messages]
    while roles and roles[-1] in ("system", "tool"):
        roles.pop()
    if "user" not in roles:
        raise ValueError("no user's turn")
    if "assistant" in roles and roles.index("assistant") < roles.index("user"):
        raise ValueError("an answer before the first question")
    if not all(one["content"].strip() for one in messages[: len(roles)] if one["role"] == "user"):
        raise ValueError("an empty question")
    return messages[: len(roles)]


def questions(messages: Messages) -> str:
    """The text that names a conversation and gives its split: all but answers, so that no question is in two splits."""
    return json.dumps([[one["role"], one["content"]] for one in messages if one["role"] != "assistant"])


def fingerprint(text: str) -> str:
    """A name for a text by its content."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
