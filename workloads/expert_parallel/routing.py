"""The ways in which the experts of tokens are chosen. Pure."""

NO_EXPERT = -1
"""The expert id of a dropped pair of token and expert."""
ROUTER = "router"
"""The routing in which the trained router selects experts."""
BALANCED = "balanced"
"""The routing in which all experts take as equal numbers of tokens as possible."""
ZIPF = "zipf"
"""The routing in which tokens choose experts at random, with popularities by Zipf's law.

The r-th expert in a random order is chosen with a probability proportional to 1 / r.
"""
ROUTINGS = (ROUTER, BALANCED, ZIPF)
