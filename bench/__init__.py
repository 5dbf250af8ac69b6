"""What is measured and how: cases, launching, timing, records, collectives, point-to-point."""
