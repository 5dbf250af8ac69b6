"""What other tools print of the same collectives, for the tests of reports/formats, and what is read of it."""

from collections.abc import Callable
from typing import Any

import msgspec

from parbench.bench.results.records import Record
from parbench.bench.text import UserError
from parbench.reports.formats.foreign import ImportedResult, ImportedRun
from tests.support.reports_fixtures import collective_case, ok_record

Parser = Callable[[str, str, int | None], ImportedRun]

NCCL_HEAD = """\
# nccl-tests version 2.19.6 nccl-headers=22907 nccl-library=22907
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 1024 maxBytes 4194304 step: 64(factor) warmup iters: 1 iters: 20 agg iters: 1 \
validation: 1 graph: 0 unalign: 0
#
# Using devices
#  Rank  0 Group  0 Pid  41231 on     hopper1 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  41231 on     hopper1 device  1 [0000:43:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  50117 on     hopper2 device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  50117 on     hopper2 device  1 [0000:43:00] NVIDIA H100 80GB HBM3
"""
NCCL_COLUMNS = """\
#
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong 
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         
"""  # noqa: W291
NCCL_ROWS = """\
        1024           256     float     sum      -1    18.93    0.05    0.08       0    17.02    0.06    0.09       0
     4194304       1048576     float     sum      -1    71.36   58.78   88.16       0    70.80   59.24   88.86       2
"""
NCCL_FOOT = """\
# Out of bounds values : 1 FAILED
# Avg bus bandwidth    : 44.2975 
#
# Collective test concluded: all_reduce_perf
#
"""  # noqa: W291
NCCL = NCCL_HEAD + NCCL_COLUMNS + NCCL_ROWS + NCCL_FOOT

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


def nccl_report(**more: Any) -> dict[str, Any]:
    placed = {"time": 71.36, "alg_bw": 58.78, "bus_bw": 88.16, "nwrong": 0.0}
    per_iteration = {"skipped_iterations": 1, "min_us": 70.0, "times_us": [99.0, 70.0, 72.0]}
    result = {"size": 4194304, "count": 1048576, "type": "float", "redop": "sum", "root": "    -1"}
    result |= {"out_of_place": placed, "out_of_place_per_iter": per_iteration}
    result |= {
        "in_place": {**placed, "nwrong": None},
        "actual_iterations": 20,
        "experiment_name": "",
    }
    devices = [
        {"rank": 2 * i, "group": 0, "pid": 1, "hostname": f"hopper{i}", "device": 0} for i in (0, 1)
    ]
    document = {
        "version": 3,
        "start_time": "2026-03-04 05:06:07",
        "args": ["./build/all_reduce_perf", "-g", "2"],
    }
    document |= {"env": ["NCCL_ALGO=Ring", "HF_TOKEN=s3cret"], "nccl_version": 22907}
    document |= {
        "config": {"nthreads": 1, "ngpus": 2, "blocking_collectives": "false", "devices": devices}
    }
    document |= {"results": [result], "out_of_bounds": {"count": 0, "okay": "true"}}
    return (
        document
        | {"average_bus_bandwidth": {"bandwidth": 88.16, "okay": "unchecked"}, "errors": []}
        | more
    )


def make_pairs_record(size_bytes: int = 4096) -> Record:
    """Return an all_gather of a pair of the four ranks; its busbw is that of two."""
    record = ok_record(collective_case("all_gather", size_bytes, group="pairs", group_index=0))
    busbw = msgspec.structs.replace(
        record.metrics["busbw"], value=(record.metrics["algbw"].value or 0) / 2
    )
    details = {"group_size": 2, "group_ranks": [0, 1]}
    return msgspec.structs.replace(
        record, metrics={**record.metrics, "busbw": busbw}, details=details
    )


def metric_value(found: ImportedResult, name: str) -> Any:
    """Return a known number; to mypy it is anything, so that it may be compared with ``pytest.approx`` in a tuple."""
    assert found.metrics[name].value is not None
    return found.metrics[name].value


def parse_error(parse: Parser, text: str, nproc: int | None = None) -> str:
    """Return the sentence with which the file ``f`` is refused, nothing if it is read."""
    try:
        parse(text, "f", nproc)
    except UserError as error:
        return str(error)
    return ""
