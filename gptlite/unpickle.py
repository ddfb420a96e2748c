"""Unpickling of files that others made: plain values, and objects of a few named classes. No file can run code.

It is based on the library's unpickler in Python. The one in C restricts only the names that a pickle refers to, so a
pickle can still change the classes that it may use, or give a dict a key whose hash takes years.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

_KEYS = (str, bytes, int, float, type(None))
# Opcodes that no allowed file has: objects by other means than names, sets, and buffers from outside.
_REFUSED = (
    *(pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.INST, pickle.OBJ),
    *(pickle.NEWOBJ_EX, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.NEXT_BUFFER),
    pickle.READONLY_BUFFER,
)
Setter = Callable[[Any, Any], None]
_Base: Any = pickle._Unpickler  # type: ignore[attr-defined]


def unpickle(
    content: bytes, names: Mapping[tuple[str, str], Any], setters: Mapping[type, Setter], encoding: str = "ASCII"
) -> Any:
    """Return the object that a pickle contains. Raises pickle.UnpicklingError.

    `names` gives the object for each module and name that the pickle may refer to: a function that it may call, or a
    class of which it may make instances without arguments. `setters` has for each such class a function (instance,
    state) that checks and sets the state of an instance. Only instances of these classes can be keys besides strings
    and numbers. `encoding`: that of strings from Python 2, as for pickle.loads.
    """
    try:
        return _Unpickler(content, names, setters, encoding).load()
    except pickle.UnpicklingError:
        raise
    except RecursionError:
        raise pickle.UnpicklingError("it is nested too deeply") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error!s:.200}") from None


class _Unpickler(_Base):
    dispatch: ClassVar = {key: value for key, value in _Base.dispatch.items() if key not in {op[0] for op in _REFUSED}}

    def __init__(
        self, content: bytes, names: Mapping[tuple[str, str], Any], setters: Mapping[type, Setter], encoding: str
    ) -> None:
        super().__init__(io.BytesIO(content), encoding=encoding)
        self._names, self._setters = names, setters

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module!r:.100}.{name!r:.100}, which is not allowed") from None

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if isinstance(function, type) or not any(function is each for each in self._names.values()):
            raise pickle.UnpicklingError("it calls something else than the functions that are allowed")
        self.stack[-1] = function(*arguments)

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        kind = self.stack.pop()
        if kind not in self._setters or arguments:
            raise pickle.UnpicklingError("it makes an object of a class that is not allowed")
        self.append(kind.__new__(kind))

    def load_build(self) -> None:
        state = self.stack.pop()
        if (setter := self._setters.get(type(self.stack[-1]))) is None:
            raise pickle.UnpicklingError("it changes an object of a class that is not allowed")
        setter(self.stack[-1], state)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set(items)

    def load_appends(self) -> None:
        items = self.pop_mark()
        self._list().extend(items)

    def load_append(self) -> None:
        value = self.stack.pop()
        self._list().append(value)

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise pickle.UnpicklingError("it sets items of something else than a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, _KEYS) and type(key) not in self._setters:
                raise pickle.UnpicklingError(f"it has a key of type {type(key).__name__}")
            target[key] = value

    def _list(self) -> list[Any]:
        target = self.stack[-1]
        if type(target) is not list:
            raise pickle.UnpicklingError("it appends to something else than a list")
        return target

    for _code, _load in (
        *((pickle.REDUCE, load_reduce), (pickle.NEWOBJ, load_newobj), (pickle.BUILD, load_build)),
        *((pickle.SETITEM, load_setitem), (pickle.SETITEMS, load_setitems), (pickle.DICT, load_dict)),
        *((pickle.APPEND, load_append), (pickle.APPENDS, load_appends)),
    ):
        dispatch[_code[0]] = _load
    del _code, _load
