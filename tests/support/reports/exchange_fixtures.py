"""Output of other tools for the tests of reports/formats."""

from pathlib import Path
from typing import Any

FORMATS_FOLDER = Path(__file__).parents[2] / "reports" / "formats"

NCCL = (FORMATS_FOLDER / "nccl_all_reduce.txt").read_text()
"""Two sizes of an all_reduce on four GPUs of two hosts; the last in-place result is wrong."""

OSU = """\

# OSU MPI Allreduce Latency Test v7.5
# Datatype: MPI_FLOAT.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations        Validation
4                       3.17              2.90              3.51        1000              Pass
1048576               812.44            800.02            830.91         100              Fail
"""
OSU_CUDA = """\
# OSU MPI-CUDA All-to-All Personalized Exchange Latency Test v7.5
# Size       Avg Latency(us)
1024                   22.07
"""


def nccl_report(**overrides: Any) -> dict[str, Any]:
    """Return the JSON report of nccl-tests of one size on two hosts with two GPUs each."""
    placement = {"time": 71.36, "alg_bw": 58.78, "bus_bw": 88.16, "nwrong": 0.0}
    result = {
        "size": 4194304,
        "count": 1048576,
        "type": "float",
        "redop": "sum",
        "root": "    -1",
        "out_of_place": placement,
        "in_place": {**placement, "nwrong": None},
        "experiment_name": "",
    }
    devices = [
        {"rank": 0, "group": 0, "pid": 1, "hostname": "hopper0", "device": 0},
        {"rank": 2, "group": 0, "pid": 1, "hostname": "hopper1", "device": 0},
    ]
    return {
        "version": 3,
        "start_time": "2026-03-04 05:06:07",
        "args": ["./build/all_reduce_perf", "-g", "2"],
        "env": ["NCCL_ALGO=Ring", "HF_TOKEN=s3cret"],
        "nccl_version": 22907,
        "config": {
            "nthreads": 1,
            "ngpus": 2,
            "blocking_collectives": "false",
            "devices": devices,
        },
        "results": [result],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 88.16, "okay": "unchecked"},
        "errors": [],
        **overrides,
    }
