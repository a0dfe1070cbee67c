"""Inside the sandbox: values as JSON between a candidate and whoever asks it, with their Python types.

Lists, numbers, text, true, false and null are themselves; an object with one key is a tagged value: `t` tuple,
`d` dict, `s` set, `z` frozenset, `b` bytes, `c` complex, `f` a float that JSON has not, `o` anything else by number.
"""

from __future__ import annotations

# not imported at run time: every test would wait for it
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Objects:
    """Values that are no data, by number: functions, classes, instances.

    A subclass of a plain type counts as its plain content: what it overrides decides nothing.
    """

    def __init__(self) -> None:
        self.held: list[Any] = []

    def encode(self, value: Any) -> Any:
        """JSON for a value: data as what it is, tagged where JSON has no such type; the rest as a number."""
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        if isinstance(value, int):
            return int.__add__(value, 0)
        if isinstance(value, float):
            plain = float.__add__(value, 0.0)
            return plain if plain - plain == 0.0 else {"f": float.__repr__(plain)}
        if isinstance(value, str):
            return str.__str__(value) if kind is str else "".join(str.__iter__(value))
        if isinstance(value, list):
            return [self.encode(item) for item in list.__iter__(value)]
        if isinstance(value, tuple):
            return {"t": [self.encode(item) for item in tuple.__iter__(value)]}
        if isinstance(value, dict):
            return {"d": [[self.encode(k), self.encode(v)] for k, v in dict.items(value)]}
        if isinstance(value, set):
            return {"s": [self.encode(item) for item in set.__iter__(value)]}
        if isinstance(value, frozenset):
            return {"z": [self.encode(item) for item in frozenset.__iter__(value)]}
        if isinstance(value, bytes | bytearray):
            return {"b": bytes(value).decode("latin-1")}
        if kind is complex:
            return {"c": [repr(value.real), repr(value.imag)]}
        self.held.append(value)
        return {"o": len(self.held) - 1, "n": str(getattr(kind, "__name__", "object"))}

    def decode(self, value: Any) -> Any:
        """The value that a request carries."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((tag, content),) = value.items()
        if tag == "o":
            return self.held[content]
        if tag == "d":
            return {self.decode(k): self.decode(v) for k, v in content}
        if tag == "b":
            return content.encode("latin-1")
        if tag == "f":
            return float(content)
        if tag == "c":
            return complex(float(content[0]), float(content[1]))
        return {"t": tuple, "s": set, "z": frozenset}[tag](self.decode(item) for item in content)
