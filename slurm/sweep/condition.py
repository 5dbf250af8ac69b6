"""Conditions that take points out of a sweep, such as ``nodes == 8 and dtype in ['bfloat16', 'float16']``.

Python's parser reads them and nothing runs them: what is allowed is ``and``, ``or``, ``not``, parentheses, and
comparisons of two operands, or of one with a list of them: names, numbers, sizes such as 64K, words in quotes, true or
false.
"""

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from parbench.bench.plan.params import Value
from parbench.bench.text import UserError, did_you_mean, listed, parse_size

Values = Mapping[str, Value]
_MAX_LENGTH = 1000  # which bounds how deep one can be nested, too
_TOKEN = re.compile(
    r"""(?P<blank>\s+) | (?P<size>\d+[KMGT](?:i?B)?\b) | (?P<text>'[^']*'|"[^"]*") | (?P<word>[A-Z_]\w*)
    | (?P<number>\d+(?:\.\d+)?(?:E[+-]?\d+)?(?![\w.])) | (?P<sign>[=!<>]=|[-<>()\[\],]) | (?P<wrong>.)""",
    re.VERBOSE | re.ASCII | re.IGNORECASE,
)
_COMPARE: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.In: ("in", operator.eq),  # with any of the list
    ast.NotIn: ("not in", operator.eq),
}
_KINDS = {bool: "true or false", str: "a word"}


def parse_condition(text: str, known: Collection[str]) -> Callable[[Values], bool]:
    """Return what tells whether a condition holds for a point's values, of which ``known`` are the names.

    ``UserError`` names the text, what is wrong in it and what may stand there; so does what is returned, where values
    of different kinds meet.
    """
    if len(text) > _MAX_LENGTH:
        raise UserError(f"{text[:40]!r}... has {len(text)} characters: a condition has at most {_MAX_LENGTH}")
    try:
        tree = ast.parse(_TOKEN.sub(_as_python, text).strip(), mode="eval")
        holds = _condition(text, tree.body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        how = "write it as in nodes == 8 and dtype in ['int8', 'int32']"
        raise UserError(
            f"{text!r} is not understood: {getattr(error, 'msg', 'it is nested too deep')}; {how}"
        ) from error
    for name in (node.id for node in ast.walk(tree) if isinstance(node, ast.Name)):
        if name not in (*known, "true", "false"):
            hint = did_you_mean(name, known) or f"; write a word as {name!r}, in quotes"
            raise UserError(f"{text!r} speaks of {name!r}, and a point has {listed(known)}{hint}")
    return holds


def _as_python(token: re.Match[str]) -> str:
    match token.lastgroup:
        case "blank":
            return " "
        case "size":
            return str(parse_size(token[0]))
        case "text":
            return f"({token[0][1:-1]!r})"  # in parentheses, as Python makes one word of two neighbours
        case "wrong":
            text, place = token.string, token.start()
            hint = "; did you mean '=='?" if token[0] == "=" else ""
            raise UserError(f"{text!r} is not understood from character {place + 1} on: {text[place:]!r}{hint}")
    return token[0]


def _condition(text: str, node: ast.expr) -> Callable[[Values], bool]:
    match node:
        case ast.BoolOp(op=op, values=parts):
            judges = [_condition(text, part) for part in parts]  # all: what cannot be compared is always seen
            if isinstance(op, ast.Or):
                return lambda values: True in [holds(values) for holds in judges]
            return lambda values: False not in [holds(values) for holds in judges]
        case ast.UnaryOp(op=ast.Not(), operand=denied):
            inner = _condition(text, denied)
            return lambda values: not inner(values)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            sign, compare = _COMPARE[type(op)]
            choices = [right]
            if isinstance(op, ast.In | ast.NotIn):
                if not isinstance(right, ast.List) or not right.elts:
                    raise _wrong(text, right, "a list in brackets, such as [1, 2]")
                choices = right.elts
            one, *others = [_operand(text, part) for part in (left, *choices)]

            def holds(values: Values) -> bool:
                found = [compare(*_alike(text, one(values), other(values), sign)) for other in others]
                return (True in found) != isinstance(op, ast.NotIn)

            return holds
    raise _wrong(text, node, f"one comparison by {listed(sign for sign, _ in _COMPARE.values())}")


def _operand(text: str, node: ast.expr) -> Callable[[Values], Value]:
    match node:
        case ast.Name(id="true" | "false" as word):
            return lambda values: word == "true"
        case ast.Name(id=name):
            return lambda values: values[name]
        case ast.Constant(value=int() | float() | str() as literal) if not isinstance(literal, bool):
            return lambda values: literal
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return lambda values: -number
    raise _wrong(text, node, "a name, a number, a size such as 64K, a word in quotes, true or false")


def _wrong(text: str, node: ast.expr, expected: str) -> UserError:
    return UserError(f"{text!r} has {ast.unparse(node)!r} where {expected} is expected")


def _alike(text: str, left: Value, right: Value, sign: str) -> tuple[Value, Value]:
    """Return two values that can be compared; ``UserError`` if they are of different kinds."""
    one, other = (_KINDS.get(type(value), "a number") for value in (left, right))
    if one != other:
        raise UserError(f"{text!r} compares {left!r}, {one}, with {right!r}, {other}")
    if isinstance(left, bool) and sign in ("<", "<=", ">", ">="):
        raise UserError(f"{text!r} compares {left!r} with {right!r} by {sign}: use == or !=")
    return left, right
