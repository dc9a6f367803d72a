"""Recipe section: served traffic as a source of the target's own text."""

from __future__ import annotations

from pydantic import Field

from distill.recipe.section import Section


class Traffic(Section):
    """A jsonl file of served prompts and the target's answers, which may grow while it is read.

    A line is `{"prompt": …, "answer": …}` or `{"messages": […]}`. The last of the messages is the assistant's answer;
    the others are formatted with the chat template of the target's tokenizer. An answer ends with the target's end
    token, unless the line has a `finish_reason` other than `stop`. A hash of the prompt chooses its split, with the
    shares of the corpus: the draft learns from answers to train prompts and is measured on prompts of the other splits.
    """

    path: str = Field(description="the jsonl file")
    prompt_field: str = Field("prompt", description="field with the prompt, exactly as it was sent to the target")
    answer_field: str = Field("answer", description="field with the target's answer")
