"""A throw-away Slurm cluster on one machine, for tests of sweeps, screening and ranks on several hosts."""
