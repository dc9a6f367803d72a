"""Packing, documents that do not see each other, the order of epochs, splits, prompts and reading documents."""

from __future__ import annotations

import datetime
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Patch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from toys import toy
from transformers.integrations import flex_attention as transformers_flex

from distill.data.packing import concatenate, fitted_rows, pack, planned
from distill.data.prompts import cut_prompts
from distill.data.samples import SPLITS
from distill.data.sources import Document, Documents, read_documents, split_of
from distill.engines.torch import blocks as forward
from distill.engines.torch.blocks import (
    PADDING,
    Packed,
    attend_within,
    attention_mask,
    document_segments,
    hidden_states,
    packed_logits,
    separation,
)
from distill.errors import DataError, RunError
from distill.recipe import Corpus, Source
from distill.training.setup import epoch_order, recompute_activations

torch.set_num_threads(1)


def pieces(packed: Packed) -> list[list[tuple[list[int], list[bool]]]]:
    """The documents of each block with their mask, checking borders, positions and padding on the way."""
    found = []
    for ids, documents, positions, mask in zip(
        packed.ids.tolist(), packed.documents.tolist(), packed.positions.tolist(), packed.mask.tolist(), strict=True
    ):
        row: list[tuple[list[int], list[bool]]] = []
        padding = False
        for token, document, position, wanted in zip(ids, documents, positions, mask, strict=True):
            if document == PADDING:
                padding = True
                assert not wanted
                continue
            assert not padding  # nothing after padding
            if document == len(row):
                row.append(([], []))
            assert document == len(row) - 1 and position == len(row[-1][0])
            row[-1][0].append(token)
            row[-1][1].append(wanted)
        for _, wants in row:
            assert not wants[-1]  # a document's last token has no next one
        found.append(row)
    return found


documents_of = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=20)


def numbered(shape: list[tuple[int, int]]) -> list[tuple[list[int], int]]:
    """Documents of given lengths and firsts, every token a number of its own."""
    sequences, token = [], 0
    for length, first in shape:
        sequences.append((list(range(token, token + length)), min(first, length)))
        token += length
    return sequences


@settings(max_examples=200, deadline=None)
@given(documents_of, st.integers(2, 33))
def test_split_long_keeps_every_token_in_order(shape: list[tuple[int, int]], block: int) -> None:
    sequences = numbered(shape)
    packed = pack(sequences, block, split_long=True)
    rows = pieces(packed)
    assert packed.ids.shape == (len(rows), block)
    assert [t for row in rows for ids, _ in row for t in ids] == [t for ids, _ in sequences for t in ids]
    owner = {t: (number, i) for number, (ids, _) in enumerate(sequences) for i, t in enumerate(ids)}
    for row in rows:
        for ids, mask in row:
            number = owner[ids[0]][0]
            assert {owner[t][0] for t in ids} == {number}  # a piece belongs to one document
            for at in range(len(ids) - 1):  # the distribution of token `at + 1` is wanted from index `first` on
                assert mask[at] == (owner[ids[at + 1]][1] >= sequences[number][1])
    # no block is left half empty: only a lone free position may be
    used = [sum(len(ids) for ids, _ in row) for row in rows]
    assert all(count >= block - 1 for count in used[:-1])


@settings(max_examples=200, deadline=None)
@given(documents_of, st.integers(30, 64))
def test_whole_documents(shape: list[tuple[int, int]], block: int) -> None:
    sequences = numbered(shape)
    packed = pack(sequences, block, split_long=False)
    rows = pieces(packed)
    assert [ids for row in rows for ids, _ in row] == [ids for ids, _ in sequences]
    assert packed.labels().tolist() == [t for ids, first in sequences for t in ids[first:]]
    with pytest.raises(AssertionError, match="longer than a block"):
        pack([*sequences, (list(range(block + 1)), 1)], block, split_long=False)


def test_an_order_that_fills_blocks() -> None:
    """Nearly no padding; each sequence once."""
    generator = random.Random(0)
    lengths = [generator.randint(40, 350) for _ in range(300)]
    rows = fitted_rows(lengths, 512)
    order = [index for row in rows for index in row]
    assert sorted(order) == list(range(300)) and fitted_rows([], 512) == []
    assert max(sum(lengths[index] for index in row) for row in rows) <= 512
    packed = pack([([1] * lengths[index], 1) for index in order], 512, split_long=False)
    assert len(packed) <= 1.02 * sum(lengths) / 512 + 1


def test_turns_of_a_conversation_are_one_text() -> None:
    """Where the next prompt holds all that came before; each answer's distributions are those of its own sample."""
    generator = random.Random(1)
    turns: list[tuple[list[int], list[int]]] = []
    kept, thinking = [], []
    for number in range(12):
        prompt = [generator.randrange(30) for _ in range(generator.randint(3, 9))]
        for _ in range(number % 4 + 1):
            answer = [generator.randrange(30) for _ in range(generator.randint(2, 6))]
            turns.append((prompt, answer))
            dropped = number % 5 == 4  # as a template that leaves out earlier thinking
            (thinking if dropped else kept).append(len(turns) - 1)
            prompt = [*prompt, *answer[dropped:], *(generator.randrange(30) for _ in range(3))]
    blocks, rows = planned(turns.__getitem__, len(turns), 64)
    documents = [own for row in rows for own in row]
    assert sorted(one for own in documents for one in own) == [*range(len(turns))]
    assert all(len(own) == 1 for own in documents if own[0] in thinking)
    assert {len(own) for own in documents if own[0] in kept} == {1, 2, 3, 4}
    packed = blocks.take(slice(None))
    assert packed.scored.tolist() == blocks.scored.tolist() and int(packed.mask.sum()) == sum(len(a) for _, a in turns)
    order = [one for own in documents for one in own]
    assert packed.labels().tolist() == [token for one in order for token in turns[one][1]]
    model = toy("qwen2").double()
    alone = pack([(prompt + answer, len(prompt)) for prompt, answer in (turns[one] for one in order)], 64, False)
    with torch.no_grad():
        found, expected = (packed_logits(model, one)[one.mask] for one in (packed, alone))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    index = torch.tensor([len(blocks) - 1, 0])
    assert torch.equal(blocks.take(index).ids, packed.ids[index]) and len(packed) < len(alone)


def test_saved_taken_and_joined(tmp_path: Path) -> None:
    """Numbers of documents are saved where asked for, and go on from pack to pack where all have them."""
    parts = [pack(numbered(shape), 8, split_long=True) for shape in ([(20, 1), (3, 1), (9, 1)], [(5, 1), (9, 2)])]
    both = concatenate(parts)
    assert both.first is not None and both.first.tolist() == [0, 0, 0, 2, 2, 3, 4]
    both.save(tmp_path / "with.safetensors", numbered=True)
    both.save(tmp_path / "without.safetensors")
    again, without = (Packed.load(tmp_path / f"{name}.safetensors") for name in ("with", "without"))
    for name, value in both.tensors().items():
        for read in (again, without):
            assert torch.equal(value, read.tensors()[name]) and value.dtype == read.tensors()[name].dtype
    assert without.first is None and concatenate([parts[0], without]).first is None
    taken = again.take(torch.tensor([3, 1]))
    assert torch.equal(taken.ids, both.ids[[3, 1]]) and taken.first is not None and taken.first.tolist() == [2, 0]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 300), st.integers(0, 2**40), st.integers(0, 1000))
def test_epochs_are_permutations_that_can_be_seeked(count: int, seed: int, epoch: int) -> None:
    order = epoch_order(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    torch.rand(7)  # the global generator has no say
    assert torch.equal(order, epoch_order(count, seed, epoch))
    if count > 20:
        assert not torch.equal(order, epoch_order(count, seed, epoch + 1))
        assert not torch.equal(order, epoch_order(count, seed + 1, epoch))


def test_splits_have_the_fractions_asked_for() -> None:
    names = [f"module/{i}.py" for i in range(20000)]
    found = [split_of(name, 0.1, 0.2) for name in names]
    for split, share in (("train", 0.7), ("validation", 0.1), ("test", 0.2)):
        assert abs(found.count(split) / len(names) - share) < 4 * (share * (1 - share) / len(names)) ** 0.5
    # raising one share moves documents from train only
    assert all(b == a or a == "train" for a, b in zip(found, (split_of(n, 0.3, 0.2) for n in names), strict=True))
    assert {split_of(name, 0, 0) for name in names} == {"train"}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def tree(path: Path, **changes: object) -> Source:
    return Source(kind="tree", path=str(path), **changes)


def test_a_document_keeps_its_split_when_others_come(tmp_path: Path) -> None:
    root = write(tmp_path / "a", {f"m{i}.py": f"x = {i}\n" for i in range(60)})
    corpus = Corpus(sources=(tree(root),), validation=0.2, test=0.2)
    before = {d.name: d.split for d in read_documents(corpus)[0]}
    write(root, {f"new/m{i}.py": f"y = {i}\n" for i in range(60)} | {"m3.py": "changed\n"})
    after = {d.name: d.split for d in read_documents(corpus)[0]}
    assert len(after) == 120 and before == {name: after[name] for name in before}
    assert before == {f"m{i}.py": split_of(f"m{i}.py", 0.2, 0.2) for i in range(60)}


def test_what_a_tree_drops(tmp_path: Path) -> None:
    files = {"a.py": "a", "b.py": "b", "same_as_a.py": "a", "empty.py": " \n", "notes.txt": "no"}
    root = write(tmp_path / "a", files | {"tests/t.py": "t", "x/tests/t.py": "u", "x/tests.py": "kept"})
    (root / "latin.py").write_bytes(b"\xe9\xff")
    other = write(tmp_path / "b", {"b.py": "another text, a name seen before", "c.py": "c"})
    corpus = Corpus(sources=(tree(root, exclude=("tests",), split="train"), tree(other, split="test")))
    documents, dropped = read_documents(corpus, needed=())
    assert [d.text for d in documents] == ["a", "b", "kept", "another text, a name seen before", "c"]
    names = [d.name.partition("#")[0] for d in documents]
    assert names == ["a.py", "b.py", "x/tests.py", "b/b.py", "c.py"]
    assert [(d.split, d.source) for d in documents] == [("train", "a")] * 3 + [("test", "b")] * 2
    assert dropped == {"duplicate": 1, "empty": 1, "not UTF-8": 1}
    with pytest.raises(DataError, match="no validation document"):
        read_documents(corpus)
    only = Corpus(sources=(tree(other, split="test", keep=("train",)),))
    none, left = read_documents(only, needed=())
    assert not none and left == {"of split test, not kept": 2}
    few = Corpus(sources=(tree(root, split="train"), tree(other, split="train")), max_documents=1)
    documents, dropped = read_documents(few, needed=("train",))
    assert [d.name for d in documents] == ["a.py", "b.py"] and sum(dropped.values()) == 2


def test_text_and_jsonl(tmp_path: Path) -> None:
    records = [json.dumps({"body": text}) + "\n" for text in ("first", "second", "first", "  ")]
    write(tmp_path, {"book.txt": "one\ntwo\n", "r.jsonl": "".join(records)})
    book = Source(kind="text", path=str(tmp_path / "book.txt"), split="validation")
    lines = Source(kind="jsonl", path=str(tmp_path / "r.jsonl"), fields={"text": "body"}, split="train")
    documents, dropped = read_documents(Corpus(sources=(book, lines)), needed=())
    assert [(d.split, d.text) for d in documents[1:]] == [("train", "first"), ("train", "second")]
    assert (documents[0].name, documents[0].split, documents[0].text) == ("book.txt", "validation", "one\ntwo\n")
    # A record is named by its content, so that it keeps its split when others come before it.
    assert documents[1].name.endswith(hashlib.sha256(b"first").hexdigest()[:16])
    assert dropped == {"duplicate": 1, "empty": 1}
    for kind, path, message in (
        ("text", tmp_path, "is a folder"),
        ("tree", tmp_path / "book.txt", "is a file"),
        ("jsonl", tmp_path / "none", "does not exist"),
    ):
        with pytest.raises(DataError, match=message):
            read_documents(Corpus(sources=(Source(kind=kind, path=str(path)),)), needed=())


def test_documents_are_on_the_disk_as_they_were_given(tmp_path: Path, monkeypatch: Patch) -> None:
    messages = ({"role": "user", "content": "q \ud800"}, {"role": "assistant", "content": "a", "weight": 0})
    more = {"messages": messages, "label": "l", "own": True, "arguments": {"day": datetime.date(2026, 1, 2)}}
    texts = [Document(f"d{i} \udcff", SPLITS[i % 3], "é" * i, "s", **(more if i % 2 else {})) for i in range(40)]
    kept = Documents(tmp_path)
    for document in texts:
        kept.append(document)
    assert [*kept.sealed()] == texts and kept[-2:] == texts[-2:] and not [*tmp_path.iterdir()]
    own = [document for document in texts if document.split == "test"]
    random.Random(7).shuffle(own)
    assert [*kept.shuffled("test", 7)] == own  # whose file stays open
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(kept, "_file", full)
        with pytest.raises(RunError, match="disk is full: cannot write"):
            kept.append(texts[0])


def by_character(text: str) -> list[int]:
    return [ord(c) for c in text]


def prose(name: str, lines: int, width: int = 20) -> Document:
    return Document(name, "train", "".join(f"{name}:{i:04d}".ljust(width - 1, ".") + "\n" for i in range(lines)))


def test_prompts_are_exact_distinct_and_beginnings_first() -> None:
    documents = [prose(f"d{i}", 10 + i) for i in range(8)] + [prose("short", 1, 6)]
    texts = {d.name: d.text for d in documents}
    prompts = [*cut_prompts(documents, by_character, 1000, tokens=15, stride=50, seed=3)]
    assert len({p.id for p in prompts}) == len(prompts)
    offsets: dict[str, list[int]] = {}
    order: list[int] = []
    for prompt in prompts:
        name, _, offset = prompt.id.rpartition("@")
        at = int(offset)
        assert len(prompt.prompt) == 15 and prompt.prompt == by_character(texts[name][at : at + 15])
        assert at == 0 or texts[name][at - 1] == "\n"  # later pieces start at a line
        if offsets.get(name):
            assert at - offsets[name][-1] >= 50
        order.append(len(offsets.setdefault(name, [])))
        offsets[name].append(at)
    assert order == sorted(order) and order.count(0) == 8 and "short" not in offsets
    assert [p.id for p in cut_prompts(documents, by_character, 5, 15, 50, 3)] == [p.id for p in prompts[:5]]
    assert {p.id for p in cut_prompts(documents, by_character, 8, 15, 50, 4)} == {f"d{i}@0" for i in range(8)}
    firsts = {tuple(p.id for p in cut_prompts(documents, by_character, 8, 15, 50, seed)) for seed in range(4)}
    assert len(firsts) > 1  # the seed draws the order
    assert [*cut_prompts(list(reversed(documents)), by_character, 1000, 15, 50, 3)] == prompts


# ── attention document by document ──


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {"num_key_value_heads": 4},
    "mistral": {"sliding_window": 5},
    "gemma3": MIXED | {"query_pre_attn_scalar": 8},
}


def blocks(*lengths: int, width: int = 40) -> Packed:
    generator = torch.Generator().manual_seed(0)
    texts = [(torch.randint(0, 61, (n,), generator=generator).tolist(), 1) for n in lengths]
    return pack(texts, width, split_long=False)


def alone(model: Any, packed: Packed) -> Tensor:
    """The hidden states of all documents, each read by itself."""
    rows = zip(packed.ids.long(), packed.documents, strict=True)
    texts = [ids[documents == number] for ids, documents in rows for number in range(int(documents.max()) + 1)]
    return torch.cat([model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in texts])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch looks at it
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_packed_documents_do_not_see_each_other(kind: str, checkpointing: bool, monkeypatch: Patch) -> None:
    """States and gradients with masks, document by document, with block masks and in compiled layers are those of the
    documents alone; some are shorter and some longer than a window, one has one token, and padding stands between two
    blocks."""
    # What a GPU compiles, as torch computes it here, backward too.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    eager = lambda *given, training, **options: flex_attention.flex_attention(*given, **options)  # noqa: E731
    monkeypatch.setattr(transformers_flex, "compile_friendly_flex_attention", eager)
    monkeypatch.setattr(flex_attention, "_WARNINGS_SHOWN", {"flex_attention_performance"})
    model = toy(kind, **MODELS[kind]).double()
    if checkpointing:
        recompute_activations(model)
        model.train()
    packed = blocks(7, 3, 12, 1, 5, 33, 2, 40, 21)

    def gradients(found: Tensor) -> list[Tensor]:
        model.zero_grad()
        (found * torch.linspace(-1, 1, found.shape[-1])).sum().square().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = alone(model, packed)
    wanted = gradients(expected)
    for masked_below, kind_of_mask in ((10**6, torch.bool), (1, torch.int32), (1, None)):
        monkeypatch.setattr(forward, "masked_below", lambda device, long=masked_below: long)
        monkeypatch.setattr(forward, "takes_block_masks", lambda *_, own=kind_of_mask is None: own)
        given = separation(model, packed.documents, torch.device("cpu"))
        one = next(iter(given.values())) if isinstance(given, dict) else given
        assert getattr(one, "dtype", None) == kind_of_mask
        found = hidden_states(model, packed)[packed.documents >= 0]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        own = gradients(found)
        assert len(own) == len(wanted) > 10
        for one, other in zip(own, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))


def test_segments() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1], [-1, -1, -1, -1, -1, -1], [0, 1, 2, 2, -1, -1]])
    expected = [[2, 3], [3, 3], [1, -1], [6, -1], [1, 3], [1, 3], [2, 3], [2, -1]]
    found = document_segments(documents, 3)
    assert found.shape == (1, 1, 8, 2) and found[0, 0].tolist() == expected
    assert document_segments(documents, None)[0, 0, :, 1].tolist() == [0, 0, -1, -1, 0, 0, 0, -1]
    query = torch.randn(3, 2, 6, 4)
    output = attend_within(query, query[:, :1], query[:, :1], found)
    assert bool((output.abs().sum((-1, -2)) > 0).eq(documents >= 0).all()), "padding attends to nothing"


def test_under_autocast_a_cpu_still_computes_in_fp32() -> None:
    """As trainings in bf16 call it: inputs and output in bf16, all between in fp32, gradients in the inputs' type."""
    torch.manual_seed(0)
    documents = torch.tensor([[0] * 9 + [1] * 5 + [-1] * 2, [0] * 3 + [1] * 13])
    segments = document_segments(documents, None)
    inputs = [torch.randn(2, heads, 16, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend_within(*inputs, segments)
    assert found.dtype == torch.bfloat16
    (found.float() * torch.linspace(-1, 1, 8)).sum().backward()
    wide = [x.detach().float().requires_grad_() for x in inputs]
    keys, values = (x.repeat_interleave(2, 1) for x in wide[1:])
    mask = attention_mask(documents)
    expected = scaled_dot_product_attention(wide[0], keys, values, attn_mask=mask).transpose(1, 2)
    inside = (documents >= 0)[..., None, None]
    (expected.to(torch.bfloat16).float() * inside * torch.linspace(-1, 1, 8)).sum().backward()
    assert torch.equal(found, (expected * inside).to(torch.bfloat16))
    for one, other in zip(inputs, wide, strict=True):
        assert one.grad is not None and one.grad.dtype == torch.bfloat16 and other.grad is not None
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=1e-2, atol=1e-2 * float(other.grad.abs().max()))


def test_masks_stay_where_they_are_cheap_or_needed() -> None:
    short, long = blocks(7, width=64).documents, blocks(7, width=forward.LONG).documents
    cpu = torch.device("cpu")
    assert separation(toy("qwen2"), short, cpu).dtype == torch.int32
    meta = torch.device("meta")
    assert separation(toy("qwen2"), short, meta).dtype == torch.bool
    assert separation(toy("qwen2"), long, meta).dtype == torch.int32
    eager = toy("qwen2")
    eager.config._attn_implementation = "eager"
    assert separation(eager, long, cpu).is_floating_point()
    compiled = toy("qwen2")
    compiled.model._compiled_call_impl = hidden_states  # as Module.compile sets it
    assert separation(compiled, long, cpu).dtype == torch.int32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_block_masks_on_a_gpu(compiled: bool, monkeypatch: Patch) -> None:
    """FlexAttention's kernels give what masks do, up to bfloat16, forward and backward."""
    gpu = torch.device("cuda")
    model = toy("mistral", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, sliding_window=8)
    model.to(gpu, torch.bfloat16)
    packed = blocks(7, 3, 12, 1, 5, 33, 2, 40, 21)
    found: list[Tensor] = []
    for blocked in (False, True):
        if not blocked:
            monkeypatch.setattr(forward, "takes_block_masks", lambda *_: False)
        else:
            monkeypatch.undo()
            assert not isinstance(separation(model, packed.documents, gpu), Tensor)
            if compiled:
                model.model.compile()
        model.zero_grad()
        states = hidden_states(model, packed)[packed.documents.to(gpu) >= 0].float()
        states.square().sum().backward()
        found += [states.detach(), *(p.grad.float() for p in model.parameters() if p.grad is not None)]
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(one.abs().max()))
