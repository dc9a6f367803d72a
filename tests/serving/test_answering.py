"""`generate` end to end: contexts that differ, models without trees, and text of a SentencePiece tokenizer."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from table_model import TableModel
from toys import blurred, decode_at_once, random_prompts, save_toy, toy, toy_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.decoding.configured import DrafterInputs, check_trees, make_drafter, require_trees
from distill.decoding.costs import Costs
from distill.decoding.decode import Decoded, decode_text, plain
from distill.decoding.lengths import Adaptive, Fixed
from distill.decoding.rules import Rules
from distill.decoding.trees import Shape, TreeDrafter
from distill.engines.loaded import BatchedTorchModel, LoadedPair, Opening, encode_prompt, load_pair
from distill.engines.torch.hugging_face import encode
from distill.engines.torch.model import TorchLogits, TorchModel
from distill.errors import DataError, RecipeError
from distill.gguf.writer import export_gguf
from distill.measuring.compare import PairSettings, PairTexts, measure_pair
from distill.measuring.speedup_results import PairMeasured
from distill.recipe import Configuration, Sampler, Speedup, Target, load_recipe
from distill.recipe.configuration import TREES
from distill.serving.answering import Continuation, begin
from distill.serving.terminal import stream

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("DISTILL_SHARED", ROOT.parent / "shared")) / "tokenizers"
Capture = pytest.CaptureFixture[str]
PROMPT = "def f(self): return self.value + other"


def asked(
    *, temperature: float = 0.0, stop: tuple[str, ...] = (), grammar: tuple[str, str] | None = None, **settings: Any
) -> Continuation:
    """A request as the command makes it from its options; three drafted tokens where nothing else is given."""
    if settings.get("widths") is None and settings.get("drafter") != "none":
        settings.setdefault("length", 3)
    if settings.get("drafter") in TREES and settings.get("widths") is None:
        settings["nodes"] = 2 * settings["length"]
    configuration = Configuration(sampler="recipe" if temperature else "greedy", **settings)
    return Continuation(configuration, Sampler(temperature=temperature), stop=stop, grammar=grammar)


PLAINLY = asked(drafter="none")


def continued(
    target: Path, draft: Path, text: str, tokens: int, request: Continuation, capture: Capture
) -> tuple[str, str]:
    capture.readouterr()
    stream(Opening(Target(model=str(target)), str(draft), threads=1), text, tokens, request)
    found = capture.readouterr()
    return found.out, found.err


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 160 tokens of context, drafts of 160 and of 32, their GGUF files, and a target whose layers see 20
    tokens."""
    folder, tokenizer = tmp_path_factory.mktemp("pairs"), toy_tokenizer()
    size = len(tokenizer)
    model = toy(vocabulary=size, seed=3)
    save_toy(model, tokenizer, folder / "target")
    draft = blurred(model, 4, 0.02)
    save_toy(draft, tokenizer, folder / "draft")
    draft.config.max_position_embeddings = 32
    save_toy(draft, tokenizer, folder / "short")
    for name in ("target", "draft", "short"):
        export_gguf(folder / name, folder / f"{name}.gguf", "f32")
    save_toy(toy("gpt_neo", vocabulary=size), tokenizer, folder / "local")
    return folder


def test_a_pair_is_timed_once(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the longest round that a configuration may draft, whatever is decoded; a tree's is its nodes."""
    timed: list[int] = []

    def measured(*given: Any) -> Any:
        timed.append(given[2])
        return Costs((1.0,) * (timed[-1] + 1), 0.1, 0.1)

    monkeypatch.setattr("distill.decoding.configured.measure_costs", measured)
    with load_pair(Target(model=str(folders / "target")), str(folders / "draft"), tokens=40, threads=1) as pair:
        for length in (3, 3, 5, 3):
            begin(pair, None, asked(rule="expected-value", length=length))
        tree = begin(pair, None, asked(drafter="tree")).drafter
        assert isinstance(tree, TreeDrafter) and isinstance(tree.rule, Adaptive)
        assert timed == [3, 5, 6] and len(tree.rule.costs.target) == 7


def test_plain_text_is_streamed(folders: Path) -> None:
    """Token by token, as transformers generates it; and what the generator makes is what `plain` makes."""
    target = Target(model=str(folders / "target"))
    with load_pair(target, None, tokens=40, threads=1) as pair:
        ids = encode(pair.tokenizer, "def f(")
        result = Decoded()
        parts = [list(part) for part in begin(pair, None, PLAINLY).stream(ids, 12, result)]
        assert [len(part) for part in parts] == [1] * 12 and [*chain(*parts)] == result.tokens
        assert plain(pair.target, ids, 12, pair.ends).tokens == result.tokens and result.seconds > 0
    model = AutoModelForCausalLM.from_pretrained(folders / "target")
    whole = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert result.tokens == whole.tolist()


def test_a_chat_model_is_asked(folders: Path, tmp_path: Path, capsys: Capture) -> None:
    """As transformers renders the question and goes on. Without a template, or where asked to, a text is continued."""
    shutil.copytree(folders / "target", tmp_path / "chat")
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "chat")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "def f("}], return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "chat")
    wanted = tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :])

    def said(target: Path, *options: str) -> tuple[str, str]:
        pair = (target, folders / "draft")
        assert tiny.call("generate", "def f(", *pair, "--tokens", 12, "--threads", 1, *options) == 0
        found = capsys.readouterr()
        return found.out, found.err

    for options in ((), ("--chat",)):
        answer, notes = said(tmp_path / "chat", *options)
        assert answer.strip() == wanted.strip()
        assert ("asked as a user's message" in notes) == (not options)
    continued_text = said(folders / "target")[0]
    assert continued_text.startswith("def f(") and said(tmp_path / "chat", "--no-chat")[0] == continued_text
    pair = (folders / "target", folders / "draft")
    assert "has no chat template" in tiny.refused(capsys, "generate", "def f(", *pair, "--chat")


@pytest.mark.parametrize("suffix", ["", pytest.param(".gguf", marks=tiny.needs_llama)])
@pytest.mark.parametrize("text", ["def f(", PROMPT * 3])
def test_decoding_goes_on_where_the_drafts_context_ends(folders: Path, text: str, suffix: str, capsys: Capture) -> None:
    """A prompt that the short draft can read, and one that it cannot; a GGUF pair continues as its folders do."""
    target, draft, short = (Path(f"{folders / name}{suffix}") for name in ("target", "draft", "short"))
    wanted = continued(folders / "target", folders / "draft", text, 60, PLAINLY, capsys)[0]
    for request in (
        PLAINLY,
        asked(length=5, stop=("\u0001never",)),
        asked(rule="p_min", p_min=0.2),
        asked(rule="expected-value"),
        asked(drafter="lookup+draft"),
        asked(drafter="tree"),
        asked(drafter="lookup+tree"),
        asked(drafter="lookup"),
    ):
        found, told = continued(target, draft, text, 60, request, capsys)
        assert found == wanted and "60 tokens, " in told and "context of" not in told
        found, told = continued(target, short, text, 60, request, capsys)
        assert found == wanted and "60 tokens" in told and "leaves room" not in told
        assert (f"the draft {short} has a context of 32" in told) == request.configuration.asks_the_draft
    sampled = [
        continued(target, short, text, 20, asked(temperature=0.9, verifier="block"), capsys)[0] for _ in range(2)
    ]
    assert sampled[0] == sampled[1] and sampled[0].startswith(text)
    # Stop strings end the text at the same byte, and the target's own context ends every text.
    stop = re.compile("[a-z]{2}").search(wanted, len(text))
    assert stop is not None
    stopped = continued(target, draft, text, 60, asked(stop=(stop[0],)), capsys)[0]
    assert stopped == wanted[: stop.start()] + "\n"
    # An end token has no text in which a stop string could be found.
    with load_pair(Target(model=str(target)), str(draft), tokens=40, threads=1) as pair:
        end = next(iter(pair.ends))
        ids = [*encode_prompt(str(target), "some words"), end]
        stops = [
            begin(pair, None, asked(stop=(word,))).rules.stop for word in (pair.token_bytes(end).decode(), "words")
        ]
        assert [stop is not None and stop(ids, 0).ended for stop in stops] == [False, True]
    room = TorchModel(toy(vocabulary=9)).capacity
    assert f"the target's context of {room} leaves room for" in continued(target, short, text, 500, PLAINLY, capsys)[1]


@tiny.needs_llama
def test_gguf_pairs_obey_grammars(folders: Path, capsys: Capture) -> None:
    pytest.importorskip("llguidance")
    target, draft = folders / "target.gguf", folders / "draft.gguf"
    for kind, grammar, form in (
        ("gbnf", 'root ::= "(" [a-c] [a-c]? ")"', r"\([a-c]{1,2}\)"),
        ("regex", "[0-9]{3}-[xy]", "[0-9]{3}-[xy]"),
        ("json", '{"enum": ["one", "two"]}', '"(one|two)"'),
    ):
        texts = set()
        for drafter in ("none", "draft"):
            request = asked(drafter=drafter, grammar=(kind, grammar))
            texts.add(continued(target, draft, "def ", 60, request, capsys)[0].removesuffix("\n"))
        (text,) = texts
        assert re.fullmatch("def " + form, text)
    with pytest.raises(DataError, match="there is no rule `other`"):
        continued(target, draft, "def ", 9, asked(grammar=("gbnf", "root ::= other")), capsys)


@tiny.needs_llama
def test_trees_are_drawn_by_widths(folders: Path, capsys: Capture) -> None:
    for suffix in ("", ".gguf"):
        target, draft = (Path(f"{folders / name}{suffix}") for name in ("target", "draft"))
        for verifier in (None, "distinct"):
            request = asked(temperature=0.7, drafter="tree", widths=(2, 2, 1), verifier=verifier)
            text, told = continued(target, draft, PROMPT, 24, request, capsys)
            accepted, drafted = map(int, re.findall(r"\((\d+)/(\d+)\)", told)[0])
            rounds = round(23 / float(re.findall(r"([\d.]+) tokens/round", told)[0]))
            assert text.startswith(PROMPT) and "24 tokens" in told
            assert accepted and 2 <= drafted / rounds <= 10
        # A draft that is its target is accepted whole, in every draw.
        request = asked(temperature=0.7, drafter="tree", widths=(1, 1, 1))
        told = continued(target, target, PROMPT, 21, request, capsys)[1]
        assert "4.00 tokens/round, acceptance rate 100.0%" in told
    pair = (folders / "target", folders / "draft", PROMPT, 9)
    with pytest.raises(DataError, match="a greedy sampler draws nothing"):
        continued(*pair, asked(drafter="tree", widths=(2, 2, 1)), capsys)
    with pytest.raises(DataError, match="no verifier `block` for trees"):
        continued(*pair, asked(temperature=0.7, drafter="tree", widths=(2, 2, 1), verifier="block"), capsys)
    drawn = ("generate", "x", "-C")
    assert "widths is not read by drafter lookup" in tiny.refused(capsys, *drawn, "widths=[2,1],drafter=lookup")
    assert "length is not read by drafter tree of widths" in tiny.refused(
        capsys, *drawn, "widths=2,1,drafter=tree,length=6"
    )


@tiny.needs_llama
def test_gguf_pairs_that_cannot_be_used(folders: Path, capsys: Capture) -> None:
    target, draft = folders / "target.gguf", folders / "draft.gguf"
    with pytest.raises(DataError, match="the prompt is empty"):
        continued(target, draft, "", 9, asked(), capsys)
    with pytest.raises(DataError, match="tokens fill the target's context"):
        continued(target, draft, PROMPT * 200, 9, asked(), capsys)
    with pytest.raises(DataError, match="reads both tokenizers from Hugging Face folders"):
        continued(target, draft, "def", 9, asked(drafter="string"), capsys)
    pair = ("generate", "def", target)
    assert tiny.call(*pair, folders / "draft", "--tokens", 5) == 0  # beside a folder: imported, in PyTorch
    printed = capsys.readouterr()
    assert printed.out.startswith("def") and "importing target.gguf" in printed.err
    assert "nothing.gguf cannot be read" in tiny.refused(capsys, *pair, folders / "nothing.gguf")
    assert tiny.shown(capsys, *pair, draft, "--tokens", 5).startswith("def")


def test_every_drafter_and_rule_outlives_the_drafts_context() -> None:
    costs = Costs((1.0, 1.1, 1.2, 1.3, 1.4), 0.1, 0.1)
    target = TableModel(6, 1)
    short = target.near(0.5, 2, capacity=12)
    rules = ("fixed", "p_min", "ratio", "beta", "start-continue")
    configurations = [Configuration(rule=rule, length=4) for rule in rules]
    configurations += [Configuration(rule="expected-value", length=4)]
    configurations += [one.model_copy(update={"drafter": "lookup+draft"}) for one in configurations]
    configurations += [Configuration(drafter="tree", nodes=5, length=3)]
    for configuration in configurations:
        for prompt in ([0, 1], [0, 1, 2, 3] * 2, [0, 1, 2, 3] * 3, [0, 1, 2, 3] * 6):
            drafter = make_drafter(configuration, short, Sampler(temperature=0), lambda: 0.0, DrafterInputs(costs))
            result = decode_text(target, drafter, prompt, 24, Rules())
            assert result.tokens == plain(target, prompt, 24).tokens
            if configuration.drafter != "lookup+draft":
                assert all(r.drafted == 0 for r in result.rounds if r.depth + 1 >= short.capacity)
                assert any(r.drafted for r in result.rounds) == (len(prompt) < 11)


def test_a_batch_outlives_the_drafts_context() -> None:
    model = toy(vocabulary=61).double()
    short = blurred(toy(vocabulary=61, max_position_embeddings=20).double(), 1, 0.02)
    prompts = [random_prompts(1, 61, seed=size, shortest=size, longest=size)[0] for size in (3, 19, 20, 21, 40)]
    for some in (prompts, prompts[3:]):
        target, draft = (BatchedTorchModel(one, len(some)) for one in (model, short))
        results = decode_at_once(target, draft, some, 24, Rules(), 3)
        for prompt, result in zip(some, results, strict=True):
            assert result.tokens == plain(TorchModel(model), prompt, 24).tokens
            assert any(r.drafted for r in result.rounds) == (len(prompt) < 18)


def test_trees_are_refused_before_anything_is_decoded(folders: Path, capsys: Capture) -> None:
    local, draft = folders / "local", folders / "draft"
    tree = asked(drafter="tree")
    for pair, role in (((local, draft), "target"), ((draft, local), "draft")):
        with pytest.raises(DataError, match=f"the {role} takes no trees") as caught:
            continued(*pair, PROMPT, 8, tree, capsys)
        assert caught.value.hint is not None and PROMPT not in capsys.readouterr().out
    chains = [continued(local, draft, PROMPT, 12, asked(drafter=name), capsys)[0] for name in ("draft", "lookup")]
    assert chains == [continued(local, draft, PROMPT, 12, PLAINLY, capsys)[0]] * 2
    models = [TorchModel(toy("gpt_neo")), TorchModel(toy())]
    require_trees(models[1], models[1])
    settings = PairSettings(
        Target(model="p"), None, speedup=Speedup(lengths=(), configurations=(Configuration(drafter="tree"),))
    )
    with pytest.raises(DataError, match="the target takes no trees"):
        pair = LoadedPair("pytorch", "p", *models, [])
        measure_pair(settings, pair, PairMeasured("p", "pytorch"), PairTexts([[1, 2]]))


def test_a_chain_of_a_tree_drafter_needs_no_trees() -> None:
    """Shapes without siblings, and drafts without room, are verified as chains; greedily they are the text."""
    target, draft = TorchModel(toy("gpt_neo")), TorchModel(toy("mistral"))
    prompt = random_prompts(1, 61, seed=2)[0]
    chain = TreeDrafter(draft, Sampler(temperature=0), random.random, 3, branching=1, rule=Fixed(3))
    result = decode_text(target, chain, prompt, 20, Rules())
    assert result.tokens == plain(target, prompt, 20).tokens and any(r.drafted == 3 for r in result.rounds)
    draws = random.Random(0).random
    distinct = Rules(Sampler(temperature=1.0), "distinct", random=draws)
    full = TorchModel(toy("mistral", max_position_embeddings=2))
    for model, widths in ((draft, [1, 1]), (full, [2, 2])):
        drafter = TreeDrafter(model, distinct.sampler, draws, 2, shape=Shape.of_widths(widths), distinct=True)
        result = decode_text(target, drafter, prompt, 12, distinct)
        assert len(result.tokens) == 12 and any(r.drafted for r in result.rounds) == (model is draft)


def test_check_refuses_trees_of_a_chunked_target(world: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "chunked"
    shutil.copytree(world / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"attention_chunk_size": 16, "layer_types": ["chunked_attention"] * config["num_hidden_layers"]}
    (folder / "config.json").write_text(json.dumps(config))
    options = (f"target.model={folder}", "speedup.configurations=[{drafter: tree, nodes: 4, length: 3}]")
    gguf = "speedup.backends=[gguf]"
    for change in ((options[1],), (options[0], "speedup.configurations=[]"), (*options, gguf)):
        recipe = load_recipe(world / "recipe.yaml", change)
        check_trees(recipe, recipe.target.model)
    recipe = load_recipe(world / "recipe.yaml", options)
    with pytest.raises(RecipeError, match=r"the target .*chunked takes no trees: it has layers of the kind chunked"):
        check_trees(recipe, str(world / "target"))
    recipe = load_recipe(world / "recipe.yaml", options[1:])
    with pytest.raises(RecipeError, match=r"the donor .*chunked takes no trees"):
        check_trees(recipe, str(folder))
    assert "takes no trees" in tiny.refused(capsys, "check", world / "recipe.yaml", *options)


@pytest.mark.slow
def test_sentencepiece_keeps_its_spaces(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every configuration prints the bytes of the whole text behind the prompt, up to a stop string inside a word."""
    if not (SHARED / "llama-2").is_dir():
        pytest.skip(f"no tokenizer llama-2 in {SHARED}; set DISTILL_SHARED")
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "llama-2")
    text = "The old man went home, and then he slept until the morning came."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    folder = save_toy(
        toy("llama", vocabulary=len(tokenizer), bos_token_id=1, eos_token_id=2), tokenizer, tmp_path / "m"
    )
    extend = TorchModel.extend

    def script(model: TorchModel, tokens: Any, *given: Any, **named: Any) -> Any:
        """The next token of the text, whatever the weights say."""
        before, values = model.lengths[0], extend(model, tokens).values.clone()
        for index in range(len(tokens)):
            values[index, ids[min(before + index, len(ids) - 1)]] = 1e9  # the prompt begins with <s>
        return TorchLogits(values if named.get("want") is None else values[list(named["want"])])

    monkeypatch.setattr(TorchModel, "extend", script)
    for request in (PLAINLY, asked(), asked(drafter="lookup")):
        assert continued(folder, folder, "The old", len(ids) - 2, request, capsys)[0] == text + "\n"
        stopped = continued(folder, folder, "The old", len(ids) - 2, replace(request, stop=("ept until t",)), capsys)[0]
        assert stopped == text[: text.index("ept")] + "\n"
