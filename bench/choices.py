"""The fixed values of options, without imports, so that the help of a command is fast."""

PRESET_NAMES = ("smoke", "node", "full")
DEVICES = ("cpu", "cuda")
BACKENDS = ("gloo", "nccl")
LAUNCHERS = ("local", "srun")
DISTRIBUTIONS = ("block", "cyclic")
RUN_FORMATS = ("tables", "json", "nccl-tests")
