"""Every way to decode on the pretend device: the texts and rounds are those of the CPU, and no devices are mixed."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_batch import streams, summary
from test_configurations import CONFIGURATIONS, COSTS
from test_grammar import tokens_of
from toys import blurred, decode_at_once, random_prompts, toy

from distill.decoding.configured import DrafterInputs, make_drafter
from distill.decoding.decode import Decoded, decode_text, plain
from distill.decoding.grammar import Constraint, constraint
from distill.decoding.lengths import AcceptedRatio
from distill.decoding.ngrams import NGramTable, count_ngrams, write_table
from distill.decoding.rules import Constrained, Forced, Rules
from distill.engines.loaded import BatchedTorchModel, growing_decoder
from distill.engines.torch.hugging_face import load_weights
from distill.engines.torch.model import TorchModel
from distill.engines.torch.static import StaticTorchModel
from distill.recipe import Configuration, Sampler

torch.set_num_threads(1)

V = 61
ENDS = [7]
# In fp64 rounding decides nothing, although the CPU and the device add up in other orders.
TARGET = toy("qwen2", seed=3).double()
DRAFT = blurred(TARGET, 6, 0.03)
PROMPTS = random_prompts(3, V, seed=1)
Decoders = tuple[Any, Any]


@functools.cache
def placed(role: str, device: str) -> Any:
    """A model on a device, loaded once."""
    model = copy.deepcopy(TARGET if role == "target" else DRAFT)
    if device != "split":
        return model.to(device)
    with tempfile.TemporaryDirectory() as folder:
        model.float().save_pretrained(folder)
        first = "model.embed_tokens", "lm_head", "model.rotary_emb", "model.layers.0"
        last = "model.layers.1", "model.norm"
        places = dict.fromkeys(first, 0) | dict.fromkeys(last, 1)
        spread = load_weights(folder, torch.float32, device_map=places).eval().double()
    assert len({parameter.device for parameter in spread.parameters()}) == 2
    return spread


def decoders(static: bool, target: str, draft: str) -> Decoders:
    """Target and draft with their caches on these devices."""
    kind = StaticTorchModel if static else TorchModel
    return kind(placed("target", target)), kind(placed("draft", draft))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> NGramTable:
    """N-grams of texts of the target."""
    path = tmp_path_factory.mktemp("table") / "ngrams.safetensors"
    texts = [
        text(Configuration(drafter="none"), decoders(False, "cpu", "cpu"), prompt, Sampler(temperature=1.0))
        for prompt in PROMPTS
    ]
    write_table(path, count_ngrams([one.tokens for one in texts]), {"tokenizer": "ours"})
    return NGramTable.open(path, "ours")


def text(
    configuration: Configuration,
    models: Decoders,
    prompt: list[int],
    sampler: Sampler,
    table: NGramTable | None = None,
    grammar: Constraint | None = None,
) -> Decoded:
    """A prompt continued as a configuration says."""
    target, draft = models
    verifier = configuration.verified_by if configuration.drafts else "token" if sampler.temperature else "greedy"
    rules = Rules(sampler, verifier, ENDS, random.Random(5).random, constraint=grammar)
    if not configuration.drafts:
        return plain(target, prompt, 16, rules=rules)
    asked = draft if grammar is None else Constrained(draft, grammar)
    drafter = make_drafter(configuration, asked, sampler, rules.random, DrafterInputs(COSTS, table=table))
    return decode_text(target, drafter if grammar is None else Forced(drafter, grammar), prompt, 16, rules)


GREEDY = Sampler(temperature=0)
SAMPLERS = {
    "temperature": Sampler(temperature=0.8),
    "top-k, top-p, min-p": Sampler(temperature=0.9, top_k=12, top_p=0.9, min_p=0.02),
    "repetition penalty": Sampler(temperature=0.7).penalised(1.3),
}
SAMPLED = [
    Configuration(drafter="none", sampler="recipe"),
    *(Configuration(length=3, verifier=verifier, sampler="recipe") for verifier in ("token", "block", "match")),
    Configuration(rule="p_min", length=4, p_min=0.2, sampler="recipe"),
    Configuration(drafter="lookup", sampler="recipe"),
    Configuration(drafter="lookup+draft", length=3, sampler="recipe"),
    Configuration(drafter="table", sampler="recipe"),
]
TREES = [
    Configuration(drafter="tree", nodes=6, length=3, sampler="recipe"),
    Configuration(drafter="tree", widths=[2, 2], sampler="recipe"),
    Configuration(drafter="tree", widths=[3, 1], verifier="distinct", sampler="recipe"),
]


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_greedy_texts_are_those_of_the_cpu(pretend: Any, table: NGramTable, static: bool) -> None:
    device, cpu = decoders(static, "pretend", "pretend"), decoders(static, "cpu", "cpu")
    accepted = 0
    every = [*CONFIGURATIONS, Configuration(drafter="none"), Configuration(drafter="table", nodes=5, length=4)]
    for configuration in every:
        expected = text(configuration, cpu, PROMPTS[0], GREEDY, table)
        with pretend.counting() as counts:
            found = text(configuration, device, PROMPTS[0], GREEDY, table)
        # A session's clock decides how many tokens expected value drafts, but not which ones follow.
        whole = 1 if configuration.needs_costs else 3
        assert summary(found)[:whole] == summary(expected)[:whole], configuration.described
        assert counts.launches > 100, configuration.described
        accepted += sum(one.accepted for one in found.rounds)
    assert accepted > 50


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_sampled_texts_are_those_of_the_cpu(
    pretend: Any, table: NGramTable, static: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its static cache, whose rounds take the same random numbers, by a clock that no load of the machine moves."""
    clock = itertools.count(0.0, COSTS.target[0] / 2)
    for module in ("decode", "drafters"):
        monkeypatch.setattr(f"distill.decoding.{module}.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    device, cpu = decoders(static, "pretend", "pretend"), decoders(True, "cpu", "cpu")
    for configuration in [*SAMPLED, *([] if name == "repetition penalty" else TREES)]:
        found, expected = (text(configuration, models, PROMPTS[1], SAMPLERS[name], table) for models in (device, cpu))
        assert summary(found) == summary(expected), configuration.described


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_grammars(pretend: Any, static: bool) -> None:
    pytest.importorskip("llguidance")
    letters = [bytes([97 + number % 26]) * (1 + number // 26) for number in range(V)]
    grammar = constraint("regex", "(abc|[d-g]x?)+", tokens_of(letters, ENDS))
    device, cpu = decoders(static, "pretend", "pretend"), decoders(static, "cpu", "cpu")
    for sampler in (GREEDY, Sampler(temperature=1.0)):
        configuration = Configuration(length=3, sampler="recipe" if sampler.temperature else "greedy")
        for one in (configuration, Configuration(drafter="none", sampler=configuration.sampler)):
            found, expected = (text(one, models, PROMPTS[0], sampler, grammar=grammar) for models in (device, cpu))
            assert summary(found) == summary(expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("make", [BatchedTorchModel, StaticTorchModel])
def test_batches(pretend: Any, make: Callable[..., Any], temperature: float) -> None:
    sampler = Sampler(temperature=temperature)
    rules = Rules(sampler, "token" if temperature else "greedy", ENDS)
    texts = {}
    for device in ("cpu", "pretend"):
        target, draft = (make(placed(role, device), rows=3) for role in ("target", "draft"))
        found = []
        for length in (0, 2, lambda: AcceptedRatio(3, longest=4)):
            found += decode_at_once(target, draft, PROMPTS, 12, rules, length, streams(3, 2))
        texts[device] = [summary(one) for one in found]
    assert texts["cpu"] == texts["pretend"]


@pytest.mark.parametrize(
    ("places", "static"),
    [
        (("pretend:0", "pretend:1"), True),
        (("pretend:0", "cpu"), True),
        (("cpu", "pretend:0"), False),
        (("split", "pretend:1"), False),
        (("split", "pretend:0"), True),
    ],
)
def test_two_devices(pretend: Any, table: NGramTable, places: tuple[str, str], static: bool) -> None:
    """A draft elsewhere than its target, and a target whose layers lie on two devices."""
    with pretend.available(2):
        device, cpu = decoders(static, *places), decoders(static or places[0] != "cpu", "cpu", "cpu")
    for configuration in (Configuration(length=3), Configuration(drafter="tree", nodes=6, length=4), *SAMPLED, *TREES):
        sampler = Sampler(temperature=0.8) if configuration.sampler == "recipe" else GREEDY
        found, expected = (text(configuration, models, PROMPTS[2], sampler, table) for models in (device, cpu))
        assert summary(found) == summary(expected), configuration.described


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        *((kind, growing_decoder) for kind in ("gemma3", "gpt_oss", "qwen3_next", "falcon_h1", "lfm2")),
        ("gemma3", StaticTorchModel),
    ],
)
def test_other_layers(pretend: Any, kind: str, make: Callable[..., Any]) -> None:
    """Windows, experts and recurrent states, whose snapshots lie on the device."""
    model, texts = toy(kind, seed=3), []
    for device in ("cpu", "pretend"):
        target, draft = (make(copy.deepcopy(one).to(device)) for one in (model, blurred(model, 6, 0.02)))
        texts.append(summary(text(Configuration(length=3), (target, draft), PROMPTS[1], GREEDY)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", [TorchModel, StaticTorchModel])
def test_a_device_that_lacks_what_mps_lacks(pretend: Any, table: NGramTable, kind: Any) -> None:
    """Without fp64, sorts of int64 and two hundred operations. Rounds then take the host's part, as those of a growing
    cache on the CPU do."""
    models = [copy.deepcopy(model).float() for model in (TARGET, DRAFT)]
    cpu = TorchModel(models[0]), TorchModel(models[1])
    device = kind(copy.deepcopy(models[0]).to("pretend")), kind(copy.deepcopy(models[1]).to("pretend"))
    for configuration in [*SAMPLED, *TREES, CONFIGURATIONS[0], Configuration(drafter="tree", nodes=6, length=4)]:
        sampler = Sampler(temperature=0.8, top_k=20, top_p=0.95) if configuration.sampler == "recipe" else GREEDY
        expected = text(configuration, cpu, PROMPTS[2], sampler, table)
        with pretend.without("float64", pretend.SORTS, *pretend.lacking("MPS")):
            found = text(configuration, device, PROMPTS[2], sampler, table)
        assert summary(found) == summary(expected), configuration.described
