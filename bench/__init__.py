"""Measurement: cases, launching, timing, records, and collective and point-to-point operations."""
