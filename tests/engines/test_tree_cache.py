"""Trees of tokens in the caches of both backends: whatever was added, kept or dropped, logits are a fresh prefill's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import needs_llama
from toys import save_toy, toy, toy_tokenizer

from distill.engines.llama_cpp.model import GgufModel
from distill.engines.model import ROOT, PendingTree
from distill.engines.torch.model import TorchModel
from distill.engines.torch.static import StaticTorchModel
from distill.errors import DataError
from distill.gguf.library import library
from distill.gguf.writer import export_gguf

torch.set_num_threads(1)

V = 61
# Without windows, and with; all: test_families.py. Eager attention adds the mask, whatever its type.
HUGGING_FACE = {kind: toy(kind, seed=3) for kind in ("qwen2", "gemma3")}
HUGGING_FACE["eager"] = toy("llama", seed=3, attn_implementation="eager")


def prefill(hugging_face: Any, context: Sequence[int]) -> torch.Tensor:
    """Logits [V] after `context`, computed from nothing and without a cache."""
    with torch.inference_mode():
        return hugging_face(torch.tensor([list(context)]), use_cache=False).logits[0, -1]


class Mirror:
    """What a model should hold, kept by hand: the committed tokens and the pending nodes with their parents."""

    def __init__(
        self, model: Any, fresh: Callable[[Sequence[int]], torch.Tensor], compare: Callable[..., None]
    ) -> None:
        self.model, self.fresh, self.compare = model, fresh, compare
        self.context: list[int] = []
        self.nodes: list[tuple[int, int]] = []  # token, parent

    def path(self, node: int) -> list[int]:
        """Node numbers from the root down to `node`."""
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.nodes[node][1]
        return found[::-1]

    def leaves(self) -> int:
        return len(self.nodes) - len({parent for _, parent in self.nodes} - {ROOT})

    def text(self, node: int) -> list[int]:
        return [*self.context, *(self.nodes[i][0] for i in self.path(node))]

    def chain(self, tokens: list[int], want: list[int] | None = None) -> None:
        got = self.model.extend(tokens, want=want).full()
        start = len(self.context)
        self.context += tokens
        wanted = range(len(tokens)) if want is None else want
        self.check(got, [self.context[: start + i + 1] for i in wanted])

    def tree(self, tokens: list[int], parents: list[int], want: list[int] | None = None) -> None:
        first = len(self.nodes)
        got = self.model.extend(tokens, parents=parents, want=want).full()
        self.nodes += zip(tokens, parents, strict=True)
        self.check(got, [self.text(first + i) for i in (range(len(tokens)) if want is None else want)])

    def check(self, got: torch.Tensor, texts: list[list[int]]) -> None:
        assert len(got) == len(texts) and self.model.lengths == [len(self.context)]
        for row, text in zip(got, texts, strict=True):
            self.compare(row, self.fresh(text))

    def keep(self, path: list[int]) -> None:
        self.model.keep([path])
        self.context += [self.nodes[node][0] for node in path]
        self.nodes = []
        assert self.model.lengths == [len(self.context)]

    def rollback(self, size: int) -> None:
        self.model.rollback([size])
        del self.context[size:]
        self.nodes = []
        assert self.model.lengths == [size]

    def step(self, draws: random.Random, most_leaves: int) -> None:
        """One thing that a decoder could do."""
        capacity, vocabulary = self.model.capacity, self.model.vocabulary_size
        choice = draws.random()
        if self.nodes and choice < 0.4:
            self.keep(self.path(draws.randrange(-1, len(self.nodes))))
        elif choice < 0.55:
            size = len(self.context)
            self.rollback(draws.choice([size, draws.randrange(size + 1), max(0, size - 2), 0]))
        elif choice < 0.7 and not self.nodes:
            tokens = [draws.randrange(vocabulary) for _ in range(draws.choice([1, 1, 2, 5, 9]))]
            if len(self.context) + len(tokens) <= capacity:
                self.chain(tokens, draws.choice([None, [len(tokens) - 1], [0], [], [len(tokens) - 1, 0]]))
        else:
            before, parents = list(self.nodes), []
            for _ in range(draws.randint(1, 7)):
                parent = draws.randrange(-1, len(self.nodes))
                self.nodes.append((0, parent))
                if self.leaves() > most_leaves or len(self.context) + len(self.path(len(self.nodes) - 1)) > capacity:
                    self.nodes.pop()
                else:
                    parents.append(parent)
            self.nodes = before
            if parents:
                count = len(parents)
                want = draws.choice([None, None, [count - 1], [0, count - 1], [count - 1, 0, 0], []])
                self.tree([draws.randrange(vocabulary) for _ in parents], parents, want)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


# PyTorch.


@pytest.mark.parametrize("kind", HUGGING_FACE)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6))
def test_torch_after_anything_is_a_fresh_prefill(kind: str, seed: int) -> None:
    hugging_face, draws = HUGGING_FACE[kind], random.Random(seed)
    mirror = Mirror(TorchModel(hugging_face), lambda text: prefill(hugging_face, text), close)
    for _ in range(14):
        mirror.step(draws, 99)
    if mirror.nodes:
        mirror.keep(mirror.path(len(mirror.nodes) - 1))
    mirror.chain([1, 2])


def shaped(draws: random.Random, nodes: int) -> list[int]:
    return [draws.randrange(-1, node) for node in range(nodes)]


def by_depth(parents: list[int]) -> list[list[int]]:
    depths = PendingTree().grown(parents).depths
    return [[node for node, depth in enumerate(depths) if depth == level] for level in range(1, max(depths) + 1)]


def check_levels(model: Any, draws: random.Random, compare: Callable[..., None]) -> None:
    """A tree given level by level has the logits of one given at once, and so has a token behind a path of either."""
    parents = shaped(draws, 12)
    tokens = [draws.randrange(model.vocabulary_size) for _ in parents]
    numbers: dict[int, int] = {ROOT: ROOT}
    for level in by_depth(parents):
        numbers.update({node: len(numbers) - 1 + i for i, node in enumerate(level)})

    def at_once() -> torch.Tensor:
        return model.extend(tokens, parents=parents).full()

    def by_levels() -> torch.Tensor:
        found = {}
        for level in by_depth(parents):
            got = model.extend([tokens[n] for n in level], parents=[numbers[parents[n]] for n in level]).full()
            found.update(zip(level, got, strict=True))
        return torch.stack([found[node] for node in range(len(parents))])

    model.rollback([0])
    model.extend([3, 1, 4, 1, 5])
    for node in (11, 3):
        path, at, rows = [], node, []
        while at != ROOT:
            path.append(at)
            at = parents[at]
        for grow, names in ((at_once, range(12)), (by_levels, numbers)):
            rows.append(grow())
            model.keep([[names[n] for n in reversed(path)]])
            rows.append(model.extend([7]).full())
            model.rollback([5])
        for one, other in zip((*rows[0], *rows[1]), (*rows[2], *rows[3]), strict=True):
            compare(one, other)


def refusals(model: Any) -> list[Callable[[], Any]]:
    """Calls that must change nothing, for a model with a pending tree of parents [-1, 0, 0, -1] and capacity 16."""
    return [
        lambda: model.extend([1]),
        lambda: model.extend([], parents=[]),
        lambda: model.extend([1, 2], parents=[-1]),
        lambda: model.extend([1, 2], parents=[-1, 6]),
        lambda: model.extend([1], parents=[4]),
        lambda: model.extend([1], parents=[-2]),
        lambda: model.extend([1], counts=[2], parents=[-1]),
        lambda: model.extend([model.vocabulary_size], parents=[-1]),
        lambda: model.extend([-1], parents=[-1]),
        lambda: model.extend([1], parents=[-1], want=[1]),
        lambda: model.extend([1], parents=[-1], want=[-1]),
        lambda: model.extend([1] * 12, parents=[3, *range(4, 15)]),  # deeper than the context
        lambda: model.keep([]),
        lambda: model.rollback([1, 1]),
        lambda: model.rollback([]),
        lambda: model.keep([[0], [1]]),
        lambda: model.keep([[1]]),
        lambda: model.keep([[0, 3]]),
        lambda: model.keep([[3, 4]]),
        lambda: model.keep([[-1]]),
        lambda: model.rollback([9]),
        lambda: model.rollback([-1]),
    ]


def check_refusals(model: Any, compare: Callable[..., None]) -> None:
    mirror = Mirror(model, lambda text: text, lambda *_: None)  # type: ignore[arg-type,return-value]
    mirror.chain([1, 2, 3, 4, 5])
    for call in (
        lambda: model.keep([[0]]),
        lambda: model.extend([]),
        lambda: model.extend([1] * 12),
        lambda: model.extend([1, 2], counts=[1, 1]),
        lambda: model.extend([3, 4], want=[0, 5]),
        lambda: model.extend([3, 4], want=[-1]),
        lambda: model.rollback([6]),
    ):
        with pytest.raises(ValueError):
            call()
        assert model.lengths == [5]
    model.keep([[]])  # nothing is pending, nothing is kept
    mirror.tree([1, 2, 3, 4], [-1, 0, 0, -1])
    for call in refusals(model):
        with pytest.raises(ValueError):
            call()
        assert model.lengths == [5]
    grown = model.extend([7, 8], parents=[2, 3]).full()
    mirror.nodes += [(7, 2), (8, 3)]
    texts = [mirror.text(4), mirror.text(5)]
    mirror.keep([0, 2, 4])
    after = model.extend([9]).full()[0]
    for got, text in ((grown[0], texts[0]), (grown[1], texts[1]), (after, [*mirror.context, 9])):
        model.rollback([0])
        compare(got, model.extend(text, want=[len(text) - 1]).full()[0])


def test_torch_refusals_change_nothing() -> None:
    for kind in (TorchModel, StaticTorchModel):
        check_refusals(kind(toy(seed=3, max_position_embeddings=16)), close)


@pytest.mark.parametrize("kind", [TorchModel, StaticTorchModel])
def test_torch_failure_inside_the_model_changes_nothing(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that fails leaves the layers before it longer: they are cut again, or overwritten."""
    hugging_face = toy("gemma3", seed=3)
    mirror = Mirror(kind(hugging_face), lambda text: prefill(HUGGING_FACE["gemma3"], text), close)
    mirror.chain([1, 2, 3])
    mirror.tree([4, 5], [-1, 0])

    def broken(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(hugging_face.model.layers[1].mlp, "forward", broken)
    for call in (lambda: mirror.model.extend([6], parents=[1]), lambda: mirror.model.extend([6] * 9, parents=[-1] * 9)):
        with pytest.raises(MemoryError):
            call()
    monkeypatch.undo()
    mirror.tree([7, 8], [1, -1])
    mirror.keep([0, 1, 2])
    mirror.chain([3, 3])


# GGUF.


@pytest.fixture(scope="module", params=["qwen2", "gemma2"])  # one cache, and two: of layers without and with a window
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = toy_tokenizer()
    model = toy(request.param, vocabulary=len(tokenizer), seed=11, tie_word_embeddings=True)
    export_gguf(save_toy(model, tokenizer, folder / "m"), folder / "m.gguf", "f32")
    return folder / "m.gguf"


@pytest.fixture(scope="module")
def single(exported: Path) -> Iterator[GgufModel]:
    """A model that never saw a tree, to compare with."""
    with GgufModel(exported, context=64, threads=1) as model:
        yield model


def gguf_prefill(model: GgufModel, text: Sequence[int]) -> torch.Tensor:
    model.rollback([0])
    return model.extend(text, want=[len(text) - 1]).full()[0]


@pytest.fixture(scope="module")
def noise(single: GgufModel) -> float:
    """The largest logit difference between a text prefilled at once and token by token, without any tree."""
    draws, most = random.Random(2), 0.0
    for _ in range(20):
        text = [draws.randrange(single.vocabulary_size) for _ in range(40)]
        single.rollback([0])
        whole = single.extend(text).full()
        single.rollback([0])
        most = max(most, (whole - torch.cat([single.extend([token]).full() for token in text])).abs().max().item())
    assert 0 < most < 1e-2
    return most


def within(noise: float) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Equal up to the noise, and the same best token where the gap to the second exceeds it."""

    def compare(got: torch.Tensor, expected: torch.Tensor) -> None:
        assert (got - expected).abs().max().item() <= noise
        best = expected.topk(2).values
        assert got.argmax() == expected.argmax() or best[0] - best[1] <= noise

    return compare


@needs_llama
def test_gguf_after_anything_is_a_fresh_prefill(exported: Path, single: GgufModel, noise: float) -> None:
    with GgufModel(exported, context=64, batch=32, threads=1, max_leaves=6) as model:
        assert model.max_leaves == 6
        for seed in range(12):
            model.rollback([0])
            mirror, draws = Mirror(model, lambda text: gguf_prefill(single, text), within(noise)), random.Random(seed)
            for _ in range(25):
                mirror.step(draws, 6)
            if mirror.nodes:
                mirror.keep(mirror.path(len(mirror.nodes) - 1))
            if len(mirror.context) < 63:
                mirror.chain([1, 2])


@needs_llama
def test_gguf_refusals_change_nothing(exported: Path, noise: float) -> None:
    with GgufModel(exported, context=16, batch=12, threads=1, max_leaves=4) as model:
        check_refusals(model, within(noise))
        model.rollback([0])
        model.extend([1, 2])
        for bad in ([-1] * 5, [-1, 0, 0, 0, 0, 0], [ROOT] * 13):  # leaves, leaves below a node, the batch
            with pytest.raises(ValueError):
                model.extend([1] * len(bad), parents=bad)
        model.extend([1] * 4, parents=[-1] * 4)
        with pytest.raises(ValueError, match="max_leaves"):
            model.extend([1, 1], parents=[0, 0])
        model.extend([1] * 4, parents=[0, 1, 2, 3])
    with GgufModel(exported, context=16, threads=1) as model:
        assert model.max_leaves == 0
        with pytest.raises(ValueError, match="max_leaves"):
            model.extend([1], parents=[-1])
        model.keep([[]])
        with pytest.raises(ValueError, match="ids"):
            model.file.detokenize([model.file.head_rows])
        model.extend([1] * 16)  # to the end of the context
        model.close()
    for leaves in (-1, 256, 16):
        with pytest.raises(ValueError):
            GgufModel(exported, context=16, max_leaves=leaves)
    for call in (lambda: model.keep([[]]), lambda: model.extend([1]), lambda: model.file.tokenize("a")):
        with pytest.raises(ValueError, match="closed"):
            call()


@needs_llama
def test_gguf_failure_inside_llama_changes_nothing(
    exported: Path, single: GgufModel, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GgufModel(exported, context=64, threads=1, max_leaves=5) as model:
        mirror = Mirror(model, lambda text: gguf_prefill(single, text), within(noise))
        mirror.chain([1, 2, 3])
        mirror.tree([4, 5, 6], [-1, 0, 0])
        true_decode = library().llama_decode

        def broken(*arguments: Any) -> int:
            true_decode(*arguments)  # the nodes are in the cache, and still the call fails
            return -3

        monkeypatch.setattr(library(), "llama_decode", broken)
        with pytest.raises(DataError):
            model.extend([7, 8, 9], parents=[1, 1, -1])
        monkeypatch.undo()
        mirror.tree([8, 9, 7, 1], [1, 1, 2, -1])
        mirror.keep([0, 1, 4])
        mirror.tree([2, 3], [-1, -1])
        mirror.keep([1])
        mirror.chain([4])
