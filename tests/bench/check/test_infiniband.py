"""InfiniBand ports that are down, slow or have new errors are found."""

from pathlib import Path

from parbench.bench.check.infiniband import find_port_faults, read_ports
from tests.support.trees import write_tree


def write_port(root: Path, name: str, **files: str) -> None:
    """Write an active port of 400 Gb/s; digits are counters."""
    content = {
        "state": "4: ACTIVE",
        "rate": "400 Gb/sec (4X NDR)",
        "phys_state": "5: LinkUp",
        "link_layer": "InfiniBand",
        **files,
    }
    adapter = f"sys/class/infiniband/{name}"
    tree = {f"{adapter}/board_id": "MT_0000000838\n"}
    for key, value in content.items():
        folder = "ports/1/counters" if value.isdecimal() else "ports/1"
        tree[f"{adapter}/{folder}/{key}"] = f"{value}\n"
    write_tree(root, tree)


def test_down_and_slow_ports_are_bad(tmp_path: Path) -> None:
    for number in range(8):
        write_port(tmp_path, f"mlx5_{number}", symbol_error="7")
    write_port(tmp_path, "mlx5_3", state="1: DOWN", phys_state="2: Polling")
    write_port(tmp_path, "mlx5_4", rate="100 Gb/sec (1X NDR)")
    write_port(tmp_path, "mlx5_6", state="1: DOWN", phys_state="3: Disabled")
    ports = read_ports(tmp_path)
    down, slow = find_port_faults(ports, ports)
    assert down.text.startswith("port mlx5_3/1: DOWN")
    assert slow.text.startswith("port mlx5_4/1: 100 Gb/s")
    assert down.is_bad
    assert slow.is_bad


def test_new_errors_warn_and_lost_link_is_bad(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", symbol_error="7", link_downed="0")
    write_port(tmp_path, "mlx5_1", symbol_error="7", link_downed="0")
    before = read_ports(tmp_path)
    write_port(tmp_path, "mlx5_0", symbol_error="9", link_downed="0")
    write_port(tmp_path, "mlx5_1", symbol_error="7", link_downed="1")
    errors, lost = find_port_faults(before, read_ports(tmp_path))
    assert "symbol_error increased by 2" in errors.text
    assert not errors.is_bad
    assert lost.is_bad


def test_unused_board_has_no_faults(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", state="1: DOWN", phys_state="2: Polling")
    [port] = read_ports(tmp_path)
    assert find_port_faults([port], [port]) == ()


def test_host_without_infiniband_has_no_ports(tmp_path: Path) -> None:
    assert read_ports(tmp_path) == ()
