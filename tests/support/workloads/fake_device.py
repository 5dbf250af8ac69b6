"""Run the model on a device that computes nothing, to find tensors that are on another one.

torch lets Python stand in for a device (``PrivateUse1``), and fake tensors carry its name through
autograd and optimizers. Operators raise an error for tensors of two devices, as on CUDA, and for
a result that the host has to read. The stand-in stays for the life of a process, so
``python -m tests.support.workloads.fake_device`` is a process of its own.
"""

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from parbench.workloads.context_parallel.attention_kernel import (
    CudaEfficient,
    CudaFlash,
    Kernel,
)
from parbench.workloads.context_parallel.attention_methods import (
    build_attention,
    install_attention,
)
from parbench.workloads.context_parallel.sequence_split import split_sequence
from parbench.workloads.expert_parallel.moe_case import make_moe
from parbench.workloads.expert_parallel.moe_layer import MoeLayer
from parbench.workloads.model.optimizer import make_optimizer
from parbench.workloads.model.shapes import SHAPES, Shape
from parbench.workloads.model.transformer import Transformer, compute_loss

NAME = "fake_gpu"
DEVICE = f"{NAME}:0"
DTYPE = torch.bfloat16


def keep_model(model: Transformer, shape: Shape) -> None:
    """Leave the model as it is."""


def put_experts(model: Transformer, shape: Shape) -> None:
    """Replace FFNs by experts that drop nothing, so that the host has nothing to read."""
    moe = make_moe({"microbatch": 2}, shape, 1)
    for layer in model.layers.values():
        layer.ffn = MoeLayer(shape, moe)


def put_flash_attention(model: Transformer, shape: Shape) -> None:
    put_attention(model, shape, CudaFlash())


def put_efficient_attention(model: Transformer, shape: Shape) -> None:
    put_attention(model, shape, CudaEfficient())


def put_attention(model: Transformer, shape: Shape, kernel: Kernel) -> None:
    """Let layers attend by blocks, as context parallelism does."""
    split = split_sequence("ring", shape, ranks=1)
    attention = build_attention(split, 0, torch.device(DEVICE), {}, kernel)
    positions = torch.arange(shape.sequence, device=DEVICE)
    install_attention(model, attention, positions)


def train(shape: Shape, change: Callable[[Transformer, Shape], None]) -> None:
    """Take one training step of a changed model."""
    with torch.device(DEVICE):
        model = Transformer(shape)
        change(model, shape)
    tokens = torch.zeros(2, shape.sequence + 1, dtype=torch.int64, device=DEVICE)
    loss = compute_loss(model, tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    make_optimizer(model.parameters(), DTYPE).step()


def train_all() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    torch.set_default_dtype(DTYPE)
    changes = (keep_model, put_experts, put_flash_attention, put_efficient_attention)
    with FakeTensorMode():
        for shape in (SHAPES["tiny"], SHAPES["tiny-llama"]):
            for change in changes:
                train(shape, change)


if __name__ == "__main__":
    train_all()
