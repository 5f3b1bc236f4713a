"""Where failed episodes of one task share a state, and where another episode first acts differently.

Pure logic on texts (methods.md, section 6.6, steps 2 to 4): a state is everything seen and done up to it. Nothing here
plays anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# (first observation, (action, observation), (action, observation), ...), all canonical.
Key = tuple[str | tuple[str, str], ...]


@dataclass(frozen=True)
class Path:
    """One episode as text: ``observations[k]`` is what was seen before ``actions[k]``."""

    observations: tuple[str, ...]
    actions: tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """A state in which at least one episode acted. ``members``: places of these episodes in the list, ascending."""

    key: Key
    members: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Actions played before this state; the root has depth 0."""
        return len(self.key) - 1


def canonical(text: str) -> str:
    """Lower case, single spaces."""
    return " ".join(text.lower().split())


def build(paths: Sequence[Path]) -> dict[Key, Node]:
    """All states in which an episode acted. The state after the last action is none: nothing can be played from it."""
    members: dict[Key, list[int]] = {}
    for place, path in enumerate(paths):
        key: Key = ()
        for k in range(len(path.actions)):
            seen = canonical(path.observations[k])
            key = (*key, seen if k == 0 else (canonical(path.actions[k - 1]), seen))
            members.setdefault(key, []).append(place)
    return {key: Node(key, tuple(places)) for key, places in members.items()}


def eligible(tree: dict[Key, Node], *, support: int, fallback_depth: int) -> list[Node]:
    """States shared by ``support`` or more episodes; if only the root is, all of depth 1..``fallback_depth`` as
    well.
    """
    shared = [node for node in tree.values() if len(node.members) >= support]
    if any(node.depth > 0 for node in shared):
        return shared
    return shared + [
        node for node in tree.values() if 1 <= node.depth <= fallback_depth and len(node.members) < support
    ]


def schedule(nodes: Sequence[Node], limit: int) -> list[Node]:
    """States to start from, in order: the deepest one (ties: more episodes, then the first), then its eligible
    ancestors from near to far; at most ``limit``."""
    if not nodes:
        return []
    start = max(nodes, key=lambda node: (node.depth, len(node.members)))
    above = [node for node in nodes if node.depth < start.depth and start.key[: node.depth + 1] == node.key]
    return [start, *sorted(above, key=lambda node: -node.depth)][:limit]


def first_divergence(student: Path, teacher: Path) -> int | None:
    """First turn at which both are in the same state and act differently.

    None if the states differ first, or if the shorter episode ends before they act differently.
    """
    for k, (mine, other) in enumerate(zip(student.actions, teacher.actions)):
        if canonical(student.observations[k]) != canonical(teacher.observations[k]):
            return None
        if canonical(mine) != canonical(other):
            return k
    return None
