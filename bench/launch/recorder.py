"""Writes the records of a run, with the environment and the placement of its ranks. Without torch.

A record is the outcome of one case in one repetition, as one line of JSON.
"""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from parbench.bench.files import convert_write_errors
from parbench.bench.launch.messages import Hello, Outcome
from parbench.bench.machine.environment import (
    describe_relations,
    find_differing_values,
    format_cpus,
    split_environments,
)
from parbench.bench.machine.gpu import GpuReport, inspect_gpus
from parbench.bench.machine.gpu_inventory import GpuInventory
from parbench.bench.plan.cases import Case
from parbench.bench.results.records import Record, RecordedOutcome, WorldInfo, compute_noise
from parbench.bench.results.runs import (
    RecordWriter,
    Run,
    make_samples_path,
    make_trace_path,
    utc_now,
    write_run_info,
)

FAILED_STATUSES = ("failed", "hang", "wrong")
"""The statuses of a record whose case failed. The status skipped is not among them."""


class Recorder:
    """Writes a record for each case and repetition, and the ranks' environment to run.json."""

    def __init__(self, run: Run, writer: RecordWriter) -> None:
        """Prepare the records of a run.

        ``run`` has the plan and the records so far. ``writer`` appends records to the run's file.
        """
        self._path = run.path
        self._info = run.info
        self._writer = writer
        plan = run.info.plan
        self._world = WorldInfo(size=plan.nproc, nodes=1, backend=plan.backend, device=plan.device)
        self._gpus = GpuInventory(
            inspect_gpus(os.environ) if plan.device == "cuda" else GpuReport()
        )
        self._environment: dict[str, Any] = {}
        """The differences of the current ranks from the environment in run.json.

        Each record contains them. The key ``changed`` has the shared facts that differ, by path of
        the fact such as ``host.os``, as a list of the old and the new value. The key ``rank N`` has
        the facts in which that rank differs from other ranks, by group and name.
        """
        self._placement_notes: list[str] = []
        self.failures = {
            record.case.id: record for record in run.records if record.status in FAILED_STATUSES
        }
        """The last record with a failed status of each case, by the id of the case.

        Such a case is not measured in later repetitions.
        """

    def store_environment(self, hellos: Sequence[Hello]) -> None:
        """Store the environment of new ranks, which ``hellos``, their first messages, contain.

        ``hellos`` are in rank order. The driver calls this once for each start of all ranks. The
        first call writes the facts that are equal on all ranks to run.json. Each record that
        ``write`` writes after a call contains the differences of these ranks: facts in which a rank
        differs from the others, and shared facts that differ from those in run.json.
        """
        common, differences = split_environments(
            self._gpus.add_facts([hello.environment for hello in hellos])
        )
        places = [hello.place for hello in hellos]
        common["locality"] = describe_relations(places, self._gpus.links)
        num_hosts = len({place.host_key for place in places})
        if num_hosts > 1:
            common["hosts"] = [place.host for place in places]
            common["switches"] = {place.host: place.switches for place in places if place.switches}
        if self._info.environment is None:
            self._info = replace(self._info, environment=common)
            with convert_write_errors(self._path / "run.json"):
                write_run_info(self._path, self._info)
        changed = find_differing_values(self._info.environment or {}, common)
        self._environment = {"changed": changed} if changed else {}
        for hello, own in zip(hellos, differences, strict=True):
            if own:
                self._environment[f"rank {hello.rank}"] = own
        self._world = replace(self._world, nodes=num_hosts)
        self._placement_notes = find_misplacements(hellos)

    def write(self, repetition: int, case: Case, outcome: Outcome) -> Record:
        """Write the record of a case in a repetition and return it.

        Files with the samples of all ranks and with the timeline of a step are written too, if
        there are any. ``repetition`` is the number of the repetition, from 0.
        """
        result = {name: getattr(outcome, name) for name in RecordedOutcome.__struct_fields__}
        result["notes"] = [*self._info.plan.notes, *self._placement_notes, *outcome.notes]
        fault = self._info.plan.injection
        record = Record(
            **result,
            case=case,
            world=self._world,
            repetition=repetition,
            noise=compute_noise(outcome.samples),
            injected="" if fault is None else fault.text,
            environment=self._environment,
            emulation=self._info.plan.emulation,
            started=outcome.started or utc_now(),
            seconds=outcome.wall_seconds,
        )
        if outcome.raw:
            self._writer.write_file(make_samples_path(record), outcome.raw)
        if outcome.timeline:
            self._writer.write_file(make_trace_path(record), outcome.timeline)
        # The record comes last, because a resumed run does not measure its case again.
        self._writer.write(record)
        if record.status in FAILED_STATUSES:
            self.failures[case.id] = record
        return record


def find_misplacements(hellos: Sequence[Hello]) -> list[str]:
    """Return warnings, as text, about ranks that are slow because of the CPUs they may use.

    One warning names all ranks whose CPUs are in another NUMA node than their GPU. Another one
    names each CPU that is the only CPU of several ranks. ``hellos`` are the first messages of all
    ranks, in rank order.
    """
    warnings = []
    places = [hello.place for hello in hellos]
    cpus = [(place.host_key, place.cpus[0]) for place in places if len(place.cpus) == 1]
    distant_ranks = [
        rank
        for rank, place in enumerate(places)
        if place.gpu_numa_node not in (None, *place.numa_nodes)
    ]
    if distant_ranks:
        fix = "let ranks use CPUs next to their GPUs (srun --cpu-bind, taskset)"
        problem = "the CPUs are in another NUMA node than the GPU"
        warnings.append(f"rank {format_cpus(distant_ranks)}: {problem}; {fix}")
    for ((host, _), cpu), count in Counter(cpus).items():
        if count > 1:
            warnings.append(f"{count} ranks share CPU {cpu} of {host}")
    return warnings
