"""The allowed values of options with a fixed set, without imports, so that ``--help`` is fast."""

PRESET_NAMES = ("smoke", "node", "full")
"""The values of ``--preset``."""
DEVICES = ("cpu", "cuda")
"""The values of ``--device``."""
BACKENDS = ("gloo", "nccl")
"""The values of ``--backend``, as torch.distributed names backends."""
LAUNCHERS = ("local", "srun")
"""The values of ``--launcher``."""
DISTRIBUTIONS = ("block", "cyclic")
"""The values of ``--distribution`` of ranks over nodes, as Slurm names them."""
RUN_FORMATS = ("tables", "json", "nccl-tests")
"""The values of ``--format`` of ``parbench run``."""
