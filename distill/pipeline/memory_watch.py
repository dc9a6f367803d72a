"""Peak memory of this process since the last look, from samples; that of accelerators from torch's own counters."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

INTERVAL = 0.02  # seconds between samples: a model's load or a batch lasts longer


class MemoryWatch:
    """Samples the resident size in a thread of its own within a `with` block; `take` gives the peaks since the last."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._peak = 0
        self._lock = threading.Lock()  # a sample taken before `take` must not be noted after it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        self.take()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(INTERVAL):
            with self._lock:
                self._peak = max(self._peak, self._process.memory_info().rss)

    def take(self) -> tuple[int, int]:
        """Bytes of the process and of all accelerators at their peaks since the last call; frees what is not used."""
        with self._lock:
            found = max(self._peak, self._process.memory_info().rss), _device_peak()
            gc.collect()
            self._peak = 0
        return found


def _device_peak() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0
    total = 0
    for index in range(torch.cuda.device_count()):
        total += int(torch.cuda.max_memory_reserved(index))
        torch.cuda.reset_peak_memory_stats(index)
    return total
