"""The tokens of a tokenizer: their bytes, kinds and roles, and how bytes become tokens. No torch here."""

from distill.vocabulary.vocabulary import Vocabulary

__all__ = ["Vocabulary"]
