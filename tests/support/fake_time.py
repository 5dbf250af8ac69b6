"""Clocks that tests set."""


class FakeTime:
    """Stands for the module ``time``, where sleeping takes ``late_seconds`` too long."""

    def __init__(self, late_seconds: float = 0.0) -> None:
        self.now = 100.0
        self.late_seconds = late_seconds
        self.sleeps: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self.sleeps.append(seconds)
            self.now += seconds + self.late_seconds


class HeldTime:
    """Stands for the module ``time``: a clock that moves only during a sleep."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self.now_ns = now_ns

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def time_ns(self) -> int:
        return self.now_ns

    def perf_counter(self) -> float:
        return self.now_ns / 1e9

    def sleep(self, seconds: float) -> None:
        self.sleep_ns(round(seconds * 1e9))

    def sleep_ns(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
