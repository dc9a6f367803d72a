"""Metrics against loops in fp64, intervals, and acceptance by position by hand."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import astuple
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import random_prompts, toy

from distill.data.packing import pack
from distill.decoding.decode import Round
from distill.engines.torch.blocks import Packed, packed_inputs
from distill.engines.torch.hugging_face import trim_head
from distill.engines.torch.model import TorchModel
from distill.measuring import evaluation
from distill.measuring.evaluation import METRICS, all_metrics, position_metrics
from distill.recipe import Sampler
from distill.tables import Interval, ratio_interval

torch.set_num_threads(1)


def by_loops(target: list[float], draft: list[float], sampler: Sampler) -> list[float]:
    """The seven metrics of one position with math only (truncation by top_k alone)."""

    def distribution(logits: list[float], temperature: float = 1.0, top_k: int = 0) -> list[float]:
        kept = set(sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or None])
        best = max(logits)
        terms = [math.exp((x - best) / temperature) if i in kept else 0.0 for i, x in enumerate(logits)]
        return [t / math.fsum(terms) for t in terms]

    p, q = distribution(target), distribution(draft)
    served = [distribution(x, sampler.temperature, sampler.top_k) for x in (target, draft)]
    drawn = distribution(draft, sampler.temperature, 10)
    best = draft.index(max(draft))
    same = float(target.index(max(target)) == best)
    return [
        math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
        math.fsum(b * math.log(b / a) for a, b in zip(p, q, strict=True)),
        math.fsum(min(a, b) for a, b in zip(*served, strict=True)),
        math.fsum(min(a, b) for a, b in zip(served[0], drawn, strict=True)),
        served[0][best],
        same,
        math.fsum(served[0]),
    ]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=0.6, top_k=5), Sampler(temperature=1.7, top_k=3)])
def test_position_metrics(sampler: Sampler) -> None:
    generator = torch.Generator().manual_seed(1)
    target, draft = (3 * torch.randn(40, 22, generator=generator) for _ in range(2))
    draft[20:] = target[20:] + 0.5 * torch.randn(20, 22, generator=generator)
    wide = torch.cat([target, torch.full((40, 3), 50.0)], dim=1)  # padding rows, of which the draft has fewer
    got = position_metrics(wide, torch.cat([draft, torch.full((40, 1), 60.0)], dim=1), sampler, 22)
    assert got.shape == (40, len(METRICS)) and got.dtype == torch.float32
    expected = torch.tensor([by_loops(a, b, sampler) for a, b in zip(target.tolist(), draft.tolist(), strict=True)])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert 0 < float(got[:, METRICS.index("acceptance_greedy")].mean()) < 1


def test_greedy_sampler_makes_all_acceptances_one() -> None:
    generator = torch.Generator().manual_seed(2)
    target, draft = torch.randn(200, 5, generator=generator), torch.randn(200, 5, generator=generator)
    table = dict(zip(METRICS, position_metrics(target, draft, Sampler(temperature=0.0), 5).T, strict=True))
    for name in ("acceptance_sampling", "acceptance_match"):
        assert torch.equal(table[name], table["acceptance_greedy"])
    assert bool(table["acceptance_drawn"].isnan().all())  # nothing is drawn


def test_blocks_are_measured_by_document() -> None:
    target, draft = toy(seed=1), toy(seed=2, layers=1)
    prompts = random_prompts(9, 61, seed=3)
    blocks = pack([(p, 2) for p in prompts], 24, split_long=False)
    sampler = Sampler(temperature=0.8, top_k=10)
    found = evaluation.sum_by_document(evaluation.block_values(target, {"d": draft}, blocks, sampler, 61, batch=2))["d"]
    sums, counts = found.least, found.counts
    assert found.units == list(range(9)) and numpy.array_equal(sums, found.most)
    assert counts.tolist() == [len(p) - 2 for p in prompts]
    with torch.inference_mode():
        for row, prompt in enumerate(prompts):  # alone, without packing
            logits = [m(torch.tensor([prompt])).logits[0, 1:-1] for m in (target, draft)]
            expected = position_metrics(*logits, sampler, 61).double().sum(0)
            assert sums[row] == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-4)
    texts = evaluation.sum_by_document(
        evaluation.text_values(TorchModel(target), {"d": TorchModel(draft)}, blocks, sampler, 61, "own")
    )["d"]
    assert texts.units == found.units and texts.counts.tolist() == counts.tolist()
    assert texts.least == pytest.approx(sums, rel=1e-4, abs=1e-4)
    table = found.divergences()
    assert table.tokens == counts.sum() and table.prompts == 9
    assert table.forward_kl.mean == pytest.approx(sums[:, 0].sum() / counts.sum())
    assert table.acceptance_ceiling.mean == pytest.approx(sums[:, -1].sum() / counts.sum())
    same = evaluation.sum_by_document(evaluation.block_values(target, {"d": target}, blocks, sampler, 61))["d"].least
    assert same[:, :2] == pytest.approx(0, abs=1e-6)
    assert same[:, [2, 5]] == pytest.approx(numpy.stack([counts] * 2, 1))


def test_a_document_in_several_blocks_is_one_unit() -> None:
    """As often as texts are longer than a block: as many units as documents, whatever the batch, and the same sums."""
    target, draft = toy(seed=1), toy(seed=2, layers=1)
    prompts = random_prompts(9, 61, seed=3)
    blocks = pack([(prompt, 1) for prompt in prompts], 10, split_long=True)
    pieces = sum(int((row.max() + 1).clamp(min=0)) for row in blocks.documents)
    assert pieces > len(prompts), "documents are split here"

    def measured(blocks: Packed, batch: int = 2) -> evaluation.Measured:
        return evaluation.sum_by_document(
            evaluation.block_values(target, {"d": draft}, blocks, Sampler(temperature=0.8), 61, batch)
        )["d"]

    found = measured(blocks)
    sums, counts = found.least, found.counts
    assert len(sums) == len(counts) == len(prompts)
    assert counts.sum() == int(blocks.mask.sum())
    turned = measured(blocks.take(torch.arange(len(blocks)).flip(0)))
    assert [turned.counts[turned.units.index(unit)] for unit in found.units] == counts.tolist()
    assert turned.least.sum(0) == pytest.approx(sums.sum(0), rel=1e-5)
    assert found.divergences().prompts == len(prompts)


def rounds_of(*pairs: tuple[int, int]) -> list[Round]:
    return [Round(10 * i, drafted, accepted, 0.1) for i, (drafted, accepted) in enumerate(pairs)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(0, 6).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=6),
        min_size=1,
        max_size=5,
    )
)
def test_position_acceptance_by_walking_the_drafts(pairs: list[list[tuple[int, int]]]) -> None:
    """A position counts where it was drafted and the one before it was accepted, by whether the target's token there
    ends three tokens that stood before."""
    draw, texts = random.Random(str(pairs)), []
    walked = {kind: {i: [0, 0] for i in range(1, 7)} for kind in ("new", "repeated")}
    for own in pairs:
        first = [*draw.choices("ab", k=2), "c"]  # the prompt and the first new token
        whole = first + draw.choices("ab", k=sum(accepted + 1 for _, accepted in own))
        texts.append((whole[:2], whole[2:]))
        at = 3
        for drafted, accepted in own:
            for position in range(1, drafted + 1):
                here, before = whole[: at + position], "".join(whole[: at + position - 1])
                counts = walked["repeated" if "".join(here[-3:]) in before else "new"][position]
                counts[0] += 1
                if position > accepted:
                    break
                counts[1] += 1
            at += accepted + 1
    rounds = [rounds_of(*own) for own in pairs]
    judged = evaluation.judged_positions(rounds, texts)
    for kind, found in evaluation.positions_by_text(judged, 6).items():
        assert {r.position: [r.drafted, r.accepted] for r in found} == walked[kind]
    table = evaluation.position_acceptance(judged, 6)
    assert {r.position: [r.drafted, r.accepted] for r in table} == {
        at: [one + other for one, other in zip(walked["new"][at], walked["repeated"][at], strict=True)]
        for at in range(1, 7)
    }
    for row in table:
        assert row.rate.mean == pytest.approx(row.accepted / row.drafted if row.drafted else math.nan, nan_ok=True)
        assert not row.drafted or row.rate.low <= row.rate.mean <= row.rate.high
    tokens = [accepted + 1 for _, accepted in itertools.chain(*pairs)] or [math.nan]
    assert evaluation.tokens_per_round(rounds).mean == pytest.approx(numpy.mean(tokens), nan_ok=True)


def test_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    generator = numpy.random.default_rng(5)
    hits = 0
    for _ in range(300):
        counts = generator.integers(1, 9, size=40).astype(float)
        rates = generator.beta(4, 2, size=40)  # prompts differ, and their tokens with them
        found = ratio_interval(generator.binomial(counts.astype(int), rates), counts)
        assert found.low <= found.mean <= found.high
        hits += found.low <= 4 / 6 <= found.high
    assert 0.9 <= hits / 300 <= 0.98


def test_an_interval_of_few_units_is_that_of_student_s_t() -> None:
    """Of a mean of normal values it is the t interval, up to the resampling's noise."""
    generator, units = numpy.random.default_rng(3), 12
    widths = []
    for _ in range(40):
        values = generator.normal(10, 1, units)
        found = ratio_interval(values, [1] * units)
        half = 2.201 * values.std(ddof=1) / units**0.5
        widths.append((found.high - found.low) / (2 * half))
    assert numpy.mean(widths) == pytest.approx(1, abs=0.02)


def test_interval_edges() -> None:
    assert ratio_interval([2, 4, 6], [2, 4, 6]) == Interval(1, 1, 1)
    assert ratio_interval([3], [4]) == Interval(0.75, 0.75, 0.75)
    for empty in ([], [0, 0]):
        assert all(math.isnan(x) for x in astuple(ratio_interval(empty, empty)))
    found = ratio_interval([1, 0, 0, 0], [1, 0, 0, 0])  # most resamples count nothing
    assert found == Interval(1, 1, 1)


def small(kind: str, **further: float) -> torch.nn.Module:
    """A random model of another architecture with 61 tokens."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "pad_token_id": 0}
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**sizes, **further)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


class Shifted(torch.nn.Module):
    """A model whose logits are not those of its head."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.config, self.dtype, self.base_model = model, model.config, model.dtype, model.base_model
        self.get_input_embeddings, self.get_output_embeddings = model.get_input_embeddings, model.get_output_embeddings

    def forward(self, **inputs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.inner(**inputs).logits + torch.arange(61))


@torch.inference_mode()
def test_logits_of_a_few_rows_are_the_model_s_own() -> None:
    """With a trimmed head, a soft cap and a scale; and where the head does not give them, of whole blocks."""
    blocks = pack([(prompt, 1) for prompt in random_prompts(9, 61, seed=3)], 16, split_long=True)
    models = {
        "llama": (toy(seed=1), True),
        "trimmed": (trim_head(toy(seed=1), [2, 3, 30, 60]), True),
        "soft cap": (small("Gemma2", final_logit_softcapping=2.0), True),
        "scale": (small("Granite", logits_scaling=3.0), True),
        "not its head's": (Shifted(toy(seed=1)), False),
    }
    for name, (model, by_rows) in models.items():
        whole, rows = model(**packed_inputs(model, blocks)).logits, evaluation.RowLogits(model)
        found = rows.of(blocks)
        for block in range(len(blocks)):
            here = blocks.mask[block].nonzero()[:, 0]
            assert torch.allclose(found(block, here), whole[block][here].float(), atol=1e-5), name
        assert rows._by_rows is by_rows, name


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(),
        Sampler(temperature=0.7),
        Sampler(temperature=0.8, top_p=0.9),
        Sampler(temperature=0.6, top_k=5),
        Sampler(temperature=0),
    ],
)
def test_metrics_in_pieces_are_the_same(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, with ties among the likeliest, equal rows, padding, and logits that are not finite."""
    monkeypatch.setattr("distill.measuring.evaluation.CACHED_LOGITS", 300)
    generator = torch.Generator().manual_seed(2)
    target, draft = (4 * torch.randn(40, 90, generator=generator) for _ in range(2))
    draft[5] = target[5]
    draft[6, :20] = 9.0  # twenty tokens are the likeliest
    draft[7:9, 3:] = -torch.inf  # trimmed
    target[9, :80] = -torch.inf
    target[10], draft[10] = 1e4 * target[10], 1e-3 * draft[10]
    draft[9, :80] = -torch.inf
    found, expected = (metrics(target, draft, sampler, 85) for metrics in (all_metrics, position_metrics))
    assert found.shape == expected.shape == (40, len(METRICS))
    assert torch.allclose(found, expected, rtol=0, atol=1e-6, equal_nan=True)
    same = found[5]
    assert same[:2] == pytest.approx(0, abs=1e-5) and same[METRICS.index("acceptance_sampling")] == pytest.approx(1)
