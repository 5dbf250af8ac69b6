"""AdamW of float32 masters takes 12 bytes a parameter, follows torch's, and keeps updates that bfloat16 would lose."""

import torch

from workloads.optimizer import LEARNING_RATE, MasterAdamW, make_optimizer, optimizer_class


def test_a_narrow_type_has_masters() -> None:
    assert optimizer_class(torch.float32) is torch.optim.AdamW
    assert optimizer_class(torch.bfloat16) is MasterAdamW


def test_state_is_twelve_bytes_a_parameter() -> None:
    weight = torch.ones(1000, dtype=torch.bfloat16, requires_grad=True)
    optimizer = MasterAdamW([weight], lr=LEARNING_RATE)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert sum(held.numel() * held.element_size() for held in optimizer.held() if held.numel() > 1) == 12 * 1000


def test_weights_are_those_of_torch_rounded() -> None:
    start = torch.linspace(-1, 1, 64, dtype=torch.bfloat16)
    narrow, wide = start.clone().requires_grad_(), start.float().requires_grad_()
    ours, theirs = make_optimizer([narrow], torch.bfloat16), torch.optim.AdamW([wide], lr=LEARNING_RATE)
    for number in range(20):
        gradient = torch.sin(torch.arange(64.0) + number).bfloat16()
        narrow.grad, wide.grad = gradient.clone(), gradient.float()
        ours.step()
        theirs.step()
    assert torch.equal(narrow.detach(), wide.detach().bfloat16())
    assert not torch.equal(narrow.detach(), start)


def test_updates_smaller_than_a_step_of_bfloat16_add_up() -> None:
    weight = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    optimizer = MasterAdamW([weight], lr=1e-4)
    seen = []
    for _ in range(60):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        seen.append(float(weight.detach()[0]))
    assert seen[0] == 1
    assert seen[-1] < 1
