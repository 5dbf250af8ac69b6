"""What is shown of a run: summaries, tables, plots, the page. Never imports torch."""
