"""Conditions that take points out of a sweep, such as ``nodes == 8 and dtype in ['bfloat16', 'float16']``.

A small grammar of its own, so that a sweep file can run no code::

    condition  = both ("or" both)*
    both       = one ("and" one)*
    one        = "not" one | "(" condition ")" | operand comparison
    comparison = ("==" | "!=" | "<" | "<=" | ">" | ">=") operand | ["not"] "in" "[" operand ("," operand)* "]"
    operand    = NAME | NUMBER | SIZE | 'text' | "text" | true | false
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.plan.params import Value
from bench.text import UserError, did_you_mean, listed, parse_size

_TOKEN = re.compile(
    r"""(?P<blank>\s+)
    | (?P<size>\d+[KMGTkmgt](?:i?B)?\b)
    | (?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.]))
    | (?P<text>'[^']*'|"[^"]*")
    | (?P<sign>==|!=|<=|>=|<|>|\(|\)|\[|\]|,)
    | (?P<word>[A-Za-z_]\w*)""",
    re.VERBOSE | re.ASCII,
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_COMPARISONS = listed([*_COMPARE, "in", "not in"])
_KEYWORDS = ("and", "or", "not", "in")
_MAX_DEPTH = 50

Values = Mapping[str, Value]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A parsed condition: its text, the names it speaks of, and whether it holds for a point's values."""

    text: str
    names: tuple[str, ...]
    holds: Callable[[Values], bool]


def parse_condition(text: str) -> Condition:
    """Return the condition; ``UserError`` names the text, the place and what may stand there."""
    parser = _Parser(text)
    holds = parser.condition()
    parser.expect_end()
    return Condition(text=text, names=tuple(dict.fromkeys(parser.names)), holds=holds)


def check_names(condition: Condition, known: Mapping[str, object]) -> None:
    """Refuse a condition that speaks of what no point has; ``UserError`` lists what they have."""
    for name in condition.names:
        if name not in known:
            raise UserError(
                f"{condition.text!r} speaks of {name!r}, and a point has {listed(known)}"
                f"{did_you_mean(name, known) or f'; write a word as {name!r}, in quotes'}"
            )


@dataclass(frozen=True, kw_only=True)
class _Token:
    kind: str
    text: str
    place: int


Holds = Callable[[Values], bool]
Operand = Callable[[Values], Value]


class _Parser:
    """Recursive descent, one method for each rule of the grammar; every rule returns what evaluates it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._next = 0
        self._depth = 0
        self.names: list[str] = []

    def condition(self) -> Holds:
        parts = [self._both()]
        while self._take("or"):
            parts.append(self._both())
        return lambda values: True in [part(values) for part in parts]  # all: what cannot be compared is always seen

    def _both(self) -> Holds:
        parts = [self._one()]
        while self._take("and"):
            parts.append(self._one())
        return lambda values: False not in [part(values) for part in parts]

    def _one(self) -> Holds:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UserError(f"{self._text!r} is nested more than {_MAX_DEPTH} deep")
        holds = self._denied() or self._enclosed() or self._comparison()
        self._depth -= 1
        return holds

    def _denied(self) -> Holds | None:
        if not self._take("not"):
            return None
        inner = self._one()
        return lambda values: not inner(values)

    def _enclosed(self) -> Holds | None:
        if not self._take("("):
            return None
        inner = self.condition()
        self._expect(")", "a closing parenthesis")
        return inner

    def _comparison(self) -> Holds:
        left = self._operand()
        for sign, compare in _COMPARE.items():
            if self._take(sign):
                right = self._operand()
                return lambda values: compare(*self._alike(left(values), right(values), sign))
        is_denied = self._take("not")
        if not self._take("in"):
            raise self._wrong("in" if is_denied else _COMPARISONS)
        choices = self._list()

        def holds(values: Values) -> bool:
            value = left(values)
            found = [operator.eq(*self._alike(value, choice(values), "in")) for choice in choices]
            return (True in found) != is_denied

        return holds

    def _list(self) -> list[Operand]:
        self._expect("[", "a list in brackets, such as [1, 2]")
        operands = [self._operand()]
        while self._take(","):
            operands.append(self._operand())
        self._expect("]", "a comma or a closing bracket")
        return operands

    def _operand(self) -> Operand:
        token = self._peek()
        if token is None or token.kind == "sign" or token.text in _KEYWORDS:
            raise self._wrong("a name, a number, a size such as 64K or a word in quotes")
        self._next += 1
        if token.kind == "word" and token.text not in ("true", "false"):
            self.names.append(token.text)
            return lambda values: values[token.text]
        literal = _literal(token)
        return lambda values: literal

    def _alike(self, left: Value, right: Value, sign: str) -> tuple[Value, Value]:
        """Return two values that can be compared; ``UserError`` if they are of different kinds."""
        kinds = _kind(left), _kind(right)
        if kinds[0] != kinds[1]:
            raise UserError(f"{self._text!r} compares {left!r}, {kinds[0]}, with {right!r}, {kinds[1]}")
        if kinds[0] == "true or false" and sign not in ("==", "!=", "in"):
            raise UserError(f"{self._text!r} compares {left!r} with {right!r} by {sign}: use == or !=")
        return left, right

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self, text: str) -> bool:
        token = self._peek()
        if token is None or token.kind == "text" or token.text != text:
            return False
        self._next += 1
        return True

    def _expect(self, text: str, words: str) -> None:
        if not self._take(text):
            raise self._wrong(words)

    def expect_end(self) -> None:
        if self._peek() is not None:
            raise self._wrong("and, or or the end")

    def _wrong(self, expected: str) -> UserError:
        token = self._peek()
        found = f"{token.text!r} at character {token.place}" if token else "its end"
        return UserError(f"{self._text!r} has {found} where {expected} is expected")


def _tokens(text: str) -> list[_Token]:
    tokens, place = [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            hint = "; did you mean '=='?" if text[place] == "=" else ""
            raise UserError(f"{text!r} is not understood from character {place + 1} on: {text[place:]!r}{hint}")
        if match.lastgroup != "blank":
            tokens.append(_Token(kind=str(match.lastgroup), text=match[0], place=place + 1))
        place = match.end()
    return tokens


def _literal(token: _Token) -> Value:
    if token.kind == "word":
        return token.text == "true"
    if token.kind == "text":
        return token.text[1:-1]
    if token.kind == "size":
        return parse_size(token.text)
    return int(token.text) if token.text.lstrip("-").isdigit() else float(token.text)


def _kind(value: Value) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a word" if isinstance(value, str) else "a number"
