"""Doors: upstream's module paths whose names live in several modules of ours. A door defines nothing itself."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def open_door(path: str, *homes: ModuleType) -> None:
    """Makes the module `path` read each name from the first of `homes` that has it, and replace it there.

    A test or plug-in that patches `path.name` therefore patches what runs. Names that `path` itself defines stay its own.
    """

    class Door(ModuleType):
        def __getattr__(self, name: str) -> Any:
            for home in homes:
                if hasattr(home, name):
                    return getattr(home, name)
            raise AttributeError(f"module {path!r} has no attribute {name!r}")

        def __setattr__(self, name: str, value: Any) -> None:
            home = next((home for home in homes if hasattr(home, name)), None)
            if home is None or name in self.__dict__:
                super().__setattr__(name, value)
            else:
                setattr(home, name, value)

    sys.modules[path].__class__ = Door
