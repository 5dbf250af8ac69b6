"""The tables of reports, one module per subject."""
