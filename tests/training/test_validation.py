"""Expected acceptance of a draft on given texts, by hand and in a training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from trainings import Trainer, metrics

from distill.data.texts import Prompt
from distill.sampler import Sampler
from distill.training.validation import ServedTarget


@pytest.mark.parametrize("protocol", ["sampling", "match", "greedy"])
def test_expected_acceptance_by_hand(protocol: Any) -> None:
    target, draft = toys.toy(seed=1), toys.toy(seed=2)
    sampler = Sampler(temperature=0.7, top_k=20)
    served = ServedTarget(target, 60, (), sampler, protocol, 0)  # of 61 columns, the last is padding
    prompts = [Prompt(str(i), ids) for i, ids in enumerate(toys.random_prompts(3, 60, 5))]
    texts = toys.random_prompts(3, 60, 7)
    found = served.expected(draft, prompts, texts)
    for prompt, text, value in zip(prompts, texts, found, strict=True):
        total = 0.0
        for at in range(len(text)):
            ids = torch.tensor([[*prompt.ids, *text[:at]]])
            with torch.no_grad():
                own, other = (model(input_ids=ids).logits[:, -1, :60].float() for model in (target, draft))
            p, q = sampler.probabilities(own)[0], sampler.probabilities(other)[0]
            if protocol == "sampling":
                total += sum(min(float(a), float(b)) for a, b in zip(p, q, strict=True))
            elif protocol == "match":
                total += float(p[int(other.argmax())])
            else:
                total += float(own.argmax() == other.argmax())
        assert value == pytest.approx(total, abs=1e-4)
    if protocol != "match":
        assert served.expected(target, prompts, texts) == pytest.approx([len(text) for text in texts], abs=1e-4)


def test_every_evaluation_has_it_on_the_same_texts(train: Trainer) -> None:
    found = metrics(train("train.rate=1e-9"), "acceptance")
    expected = [line["expected_acceptance"] for line in found]
    assert [line["step"] for line in found] == [0, 4, 8] and 0 < expected[0] < 1
    assert expected == pytest.approx([expected[0]] * 3, abs=1e-4), "weights that hardly change, on the same texts"
