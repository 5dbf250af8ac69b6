"""Measurement: cases, launching, timing, records, collectives, point-to-point."""
