"""Recipe section: served logs as a source of the target's own text."""

from __future__ import annotations

from pydantic import Field

from distill.recipe.section import Section


class Traffic(Section):
    """A jsonl file of served prompts and the target's answers, which may grow while it is read.

    A line is `{"prompt": …, "answer": …}` or `{"messages": […]}`, whose last message is the assistant's answer and
    whose others go through the chat template of the target's tokenizer. An answer ends with the target's end token,
    unless the line has a `finish_reason` other than `stop`. A hash of the prompt decides the split, by the shares of
    the corpus: answers of train prompts are learnt from, prompts of the other splits are measured on.
    """

    path: str = Field(description="the file")
    prompt_field: str = Field("prompt", description="the field that holds the prompt, as the target was given it")
    answer_field: str = Field("answer", description="the field that holds the target's answer")
