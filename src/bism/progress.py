"""One line that says how far a run is: live on a terminal, a few plain lines in a log."""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np


class Progress:
    def __init__(self, steps: int, show: bool | str = True, start: int = 0, rate: Callable[[float], str] | None = None):
        self._bar = self._console = None
        self.rate = rate or (lambda rate: f"{rate:,.0f} it/s")
        self.label = show if isinstance(show, str) else "training"
        self.steps, self._told, self._told_at = steps, start, time.perf_counter()
        if not show:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        if self._console.is_terminal:
            columns = ("{task.description}", BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
            self._bar = Bar(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task(self.label, total=steps, completed=start, facts="compiling")
            self._bar.start()

    def update(self, step: int, rate: float, record: dict[str, Any]) -> None:
        if self._console is None:
            return
        shown = {name: value for name, value in record.items() if name not in ("step", "seconds")}
        facts = "  ".join([self.rate(rate), *(f"{name} {_short(value)}" for name, value in shown.items())])
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
        elif step == self.steps or (step - self._told >= self.steps // 10 and time.perf_counter() - self._told_at > 10):
            self.say(f"{self.label}: {step}/{self.steps}  {facts}")
            self._told, self._told_at = step, time.perf_counter()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _short(value):
    """A number, or the mean over the seeds."""
    return f"{np.mean(value):.4g}"
