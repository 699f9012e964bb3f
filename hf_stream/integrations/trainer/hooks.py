"""The hooks on Trainer: as long as a callback lives, a few methods look whether their trainer has one.

Callbacks are not told which trainer they belong to, and checkpoints are saved and loaded by methods of `Trainer`. It is
those of the base class that are hooked, so subclasses that extend them with `super()` keep working. Trainers without
our callback pass through. When the last callback is gone, the methods are as they were.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from transformers import Trainer

from hf_stream.integrations.trainer.methods import METHODS
from hf_stream.integrations.trainer.settings import Settings

Method = Callable[..., Any]

# A callback may be collected at any moment, in the middle of a function here too: the lock lets the same thread in
# again, and each step below leaves things so that the next one may be taken by a call within.
_lock = threading.RLock()
_users: set[int] = set()
_hooked: dict[str, tuple[Method, Method]] = {}


def hook_for(user: Any) -> None:
    """Hook the methods until `user`, and every other one, is gone.

    Args:
        user: Among a trainer's callbacks, it says with its `settings` how to save and load.
    """
    with _lock:
        _users.add(id(user))
        weakref.finalize(user, _release, id(user)).atexit = False
        for name, ours in METHODS.items():
            if name not in _hooked:
                plain = getattr(Trainer, name)
                hook = _hook(name, plain, ours)
                setattr(Trainer, name, hook)
                _hooked[name] = plain, hook


def _release(user: int) -> None:
    with _lock:
        _users.discard(user)
        while _hooked and not _users:
            name, (plain, hook) = _hooked.popitem()
            # Whoever has put something over the hook meanwhile keeps it; it calls the plain method through the hook.
            if vars(Trainer)[name] is hook:
                setattr(Trainer, name, plain)


def _hook(name: str, plain: Method, ours: Method) -> Method:
    @functools.wraps(plain)
    def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        settings = _settings_of(trainer)
        # An older hook may be left below what somebody has put over it.
        if settings is None or _hooked.get(name) != (plain, method):
            return plain(trainer, *args, **kwargs)
        return ours(settings, trainer, functools.partial(plain, trainer), *args, **kwargs)

    return method


def _settings_of(trainer: Any) -> Settings | None:
    handler = getattr(trainer, "callback_handler", None)
    callbacks = handler.callbacks if handler is not None else ()
    return next((callback.settings for callback in callbacks if id(callback) in _users), None)
