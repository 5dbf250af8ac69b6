"""Output of other tools for the tests of reports/formats."""

from pathlib import Path

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
