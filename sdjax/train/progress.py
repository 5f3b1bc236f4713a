"""Progress of a run in the terminal: steps, what is going on now, and the newest numbers."""

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Progress:
    """Two bars (run and current phase) on a terminal; one line per validation where output is a file."""

    def __init__(self, console: Console, name: str, steps: int, done: int):
        self.console, self.name = console, name
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._run = self._bars.add_task(f"[bold]{name}", total=steps, completed=done)
        self._phase = self._bars.add_task("starting", total=None)

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def phase(self, name: str, total: int | None = None) -> None:
        self._bars.reset(self._phase, description=f"  {name}", total=total, completed=0)

    def episode_done(self, _: Any) -> None:
        self._bars.advance(self._phase)

    def step_done(self, step: int, record: dict[str, Any]) -> None:
        self._bars.update(
            self._run,
            completed=step,
            description=f"[bold]{self.name}[/] win {100 * record['train/win_rate']:.0f} %",
        )

    def validated(self, step: int, summary: dict[str, float]) -> None:
        self.console.print(
            f"{self.name}: validation after {step} updates: success {summary['val/success']:.1f} %, "
            f"score {summary['val/score']:.1f}, {summary['val/turns_mean']:.1f} turns"
        )

    def sft_step(self, step: int, loss: float) -> None:
        self._bars.update(self._run, completed=step, description=f"[bold]{self.name}[/] loss {loss:.3f}")
