"""Doors: upstream's module paths whose names live in several modules of ours. A door defines
nothing itself.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def open_door(path: str, *homes: ModuleType) -> None:
    """Makes the module `path` read each name from the first of `homes` that has it, and replace it
    there.

    A test or plug-in that patches `path.name` therefore patches what runs, and one that deletes it
    afterwards, as `mock.patch` does, takes its replacement back. Names that `path` itself defines
    stay its own.
    """
    replaced: dict[str, list[Any]] = {}  # by name: what stood in the home before each replacement

    class Door(ModuleType):
        def __getattr__(self, name: str) -> Any:
            for home in homes:
                if hasattr(home, name):
                    return getattr(home, name)
            raise AttributeError(f"module {path!r} has no attribute {name!r}")

        def __setattr__(self, name: str, value: object) -> None:
            home = next((home for home in homes if hasattr(home, name)), None)
            if home is None or name in self.__dict__:
                super().__setattr__(name, value)
            else:
                replaced.setdefault(name, []).append(getattr(home, name))
                setattr(home, name, value)

        def __delattr__(self, name: str) -> None:
            if name in self.__dict__ or not replaced.get(name):
                super().__delattr__(name)
            else:
                home = next(home for home in homes if hasattr(home, name))
                setattr(home, name, replaced[name].pop())

    sys.modules[path].__class__ = Door
