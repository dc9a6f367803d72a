"""Whether a target and a draft fit each other: the rules of our decoder, llama.cpp and vLLM, from files only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from distill.engines.server_commands import refuse_head_file
from distill.engines.torch.hugging_face import context_length, load_config, load_tokenizer, read_kept, text_folder
from distill.errors import DataError, PairError, RecipeError
from distill.files import is_gguf, is_utf8
from distill.folders import read_config
from distill.gguf.head import ALWAYS_ADDS_BOS, DEFAULTS, Defaults, FileHead, open_head, stated_ends, token_key
from distill.gguf.importing import one_engine
from distill.recipe import Configuration
from distill.vocabulary.vocabulary import (
    SPACE,
    added_around,
    from_mapped,
    named_id,
    open_tokenizer,
    tokenizer_settings,
    tokens_without_row,
)

# ── A model's vocabulary and context as the rules compare them, read from a folder or a GGUF file without weights ──
# Legend: V rows of the model's vocabulary, padding included.


@dataclass(frozen=True)
class VocabularyMetadata:
    """A model's vocabulary and context as llama.cpp and vLLM see them.

    `tokens` [V] are the raw token strings. Padding rows are named [PAD<id>], as every converter does. `bos` and `eos`
    are added to a text if `add_bos` and `add_eos` are true. `rowless` are the tokenizer's markers of images and sounds
    without a row. `kept` is the number of ids of a trimmed head, or None for the whole head. `context` is the training
    context in tokens.
    """

    reference: str
    kind: str
    tokens: list[str] = field(repr=False)
    bos: int | None
    eos: int | None
    add_bos: bool
    add_eos: bool
    context: int | None
    architecture: str
    chat_template: bool
    rowless: tuple[str, ...] = ()
    kept: int | None = None

    @classmethod
    def read(cls, reference: str) -> VocabularyMetadata:
        """Read the metadata of a Hugging Face folder, a hub name or a .gguf file. DataError if it cannot be read."""
        return _from_gguf(Path(reference)) if is_gguf(reference) else _from_folder(reference)

    @property
    def rows(self) -> int:
        """The number V of rows: Hugging Face's vocab_size."""
        return len(self.tokens)

    def real(self, index: int) -> str | None:
        """Return the string of a token, or None for a padding row."""
        if index >= len(self.tokens) or self.tokens[index] == f"[PAD{index}]":
            return None
        return self.tokens[index]

    def with_rows(self, rows: int) -> VocabularyMetadata:
        """Return the metadata with padding rows appended, or rows at the end removed."""
        padding = [f"[PAD{index}]" for index in range(len(self.tokens), rows)]
        return replace(self, tokens=self.tokens[:rows] + padding)

    @property
    def real_tokens(self) -> int:
        """The number of rows that hold tokens."""
        return sum(self.real(index) is not None for index in range(self.rows))


def _from_folder(reference: str) -> VocabularyMetadata:
    place = str(text_folder(reference))
    folder, config = Path(place), load_config(place).get_text_config()
    rows = getattr(config, "vocab_size", None)
    if not isinstance(rows, int) or rows < 1:
        raise DataError(f"{folder}/config.json: vocab_size is {rows!r}", "correct config.json")
    tokenizer, settings, raw = _tokenizer(place), tokenizer_settings(folder), read_config(folder)
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    model = _gguf_model(place, tokenizer, config.model_type)
    named = {role: named_id(role, settings, raw, ids, rows) for role in ("bos", "eos")}
    ends = _text_ends(tokenizer, settings, named, DEFAULTS[model])
    kept, tokens = read_kept(folder), {index: token for token, index in ids.items()}
    templates = any((folder / f"chat_template.{kind}").is_file() for kind in ("jinja", "json"))
    return VocabularyMetadata(
        reference=reference,
        tokens=[tokens.get(index, f"[PAD{index}]") for index in range(rows)],  # the converters' names for padding
        **ends._replace(add_bos=ends.add_bos or model == ALWAYS_ADDS_BOS)._asdict(),
        context=context_length(config),
        architecture=config.model_type,
        chat_template=bool(settings.get("chat_template")) or templates,
        rowless=tuple(sorted(tokens_without_row(folder, ids, special, rows))),
        kept=None if kept is None else len(kept["kept"]),
    )


def _tokenizer(place: str) -> Any:
    """Return the tokenizers.Tokenizer of a folder."""
    path = Path(place) / "tokenizer.json"
    if path.is_file():
        return open_tokenizer(path)
    backend = getattr(load_tokenizer(place), "backend_tokenizer", None)
    if backend is None:
        raise DataError(f"{place}: its tokenizer has no fast version to read", "save it with a tokenizer.json")
    return backend


def _gguf_model(place: str, tokenizer: Any, architecture: str) -> str:
    """Return the tokenizer.ggml.model that llama.cpp's converter would write."""
    model = type(tokenizer.model).__name__
    if architecture.startswith("gemma4"):
        return "gemma4"
    if model != "BPE":
        raise DataError(f"{place}: tokenizers of kind {model} are not supported", "use another tokenizer")
    return "llama" if tokenizer.model.byte_fallback else "gpt2"


def _text_ends(
    tokenizer: Any, settings: Mapping[str, Any], named: Mapping[str, int | None], defaults: Defaults
) -> Defaults:
    """Return the tokens that begin and end a text, and whether they are added to it, instead of llama.cpp's `defaults`.

    The tokens come from the tokenizer's post-processor, or from the ids that the files name. The settings
    add_bos_token and add_eos_token decide whether they are added. Without a setting, the post-processor decides.
    """
    before, after = added_around(tokenizer) or ([], [])
    bos = next((number for number in (*before[:1], named["bos"]) if number is not None), defaults.bos)
    eos = next((number for number in (*after[-1:], named["eos"]) if number is not None), defaults.eos)
    add_bos, add_eos = (settings.get(f"add_{role}_token") for role in ("bos", "eos"))
    add_bos = add_bos if isinstance(add_bos, bool) else bool(before) or defaults.add_bos
    add_eos = add_eos if isinstance(add_eos, bool) else bool(after) or defaults.add_eos
    return Defaults(defaults.kind, bos, eos, add_bos, add_eos)


def _from_gguf(path: Path) -> VocabularyMetadata:
    head = open_head(path)
    refuse_head_file(head)
    model, tokens = head.text("tokenizer.ggml.model"), head.texts("tokenizer.ggml.tokens", "surrogateescape")
    if model is None or "tokenizer.ggml.tokens" not in head.values:
        raise DataError(
            f"{path} contains no tokenizer", "give a complete model file (of a split model, the first part)"
        )
    if model not in DEFAULTS:
        raise DataError(f"{path}: tokenizer.ggml.model is {model!r}, which is unknown", f"known: {', '.join(DEFAULTS)}")
    # llama.cpp loads only files with one row per token.
    embedding = head.shapes.get("token_embd.weight", [0, len(tokens)])
    if embedding[-1:] != [len(tokens)]:
        embedded = embedding[-1] if embedding else "none"
        raise DataError(f"{path} names {len(tokens)} tokens, but embeds {embedded}", "export the model again")
    ends = stated_ends(head)
    bos, eos = (_token_id(head, role, len(tokens), getattr(ends, role)) for role in ("bos", "eos"))
    return VocabularyMetadata(
        reference=str(path),
        tokens=tokens,
        **ends._replace(bos=bos, eos=eos)._asdict(),
        context=head.context,
        architecture=head.architecture,
        chat_template="tokenizer.chat_template" in head.values,
    )


def _token_id(head: FileHead, role: str, count: int, default: int | None) -> int | None:
    """Return the id that a file names for a role. If it is not an id, return the default, as llama.cpp does."""
    number = head.values.get(token_key(role))
    return number if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < count else default


# ── The rules ──

LLAMA_CPP_SIZE_DIFFERENCE = 128  # llama.cpp's SPEC_VOCAB_MAX_SIZE_DIFFERENCE
LLAMA_CPP_FIRST_ID = 5  # SPEC_VOCAB_CHECK_START_TOKEN_ID: token strings are compared from this id on.
BYTE_LEVEL = "BPE"  # a kind of vocabulary
LONGEST_SHOWN = 40  # characters of a token in a message

TRANSPLANT = "transplant the target's vocabulary into the draft: cut.transplant in a recipe, or `distill transplant`"
OTHER_ROWS = f"give the draft {{}} rows too: {TRANSPLANT}"
ANY_ROWS = '"use_heterogeneous_vocab": true, which drafts only the draft\'s best tokens'  # in vLLM's configuration
SAME_FILES = "copy the target's tokenizer files into the draft's folder and export the draft again"


class Mismatch(NamedTuple):
    """The reason why a pair does not fit by a rule, and the next step."""

    reason: str
    remedy: str


Verdict = Mismatch | None  # None means that the pair fits.


@dataclass(frozen=True)
class PairReport:
    """The verdict of each rule on a pair. `distill` is the rule of our decoder. `context` is only a warning."""

    distill: Verdict
    llama_cpp: Verdict
    vllm: Verdict
    context: Verdict
    target: VocabularyMetadata = field(repr=False)
    draft: VocabularyMetadata = field(repr=False)

    def verdicts(self) -> Iterator[tuple[str, bool, str]]:
        """Yield each rule's line, whether the pair fits, and the next step (or an empty text)."""
        for key, name, trouble in (
            ("distill", "pair rule of distill", "does not fit"),
            ("llama_cpp", "pair rule of llama.cpp", "does not fit"),
            ("vllm", "pair rule of vLLM", "does not fit"),
            ("context", "context", "warning"),
        ):
            mismatch: Verdict = getattr(self, key)
            reason, remedy = mismatch or ("", "")
            yield f"{name}: {trouble}: {reason}" if mismatch else f"{name}: fits", mismatch is None, remedy

    def lines(self) -> list[str]:
        """Return the report in lines: both models, then a line for each rule and each remedy."""
        rules = [
            text for line, _, remedy in self.verdicts() for text in (line, f"  {remedy}" if remedy else "") if text
        ]
        return [_described("target", self.target), _described("draft", self.draft), *rules]


def _described(role: str, metadata: VocabularyMetadata) -> str:
    """Return a line about a model."""
    parts = [f"{metadata.architecture}, {metadata.kind}, {metadata.real_tokens} tokens in {metadata.rows} rows"]
    parts.append("context unknown" if metadata.context is None else f"context {metadata.context}")
    added = [f"bos {metadata.bos}"] * metadata.add_bos + [f"eos {metadata.eos}"] * metadata.add_eos
    parts.append(f"adds {' and '.join(added)}" if added else "adds no bos or eos")
    parts.append("chat template" if metadata.chat_template else "no chat template")
    if metadata.kept is not None:
        parts.append(f"trimmed to {metadata.kept} tokens")
    if metadata.rowless:
        parts.append(f"without a row for {', '.join(metadata.rowless)}, read as text")
    return f"{role} {metadata.reference}: {', '.join(parts)}"


def _decoded(token: str, kind: str) -> str:
    """Return the text that a token stands for, not the characters by which byte-level BPE writes bytes."""
    if kind == BYTE_LEVEL and is_utf8(token):
        data = from_mapped(token)
    else:
        data = token.replace(SPACE, " ").encode("utf-8", "surrogateescape")
    return data.decode("utf-8", "backslashreplace")


def _shown(token: str | None) -> str:
    if token is None:
        return "no token"
    return repr(token) if len(token) <= LONGEST_SHOWN else repr(token[:LONGEST_SHOWN]) + "…"


Tokens = Callable[[VocabularyMetadata, int], str | None]


def _differences(first: int, last: int, target: VocabularyMetadata, draft: VocabularyMetadata, of: Tokens) -> str:
    """Describe the first id in [first, last) with different strings, and count the differences. Empty without any."""
    different = [index for index in range(first, last) if of(target, index) != of(draft, index)]
    if not different:
        return ""
    index = different[0]
    more = f" (the first of {len(different)} differences)" if len(different) > 1 else ""
    written = [of(side, index) for side in (target, draft)]
    texts = [token and _decoded(token, side.kind) for token, side in zip(written, (target, draft), strict=True)]
    # If both texts are equal, the tokens write the same text in two ways, so the raw strings are shown.
    ours, theirs = map(_shown, written if texts[0] == texts[1] else texts)
    return f"token {index} is {ours} in the target and {theirs} in the draft{more}"


def distill_rule(target: VocabularyMetadata, draft: VocabularyMetadata) -> Verdict:
    """Apply our decoder's rule: every id that is a token in one model (not padding) is the same string in both.

    Converters' files write the spaces of some added tokens as spaces, and folders write them as SentencePiece does.
    """
    byte_level = BYTE_LEVEL in (target.kind, draft.kind)

    def spaced(side: VocabularyMetadata, index: int) -> str | None:
        token = side.real(index)
        return token if token is None or byte_level else token.replace(SPACE, " ")

    different = _differences(0, max(target.rows, draft.rows), target, draft, spaced)
    return Mismatch(different, TRANSPLANT) if different else None


def llama_cpp_rule(target: VocabularyMetadata, draft: VocabularyMetadata) -> Verdict:
    """Apply llama.cpp's common_speculative_are_compatible, in its order (common/speculative.cpp)."""
    if target.kind != draft.kind:
        return Mismatch(f"the target's vocabulary has type {target.kind}, the draft's {draft.kind}", TRANSPLANT)
    sides = (
        ("bos", target.add_bos, draft.add_bos, target.bos, draft.bos),
        ("eos", target.add_eos, draft.add_eos, target.eos, draft.eos),
    )
    for name, ours, theirs, first, second in sides:
        if ours != theirs:
            with_it, without = ("target", "draft") if ours else ("draft", "target")
            return Mismatch(f"the {with_it} adds its {name} token to a text, but the {without} does not", SAME_FILES)
        if ours and first != second:
            reason = f"the {name} token that is added is {first} in the target and {second} in the draft"
            return Mismatch(reason, SAME_FILES)
    if abs(target.rows - draft.rows) > LLAMA_CPP_SIZE_DIFFERENCE:
        reason = f"vocabulary sizes {target.rows} and {draft.rows} differ by more than {LLAMA_CPP_SIZE_DIFFERENCE}"
        return Mismatch(reason, OTHER_ROWS.format(target.rows))
    last = min(target.rows, draft.rows)
    different = _differences(LLAMA_CPP_FIRST_ID, last, target, draft, lambda side, index: side.tokens[index])
    return Mismatch(different, TRANSPLANT) if different else None


def vllm_rule(target: VocabularyMetadata, draft: VocabularyMetadata) -> Verdict:
    """Apply vLLM's rule: equal vocab_size including padding. `use_heterogeneous_vocab` lifts it and drafts greedily."""
    if target.rows == draft.rows:
        return None
    reason = f"vocab_size is {target.rows} in the target and {draft.rows} in the draft"
    return Mismatch(reason, f"{OTHER_ROWS.format(target.rows)}; or serve it with {ANY_ROWS}")


def context_rule(draft: VocabularyMetadata, served: int | None) -> Verdict:
    """Require that the draft's training context is at least the served one. It fits if the served one is unknown."""
    if draft.context is None:
        remedy = "set max_position_embeddings in its config.json, or export it again"
        return Mismatch("the draft names no context length", remedy)
    if served is None or draft.context >= served:
        return None
    reason = f"the draft was made for {draft.context} tokens, but {served} will be served"
    shorter = f"serve at most {draft.context} tokens (llama.cpp --ctx-size, vLLM --max-model-len)"
    return Mismatch(reason, f"{shorter}, or cut the draft from a donor with a longer context")


def compare_pair(target: str, draft: str, same_rows: bool = False) -> PairReport:
    """Compare two models by the rules of each decoder. Loads no weights.

    Each model is a Hugging Face folder, a hub name or a .gguf file. The served context is the target's. With
    `same_rows`, the draft is a donor that will get the target's number of rows if our own rule allows it. Raises
    DataError if a model cannot be read.
    """
    ours = VocabularyMetadata.read(target)
    theirs = ours if target == draft else VocabularyMetadata.read(draft)
    if same_rows and distill_rule(ours, theirs) is None:
        theirs = theirs.with_rows(ours.rows)
    ours_rule, llama = distill_rule(ours, theirs), llama_cpp_rule(ours, theirs)
    return PairReport(ours_rule, llama, vllm_rule(ours, theirs), context_rule(theirs, ours.context), ours, theirs)


def require_pair(target: str, draft: str) -> PairReport:
    """Return `compare_pair`. Raises PairError if our decoder could not use the two models together."""
    report = compare_pair(target, draft)
    if report.distill is not None:
        hint = f"choose a donor with the target's tokenizer, or {report.distill.remedy}"
        raise PairError(f"{draft} does not fit the target {target}: {report.distill.reason}", hint)
    return report


def require_drafts(target: str, draft: str, foreign: bool, in_bits: bool = False) -> tuple[str, str]:
    """Return the references of a pair for one engine. If one is a GGUF file, it is imported (`one_engine`).

    References are resolved before. Raises PairError for a draft that does not fit, unless it may have another
    vocabulary (`foreign`).
    """
    if foreign:
        return one_engine(target, draft, in_bits)
    try:
        require_pair(target, draft)
    except PairError as error:
        if is_gguf(target):
            raise
        hint = "draft text instead, which works with any tokenizer: drafter=string; or transplant the vocabulary"
        raise PairError(error.what, f"{hint} (`distill transplant`)") from None
    return one_engine(target, draft, in_bits)


def pair_references(
    target: str, draft: str | None, configurations: Sequence[Configuration], in_bits: bool = False
) -> tuple[str, str | None]:
    """Return target and draft as they will be loaded. References are resolved before. Loads nothing.

    Raises RecipeError, DataError or PairError for a draft that is missing, unused or does not fit.
    """
    foreign = [configuration for configuration in configurations if configuration.other_vocabulary]
    native = [configuration for configuration in configurations if configuration.asks_the_draft]
    if foreign and native:
        raise RecipeError(
            f"`{native[0].described}` needs a draft with the target's vocabulary, but `{foreign[0].described}` needs a "
            f"draft with another vocabulary"
        )
    if draft is None:
        if foreign or native:
            raise RecipeError(f"`{(foreign or native)[0].described}` needs a draft", "name one, or use drafter=lookup")
        return target, None
    if not foreign and not native:
        raise RecipeError("no configuration uses the draft", "leave the draft out")
    if foreign and is_gguf(target):
        raise DataError(f"drafter {foreign[0].drafter} reads both tokenizers from Hugging Face folders")
    return require_drafts(target, draft, bool(foreign), in_bits)
