"""The pickle of a file of tensors, interpreted so that it can make dictionaries, tuples and descriptions of tensors.

A pickle is a program that can call anything. This interpreter calls nothing: it has the few operations that a
dictionary of tensors needs, and the few names that `torch.save` writes stand for descriptions, not for functions of
torch. Any other name or operation is refused. So there is nothing to escape from, and no torch to be of a safe version.

Nothing that the pickle makes is printed, compared or hashed except strings and numbers: a tuple of tuples of tuples can
be short in the file and endless when it is shown.

Source: CPython, `Lib/pickletools.py`; torch, `_weights_only_unpickler.py` (which names) and `_utils.py` (what they do).
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from llamarium.checkpoints.pytorch.archive import fault
from llamarium.errors import escape

_MOST_OPERATIONS = 2**18  # a tensor takes about sixty

STORAGES = {
    "torch DoubleStorage": "F64",
    "torch FloatStorage": "F32",
    "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16",
    "torch LongStorage": "I64",
    "torch IntStorage": "I32",
    "torch ShortStorage": "I16",
    "torch CharStorage": "I8",
    "torch ByteStorage": "U8",
    "torch BoolStorage": "BOOL",
}
"""What the numbers of a storage are, by the name that the pickle has for it; the names are safetensors'."""

_ORDERED_DICT = "collections OrderedDict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETERS = frozenset({"torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state"})
_ALLOWED = frozenset({_ORDERED_DICT, _TENSOR, *_PARAMETERS, *STORAGES})


@dataclass(frozen=True, slots=True)
class Name:
    """A name that the pickle imports; it is not looked up."""

    text: str


@dataclass(frozen=True, slots=True)
class Storage:
    """Numbers in a record of the archive, by its key.

    Attributes:
        dtype: By safetensors' name.
        num_items: How many there are, as the pickle says.
    """

    key: str
    dtype: str
    num_items: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor: every item that offset and strides, counted in items, reach in its storage. Nothing is checked yet."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Mark:
    """Where the items of a tuple, list or dictionary begin on the stack."""


_MARK = _Mark()


def run_program(path: Path, program: bytes) -> Any:
    """Return what a pickle makes; `path` is for messages. CheckpointError, by name, for what is not a tensor."""
    return _Interpreter(path).run(program)


class _Interpreter:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def fault(self, message: str) -> Exception:
        return fault(self.path, message)

    def run(self, program: bytes) -> Any:
        try:
            for count, (opcode, argument, position) in enumerate(pickletools.genops(program)):
                if count >= _MOST_OPERATIONS:
                    raise self.fault(f"its pickle has more than {_MOST_OPERATIONS} operations")
                if opcode.name == "STOP":
                    if position != len(program) - 1 or len(self.stack) != 1:
                        raise self.fault("its pickle goes on after its end, or leaves something behind")
                    return self.stack[0]
                self.step(opcode.name, argument)
        except (ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise self.fault(f"its pickle is damaged: {escape(type(error).__name__)}: {escape(error, 200)}") from None
        raise self.fault("its pickle does not end")

    def step(self, name: str, argument: Any) -> None:
        if name in _PUSHED:
            self.stack.append(_PUSHED[name]())
        elif name in _LITERALS:
            self.stack.append(argument)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self.push_name(argument if name == "GLOBAL" else self.joined_name())
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise self.fault(f"its pickle names {escape(name, 80)!r}, an operation that no tensor needs")

    def push_name(self, text: Any) -> None:
        if text not in _ALLOWED:
            raise self.fault(f"its pickle names {escape(text, 80)!r}, which is not a tensor and is not run")
        self.stack.append(Name(text))

    def joined_name(self) -> str:
        module, name = self.pop_many(2)
        return f"{module} {name}" if isinstance(module, str) and isinstance(name, str) else "a name that is not text"

    def pop_many(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise self.fault("its pickle takes more than it made")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def pop_to_mark(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                items = self.stack[i + 1 :]
                del self.stack[i:]
                return items
        raise self.fault("its pickle takes more than it made")

    def push_tuple(self, items: list[Any]) -> None:
        self.stack.append(tuple(items))

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise self.fault("its pickle fills something that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, int)):
                raise self.fault(f"its pickle has a {type(key).__name__} for a name")
            cast(dict[Any, Any], target)[key] = value

    def append_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise self.fault("its pickle fills something that is not a list")
        cast(list[Any], target).extend(items)

    def set_state(self, _: Any) -> None:
        """Drop an object's attributes: a state dict of torch has the versions of its modules there."""
        self.pop_many(1)
        if not isinstance(self.stack[-1], dict):
            raise self.fault("its pickle sets attributes of something that is not a dictionary")

    def get(self, key: Any) -> None:
        self.stack.append(self.memo[int(key)])

    def put(self, key: Any) -> None:
        self.memo[int(key)] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def push_storage(self, _: Any) -> None:
        """Make a storage of what torch keeps outside of the pickle: ("storage", its type, key, device, items)."""
        (item,) = self.pop_many(1)
        match item:
            case ("storage", Name(text), str(key), str(), int(num_items)) if text in STORAGES:
                self.stack.append(Storage(key, STORAGES[text], num_items))
            case _:
                raise self.fault("its pickle refers to something that is not a storage of a plain type")

    def reduce(self, _: Any) -> None:
        """Make what a name stands for: the three calls that `torch.save` writes."""
        function, arguments = self.pop_many(2)
        name = function.text if isinstance(function, Name) else ""
        match name, arguments:
            case str(text), () if text == _ORDERED_DICT:
                self.stack.append({})
            case str(text), (Storage() as storage, int(offset), tuple(shape), tuple(strides), *rest) if text == _TENSOR:
                if len(rest) > 2 and rest[2]:
                    raise self.fault("a tensor is a view with torch's negative or conjugate bit")
                self.stack.append(TensorView(storage, offset, shape, strides))
            case str(text), (TensorView() as tensor, *_) if text in _PARAMETERS:
                self.stack.append(tensor)  # its Python attributes, if it has any, are not part of its numbers
            case _:
                raise self.fault("its pickle calls something that makes no plain tensor")


_PUSHED: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "MARK": lambda: _MARK,
}
_LITERALS = frozenset(
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT SHORT_BINBYTES BINBYTES "
    "UNICODE INT LONG FLOAT".split()
)
_OPERATIONS: dict[str, Callable[[_Interpreter, Any], None]] = {
    "TUPLE": lambda self, _: self.push_tuple(self.pop_to_mark()),
    "TUPLE1": lambda self, _: self.push_tuple(self.pop_many(1)),
    "TUPLE2": lambda self, _: self.push_tuple(self.pop_many(2)),
    "TUPLE3": lambda self, _: self.push_tuple(self.pop_many(3)),
    "SETITEM": lambda self, _: self.set_items(self.pop_many(2)),
    "SETITEMS": lambda self, _: self.set_items(self.pop_to_mark()),
    "APPEND": lambda self, _: self.append_items(self.pop_many(1)),
    "APPENDS": lambda self, _: self.append_items(self.pop_to_mark()),
    "BUILD": _Interpreter.set_state,
    "BINGET": _Interpreter.get,
    "LONG_BINGET": _Interpreter.get,
    "GET": _Interpreter.get,
    "BINPUT": _Interpreter.put,
    "LONG_BINPUT": _Interpreter.put,
    "PUT": _Interpreter.put,
    "MEMOIZE": _Interpreter.memoize,
    "BINPERSID": _Interpreter.push_storage,
    "REDUCE": _Interpreter.reduce,
}
