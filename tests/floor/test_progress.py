"""Progress: estimates of what is left, and which lines are printed."""

import random
from collections.abc import Iterator

import pytest

from distill import progress
from distill.progress import Progress, watched


class Clock:
    """The time that `progress` reads."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    yield clock


def test_eta_of_one_after_the_other(clock: Clock) -> None:
    work = Progress("work", 10, done=2)
    for left in range(7, -1, -1):
        clock.now += 3
        work.step()
        assert work.eta_seconds() == pytest.approx(3 * left)


def ends_of_batches(lengths: list[float], rows: int) -> list[float]:
    """When each text ends, in order, where a finished row takes the next text."""
    free, ends = [0.0] * rows, []
    for length in lengths:
        row = free.index(min(free))
        free[row] += length
        ends.append(free[row])
    return sorted(ends)


def test_eta_of_texts_that_are_written_together(clock: Clock) -> None:
    """Against the simulated truth: the first estimates are far closer than those which ignore texts under way."""
    rows, draw = 16, random.Random(0)
    ends = ends_of_batches([draw.uniform(5, 35) for _ in range(320)], rows)
    together, apart = Progress("texts", 320, together=rows), Progress("texts", 320)
    started, errors = clock.now, []
    for end in ends[:-1]:
        clock.now = started + end
        together.step()
        apart.step()
        truth = ends[-1] - end
        errors.append((abs(together.eta_seconds() - truth) / ends[-1], abs(apart.eta_seconds() - truth) / ends[-1]))
    assert max(own for own, _ in errors[:rows]) < 0.35 < 2 < max(naive for _, naive in errors[:rows])
    assert sum(own for own, _ in errors) < sum(naive for _, naive in errors) / 2


def test_progress_is_at_most_one_line_a_minute(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Over all loops, whether one is brief or ends."""
    progress.set_console(False, False)
    with watched() as loops:
        brief = Progress("part", 3, brief=True)
        whole = Progress("whole", 10)
        for _ in range(3):
            clock.now += 25
            brief.step()
            whole.step()
        clock.now += 44
        whole.step(7)
    assert loops == [whole]
    assert capsys.readouterr().err.splitlines() == ["  part 3/3 in 1m15s"]


def test_a_terminal_rewrites_its_line(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one line for each stage, also the last of a loop is replaced by what comes next."""
    progress.set_console(False, False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress.one_line_per_stage():
        short, long = Progress("short", 1, brief=True), Progress("long", 2)
        for work in (short, long, long):
            clock.now += 3
            work.step()
        progress.note("✓ stage")
        progress.show_passing("  next")
    begin = progress.ERASE
    assert (
        capsys.readouterr().err
        == f"{begin}  long 1/2 6s left{begin}  long 2/2 in 9s{begin}✓ stage\n{begin}  next{begin}"
    )
