"""Stands in for sglang-kernel on a machine without GPU: every name can be imported, and calling one raises.

SGLang then takes its own torch code. The few operators for which it has none are in ``gated_delta_net``.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"


class _Missing:
    """A name of the real package. Hashable and comparable, because SGLang keeps such names in tables."""

    def __init__(self, name):
        self.__dict__["_name"] = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{self._name} has no version for CPUs here")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __hash__(self):
        return hash(self._name)

    def __eq__(self, other):
        return isinstance(other, _Missing) and other._name == self._name


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes an empty module for every submodule that is asked for."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []
        if module.__name__ == "sgl_kernel.mamba":
            vars(module).update(importlib.import_module("sgl_kernel.gated_delta_net").OPERATORS)


sys.meta_path.append(_Finder())
importlib.import_module("sgl_kernel.gated_delta_net")
