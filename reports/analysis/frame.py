"""Rows in groups, for modules that do not group with pandas yet."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from parbench.bench.plan.cases import Case

T = TypeVar("T")
K = TypeVar("K")


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by a key of each, in the order of the first of each."""
    groups = defaultdict[K, list[T]](list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def group_rows(
    items: Iterable[T],
    case_of: Callable[[T], Case],
    *,
    without: Iterable[str] = (),
    by: Callable[[T], tuple[object, ...]] = lambda item: (),
) -> list[list[T]]:
    """Return items in groups, in the order of the first of each.

    Those of a group are alike in the case's name, in its parameters but those ``without``, and in what ``by`` says.
    """
    left_out = set(without)

    def key(item: T) -> object:
        case = case_of(item)
        return (
            case.name,
            frozenset(one for one in case.params.items() if one[0] not in left_out),
            by(item),
        )

    return [*group_by(items, key).values()]


def pivot_rows(groups: Iterable[Sequence[T]], at: Callable[[T], K]) -> list[dict[K, list[T]]]:
    """Return the items of each group by their place ``at``, of the groups that have items in two places or more."""
    return [places for group in groups if len(places := group_by(group, at)) > 1]
