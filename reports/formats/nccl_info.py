"""The facts that NCCL logs with NCCL_DEBUG=INFO: network, interface, adapters and algorithms."""

import re

from parbench.bench.text import name_first

MAX_VALUES = 8
"""The number of distinct values of a fact that are listed. The others are counted."""
ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
"""The algorithms, indexed by the numbers that NCCL printed until 2.19."""
PROTOCOLS = ("LL", "LL128", "SIMPLE")
"""The protocols, indexed by the numbers that NCCL printed until 2.19."""
_PATTERNS = {
    "network": re.compile(r"NCCL INFO Using network (\S.*?)\s*$", re.MULTILINE),
    "interface": re.compile(r"NCCL INFO Bootstrap ?: Using (?:\[\d+\])?([\w.-]+):"),
    "adapters": re.compile(r"\[\d+\](\w+):\d+/(?:IB|RoCE)"),
    "transport": re.compile(r"NCCL INFO (?:Channel|Ring) .* via (P2P|SHM|NET/\w+(?:/\d+/GDRDMA)?)"),
}
"""A pattern for each fact, whose group is the value."""
_ALGORITHM = re.compile(r"NCCL INFO \w+: \d+ Bytes -> Algo (\w+) proto (\w+)")


def read_nccl_info(text: str) -> dict[str, str]:
    """Return the facts that NCCL logged with NCCL_DEBUG=INFO, as text keyed by fact.

    The keys are ``network``, ``interface``, ``adapters``, ``transport`` and ``algorithm``. Distinct
    values are joined by commas, and a fact that the log lacks has no key.
    """
    values = {name: pattern.findall(text) for name, pattern in _PATTERNS.items()}
    values["transport"] = [re.sub(r"/\d+/", "/", name) for name in values["transport"]]
    values["algorithm"] = [
        f"{_find_name(algorithm, ALGORITHMS)}/{_find_name(protocol, PROTOCOLS)}"
        for algorithm, protocol in _ALGORITHM.findall(text)
    ]
    return {name: _join_values(words) for name, words in values.items() if words}


def _find_name(word: str, names: tuple[str, ...]) -> str:
    """Return the name of an algorithm or protocol that NCCL printed as a number or a name.

    ``names`` are indexed by the number. A word that is not a known number is returned as it is.
    """
    is_known_number = word.isdecimal() and int(word) < len(names)
    return names[int(word)] if is_known_number else word


def _join_values(values: list[str]) -> str:
    """Return the distinct values of a fact joined by commas, the first ``MAX_VALUES`` of them.

    If there are more, the text ends with the number of the others.
    """
    return ", ".join(name_first(list(dict.fromkeys(values)), MAX_VALUES))
