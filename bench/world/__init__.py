"""The environment of a benchmark: ranks, clocks, process groups, and the protocol."""
