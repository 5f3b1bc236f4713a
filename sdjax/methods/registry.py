"""Methods by name. A method file registers its class; a second class of the same name is an error."""

import difflib
import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

from sdjax.errors import ConfigError
from sdjax.methods.base import Method

_METHODS: dict[str, type[Method]] = {}
_NOT_METHODS = {"base", "registry"}


@dataclass(frozen=True)
class MethodConfig:
    """The ``method`` part of a run config: the method's name and its own settings."""

    name: str
    settings: Any

    @property
    def needs_teacher(self) -> bool:
        return "skills" in _get(self.name).views or self.acts

    @property
    def acts(self) -> bool:
        return _get(self.name).acts

    def build(self) -> Method:
        return _get(self.name)(self.settings)


def register(cls: type[Method]) -> type[Method]:
    """Class decorator.

    Raises:
      ConfigError: another class already has this name.
    """
    existing = _METHODS.get(cls.name)
    if existing is not None and existing is not cls:
        raise ConfigError(
            f"two methods are called {cls.name!r}: {existing.__module__} and {cls.__module__}.", "rename one of them."
        )
    _METHODS[cls.name] = cls
    return cls


def names() -> list[str]:
    _import_all()
    return sorted(_METHODS)


def method_class(name: str) -> type[Method]:
    return _get(name)


def config_class(name: str) -> type:
    return _get(name).Config


def make(name: str, environment: str = "alfworld", **keys: Any) -> Method:
    """A method outside a run (notebooks, tests), with the keys of its config that differ from the preset."""
    cls = _get(name)
    return cls(cls.resolve(cls.Config(**keys), environment))


def resolve(name: str, settings: Any, environment: str) -> MethodConfig:
    """The method's part of a run config with every constant filled in."""
    return MethodConfig(name, _get(name).resolve(settings, environment))


def _get(name: str) -> type[Method]:
    _import_all()
    if name not in _METHODS:
        near = difflib.get_close_matches(name, _METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known methods: {', '.join(sorted(_METHODS))}."
        raise ConfigError(f"method.name = {name!r} is not known.", hint)
    return _METHODS[name]


def _import_all() -> None:
    package = importlib.import_module("sdjax.methods")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in _NOT_METHODS:
            importlib.import_module(f"sdjax.methods.{module.name}")
