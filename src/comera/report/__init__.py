"""What a run looks like: tables, plots, the HTML page."""
