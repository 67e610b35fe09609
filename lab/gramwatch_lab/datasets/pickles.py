"""Reading the pickles in which CIFAR is published, without running them.

A pickle is a program for a small machine. It can ask to call any function of any module. This reader executes
only the few steps that dictionaries, lists, text and numbers need. It records requested calls and never makes
them. If a recorded call describes a plain array of whole numbers, this reader builds the array from checked
bytes.
"""

import math
import pickletools
from typing import Any

import numpy as np

MOST_STEPS = 2_000_000
"""The largest number of steps in a pickle. Those of CIFAR have a tenth of that."""
_ARRAYS = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
_ARRAY, _DTYPE, _BYTES = ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")
_KNOWN = {*_ARRAYS, _ARRAY, _DTYPE, _BYTES}
_CODES = {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}
"""The types that arrays may have: whole numbers only."""


class _Mark:
    """The entry on the stack below the items of a list or a dictionary."""


class _Name(tuple[str, str]):
    """The module and the name of a function or class in the pickle."""


class _Call:
    """A recorded call: the name of the function or class, the arguments, and the state set afterwards."""

    def __init__(self, name: _Name, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None


def read_pickle(content: bytes) -> dict[bytes, Any]:
    """The dictionary in a pickle, with its arrays. Any other content is refused."""
    machine = _Machine()
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number > MOST_STEPS:
            raise ValueError(f"it has more than {MOST_STEPS:,} steps")
        machine.step(opcode.name, argument)
    batch = machine.pop()
    if not isinstance(batch, dict) or b"data" not in batch:
        raise ValueError("no images in it")
    return {key: _array(value) if isinstance(value, _Call) else value for key, value in batch.items()}


class _Machine:
    """The stack and the memory of a pickle."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memory: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Carry out one step."""
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _VALUES:
            self._stack.append(argument)
        elif name in _STRINGS:  # strings of Python 2 are bytes
            self._stack.append(argument.encode("latin-1"))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memory[int(argument)] = self._stack[-1]
        elif name == "MEMOIZE":
            self._memory[len(self._memory)] = self._stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self._stack.append(self._memory[int(argument)])
        elif name not in _NOTHING:
            work = getattr(self, f"_{name.lower()}", None)
            if work is None:
                raise ValueError(f"it has a step {name}, which arrays and lists do not need")
            work(argument)

    def pop(self) -> Any:
        """The topmost item."""
        return self._stack.pop()

    def _marked(self) -> list[Any]:
        """The items above the last mark."""
        items = []
        while not isinstance(item := self.pop(), _Mark):
            items.append(item)
        return items[::-1]

    def _mark(self, _: Any) -> None:
        self._stack.append(_Mark())

    def _empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _list(self, _: Any) -> None:
        self._stack.append(self._marked())

    def _dict(self, _: Any) -> None:
        items = self._marked()
        self._stack.append({})
        self._put(items)

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._marked()))

    def _tuple1(self, _: Any) -> None:
        self._stack[-1:] = [(self._stack[-1],)]

    def _tuple2(self, _: Any) -> None:
        self._stack[-2:] = [(self._stack[-2], self._stack[-1])]

    def _tuple3(self, _: Any) -> None:
        self._stack[-3:] = [(self._stack[-3], self._stack[-2], self._stack[-1])]

    def _append(self, _: Any) -> None:
        item = self.pop()
        self._top(list).append(item)

    def _appends(self, _: Any) -> None:
        items = self._marked()
        self._top(list).extend(items)

    def _setitem(self, _: Any) -> None:
        value, key = self.pop(), self.pop()
        self._put([key, value])

    def _setitems(self, _: Any) -> None:
        self._put(self._marked())

    def _put(self, items: list[Any]) -> None:
        keys, values = [_key(item) for item in items[::2]], items[1::2]
        self._top(dict).update(zip(keys, values, strict=True))

    def _top(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise ValueError(f"it adds to something that is not a {kind.__name__}")
        return self._stack[-1]

    def _global(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))

    def _stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self._name(module, name)

    def _name(self, module: Any, name: Any) -> None:
        if (module, name) not in _KNOWN:
            raise ValueError(f"it asks for {module!s:.60}.{name!s:.60}")
        self._stack.append(_Name((module, name)))

    def _reduce(self, _: Any) -> None:
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, _Name) or type(arguments) is not tuple:
            raise ValueError("it calls something that is not a named function")
        self._stack.append(_Call(name, arguments))

    def _build(self, _: Any) -> None:
        state = self.pop()
        self._top(_Call).state = state


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = set(
    "INT LONG BININT BININT1 BININT2 LONG1 LONG4 FLOAT BINFLOAT UNICODE BINUNICODE SHORT_BINUNICODE "
    "BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8".split()
)
_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}
_NOTHING = {"PROTO", "FRAME", "STOP"}


def _array(call: _Call) -> "np.ndarray[Any, np.dtype[Any]]":
    """The array that a recorded call and its state describe, built from its bytes."""
    if call.name not in _ARRAYS or call.arguments[:1] != (_ARRAY,) or type(call.state) is not tuple:
        raise ValueError(f"it asks for {'.'.join(call.name)}")
    _, shape, dtype, by_column, content = call.state
    if type(shape) is not tuple or len(shape) > 2:
        raise ValueError("an array has more than two axes")
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError("the shape of an array is not made of whole numbers")
    kind, raw = _dtype(dtype), _raw(content)
    if len(raw) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"an array of shape {shape!s:.60} has {len(raw):,} bytes")
    return np.frombuffer(raw, kind).reshape(shape, order="F" if by_column in (1, True) else "C")


def _dtype(call: Any) -> "np.dtype[Any]":
    """The type of an array: plain whole numbers."""
    if not isinstance(call, _Call) or call.name != _DTYPE or type(call.state) is not tuple:
        raise ValueError("an array has no type")
    code, order = (_text(value) for value in (call.arguments[0], call.state[1]))
    if code not in _CODES or order not in ("|", "<", ">", "=") or any(call.state[2:5]):
        raise ValueError(f"an array is of type {order!s:.20}{code!s:.20}, not of plain whole numbers")
    return np.dtype(code if order == "|" else order + code)


def _raw(content: Any) -> bytes:
    """The bytes of an array: plain bytes, or text as Python 3 writes them for Python 2."""
    if isinstance(content, _Call) and content.name == _BYTES:
        text, encoding = content.arguments
        if type(text) is str and _text(encoding) == "latin1":
            return text.encode("latin-1")
    if type(content) is not bytes:
        raise ValueError("the content of an array is not bytes")
    return content


def _key(value: Any) -> bytes | str:
    """A key of a dictionary. It must be short: long keys, repeated often, could fill the memory."""
    key = _raw(value) if isinstance(value, _Call) and len(value.arguments[0]) < 100 else value
    if type(key) not in (bytes, str):
        raise ValueError("a key is not short text")
    return key


def _text(value: Any) -> str:
    if type(value) is bytes:
        return value.decode("latin-1")
    if type(value) is not str:
        raise ValueError("something is not text")
    return value
