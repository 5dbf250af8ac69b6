"""Reports of runs: tables, figures, findings, comparisons and history. Never imports torch."""
