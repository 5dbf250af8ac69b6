"""What a report says of nodes: where ranks ran, groups within and across nodes, runs over more and more nodes."""
