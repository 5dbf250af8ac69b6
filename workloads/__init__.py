"""Training steps to measure: the model and one file per parallelism."""
