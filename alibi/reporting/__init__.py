"""From result rows to tables, figures and a report; knows nothing of models."""
