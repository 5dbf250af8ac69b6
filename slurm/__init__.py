"""Sweeps over nodes. Never imports torch."""
