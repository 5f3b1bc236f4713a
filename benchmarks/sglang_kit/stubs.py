"""Empty ``flashinfer`` and ``xgrammar``: SGLang imports both whatever backend it is told to use, and together they are
114 MB. Every name in them exists and refuses to be called.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

STUBBED = ("flashinfer", "xgrammar")
# SGLang tries this one and takes its own kernel where the import fails.
MISSING = ("flashinfer.norm",)
VERSION = "0.6.15.post1"  # of flashinfer, which SGLang compares with the one it was built for


class Name:
    """Stands for a function, a class or a constant of a stubbed module. As a decorator it changes nothing."""

    def __init__(self, path: str):
        self.__dict__["_path"] = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        raise NotImplementedError(f"{self._path} is a stub: use attention and sampling backends that do not need it.")

    def __getattr__(self, key: str) -> "Name":
        if key.startswith("__"):
            raise AttributeError(key)
        return Name(f"{self._path}.{key}")


class Module(types.ModuleType):
    def __getattr__(self, key: str) -> Any:
        if key == "__version__":
            return VERSION
        if key.startswith("__"):
            raise AttributeError(key)
        if self.__name__.startswith("xgrammar") and key[0].isupper():
            import pydantic  # here: at start there is no path to it yet

            return type(key, (pydantic.BaseModel,), {"__module__": self.__name__})  # fields of request schemas
        return Name(f"{self.__name__}.{key}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in MISSING:
            raise ImportError(f"{name} is left out on purpose", name=name)
        if name.split(".")[0] not in STUBBED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def install() -> None:
    sys.meta_path.append(Finder())
