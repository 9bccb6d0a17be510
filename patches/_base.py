"""The two ways a patch changes something: swapping attributes, and SGLang's own hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Swap:
    """Attributes (or dict entries) replaced now and put back by ``undo``."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    @property
    def applied(self) -> bool:
        return bool(self._saved)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``. An inherited attribute is shadowed, and uncovered again on undo."""
        self._saved.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def item(self, mapping: dict, key: Any, value: Any) -> None:
        """Set ``mapping[key]``."""
        self._saved.append((mapping, key, mapping.get(key, _ABSENT)))
        mapping[key] = value

    def undo(self) -> None:
        while self._saved:
            owner, name, old = self._saved.pop()
            if isinstance(owner, dict):
                if old is _ABSENT:
                    owner.pop(name, None)
                else:
                    owner[name] = old
            elif old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


class Hook:
    """An AROUND hook of SGLang's registry that ``undo`` turns into a pass-through.

    The registry has no way to remove a hook, and wraps targets several plugins may share, so the
    wrapper stays in place and stops doing anything. ``apply`` only registers: SGLang installs the
    wrapper itself once every plugin has registered (``HookRegistry.apply_hooks``), and installing
    early would make it skip the hooks of plugins loaded later.
    """

    def __init__(self, target: str, around: Callable[..., Any]) -> None:
        self.target, self._around = target, around
        self.applied = False
        self._registered = False

    def apply(self) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        self.applied = True
        if not self._registered:
            self._registered = True

            @functools.wraps(self._around)
            def hook(original, *args, **kwargs):
                if not self.applied:
                    return original(*args, **kwargs)
                return self._around(original, *args, **kwargs)

            HookRegistry.register(self.target, hook, HookType.AROUND)

    def undo(self) -> None:
        self.applied = False
