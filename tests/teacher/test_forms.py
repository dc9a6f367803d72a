"""Log-probabilities of generated tokens: each server's reply, as recorded or by its sources, and what is refused."""

from __future__ import annotations

import copy
import functools
import json
import math
from typing import Any

import numpy
import pytest
import tiny

from distill.teacher.forms import LLAMA_SERVER, OPENAI, SGLANG, VLLM, Form, Spellings, form_of, unfinished
from distill.teacher.scores import NotDistributions, Scores, largest_difference, scores_of
from distill.vocabulary.vocabulary import Vocabulary

DEMO = tiny.ROOT / "data" / "demo-target"
TEXT = '        """Return'  # tokens 261, 359, 658 of the demo's target, which vLLM and llama-server were asked for
TOKENS = [261, 359, 658]
LOGS = {  # as vLLM 0.32.0 and llama-server of October 2026 gave them: the drawn token, and the likeliest
    261: {261: -0.9145281314849854, 258: -1.1040070056915283, 279: -1.8584654331207275},
    359: {359: -2.3351573944091797, 327: -1.7431789636611938, 310: -2.1041369438171387},
    658: {658: -2.2984747886657715, 4029: -2.707737445831299, 50: -3.11967134475708},
}
USAGE = {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3}
BODY = {
    "model": "demo", "prompt": [100, 200, 300], "max_tokens": 3, "temperature": 0.8, "top_k": 0, "top_p": 0.9,
    "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop": ["\n\n"],
}  # fmt: skip


@pytest.fixture(scope="module")
def spellings() -> Spellings:
    return Spellings(vocabulary)


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary.read(DEMO)


def spelled(token: int) -> str:
    return vocabulary().text_bytes([token]).decode("utf-8", "replace")


def entry(token: int, log: float, ids: bool) -> dict[str, Any]:
    found = {"token": spelled(token), "bytes": [*spelled(token).encode()], "logprob": log}
    return {"id": token, **found} if ids else found


def content(ids: bool) -> list[dict[str, Any]]:
    return [
        entry(token, own[token], ids) | {"top_logprobs": [entry(one, log, ids) for one, log in own.items()]}
        for token, own in LOGS.items()
    ]


def completion(logprobs: Any, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": TEXT, "logprobs": logprobs, "finish_reason": "length", **more}
    return {"id": "cmpl-1", "object": "text_completion", "model": "demo", "choices": [choice], "usage": USAGE}


def older(name: Any) -> dict[str, Any]:
    tops = [{name(one): log for one, log in own.items()} for own in LOGS.values()]
    own = [log[token] for token, log in LOGS.items()]
    return {"text_offset": [0, 12, 24], "token_logprobs": own, "tokens": [*map(name, TOKENS)], "top_logprobs": tops}


REPLIES: dict[str, tuple[Form, dict[str, Any]]] = {
    "vLLM 0.32.0, recorded": (
        VLLM,
        completion(older("token_id:{}".format), stop_reason=None, token_ids=TOKENS, prompt_token_ids=[100, 200, 300]),
    ),
    "SGLang 0.5.23, by its tokenizer_manager.py": (
        SGLANG,
        {
            "text": TEXT,
            "output_ids": TOKENS,
            "meta_info": {
                "id": "1", "finish_reason": {"type": "length", "length": 3}, "prompt_tokens": 3, "completion_tokens": 3,
                "output_token_logprobs": [[own[token], token, None] for token, own in LOGS.items()],
                "output_top_logprobs": [[[log, one, None] for one, log in own.items()] for own in LOGS.values()],
            },
        },
    ),
    "llama-server of October 2026, recorded": (
        LLAMA_SERVER,
        {
            "index": 0, "content": TEXT, "tokens": TOKENS, "stop": True, "model": "demo", "tokens_predicted": 3,
            "tokens_evaluated": 3, "stop_type": "limit", "stopping_word": "", "completion_probabilities": content(True),
        },
    ),
    "OpenAI's completions": (OPENAI, completion(older(spelled))),
    "OpenAI's chat form": (OPENAI, completion({"content": content(False)})),
    "llama-server's /v1/completions": (OPENAI, completion({"content": content(True)})),
}  # fmt: skip


def read(form: Form, reply: dict[str, Any], spellings: Spellings) -> tuple[Any, Scores]:
    answer, rows = form.read(form.reply.model_validate_json(json.dumps(reply)), spellings)
    return answer, scores_of(rows, 4096)


@pytest.mark.parametrize("kind", REPLIES)
def test_every_servers_form_gives_the_same_distributions(kind: str, spellings: Spellings) -> None:
    form, reply = REPLIES[kind]
    answer, scores = read(form, reply, spellings)
    assert answer.is_of(BODY["prompt"]) and not answer.is_of([1]) and not answer.choices[0].ended
    assert answer.choices[0].token_ids == TOKENS and scores.counts.tolist() == [3, 3, 3]
    for place, own in enumerate(LOGS.values()):
        best = sorted(own.items(), key=lambda one: -one[1])
        assert scores.ids[3 * place :][:3].tolist() == [token for token, _ in best]
        assert scores.logs[3 * place :][:3] == pytest.approx([log for _, log in best])
        assert scores.tails[place] == pytest.approx(math.log(1 - sum(map(math.exp, own.values()))), abs=1e-5)


def test_every_servers_form_asks_for_them() -> None:
    assert VLLM.ask(BODY, 7) == {**BODY, "logprobs": 7, "return_tokens_as_token_ids": True}
    assert OPENAI.ask(BODY, 7) == {**BODY, "logprobs": 7} and OPENAI.most == 20
    asked = LLAMA_SERVER.ask(BODY, 7)
    assert (asked["n_probs"], asked["n_predict"], asked["post_sampling_probs"]) == (7, 3, False)
    asked = SGLANG.ask(BODY, 7)
    assert asked["input_ids"] == BODY["prompt"] and asked["return_logprob"] and asked["top_logprobs_num"] == 7
    sampling = asked["sampling_params"]
    assert (sampling["top_k"], sampling["max_new_tokens"], sampling["stop"]) == (-1, 3, ["\n\n"])
    assert [form_of(one).name for one in ("vllm", "sglang", "llamacpp", "openai", None)] == [
        "vLLM", "SGLang", "llama-server", OPENAI.name, OPENAI.name
    ]  # fmt: skip


def changed(kind: str, change: Any) -> tuple[Form, dict[str, Any]]:
    form, reply = REPLIES[kind]
    reply = copy.deepcopy(reply)
    change(reply)
    return form, reply


def of_choice(**values: Any) -> Any:
    return lambda reply: reply["choices"][0].update(values)


FAULTS = {
    "raw logits": (
        "vLLM 0.32.0, recorded",
        of_choice(logprobs=older("token_id:{}".format) | {"top_logprobs": [{"token_id:261": 7.5}] * 3}),
        "at generated token 0 the numbers are not log-probabilities: the largest is 7.5",
    ),
    "more than everything": (
        "vLLM 0.32.0, recorded",
        of_choice(
            logprobs=older("token_id:{}".format) | {"top_logprobs": [{"token_id:1": -0.1, "token_id:2": -0.2}] * 3}
        ),
        "their probabilities add up to 1.72",
    ),
    "no log-probabilities": ("vLLM 0.32.0, recorded", of_choice(logprobs=None), "no log-probabilities"),
    "texts for ids": (
        "vLLM 0.32.0, recorded",
        of_choice(logprobs=older(lambda token: f"t{token}")),
        "by their text instead of their id",
    ),
    "other tokens": ("vLLM 0.32.0, recorded", of_choice(token_ids=[261, 359, 4]), "of other tokens"),
    "a draft": (
        "llama-server of October 2026, recorded",
        lambda reply: reply.pop("completion_probabilities"),
        "no completion_probabilities",
    ),
    "rows of other tokens": (
        "llama-server of October 2026, recorded",
        lambda reply: reply.update(tokens=[261, 359, 4]),
        "of other tokens",
    ),
    "an aborted text": (
        "SGLang 0.5.23, by its tokenizer_manager.py",
        lambda reply: reply["meta_info"].update(finish_reason={"type": "abort"}),
        r"broke off \(abort\)",
    ),
    "spaces lost": (
        "OpenAI's completions",
        of_choice(logprobs=older(lambda token: spelled(token).strip() or "x")),
        "not the text of the reply",
    ),
    "an unknown text": (
        "OpenAI's completions",
        of_choice(text="\ufffd", logprobs={"tokens": ["\ufffd"], "top_logprobs": [{"\ufffd": -0.1}]}),
        "no token, or several, are spelled",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_trusted_is_refused(fault: str, spellings: Spellings) -> None:
    kind, change, message = FAULTS[fault]
    with pytest.raises(NotDistributions, match=message):
        read(*changed(kind, change), spellings)


def test_a_text_that_several_tokens_spell_has_no_id() -> None:
    own = vocabulary()
    twice = copy.copy(own)
    object.__setattr__(twice, "bytes_of", [*own.bytes_of[:-1], own.bytes_of[359]])
    twins = Spellings(lambda: twice)
    assert twins.id_of(b"Return") == 658 and twins.id_of(own.text_bytes([359])) is None
    with pytest.raises(NotDistributions, match="several, are spelled"):
        read(*REPLIES["OpenAI's completions"], twins)


def test_tokens_within_a_character_have_no_distribution(spellings: Spellings) -> None:
    """llama-server scores the token that ends a character; € is 158, 224, 105."""
    rows = [entry(15, -0.5, True), entry(105, -0.25, True), entry(4093, -0.125, True)]
    scored = [row | {"top_logprobs": [entry(row["id"], row["logprob"], True)]} for row in rows]
    form, reply = REPLIES["llama-server of October 2026, recorded"]
    reply = reply | {"tokens": [15, 158, 224, 105, 4093], "stop_type": "eos", "completion_probabilities": scored}
    answer, scores = read(form, reply, spellings)
    assert scores.counts.tolist() == [1, 0, 0, 1, 1] and scores.ids.tolist() == [15, 105, 4093]
    assert scores.logs.tolist() == [-0.5, -0.25, -0.125] and answer.choices[0].ended
    for text, held in ((b"a", False), ("é".encode(), False), (b"\xc3", True), (b"\xe2\x82", True), (b"\xe2A", True)):
        assert unfinished(text) is held
    assert not unfinished("😀".encode()) and unfinished("😀".encode()[:3]) and not unfinished(b"\x82\x82")


def test_scores_keep_what_matters() -> None:
    """The fewest entries that hold nearly all of the mass. The tail has ids without a token, and those without mass."""
    probabilities = numpy.array([0.6, 0.3, 0.08, 0.01995, 0.00003, 0.00002])
    row = ([3, 9, 1, 7, 2, 5], numpy.log(probabilities).tolist())
    scores = scores_of([row, None, ([8, 900], [math.log(0.5), math.log(0.25)]), ([4, 6], [0.0, -9999.0])], 10)
    assert scores.counts.tolist() == [4, 0, 1, 1] and scores.ids.tolist() == [3, 9, 1, 7, 8, 4]
    assert numpy.exp(scores.tails) == pytest.approx([1 - probabilities[:4].sum(), 1, 0.5, 0], abs=1e-6)
    again = Scores.unpacked(scores.packed(), 4)
    for name in ("counts", "ids", "tails"):
        assert getattr(again, name).tolist() == getattr(scores, name).tolist()
    assert again.logs == pytest.approx(scores.logs, abs=2e-3)
    assert scores.fitted(2).counts.tolist() == [4, 0] and scores.fitted(2).ids.tolist() == [3, 9, 1, 7]
    assert scores.fitted(5).counts.tolist() == [4, 0, 1, 1, 0] and len(scores.fitted(5).tails) == 5
    fewer = scores.trimmed(0.8, 10)
    assert fewer.counts.tolist() == [2, 0, 1, 1] and fewer.ids.tolist() == [3, 9, 8, 4]
    assert numpy.exp(fewer.tails) == pytest.approx([0.1, 1, 0.5, 0], abs=1e-6)
    assert scores.trimmed(None, 1).ids.tolist() == [3, 8, 4] and scores.without_first().ids.tolist() == [8, 4]
    filled = scores.filled([3, 6, 8, 4])  # as the second token was drawn
    assert filled.counts.tolist() == [4, 1, 1, 1] and filled.ids.tolist() == [3, 9, 1, 7, 6, 8, 4]
    assert filled.logs[4] == 0 and filled.tails[1] == -100
    with pytest.raises(ValueError, match="another number of tokens"):
        Scores.unpacked(scores.packed(), 3)
    hotter = scores_of([([3, 9], [math.log(0.5), math.log(0.3)])], 10)
    assert largest_difference(scores, scores) == 0 and largest_difference(scores, hotter) > 0.1
