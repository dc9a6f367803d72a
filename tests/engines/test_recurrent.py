"""Models with recurrent layers: caches return to copies of the state, and texts are those of plain decoding.

Legend: V vocabulary.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from branches import every
from test_tree_cache import Mirror, close, gguf_prefill, prefill, within
from tiny import needs_llama
from toys import blurred, toy, write_gguf

from distill.data.packing import pack
from distill.decoding.costs import Costs
from distill.decoding.decode import MOST_RESENT, decode_text, plain
from distill.decoding.drafters import LookupDrafter, ModelDrafter
from distill.decoding.lengths import Adaptive, Drafting, Fixed
from distill.decoding.proposals import Proposal
from distill.decoding.rules import GREEDY, Rules
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.loaded import BatchedTorchModel, growing_decoder, torch_decoder
from distill.engines.model import SNAPSHOTS, resent
from distill.engines.torch.blocks import hidden_states, packed_logits
from distill.errors import DataError
from distill.recipe import PyTorch, Sampler

torch.set_num_threads(1)

V = 61
PROMPT = [5, 7, 9, 5, 7, 11, 5, 7]


def test_sampled_texts_follow_the_target_exactly() -> None:
    """Texts of three tokens, by enumeration of every draw; some rounds begin with tokens that are computed again."""
    vocabulary, prompt, sampler, again = 3, [0, 1], Sampler(temperature=0.8), 0
    models = [toy("qwen3_5_text", vocabulary, max_position_embeddings=16, initializer_range=0.1)]
    models.append(blurred(models[0], 3, 0.7))
    target, draft = (growing_decoder(model.double()) for model in models)
    extend = target.extend

    def watched(*args: Any, **options: Any) -> Any:
        nonlocal again
        again += resent(target) > 0
        return extend(*args, **options)

    target.extend = watched  # type: ignore[method-assign]

    def run(draw: Any) -> tuple[int, ...]:
        drafter = ModelDrafter(draft, Fixed(2), sampler, draw)
        return tuple(decode_text(target, drafter, prompt, 3, Rules(sampler, "token", random=draw)).tokens)

    found: dict[tuple[int, ...], float] = {}
    for weight, text in every(run):
        found[text] = found.get(text, 0.0) + weight
    assert len(found) == vocabulary**3 and again > 9
    for text, chance in found.items():
        with torch.inference_mode():
            logits = models[0](torch.tensor([[*prompt, *text]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        own = torch.softmax(logits.double() / 0.8, -1)[range(3), list(text)].prod()
        assert abs(float(own) - chance) < 1e-6, text


def test_only_tokens_after_a_snapshot_are_computed_again() -> None:
    """None after a round that was accepted whole, none of a draft that drops its last ones, and never ever more."""
    hugging_face = toy("falcon_h1")
    model, taken = growing_decoder(hugging_face), list[int]()
    model.model.register_forward_pre_hook(
        lambda _, __, inputs: taken.extend(ids.shape[1] for ids in [inputs.get("input_ids")] if ids is not None),
        with_kwargs=True,
    )
    for tokens in ([1] * 9, [2, 3, 4], [5], [6], [7]):
        model.extend(tokens)
    model.rollback([13])  # before 6
    assert resent(model) == 0
    model.extend([8, 9])
    model.rollback([14])
    assert resent(model) == 1
    model.extend([3], want=[0])
    assert resent(model) == 0 and model.lengths == [15] and taken == [9, 3, 1, 1, 1, 2, 2]
    for token in range(SNAPSHOTS + 2):
        model.extend([token, token])
    model.rollback([15])  # all copies that old are gone
    assert resent(model) == 15
    close(model.extend([4]).full()[0], prefill(hugging_face, [*[1] * 9, 2, 3, 4, 5, 8, 3, 4]))


def test_a_plain_step_takes_too_many_resent_tokens() -> None:
    """A drafter of which the first token is right and the second wrong leaves two more every round."""
    hugging_face = toy("olmo_hybrid")
    target = growing_decoder(hugging_face)
    text = plain(target, PROMPT, 40).tokens

    class HalfRight(LookupDrafter):
        def propose(self, context: Any, limit: int, ends: Any, rival: Any = None) -> Any:
            place = len(context) - len(PROMPT)
            following = text[place : place + 1]
            return Proposal.chain([*following, *((token + 1) % V for token in following)][:limit])

    found = decode_text(target, HalfRight(2), PROMPT, 40, Rules())
    drafted = [r.drafted for r in found.rounds]
    assert found.tokens == text and 0 in drafted[:-2]
    assert drafted.index(0) * 2 > MOST_RESENT >= (drafted.index(0) - 1) * 2


def test_prices_count_what_is_computed_again() -> None:
    """Costs of 1 + (m − 1)/10: each token that is or will be computed again is worth a tenth of a step."""
    count = 0
    costs = Costs(tuple(1 + m / 10 for m in range(9)), 0.0, 0.0, resent=lambda: count)
    assert costs.again(0, 1.0, 1.0) == 0
    assert costs.again(2, 2.5, 0.6) == pytest.approx((2.5 - 3 * 0.6) / 10)
    count = 4
    assert costs.again(0, 1.0, 1.0) == pytest.approx(0.4)
    # Of 1, 2 or 3 tokens with chances .2, .2, .6, and 4 before them, 5 or 6 or none are left.
    assert costs.again(2, 1 + 0.8 + 0.6, 0.6) == pytest.approx(0.4 + (0.2 * 5 + 0.2 * 6) / 10)
    steep = tuple(1 + m / 4 for m in range(9))
    every = [Costs(steep, 0.0, 0.0, resent=again) for again in (None, lambda: 0, lambda: 9)]
    for chances, sizes in (([0.9, 0.8, 0.7, 0.6], [4, 3, 4]), ([0.45, 0.25, 0.15, 0.1], [1, 1, 0])):
        assert [Adaptive(one).size(Drafting(chances=chances)) for one in every] == sizes


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "bloom", "falcon", "llama4_text"])
def test_packed_documents_are_read_alone(kind: str) -> None:
    """Logits and hidden states of a block are those of each of its documents, gradients included."""
    model = toy(kind)
    texts = [[1 + 7 * place % 59 for place in range(size)] for size in (9, 4, 11)]
    blocks = pack([(text, 0) for text in texts], 16, split_long=False)
    logits, states = packed_logits(model, blocks), hidden_states(model, blocks)
    assert len(blocks) == 2 and logits.requires_grad
    found = {(line, number) for line in range(2) for number in blocks.documents[line].tolist() if number >= 0}
    assert len(found) == 3
    for line, number in found:
        places = blocks.documents[line] == number
        text = blocks.ids[line][places].long()
        close(logits[line][places], model(text[None], use_cache=False).logits[0])
        close(model.get_output_embeddings()(states[line][places]), logits[line][places])


def test_what_a_recurrent_state_does_not_allow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hugging_face = toy("granitemoehybrid")
    model = growing_decoder(hugging_face)
    with pytest.raises(ValueError, match="trees need layers of keys and values, but some"):
        model.extend([1, 2], parents=[-1, -1])
    with pytest.raises(ValueError, match="rows of different lengths cannot be decoded together: it has"):
        BatchedTorchModel(hugging_face, 2)
    with pytest.raises(DataError, match="cannot decode with a static cache: it has"):
        torch_decoder(hugging_face, pytorch=PyTorch(static=True))
    monkeypatch.setattr(hugging_face, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(DataError, match=r"its cache cannot be continued \(division by zero\)"):
        growing_decoder(hugging_face)


def test_a_failed_step_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    hugging_face = toy("qwen3_5_text")
    model = growing_decoder(hugging_face)
    model.extend([1, 2, 3, 4])
    model.rollback([3])
    inner = model.model.model.layers[1]
    with monkeypatch.context() as broken:
        broken.setattr(inner, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.extend([5])
    close(model.extend([6]).full()[0], prefill(hugging_face, [1, 2, 3, 6]))


# GGUF files: qwen35, of which llama.cpp takes the last tokens of a call back by itself, and falcon-h1, of which it does
# not.


def write_file(path: Path, kind: str, keys: dict[str, Any], layers: list[dict[str, tuple[int, ...]]]) -> Path:
    """A file of random weights; shapes as numpy has them."""
    gguf = pytest.importorskip("gguf")
    writer, draws = gguf.GGUFWriter(path, kind), numpy.random.default_rng(0)
    shared = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8}
    shared |= {"attention.value_length": 8, "rope.freq_base": 1e4, "ssm.conv_kernel": 4, "ssm.state_size": 16}
    shared |= {"ssm.inner_size": 64, "ssm.time_step_rank": 4, "attention.layer_norm_rms_epsilon": 1e-6}
    shared |= {"block_count": len(layers), "context_length": 256, "embedding_length": 32, "feed_forward_length": 48}
    for name, value in (shared | keys).items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{kind}.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{token}" for token in range(V)])
    writer.add_token_types([1] * V)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(0)
    tensors = {"token_embd.weight": (V, 32), "output_norm.weight": (32,)}
    tensors |= {f"blk.{index}.{name}": shape for index, layer in enumerate(layers) for name, shape in layer.items()}
    for name, shape in tensors.items():
        noise = draws.standard_normal(shape).astype(numpy.float32)
        if name.endswith("norm.weight"):
            noise = 1 + noise / 10
        elif name.endswith("ssm_a"):
            noise = -numpy.exp(noise / 2)
        writer.add_tensor(name, noise * 0.3 if len(shape) > 1 and "ssm_a" not in name else noise)
    write_gguf(writer)
    return path


MLP = {"ffn_gate.weight": (48, 32), "ffn_down.weight": (32, 48), "ffn_up.weight": (48, 32), "attn_norm.weight": (32,)}
ATTENTION = {"attn_k.weight": (16, 32), "attn_v.weight": (16, 32), "attn_output.weight": (32, 32)}


def qwen35(path: Path) -> Path:
    norms = {"post_attention_norm.weight": (32,)}
    gates = {"ssm_dt.bias": (4,), "ssm_a": (4,), "ssm_beta.weight": (4, 32), "ssm_alpha.weight": (4, 32)}
    inner = {"attn_qkv.weight": (128, 32), "attn_gate.weight": (64, 32), "ssm_conv1d.weight": (128, 4)}
    delta = MLP | norms | gates | inner | {"ssm_norm.weight": (16,), "ssm_out.weight": (32, 64)}
    heads = {"attn_q.weight": (64, 32), "attn_q_norm.weight": (8,), "attn_k_norm.weight": (8,)}
    keys = {"rope.dimension_sections": [2, 1, 1, 0], "rope.dimension_count": 8, "ssm.group_count": 2}
    return write_file(path, "qwen35", keys | {"full_attention_interval": 2}, [delta, MLP | norms | ATTENTION | heads])


def falcon_h1(path: Path) -> Path:
    state = {"ssm_in.weight": (164, 32), "ssm_conv1d.weight": (96, 4), "ssm_conv1d.bias": (96,), "ssm_dt.bias": (4,)}
    state |= {"ssm_a": (4, 1), "ssm_d": (4, 1), "ssm_norm.weight": (1, 64), "ssm_out.weight": (32, 64)}
    layer = MLP | ATTENTION | state | {"attn_q.weight": (32, 32), "ffn_norm": (32,)}
    return write_file(path, "falcon-h1", {"ssm.group_count": 1}, [layer, layer])


@needs_llama
@pytest.mark.parametrize("write", [qwen35, falcon_h1])
def test_gguf(write: Any, tmp_path: Path) -> None:
    """After anything a fresh prefill; texts are those of plain decoding; what is not possible is refused."""
    path = write(tmp_path / "m.gguf")
    with (
        GgufModel(path, context=64, batch=24, threads=1, max_leaves=4) as model,
        GgufModel(path, context=64, threads=1) as fresh,
    ):
        taken = [0]
        decode = model._context._run
        model._context._run = lambda size, *rest: (taken.append(size), decode(size, *rest))  # type: ignore[assignment, func-returns-value]
        for seed in range(8):
            model.rollback([0])
            mirror, draws = Mirror(model, lambda text: gguf_prefill(fresh, text), within(5e-3)), random.Random(seed)
            for _ in range(30):
                mirror.step(draws, 0)
        del taken[:]
        text = plain(model, PROMPT, 40).tokens
        drafters = [LookupDrafter(3), ModelDrafter(fresh, Fixed(3), GREEDY, lambda: 0.0)]
        for drafter in drafters:
            found = decode_text(model, drafter, PROMPT, 40, Rules())
            assert found.tokens == text and any(one.accepted for one in found.rounds)
        del taken[:]
        found = decode_text(model, LookupDrafter(3), PROMPT, 40, Rules())
        rounds = [(one.drafted, one.accepted) for one in found.rounds]
        sent = sum(taken) - len(PROMPT) - sum(drafted + 1 for drafted, _ in rounds)
        assert any(accepted < drafted for drafted, accepted in rounds)
        assert sent == 0 if write is qwen35 else sent > 0
        costs = Costs((1.0, 1.5), 0.0, 0.0)
        assert (costs.of_target(model).resent is None) == (write is qwen35)
        assert model.max_leaves == 0
        with pytest.raises(ValueError, match="trees need layers of keys and values"):
            model.extend([1], parents=[-1])
