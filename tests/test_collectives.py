"""Every collective is right, and its check sees every kind of wrong."""

import pytest
import torch
import torch.distributed as dist

from bench.definitions import DEFINITIONS
from bench.dtypes import DTYPES, supports
from bench.runner import load_target
from bench.world import World
from ranks import Ranks
