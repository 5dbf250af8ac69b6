"""What a benchmark runs in: ranks, clocks, process groups, and the protocol of a benchmark."""
