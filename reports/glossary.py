"""The glossary: definitions of terms that reports print below their tables."""

from collections.abc import Iterable
from dataclasses import dataclass

from parbench.bench.results.metrics import Metric
from parbench.bench.results.tables import Section


@dataclass(frozen=True, kw_only=True)
class Term:
    """An entry of the glossary: a term and its definition."""

    name: str
    """The term. For a metric, its title, and its name in parentheses if the two differ."""
    text: str
    """The definition in one or more sentences."""


def list_terms(section: Section) -> tuple[Term, ...]:
    """Return the glossary entries of a report section, without duplicates.

    The terms that the tables of the section list come first. Then follow the metrics of the columns
    of these tables, if they have a formula.
    """
    metrics: dict[str, Metric] = {}
    terms = [term for table in section.tables for term in table.terms]
    for table in section.tables:
        for column in table.columns:
            metric = column.metric
            if metric and metric.formula and metric.name not in terms:
                metrics[metric.name] = metric
    return (*get_terms(terms), *map(_define_metric, metrics.values()))


def get_terms(names: Iterable[str]) -> tuple[Term, ...]:
    """Return the glossary entries with these names, in order and without duplicates."""
    return tuple(Term(name=name, text=DEFINITIONS[name]) for name in dict.fromkeys(names))


def _define_metric(metric: Metric) -> Term:
    """Return the glossary entry of a metric, with its help text and its formula."""
    name = metric.title
    if metric.name.replace("_", " ") != metric.title:
        name = f"{metric.title} ({metric.name})"
    text = f"{metric.help[0].upper()}{metric.help[1:]} ({metric.formula})."
    return Term(name=name, text=text)


DEFINITIONS = {
    "case": "A benchmark with one value for each of its parameters, such as all_reduce of 1 MiB.",
    "series": (
        "The times of one case on a number of ranks in one environment: class of hosts, versions and "
        "variables. Only times of the same series are compared between runs."
    ),
    "block": (
        "Successive iterations of one case. A repetition measures a small operation in ten blocks, "
        "in random order with those of other cases."
    ),
    "preset": "A choice of cases and of a time budget: smoke, node or full.",
    "threshold": (
        "The smallest change of a time that counts: --min-effect (3 % by default), or the value that "
        "parbench aa measured for the series, if it is higher. parbench ab uses --min-effect only."
    ),
    "exact count": (
        "A number that does not depend on the speed of the machine: calls and bytes by axis and "
        "operation, memory by component, and the schedule of a pipeline."
    ),
    "level": "Successive runs of a history in which the time of a series differs only by noise.",
    "rail": (
        "A GPU of a node and its NIC. It has the local rank of the GPU as its number, and exchanges "
        "data with the rails of the same number on other nodes."
    ),
    "point": "One combination of the values that a sweep file varies. It is measured as one run.",
    "virtual stage": (
        "One of several groups of layers that a rank of a pipeline holds (parameter virtual_stages). More of "
        "them shorten the bubble and need more messages."
    ),
    "sample": (
        "The duration of one iteration on the slowest rank, because an operation is done when its "
        "last rank is done."
    ),
    "repetition": (
        "One start of all ranks with new process groups. A single repetition does not show the "
        "variation between repetitions, so compare runs of several repetitions."
    ),
    "interval": (
        "[low, high] is a 95 % confidence interval over repetitions. It needs at least three."
    ),
    "noise": (
        "Run-to-run variation: the standard deviation of the log medians of the repetitions, "
        "corrected for small numbers. Stable below 5 %, fair below 15 %, noisy below 40 %, otherwise "
        "very noisy. With one repetition: the interquartile range of its iterations relative to "
        "their median."
    ),
    "blocking, pipelined": (
        "One operation at a time, each after a barrier (latency), or many back to back (throughput). "
        "They are different series."
    ),
    "busbw": (
        "Bus bandwidth: algbw times the factor of nccl-tests for n ranks (2(n-1)/n for an all-reduce, "
        "(n-1)/n if each rank has a shard of the data, otherwise 1). It compares with the speed of a "
        "link. The factor assumes point-to-point links, so reduction in the network can exceed that "
        "speed."
    ),
    "fit": (
        "Latency-bandwidth model (alpha-beta, Hockney) with one or two lines: time = latency + size / "
        "bandwidth. n_1/2 = latency x bandwidth is the size that reaches half of the asymptotic "
        "bandwidth."
    ),
    "breakpoint": (
        "The measured sizes between which the fit changes from one line to another, such as at a "
        "switch of protocols."
    ),
    "outliers": (
        "Sizes more than 20 % and four standard deviations from the fit. They are plotted, but have "
        "little weight in the fit."
    ),
    "late": (
        "The rank that most often arrives last, and its share of iterations. Unknown if the skew is "
        "below the uncertainty of the clocks."
    ),
    "parts of a step": (
        "compute + exposed communication + copy + idle = wall time of a profiled step. "
        "The other communication is hidden behind compute or copies."
    ),
    "bubble: schedule, imbalance, rest": (
        "Differences between simulations. They add up to the time in which a rank of the pipeline "
        "runs no action. The parts of a step count waiting for a message as exposed communication."
    ),
    "phases": (
        "Parts of a step that it marks with torch.profiler.record_function: forward, backward, "
        "optimizer. On a GPU, a phase lasts from the first to the last kernel launched within it. "
        "Communication lasts from its launch to its end, which includes waiting for other ranks."
    ),
    "F, B, I, W": (
        "F: forward. B: the full backward. I and W: input gradient and weight gradient, if the "
        "schedule separates them. A microbatch is in flight on a rank from its forward to the end of "
        "its backward."
    ),
    "parallel efficiency": (
        "Speed-up relative to the smallest number of ranks or nodes, divided by the ideal speed-up. "
        "The speed-up is the ratio of rates: tokens per second of a step, bus bandwidth of "
        "communication. Ideally the rate of a step grows with the number, and bus bandwidth stays "
        "constant."
    ),
    "ratio": (
        "Time relative to the first time of the row. Its 95 % interval is that of a t-test on the "
        "logarithms of at least three repetitions: paired within a run, and Welch's between runs. "
        "parbench compare reports which changes between runs are significant."
    ),
}
"""The definition of each term except metrics, keyed by the name of the term."""
