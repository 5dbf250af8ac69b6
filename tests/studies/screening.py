"""Estimate how often ``parbench slurm screen`` finds a node or rail that is 10 % slow.

Usage: python -m tests.studies.screening [TRIALS]

Simulated clusters whose exchanges vary by 3 %. "exact": exactly the slow node or rail is confirmed.
"""

import sys

from parbench.bench.text import format_table
from parbench.slurm.screen.ratios import Endpoint
from tests.support.slurm.screening import Cluster, estimate_rates

NUM_TRIALS = 200
SPEED = 0.9
SEED = 1


def main(trials: int) -> None:
    rows = [("nodes", "rails", "slow", "exact", "false accusations")]
    for num_nodes in (4, 8, 16, 64):
        for rails, endpoint in (
            (1, None),
            (1, Endpoint(2)),
            (8, None),
            (8, Endpoint(2)),
            (8, Endpoint(2, 3)),
        ):
            speeds = {} if endpoint is None else {endpoint: SPEED}
            cluster = Cluster(num_nodes=num_nodes, rails=rails, speeds=speeds)
            rates = estimate_rates(cluster, trials, SEED)
            label = "nothing"
            if endpoint is not None:
                label = "node" if endpoint.rail is None else "rail"
            percentages = (f"{rates.exact:.1%}", f"{rates.blamed:.1%}")
            rows.append((str(num_nodes), str(rails), label, *percentages))
    sys.stdout.write(format_table(rows) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_TRIALS)
