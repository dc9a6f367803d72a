"""Worlds in which nobody can load the target: its folder holds a tokenizer and config.json, and no weights.

A peaked target, a donor that resembles it, a GGUF file of the target, and a server that answers for it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tiny
import torch
from toys import blurred
from vllm_server import VllmServer

PEAK = 3.0  # the target's logits are so many times those of the tiny world, so that its distributions are not flat


def build(folder: Path) -> Path:
    """whole/ (the target with its weights, for references alone), target/ without them, donor/ and target.gguf."""
    from distill.engines.torch.hugging_face import load_model
    from distill.gguf.writer import export_gguf

    tiny.build_corpus(folder / "corpus")
    texts = [path.read_text() for path in sorted((folder / "corpus" / "test").iterdir())]
    lines = [{"text": text, "category": ("front", "back")[number % 2]} for number, text in enumerate(texts)]
    (folder / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tiny.build_model(folder / "whole")
    model = load_model(str(folder / "whole"), "float32", torch.device("cpu"))
    with torch.no_grad():
        model.model.norm.weight.mul_(PEAK)
    model.save_pretrained(folder / "whole")
    shutil.copytree(folder / "whole", folder / "donor")
    blurred(model, 7, 0.1).save_pretrained(folder / "donor")
    export_gguf(folder / "whole", folder / "target.gguf", "f32")
    shutil.copytree(folder / "whole", folder / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    assert not [path for path in (folder / "target").iterdir() if path.suffix in (".safetensors", ".bin")]
    return folder


def values(folder: Path) -> dict[str, Any]:
    """A small recipe of a run that never loads the target; answers and distributions come from the GGUF file."""
    found = tiny.recipe_values(folder)
    found["target"] = {"model": str(folder / "target")}
    first, second, _ = ({**one, "path": str(folder / one["path"])} for one in found["corpus"]["sources"])
    labelled = {"kind": "jsonl", "path": str(folder / "test.jsonl"), "split": "test"}
    found["corpus"]["sources"] = [first, second, labelled]
    found["answers"]["writer"] = {"gguf": str(folder / "target.gguf")}
    found["teacher"] |= {"gguf": str(folder / "target.gguf"), "top_k": 200, "mass": 0.9}
    found["cut"] |= {"donor": str(folder / "donor")}
    found["train"]["steps"] = 8
    found["eval"] |= {"prompts": 12, "new_tokens": 24}
    return found


class AnsweringServer(VllmServer):
    """The same server, which also continues prompts: it samples from the model as the request asks."""

    def completion(self, body: dict[str, Any], fault: str | None) -> tuple[int, dict[str, Any]]:
        if "prompt_logprobs" in body:
            return super().completion(body, fault)
        from distill.recipe import Sampler
        from distill.sampler import probabilities_of

        ids = list(body["prompt"])
        sampler = Sampler(
            temperature=body["temperature"],
            top_k=body.get("top_k", 0),
            top_p=body.get("top_p", 1.0),
            min_p=body.get("min_p", 0.0),
        )
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        new: list[int] = []
        tops: list[dict[str, float]] = []
        end = self.tokenizer.eos_token_id
        while len(new) < body["max_tokens"] and end not in new:
            with self.lock, torch.inference_mode():
                logits = self.model(input_ids=torch.tensor([ids + new])).logits[0, -1:].float()
                logits[:, len(self.tokenizer) :] = -torch.inf
                shares = probabilities_of(sampler, logits)[0]
            new.append(int(torch.multinomial(shares, 1, generator=generator)))
            logs = logits[0].log_softmax(-1)
            best = [new[-1], *logs.topk(body.get("logprobs", 0)).indices.tolist()]
            tops.append({f"token_id:{token}": max(float(logs[token]), -9999.0) for token in best})
        choice = {"index": 0, "text": self.tokenizer.decode(new), "token_ids": new, "prompt_token_ids": ids}
        choice |= {"finish_reason": "stop" if end in new else "length", "stop_reason": None, "logprobs": None}
        if "logprobs" in body:
            assert body["return_tokens_as_token_ids"]
            choice["logprobs"] = {"tokens": [f"token_id:{token}" for token in new], "top_logprobs": tops}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new)}
        return 200, {"id": "cmpl-2", "object": "text_completion", "model": self.name, "choices": [choice]} | {
            "usage": usage
        }
