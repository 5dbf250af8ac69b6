"""For scripts that measure on two gloo ranks: run by hand, a script starts itself again as each of them."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

from parbench.bench.machine.environment import interface_of
from parbench.bench.world.world import World, open_world

_TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr",
    "127.0.0.1",
    "--nproc-per-node",
    "2",
)
_NONE: Mapping[str, str] = MappingProxyType({})


def on_two_ranks(
    parser: argparse.ArgumentParser,
    measure: Callable[[World, argparse.Namespace], None],
    variables: Mapping[str, str] = _NONE,
) -> None:
    """Call ``measure`` with the parsed options on two ranks, which the user's environment and ``variables`` reach."""
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        with open_world("gloo", "cpu", seed=0, timeout_seconds=600) as world:
            measure(world, options)
        return
    given = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface_of("127.0.0.1") or "",
        **variables,
        **os.environ,
    }
    command = [sys.executable, *_TORCHRUN, sys.argv[0], "--rank", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=given, check=False).returncode)
