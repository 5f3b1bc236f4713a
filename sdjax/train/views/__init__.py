"""Views: what the teacher reads beside the student's prompt, by name. A method declares the views it needs."""

from collections.abc import Callable, Sequence

from sdjax.errors import ConfigError
from sdjax.train.views.base import View, ViewContext
from sdjax.train.views.future import FutureView
from sdjax.train.views.guide import GuideView
from sdjax.train.views.sibling import SiblingView
from sdjax.train.views.skills import SkillTeacher, SkillView

_MAKERS: tuple[Callable[[ViewContext], View], ...] = (SkillView, FutureView, SiblingView, GuideView)
_MAKER_OF: dict[str, Callable[[ViewContext], View]] = {name: maker for maker in _MAKERS for name in maker.names}  # type: ignore[attr-defined]


def make_views(names: Sequence[str], context: ViewContext) -> list[View]:
    """One provider for each group of names that belong together, in the order of ``names``.

    Raises:
      ConfigError: nobody provides one of the names.
    """
    makers: list[Callable[[ViewContext], View]] = []
    for name in names:
        if name not in _MAKER_OF:
            known = ", ".join(sorted(_MAKER_OF))
            raise ConfigError(f"no teacher provides the view {name!r}.", f"known views: {known}.")
        if _MAKER_OF[name] not in makers:
            makers.append(_MAKER_OF[name])
    return [maker(context) for maker in makers]


__all__ = ["SkillTeacher", "View", "ViewContext", "make_views"]
