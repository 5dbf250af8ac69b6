"""What a training step would take on machines that are not here: dry runs, search, and how far they are right."""
