"""Goodput under failures, and the batch beyond which more data parallelism helps little. Pure.

The functions return equations. They do not depend on the mesh.
"""

import math

from parbench.workloads.costs.equation import Equation

FAILURES_PER_GPU_DAY = 419 / 54 / 16_384
"""The failures of a training per GPU and day: those of Llama 3 405B.

It had 419 unexpected interruptions in 54 days on 16,384 H100s (arXiv 2407.21783, section 3.3.4).
"""
CHECKPOINT_SECONDS = 30.0
"""The assumed time for which saving a checkpoint stops the training."""
RESTART_SECONDS = 300.0
"""The assumed time from a failure to the next training step."""
CRITICAL_BATCH_AT_UNIT_LOSS = 2e8
"""The critical batch in tokens at a loss L of 1.

It is B_crit = 2e8 / L^(1 / 0.21) tokens (Kaplan et al., arXiv 2001.08361, equation 1.4).
"""
CRITICAL_BATCH_EXPONENT = 0.21
"""The number 0.21 in the equation of ``CRITICAL_BATCH_AT_UNIT_LOSS``."""
LOSS_SCALE_TOKENS = 5.4e13
"""The number of tokens D after which the loss would be 1.

The loss is L = (5.4e13 / D)^0.095 (Kaplan et al., equation 1.2), of models with a vocabulary of
50,257.
"""
LOSS_EXPONENT = 0.095
"""The number 0.095 in the equation of ``LOSS_SCALE_TOKENS``."""


def compute_goodput(gpus: int) -> Equation:
    """Return the equation of goodput: the fraction of time in which training makes progress.

    The interval between checkpoints is the best one, sqrt(2 C F), where a checkpoint takes C
    seconds and F seconds pass between failures (Young, 1974; Daly, 2006). C is the assumed
    ``CHECKPOINT_SECONDS``. F is a day divided by ``FAILURES_PER_GPU_DAY``, the failure rate of the
    training of Llama 3, and by ``gpus``. A failure costs the restart, which takes the assumed
    ``RESTART_SECONDS``, and on average half of the interval and of a checkpoint.
    """
    failure_seconds = 86_400 / (FAILURES_PER_GPU_DAY * gpus)
    interval = math.sqrt(2 * CHECKPOINT_SECONDS * failure_seconds)
    return Equation(
        text="interval / (interval + checkpoint) * "
        "failure / (failure + restart + (interval + checkpoint) / 2)",
        symbols={
            "interval": interval,
            "checkpoint": CHECKPOINT_SECONDS,
            "failure": failure_seconds,
            "restart": RESTART_SECONDS,
        },
    )


def compute_critical_batch(tokens: float) -> Equation:
    """Return the equation of the critical batch in tokens, at the end of a training.

    The training has ``tokens`` tokens. Up to the critical batch, twice the GPUs need little more
    than half the steps (McCandlish et al., arXiv 1812.06162). The critical batch is smaller at the
    beginning of a training.
    """
    return Equation(
        text="batch_scale / ((loss_tokens / tokens) ** loss_exponent) ** (1 / batch_exponent)",
        symbols={
            "batch_scale": CRITICAL_BATCH_AT_UNIT_LOSS,
            "batch_exponent": CRITICAL_BATCH_EXPONENT,
            "loss_tokens": LOSS_SCALE_TOKENS,
            "loss_exponent": LOSS_EXPONENT,
            "tokens": tokens,
        },
    )
