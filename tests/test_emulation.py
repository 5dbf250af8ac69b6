"""What is only played on one machine says so."""

from bench.emulation import EMULATED, VARIABLE, emulation, emulation_notes


def test_a_real_machine_says_nothing() -> None:
    assert emulation({}) is None
    assert emulation({VARIABLE: ""}) is None
    assert emulation_notes({}) == ()


def test_an_emulated_cluster_is_noted_in_its_own_words() -> None:
    environ = {VARIABLE: "4 nodes on one machine of 2 cores"}
    assert emulation(environ) == "4 nodes on one machine of 2 cores"
    assert emulation_notes(environ) == (f"{EMULATED}: 4 nodes on one machine of 2 cores",)
