"""Which layers a pipeline's stages hold: as many each, or as one says. Pure."""

from bench.text import UserError


def layers_of_stages(layers: int, stages: int, split: str = "") -> tuple[int, ...]:
    """Return the layers of each stage; ``split`` such as ``1+2+1+1`` names them, empty is as many each.

    ``UserError`` by equation where layers do not divide, or ``split`` is not one number for each stage.
    """
    if not split:
        if layers % stages:
            raise UserError(f"layers({layers}) % stages({stages}) != 0: split = 2+1+... says how many each stage takes")
        return (layers // stages,) * stages
    counts = tuple(_count(word, split) for word in split.split("+"))
    if len(counts) != stages:
        raise UserError(f"split = {split!r} is for {len(counts)} stages, and there are {stages}")
    if sum(counts) != layers:
        raise UserError(f"split = {split!r} holds {sum(counts)} layers, and the model has layers({layers})")
    return counts


def _count(word: str, split: str) -> int:
    if not word.strip().isdecimal() or int(word) < 1:
        raise UserError(f"split = {split!r} is not understood: it is the layers of each stage, such as 1+2+1+1")
    return int(word)
