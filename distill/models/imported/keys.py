"""The metadata of a GGUF file by key, each value with its form checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from distill.errors import DataError
from distill.models.gguf.file_head import FileHead

EXPORT_AGAIN = "convert the model again, or give its Hugging Face folder"


class Keys:
    """Values of a file's head; `own` keys stand below the architecture's name. Raises DataError, with the key."""

    def __init__(self, path: Path, head: FileHead) -> None:
        self.path, self.values = path, head.values
        self.architecture = self.text("general.architecture") or self.refuse("it names no architecture")

    def refuse(self, what: str, hint: str = EXPORT_AGAIN) -> NoReturn:
        """Raise DataError for this file."""
        raise DataError(f"{self.path}: {what}", hint)

    def text(self, key: str) -> str | None:
        """A text; None where there is none."""
        found = self.values.get(key)
        if found is None:
            return None
        try:
            return bytes(found).decode() if isinstance(found, bytes) else self.refuse(f"{key} is no text")
        except UnicodeDecodeError:
            self.refuse(f"{key} is not UTF-8")

    def texts(self, key: str) -> list[str]:
        """A list of texts, empty where there is none."""
        found = self.values.get(key, [])
        if not isinstance(found, list) or not all(isinstance(one, bytes) for one in found):
            self.refuse(f"{key} is no list of texts")
        try:
            return [one.decode() for one in found]
        except UnicodeDecodeError:
            self.refuse(f"{key} holds a text that is not UTF-8")

    def numbers(self, key: str) -> list[Any]:
        """A list of numbers, empty where there is none."""
        found = self.values.get(key, [])
        if not isinstance(found, list) or any(isinstance(one, bytes | bool | list) for one in found):
            self.refuse(f"{key} is no list of numbers")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        found = self.values.get(key, default)
        return bool(found) if isinstance(found, bool | int) else self.refuse(f"{key} is neither true nor false")

    def own(self, key: str) -> Any:
        """A value below the architecture's name; of a list with one number a layer, the number where all are equal."""
        found = self.values.get(f"{self.architecture}.{key}")
        if isinstance(found, list) and found:
            if len(set(found)) > 1:
                self.refuse(f"{self.architecture}.{key} differs between layers, which transformers cannot hold")
            return found[0]
        return found

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer below the architecture's name."""
        found = self.own(key)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or found <= 0:
            self.refuse(f"{self.architecture}.{key} is {found!r:.40}, not a positive integer")
        return int(found)

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number below the architecture's name, in the fewest digits that give the file's 32 bits."""
        found = self.own(key)
        found = default if found is None else found
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e30:
            self.refuse(f"{self.architecture}.{key} is {found!r:.40}, not a positive number")
        return shortest(found)


def shortest(value: float) -> float:
    """A number of 32 bits in the fewest digits: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))
