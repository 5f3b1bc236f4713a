"""What a player sees. Texts of environments and models are shown as they are: never read as markup, and without the
control characters that could move the cursor or hide what was written.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sdjax.envs.base import Observation, StepResult
from sdjax.play.record import Record

_HIDDEN = ("Cc", "Cf", "Cs")  # control, format (text direction) and surrogate characters


def plain(text: str, style: str = "") -> Text:
    """``text`` for the terminal, each character that would not be seen as the replacement character."""
    shown = "".join(c if c in "\n\t" or unicodedata.category(c) not in _HIDDEN else "\ufffd" for c in text)
    return Text(shown, style=style)


@dataclass(frozen=True)
class TeacherView:
    """What a teacher reads: the skill bank's text for the task, and whether it is the general part alone."""

    skills: str
    general_only: bool
    bank: str


class Screen:
    """Shows one episode turn by turn, or with ``quiet`` only how it ended. typed: a person types the moves."""

    def __init__(self, console: Console, *, quiet: bool = False, typed: bool = False):
        self._console, self._quiet = console, quiet
        self._on_screen = typed and console.is_terminal  # moves are on the screen when they are made

    def start(self, task: str, family: str, observation: Observation, teacher: TeacherView | None) -> None:
        if self._quiet:
            return
        self._console.print(_panel(f"{task} ({family})\n{observation.task}", "task"))
        if teacher is not None:
            title = f"teacher: {teacher.bank}" + (" (general part only)" if teacher.general_only else "")
            self._console.print(_panel(teacher.skills, title, "magenta"))

    def turn(self, number: int, observation: Observation, plan: Sequence[str] | None, teacher: bool) -> None:
        """plan: what the teacher would read, shown with ``teacher``."""
        if self._quiet:
            return
        parts: list[RenderableType] = [plain(observation.text)]
        for name, items in (("commands", observation.admissible), ("objects", observation.objects)):
            if items:
                parts.append(Text.assemble((f"\n{name}  ", "bold"), plain(" | ".join(items), "dim")))
        left = Panel(Group(*parts), title=Text(f"turn {number}"), title_align="left", box=box.ROUNDED)
        self._console.print(_beside(left, _panel(_plan_text(plan), "teacher: plan", "magenta")) if teacher else left)

    def move(self, action: str, said: str, problem: str) -> None:
        if self._quiet:
            return
        if said:
            self._console.print(plain(said, "italic"))
        if problem:
            self._console.print(plain(f"answer format: {problem}", "yellow"))
        if not self._on_screen:
            self._console.print(Text.assemble(("> ", "bold"), plain(action, "bold")))

    def result(self, result: StepResult, status: str) -> None:
        if not self._quiet:
            line = f"reward {result.reward:+g}   score {result.score:.2f}   {status}"
            self._console.print(Text(line, style=_color(status)))

    def last(self, observation: Observation) -> None:
        """The observation after the last move."""
        if not self._quiet:
            self._console.print(_panel(observation.text, "the end"))

    def ask(self) -> None:
        if self._on_screen:
            self._console.print(Text("> ", style="bold"), end="")

    def notes(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._console.print(plain(line, "cyan"))

    def plan(self, commands: Sequence[str] | None) -> None:
        self._console.print(_panel(_plan_text(commands), "plan", "magenta"))

    def episode(self, record: Record) -> None:
        if self._quiet:
            self._console.print(Text.assemble((f"{record.status:<10}", _color(record.status)), plain(record.task)))

    def summary(self, records: Sequence[Record], agent: str) -> None:
        table = Table(title=plain(f"{agent}: {len(records)} episode{'s' if len(records) != 1 else ''}"))
        for name in ("task", "family", "status"):
            table.add_column(name, overflow="fold")
        for name in ("score", "return", "turns"):
            table.add_column(name, justify="right")
        for record in records:
            numbers = f"{record.score:.2f}", f"{record.ret:g}", str(record.turns)
            table.add_row(
                plain(record.task), plain(record.family), Text(record.status, style=_color(record.status)), *numbers
            )
        self._console.print(table)
        if len(records) > 1:
            won = sum(record.status == "success" for record in records)
            score = sum(record.score for record in records) / len(records)
            self._console.print(Text(f"success {won} of {len(records)}, mean score {score:.3f}"))


def _panel(text: str, title: str, style: str = "none") -> Panel:
    return Panel(plain(text), title=plain(title), title_align="left", box=box.ROUNDED, border_style=style)


def _beside(left: RenderableType, right: RenderableType) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=3)
    grid.add_column(ratio=2)
    grid.add_row(left, right)
    return grid


def _plan_text(commands: Sequence[str] | None) -> str:
    if commands is None:
        return "No plan from here."
    return "\n".join(commands) if commands else "Nothing is left to do."


def _color(status: str) -> str:
    return {"success": "green", "failed": "red", "truncated": "yellow"}.get(status, "none")
