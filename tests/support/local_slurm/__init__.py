"""A temporary Slurm cluster on one machine, for tests that need several hosts."""
