"""Hybrid steps: several parallelisms on one mesh."""
