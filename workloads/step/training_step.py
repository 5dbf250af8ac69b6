"""A training step under any parallelism: forward, backward, optimizer, on microbatches of one global batch.

A parallelism is a function from the model to a ``Layout``; batches, accumulation, the parity gate and the explanation
are the same for all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from parbench.bench.launch.messages import Work
from parbench.bench.plan.params import Value
from parbench.bench.results.details import BytesFormulaDetails, MeshDetails
from parbench.bench.world.benchmark import Description, Explanation
from parbench.bench.world.world import World
from parbench.workloads.costs.communication_pattern import bytes_by_axis, calls, equation_of
from parbench.workloads.costs.flops import flops_per_token
from parbench.workloads.costs.memory import activations_of, state_of
from parbench.workloads.costs.parameter_table import num_parameters
from parbench.workloads.costs.step_spec import StepSpec
from parbench.workloads.costs.strategies import Strategy
from parbench.workloads.model.timed_compute import (
    TimedCompute,
    calibrate,
    fill_distinct_gradients,
    make_timed,
)
from parbench.workloads.model.transformer import (
    Transformer,
    checkpoint,
    draw_tokens,
    loss_of,
    materialise,
    outline,
)
from parbench.workloads.step.layout import Layout, dtype_of
from parbench.workloads.step.memory import Memory, OverTime
from parbench.workloads.step.overlap import Overlap
from parbench.workloads.step.parity import Parity
from parbench.workloads.step.peaks import Peak, peak_of
from parbench.workloads.step.probe import Probe, run_probes
from parbench.workloads.step.sent_bytes import SentBytes

SMALL_MODEL = (
    "verified on a small model of the same recipe: at this size only replicas are compared, and the loss and gradients "
    "are finite"
)
TIMED = "timed compute: ranks wait instead of computing, and weights do not change: overlap is real, results are not"
KEPT_SHARDS = (
    "reshard=false: FSDP2 keeps its shard beside the gathered parameters; it counts as a buffer"
)

LayOut = Callable[[Transformer, World, StepSpec, Mapping[str, Value]], Layout]


class TrainingStep:
    """One step of training; every data rank takes its microbatches of the same global batch."""

    def __init__(
        self,
        world: World,
        params: Mapping[str, Value],
        lay_out: LayOut,
        strategy: Strategy,
        *,
        outlined: bool = False,
    ) -> None:
        """Lay out the model; one that is ``outlined`` is on the meta device, and ``lay_out`` materialises its parts."""
        self._world, self.spec = world, strategy(params, world.size, world.device.type)
        model = outline(self.spec.shape, dtype_of(self.spec))
        if not outlined or self.spec.timed:
            materialise(model, world.seed, world.device)
        self._waiter, self._doubts = TimedCompute(world.device), dict[str, None]()
        if self.spec.timed_seconds is not None:
            self._doubts = dict.fromkeys(
                doubt for doubts in world.gather(self._waiter.doubts) for doubt in doubts
            )
            self._make_timed(model, self.spec.timed_seconds)
        checkpoint(model, self.spec.checkpointing)
        self.layout = lay_out(model, world, self.spec, params)
        if self.layout.made_groups:
            world.barrier()  # a group that one rank gives back while another still connects breaks that one
        self._fill_distinct_gradients()
        self._parity = Parity(world, self.layout, self.spec.shape, dtype_of(self.spec))
        self._peak = self._agreed_peak()
        self.small_model_wrong = 0
        """Number of wrong elements of a small model of the same recipe, where the reference does not fit."""
        self.small_model_differences: tuple[str, ...] = ()
        self._step_number = 0
        self._draw()

    def step(self) -> None:
        """Train on this rank's part of the present batch."""
        self.layout.optimizer.zero_grad()
        self._forward_backward()
        with record_function("parbench:update"):
            self.layout.optimizer.step()

    def reset(self) -> None:
        self._waiter.forget()
        self._step_number += 1
        self._draw()

    def check(self) -> int:
        """Return how many elements fail the parity gate; see ``Parity``."""
        if self.spec.timed:
            return self._parity.count_wrong_fills(self.spec.microbatches)
        if not self.spec.reference_fits:
            return self.small_model_wrong + self._parity.check_without_reference(
                self._losses_and_gradients
            )
        microbatches = self._batch.chunk(self.layout.data_size * self.spec.microbatches)
        return self._parity.count_wrong(microbatches, self._losses_and_gradients, self.step)

    def differences(self) -> Sequence[str]:
        return (*self.small_model_differences, *self._parity.differences)

    def describe(self) -> Description:
        """Return tokens, parameters and FLOPs, and what the row cannot claim."""
        tokens, flops, peak = self._tokens_per_step(), self._flops_per_rank(), self._peak
        work = [Work(name="tokens_per_second", amount=tokens)]
        if peak is not None:
            work.append(Work(name="mfu", amount=flops / peak.flops_per_second))
        return Description(
            headline="step_time",
            work=tuple(work),
            details={
                "parameters": num_parameters(self.spec.shape, self.spec.moe),
                "tokens_per_step": tokens,
                "flops_per_rank": flops,
                "flops_convention": "PaLM: 6 N + 12 L H Q T a token, attention counted whole, recomputation not",
                "peak": None
                if peak is None
                else {"flops_per_second": peak.flops_per_second, "source": peak.source},
                "optimizer": "AdamW",
                **MeshDetails(
                    axes={name: {"ranks": group.size()} for name, group in self.layout.axes.items()}
                ).as_details,
                **self._bytes_formula(),
                **self.layout.details,
            },
            notes=(*self.layout.notes, *self._notes_of_claims(), *self._doubts),
        )

    def _notes_of_claims(self) -> Sequence[str]:
        if self.spec.timed:
            return [TIMED]
        return [] if self.spec.reference_fits else [SMALL_MODEL]

    def explain_step(self, begin: Callable[[], None], budget_seconds: float) -> Explanation:
        """Say what the probes find; the model is worth nothing afterwards."""
        probes = (*self.probes(), OverTime(self._world.device))
        return run_probes(self._world, probes, self.step, begin, budget_seconds)

    def probes(self) -> Sequence[Probe[Any]]:
        """Return what looks into the step, in order: memory and bytes before steps without communication spoil it."""
        kept_shards = "fsdp" in self.spec.mesh and not self.spec.reshard
        return (
            Memory(
                world=self._world,
                layout=self.layout,
                forward=self._forward,
                formula=self.memory_formula(),
                notes=(KEPT_SHARDS,) if kept_shards else (),
            ),
            SentBytes(self.layout, self.expected_bytes()),
            Overlap(self._world, self.layout, self._notes_of_peak),
        )

    def memory_formula(self) -> dict[str, float]:
        """Return the closed forms of what this rank holds by component, those that there are."""
        at = self.spec.at(self._world.rank)
        return {**asdict(state_of(at)), "activations": activations_of(at)}

    def _bytes_formula(self) -> dict[str, object]:
        made = calls(self.spec.at(0))  # all ranks describe a step alike
        axes = dict.fromkeys(call.axis for call in made)
        texts = {
            axis: equation_of(call for call in made if call.axis == axis).text for axis in axes
        }
        return BytesFormulaDetails(bytes_formula=texts).as_details if texts else {}

    def expected_bytes(self) -> dict[str, float]:
        """Return the closed form of what this rank sends in a step, by axis."""
        return bytes_by_axis(calls(self.spec.at(self._world.rank)), self.layout.axes)

    def close(self) -> None:
        self.layout.close()

    def _notes_of_peak(self, step_seconds: float) -> tuple[str, ...]:
        """Return a note if a step of so many seconds has an MFU above 100 %.

        With long sequences that may be right: the model FLOPs count attention in full, and causal kernels execute half.
        """
        if self._peak is None:
            return ()
        peak = self._peak.flops_per_second
        mfu = self._flops_per_rank() / step_seconds / peak
        if mfu <= 1:
            return ()
        if self._peak.measured:
            return (f"mfu above 100 %: the peak of {peak:.3g} FLOP/s was measured too low",)
        counted = "it counts attention in full, as PaLM does, and a causal kernel executes about half of it"
        return (
            f"mfu above 100 %: {mfu:.0%} of {peak:.4g} FLOP/s ({self._peak.source}); {counted}",
        )

    def _flops_per_rank(self) -> float:
        return (
            self._tokens_per_step()
            * flops_per_token(self.spec.shape, self.spec.moe)
            / self._world.size
        )

    def _tokens_per_step(self) -> int:
        return self.layout.data_size * self.spec.num_sequences * self.spec.shape.sequence

    def _make_timed(self, model: Transformer, seconds: float) -> None:
        """Replace arithmetic by waits, and make them exact on a microbatch of the plain model."""
        make_timed(model, seconds, self._waiter)
        tokens = draw_tokens(self.spec.shape, self.spec.microbatch, self._world.seed, 0)
        calibrate(seconds, self._waiter, lambda: loss_of(model, tokens.to(self._world.device)))
        model.zero_grad()

    def _fill_distinct_gradients(self) -> None:
        """Let data ranks' timed gradients differ, so that their mean can be checked."""
        fill_distinct_gradients(
            self.layout.model, self.layout.data_rank, self.layout.data_size, self._world.size
        )

    def _forward_backward(self) -> Tensor | None:
        """Return the mean loss of this rank's microbatches; gradients are of the mean over all data ranks."""
        if self.layout.forward_backward is not None:
            return self.layout.forward_backward(self._mine)
        total = torch.zeros((), device=self._world.device)
        for i, tokens in enumerate(self._mine):
            last = i == len(self._mine) - 1
            with self.layout.gradient_sync(last):
                with record_function("parbench:forward"):
                    loss = self.layout.loss_of(tokens) / len(self._mine)
                with record_function("parbench:backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self.layout.finalize_gradients()
        return total

    def _forward(self) -> Tensor:
        return self.layout.loss_of(self._mine[0])

    def _losses_and_gradients(self) -> Tensor | None:
        self.layout.optimizer.zero_grad()
        return self._forward_backward()

    def _draw(self) -> None:
        """Draw the global batch, and cut out this rank's microbatches."""
        each = self.spec.num_sequences
        tokens = draw_tokens(
            self.spec.shape, self.layout.data_size * each, self._world.seed, self._step_number
        )
        self._batch = tokens.to(self._world.device)
        mine = self._batch[self.layout.data_rank * each : (self.layout.data_rank + 1) * each]
        self._mine: tuple[Tensor, ...] = torch.split(mine, self.spec.microbatch)

    def _agreed_peak(self) -> Peak | None:
        """Return the highest peak of any rank, for what it is measured by scatters; None where waits are timed."""
        if self.spec.timed:
            return None
        told = self._world.gather(peak_of(self._world.device, dtype_of(self.spec)))
        known = [peak for peak in told if isinstance(peak, Peak)]
        return max(known, key=lambda peak: peak.flops_per_second, default=None)
