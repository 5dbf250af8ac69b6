"""Results of other tools as runs of ours, and runs of ours as other tools read them."""
