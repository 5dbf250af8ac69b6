"""The names of operations, data types and reductions in nccl-tests."""

PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
    "all_to_all_v": "alltoallv_perf",
    "broadcast": "broadcast_perf",
    "reduce": "reduce_perf",
    "gather": "gather_perf",
    "scatter": "scatter_perf",
    "sendrecv": "sendrecv_perf",
}
"""The program of nccl-tests for each operation, keyed by the short name of the operation."""
TYPES = {
    "bfloat16": "bfloat16",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
    "float32": "float",
    "float16": "half",
    "float64": "double",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
}
"""The name of each torch dtype in nccl-tests, keyed by dtype."""
REDOPS = {
    "sum": "sum",
    "avg": "avg",
    "min": "min",
    "max": "max",
    "product": "prod",
    "none": "none",
}
"""The name of each reduction in nccl-tests, keyed by ``redop``."""
EXPORT_MARK = "# Written by parbench"
"""The start of the comment by which a table that parbench exported is recognized."""
